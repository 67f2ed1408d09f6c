//! Sends and receives, alone and in groups, which are per thread as in NCCL. Streams and memory are as for
//! [`flexring_all_reduce`](super::collectives::flexring_all_reduce).

use super::checks;
use super::collectives::{RawCall, flexring_request, return_request};
use super::comm::{borrow, flexring_comm};
use super::status::{check_pointer, flexring_result, guarded};
use super::types::flexring_dtype;
use flexring::Communicator;
use flexring::internal::calls::{CallOutcome, CheckedCall, NO_RECV_FROM_ANY};
use flexring::internal::device::CallerStream;
use flexring::internal::executor::PeerMessage;
use flexring_core::error::{Error, Result};
use flexring_core::rank::Rank;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

/// The group that a thread is collecting.
#[derive(Default)]
struct OpenGroup {
    /// How many flexring_group_start have no flexring_group_end yet.
    depth: usize,
    /// The messages of each communicator, in the order of their first use.
    calls: Vec<CollectedCall>,
    /// Why the group cannot be made.
    error: Option<Error>,
}

/// The messages of one communicator.
struct CollectedCall {
    comm: *mut flexring_comm,
    stream: *mut c_void,
    messages: Vec<PeerMessage>,
}

thread_local! {
    static GROUP: RefCell<OpenGroup> = RefCell::default();
}

/// Whether this thread is in a group.
fn is_grouped() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

impl OpenGroup {
    /// Adds a message.
    fn push(&mut self, comm: *mut flexring_comm, stream: *mut c_void, message: PeerMessage) -> Result<()> {
        let Some(call) = self.calls.iter_mut().find(|call| call.comm == comm) else {
            self.calls.push(CollectedCall { comm, stream, messages: vec![message] });
            return Ok(());
        };
        if call.stream != stream {
            let message = "the operations of a communicator in one group must all be in the same stream";
            return Err(Error::invalid_argument(message));
        }
        call.messages.push(message);
        Ok(())
    }
}

/// Ends a level of this thread's group. Its calls if it was the last level.
fn end_level(function: &str) -> Result<Option<Vec<CollectedCall>>> {
    GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1).ok_or_else(|| {
            Error::invalid_argument(format!("{function}: this thread has called no flexring_group_start"))
        })?;
        if group.depth > 0 {
            return Ok(None);
        }
        let OpenGroup { calls, error, .. } = std::mem::take(group);
        match error {
            Some(error) => {
                Err(error.context("the group is not made, because one of its operations was refused"))
            }
            None => Ok(Some(calls)),
        }
    })
}

impl CollectedCall {
    /// Its communicator, call and stream, if the call can be made.
    ///
    /// # Safety
    /// The communicator is NULL or a handle that lives for `'a`.
    unsafe fn check<'a>(self, function: &str) -> Result<(&'a Communicator, CheckedCall, *mut c_void)> {
        // SAFETY: the caller guarantees the handle.
        let communicator: &Communicator = unsafe { &borrow(self.comm, function)?.communicator };
        let checked = communicator.validator().group(self.messages)?;
        checks::check(communicator, &checked, self.stream).map_err(|error| error.context(function))?;
        Ok((communicator, checked, self.stream))
    }
}

/// Starts the calls of a group. All are checked before the first is started.
///
/// # Safety
/// The handles and streams are live. The memory stays valid until the outcomes are over, or on a GPU until
/// the streams have passed the calls.
unsafe fn start(function: &str, calls: Vec<CollectedCall>) -> Result<Vec<Arc<CallOutcome>>> {
    let mut checked = Vec::with_capacity(calls.len());
    for call in calls {
        // SAFETY: the caller guarantees the handles.
        checked.push(unsafe { call.check(function)? });
    }
    let start = |(communicator, call, stream): (&Communicator, CheckedCall, *mut c_void)| {
        if call.is_on_host() && stream.is_null() {
            return communicator.submit(call);
        }
        // SAFETY: the caller guarantees the stream.
        communicator.submit_in_stream(call, unsafe { CallerStream::new(stream) }, None, true)
    };
    let mut outcomes: Vec<Arc<CallOutcome>> = Vec::with_capacity(checked.len());
    for call in checked {
        match start(call) {
            Ok(outcome) => outcomes.push(outcome),
            Err(error) => {
                // The buffers of those that are started are the caller's as soon as this returns. Those on a
                // GPU are its streams'.
                outcomes.iter().for_each(|outcome| drop(outcome.wait()));
                return Err(error);
            }
        }
    }
    Ok(outcomes)
}

/// A send or a receive, as the caller passed it.
struct RawMessage {
    call: RawCall,
    count: usize,
    peer: c_int,
    is_send: bool,
}

impl RawMessage {
    /// A send.
    fn send(
        function: &'static str,
        (buffer, count, dtype): (*const c_void, usize, flexring_dtype),
        peer: c_int,
        comm: *mut flexring_comm,
    ) -> Self {
        let call = RawCall { function, comm, send: buffer, recv: null_mut(), dtype };
        Self { call, count, peer, is_send: true }
    }

    /// A receive.
    fn recv(
        function: &'static str,
        (buffer, count, dtype): (*mut c_void, usize, flexring_dtype),
        peer: c_int,
        comm: *mut flexring_comm,
    ) -> Self {
        let call = RawCall { function, comm, send: std::ptr::null(), recv: buffer, dtype };
        Self { call, count, peer, is_send: false }
    }

    /// # Safety
    /// The communicator is NULL or live. The buffer is NULL or valid for `count` elements until the call is
    /// over.
    unsafe fn message(&self) -> Result<PeerMessage> {
        let Self { call, count, peer, is_send } = self;
        // SAFETY: the caller guarantees handle and buffer.
        let (buffers, piece) = unsafe {
            let buffers = call.buffers()?;
            let piece = if *is_send { buffers.send(*count, 1)? } else { buffers.receive(*count, 1)? };
            (buffers, piece)
        };
        let advice = if *is_send { "" } else { NO_RECV_FROM_ANY };
        let peer = Rank::try_from(*peer).map_err(|_| {
            Error::invalid_argument(format!("{}: {peer} is not a rank{advice}", call.function))
        })?;
        Ok(PeerMessage { is_send: *is_send, peer, dtype: buffers.dtype, piece })
    }

    /// Makes the call, or adds it to this thread's group.
    ///
    /// # Safety
    /// As for [`message`](Self::message); the stream is NULL or live, until the end of the group if there is
    /// one.
    unsafe fn run(self, stream: *mut c_void) -> flexring_result {
        if is_grouped() {
            return guarded(|| {
                // SAFETY: the caller guarantees handle and buffer.
                let message = unsafe { self.message() };
                GROUP.with_borrow_mut(|group| {
                    let added = message.and_then(|message| group.push(self.call.comm, stream, message));
                    added.inspect_err(|error| {
                        group.error.get_or_insert_with(|| error.clone());
                    })
                })
            });
        }
        // SAFETY: as above. The pieces of `check` are those of `message`.
        unsafe { self.call.run(stream, |buffers| buffers.validator().group(vec![self.message()?])) }
    }

    /// Starts the call.
    ///
    /// # Safety
    /// As for [`message`](Self::message); `out` is NULL or may be written.
    unsafe fn start(self, out: *mut *mut flexring_request) -> flexring_result {
        if is_grouped() {
            let function = self.call.function;
            return guarded(|| {
                Err(Error::invalid_argument(format!(
                    "{function}: in a group, call the function that is not asynchronous, and flexring_group_end_async"
                )))
            });
        }
        // SAFETY: as above.
        unsafe { self.call.start(out, |buffers| buffers.validator().group(vec![self.message()?])) }
    }
}

/// Begins a group of sends and receives of this thread: flexring_send and flexring_recv only note what is to
/// be done until flexring_group_end. Groups may be nested; the last flexring_group_end counts. A group may
/// have operations of several communicators. Collectives are no part of a group: they run at once.
#[unsafe(no_mangle)]
pub extern "C" fn flexring_group_start() -> flexring_result {
    guarded(|| {
        GROUP.with_borrow_mut(|group| group.depth += 1);
        Ok(())
    })
}

/// Makes all operations of this thread's group together: none of them waits for another. On the host, with
/// stream NULL, it returns when they are complete; on a GPU they take effect in their stream, of which each
/// communicator has only one in a group. If an operation of the group was refused, none is made, and this
/// returns the same error.
///
/// # Safety
/// The communicators of the group are live. Buffers and streams of the group are valid as for
/// flexring_all_reduce.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_group_end() -> flexring_result {
    guarded(|| {
        let Some(mut calls) = end_level("flexring_group_end")? else { return Ok(()) };
        if checks::is_on() {
            // SAFETY: the caller guarantees the handles.
            return calls
                .into_iter()
                .try_for_each(|call| unsafe { call.check("flexring_group_end") }.map(drop));
        }
        if calls.len() == 1 && calls[0].stream.is_null() {
            let call = calls.remove(0);
            // SAFETY: the caller guarantees the handle.
            let (communicator, checked, _) = unsafe { call.check("flexring_group_end")? };
            if checked.is_on_host() {
                return communicator.run(&checked);
            }
            return communicator.run_in_stream(checked, CallerStream::DEFAULT);
        }
        let on_host: Vec<bool> = calls.iter().map(|call| call.stream.is_null()).collect();
        // SAFETY: the caller guarantees handles, streams and buffers.
        let outcomes = unsafe { start("flexring_group_end", calls)? };
        // All of them end, whether one fails or not: their buffers are the caller's afterwards.
        let waited = outcomes.iter().zip(on_host).filter(|(_, on_host)| *on_host);
        waited.map(|(outcome, _)| outcome.wait()).fold(Ok(()), Result::and)
    })
}

/// Starts what flexring_group_end does and returns at once, as flexring_all_reduce_async does for
/// flexring_all_reduce. flexring_wait returns when all operations are complete. Only for the outermost group.
///
/// # Safety
/// As for flexring_group_end, but the buffers must stay valid until flexring_wait has returned; `out` is NULL
/// or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_group_end_async(out: *mut *mut flexring_request) -> flexring_result {
    guarded(|| {
        let Some(calls) = end_level("flexring_group_end_async")? else {
            let message = "flexring_group_end_async: this group is in another one: call flexring_group_end";
            let error = Error::invalid_argument(message);
            GROUP.with_borrow_mut(|group| group.error.get_or_insert_with(|| error.clone()).clone());
            return Err(error);
        };
        // After the level has ended: the thread's further calls must not count as part of a group that the
        // program has ended.
        check_pointer(out, "flexring_group_end_async", "out")?;
        // SAFETY: the caller guarantees handles, streams and buffers.
        let outcomes = unsafe { start("flexring_group_end_async", calls)? };
        // SAFETY: `out` is not NULL, and the caller guarantees that it may be written.
        unsafe { return_request(out, outcomes) }
    })
}

/// Sends the `count` elements at `send` to the rank `peer`, which calls flexring_recv with the same count and
/// type. The n-th send from one rank to another matches the n-th receive there. Only these two ranks take
/// part. It may return before the peer's call, or wait for it; in a group see flexring_group_start. A rank
/// may send to itself in a group that also receives from itself.
///
/// # Safety
/// `send` is valid for reading `count` elements, in a group until its end; `comm` is NULL or a live handle.
/// Memory of a GPU, and the stream, stay valid until the stream has passed the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_send(
    send: *const c_void,
    count: usize,
    dtype: flexring_dtype,
    peer: c_int,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    // SAFETY: the caller guarantees handle, stream and buffer.
    unsafe { RawMessage::send("flexring_send", (send, count, dtype), peer, comm).run(stream) }
}

/// Receives `count` elements at `recv` from the rank `peer`, which calls flexring_send with the same count
/// and type. There is no receive from any rank.
///
/// # Safety
/// `recv` is valid for writing `count` elements, in a group until its end; otherwise as for flexring_send.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_recv(
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    peer: c_int,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    // SAFETY: the caller guarantees handle, stream and buffer.
    unsafe { RawMessage::recv("flexring_recv", (recv, count, dtype), peer, comm).run(stream) }
}

/// Starts flexring_send and returns at once, as flexring_all_reduce_async does for flexring_all_reduce. The
/// calls of a communicator run one after the other: to send and receive at the same time, use a group and
/// flexring_group_end_async.
///
/// # Safety
/// As for flexring_send, but the buffer must stay valid until flexring_wait has returned; `out` is NULL or
/// points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_send_async(
    send: *const c_void,
    count: usize,
    dtype: flexring_dtype,
    peer: c_int,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    // SAFETY: the caller guarantees handle, buffer and `out`.
    unsafe { RawMessage::send("flexring_send_async", (send, count, dtype), peer, comm).start(out) }
}

/// Starts flexring_recv and returns at once, as flexring_send_async does for flexring_send.
///
/// # Safety
/// As for flexring_recv, but the buffer must stay valid until flexring_wait has returned; `out` is NULL or
/// points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_recv_async(
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    peer: c_int,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    // SAFETY: the caller guarantees handle, buffer and `out`.
    unsafe { RawMessage::recv("flexring_recv_async", (recv, count, dtype), peer, comm).start(out) }
}
