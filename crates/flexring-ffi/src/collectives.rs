//! All-reduce, reduce-scatter, all-gather, broadcast and reduce, and what waits for asynchronous calls.
//! Counts and in-place pointers have the meaning that they have in NCCL.

use super::buffer::piece_in;
use super::checks;
use super::comm::{borrow, flexring_comm};
use super::handles::HandleTable;
use super::status::{check_pointer, flexring_result, guarded};
use super::types::{dtype_of, flexring_dtype, flexring_op, op_of};
use flexring::Communicator;
use flexring::internal::calls::{CallOutcome, CallValidator, CheckedCall};
use flexring::internal::device::CallerStream;
use flexring::internal::memory::Piece;
use flexring_core::dtype::DType;
use flexring_core::error::{Error, Result};
use flexring_core::rank::Rank;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

/// The arguments that all collectives have, as the caller passed them.
#[derive(Clone, Copy)]
pub(super) struct RawCall {
    /// Name of the C function, for error messages.
    pub function: &'static str,
    pub comm: *mut flexring_comm,
    pub send: *const c_void,
    pub recv: *mut c_void,
    pub dtype: flexring_dtype,
}

impl RawCall {
    /// Runs the call that `validate` returns: to its end if the vectors are on the host and `stream` is NULL;
    /// else it takes effect in the stream.
    ///
    /// # Safety
    /// `comm` is NULL or a live handle, and `stream` is live or NULL. The memory of the pieces that
    /// `validate` makes stays valid until this function returns, or on a GPU until the stream has passed the
    /// call.
    pub(super) unsafe fn run(
        self,
        stream: *mut c_void,
        validate: impl FnOnce(&CallBuffers<'_>) -> Result<CheckedCall>,
    ) -> flexring_result {
        guarded(|| {
            // SAFETY: the caller guarantees the handle.
            let buffers = unsafe { self.buffers()? };
            let (communicator, checked) = (buffers.communicator, validate(&buffers)?);
            if checks::is_on() {
                return checks::check(communicator, &checked, stream);
            }
            if stream.is_null() && checked.is_on_host() {
                return communicator.run(&checked);
            }
            // SAFETY: the caller guarantees the stream.
            communicator.run_in_stream(checked, unsafe { CallerStream::new(stream) })
        })
    }

    /// Starts the call that `validate` returns. On a GPU it takes effect in the default stream.
    ///
    /// # Safety
    /// `comm` is NULL or a live handle; `out` is NULL or points to a pointer that may be written. The memory
    /// of the pieces that `validate` makes stays valid until the request is over.
    pub(super) unsafe fn start(
        self,
        out: *mut *mut flexring_request,
        validate: impl FnOnce(&CallBuffers<'_>) -> Result<CheckedCall>,
    ) -> flexring_result {
        guarded(|| {
            check_pointer(out, self.function, "out")?;
            // SAFETY: the caller guarantees the handle.
            let buffers = unsafe { self.buffers()? };
            let (communicator, checked) = (buffers.communicator, validate(&buffers)?);
            let outcome = if checked.is_on_host() {
                communicator.submit(checked)?
            } else {
                communicator.submit_in_stream(checked, CallerStream::DEFAULT, None, true)?
            };
            // SAFETY: `out` is not NULL, and the caller guarantees that it may be written.
            unsafe { return_request(out, vec![outcome]) }
        })
    }

    /// The buffers of the call.
    ///
    /// # Safety
    /// `comm` is NULL or a handle that lives for `'a`.
    pub(super) unsafe fn buffers<'a>(&self) -> Result<CallBuffers<'a>> {
        // SAFETY: the caller guarantees the handle.
        let communicator: &Communicator = unsafe { &borrow(self.comm, self.function)?.communicator };
        let dtype = dtype_of(self.dtype)?;
        Ok(CallBuffers { communicator, dtype, send: self.send.cast_mut(), recv: self.recv })
    }
}

/// The buffers of one call. Their lengths are not known yet.
pub(super) struct CallBuffers<'a> {
    communicator: &'a Communicator,
    pub dtype: DType,
    send: *mut c_void,
    recv: *mut c_void,
}

/// One of the two buffers of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Send,
    Receive,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "receive",
        }
    }
}

impl CallBuffers<'_> {
    pub(super) fn validator(&self) -> CallValidator<'_> {
        self.communicator.validator()
    }

    /// The send buffer, of `parts` times `count` elements.
    ///
    /// # Safety
    /// The send buffer is NULL or valid for reading these elements until the call is over.
    pub(super) unsafe fn send(&self, count: usize, parts: usize) -> Result<Piece> {
        // SAFETY: the caller's contract is the one of `piece`.
        unsafe { self.piece(Side::Send, count, parts) }
    }

    /// The receive buffer, of `parts` times `count` elements.
    ///
    /// # Safety
    /// The receive buffer is NULL or valid for writing these elements until the call is over.
    pub(super) unsafe fn receive(&self, count: usize, parts: usize) -> Result<Piece> {
        // SAFETY: the caller's contract is the one of `piece`.
        unsafe { self.piece(Side::Receive, count, parts) }
    }

    /// Both buffers, of `count` elements each.
    ///
    /// # Safety
    /// As for [`send`](Self::send) and [`receive`](Self::receive).
    unsafe fn both(&self, count: usize) -> Result<(Piece, Piece)> {
        // SAFETY: the caller guarantees the buffers.
        unsafe {
            let input = self.send(count, 1)?;
            // In place it is one buffer.
            Ok((input, if self.send == self.recv { input } else { self.receive(count, 1)? }))
        }
    }

    /// # Safety
    /// The buffer is NULL or valid for `count * parts` elements until the call is over.
    unsafe fn piece(&self, side: Side, count: usize, parts: usize) -> Result<Piece> {
        let elements = count.checked_mul(parts).and_then(|count| count.checked_mul(self.dtype.size()));
        // No allocation can be longer than that.
        let bytes = elements.filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(|| {
            Error::invalid_argument(format!("{count} x {} is more than any memory holds", self.dtype.name()))
        })?;
        let pointer = if side == Side::Send { self.send } else { self.recv };
        if bytes == 0 {
            // Without elements, where the pointer is still says where the call runs, if it is known.
            let start = NonNull::new(pointer.cast());
            let located = start.map(|start| (start, self.communicator.memory_of(start.as_ptr(), 0)));
            return Ok(match located {
                // SAFETY: it has no bytes.
                Some((start, Ok(memory))) => unsafe { piece_in(memory, start, 0) },
                _ => Piece::EMPTY,
            });
        }
        let start = NonNull::new(pointer.cast())
            .ok_or_else(|| Error::invalid_argument(format!("the {} buffer is NULL", side.name())))?;
        if (start.as_ptr() as usize).checked_add(bytes).is_none() {
            return Err(Error::invalid_argument(format!(
                "{bytes} bytes at {pointer:p} reach beyond the address space"
            )));
        }
        let located = self.communicator.memory_of(start.as_ptr(), bytes);
        let memory = located.map_err(|error| error.context(format_args!("the {} buffer", side.name())))?;
        // SAFETY: the caller guarantees that the elements, which are these bytes, are valid, and `memory_of`
        // returned where they are.
        Ok(unsafe { piece_in(memory, start, bytes) })
    }

    /// Validates an all-reduce.
    ///
    /// # Safety
    /// The buffers are NULL or valid for `count` elements until the call is over.
    pub(super) unsafe fn all_reduce(&self, count: usize, op: flexring_op) -> Result<CheckedCall> {
        let op = op_of(op)?;
        // SAFETY: the caller guarantees the buffers.
        let (input, output) = unsafe { self.both(count)? };
        self.validator().all_reduce(input, output, self.dtype, op)
    }

    /// Validates a reduce-scatter.
    ///
    /// # Safety
    /// The send buffer is NULL or valid for `recv_count` elements for each rank until the call is over, the
    /// receive buffer for `recv_count`.
    pub(super) unsafe fn reduce_scatter(&self, recv_count: usize, op: flexring_op) -> Result<CheckedCall> {
        let (validator, op) = (self.validator(), op_of(op)?);
        // SAFETY: the caller guarantees the buffers.
        let (input, output) =
            unsafe { (self.send(recv_count, validator.world)?, self.receive(recv_count, 1)?) };
        validator.reduce_scatter(input, output, self.dtype, op)
    }

    /// Validates an all-gather.
    ///
    /// # Safety
    /// The send buffer is NULL or valid for `send_count` elements until the call is over, the receive buffer
    /// for as many for each rank.
    pub(super) unsafe fn all_gather(&self, send_count: usize) -> Result<CheckedCall> {
        let validator = self.validator();
        // SAFETY: the caller guarantees the buffers.
        let (input, output) =
            unsafe { (self.send(send_count, 1)?, self.receive(send_count, validator.world)?) };
        validator.all_gather(input, output, self.dtype)
    }

    /// Validates a broadcast.
    ///
    /// # Safety
    /// The receive buffer is NULL or valid for `count` elements until the call is over, on the root the send
    /// buffer, too.
    pub(super) unsafe fn broadcast(&self, count: usize, root: c_int) -> Result<CheckedCall> {
        let (validator, root) = (self.validator(), root_of(root)?);
        let is_root = validator.rank == root;
        // SAFETY: the caller guarantees the buffers.
        let (input, output) = unsafe {
            let input = if is_root { self.send(count, 1)? } else { Piece::EMPTY };
            (input, self.receive(count, 1)?)
        };
        validator.broadcast(input, output, self.dtype, root)
    }

    /// Validates a reduce.
    ///
    /// # Safety
    /// The send buffer is NULL or valid for `count` elements until the call is over, on the root the receive
    /// buffer, too.
    pub(super) unsafe fn reduce(&self, count: usize, op: flexring_op, root: c_int) -> Result<CheckedCall> {
        let (validator, root) = (self.validator(), root_of(root)?);
        let is_root = validator.rank == root;
        // SAFETY: the caller guarantees the buffers.
        let (input, output) = unsafe {
            let output = if is_root { self.receive(count, 1)? } else { Piece::EMPTY };
            (self.send(count, 1)?, output)
        };
        validator.reduce(input, output, self.dtype, op_of(op)?, root)
    }
}

pub(super) fn root_of(root: c_int) -> Result<Rank> {
    Rank::try_from(root).map_err(|_| Error::invalid_argument(format!("root {root} is not a rank")))
}

/// Reduces the `count` elements at `send` of all ranks into `recv` on every rank. The two buffers are the
/// same (in place), or they do not overlap. Both are memory of the host, or both are memory of one GPU.
///
/// On the host, with stream NULL, the call returns when the result is complete. On a GPU it returns at once
/// and takes effect in `stream`, a cudaStream_t or CUstream (NULL is the default stream): after the work that
/// is in the stream already, and before work that is added later, as cudaMemcpyAsync does. CUDA's driver
/// determines where memory is. Managed memory is refused, and so is a stream of a context other than the
/// GPU's primary one. If the stream is being captured, the call becomes part of the graph. If a call fails
/// after it has returned, the stream continues without a result, and flexring_comm_status,
/// flexring_comm_synchronize and all later calls return the error. If ranks are threads of one process and
/// share a GPU, give each rank its own stream, not NULL; in a common stream they would wait for each other
/// forever.
///
/// All this applies to the other collectives, too.
///
/// # Safety
/// `send` is valid for reading and `recv` for writing `count` elements; `comm` is NULL or a live handle;
/// `stream` is live. Memory of a GPU, and the stream, stay valid until the stream has passed the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_reduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_all_reduce", comm, send, recv, dtype };
    // SAFETY: the caller guarantees handle and stream, and the buffers until this function returns, which it
    // does after the call is over, or on a GPU until the stream has passed the call.
    unsafe { call.run(stream, |buffers| buffers.all_reduce(count, op)) }
}

/// Reduces the vectors at `send` of all ranks, which consist of `recv_count` elements per rank. Rank r gets
/// the r-th `recv_count` elements of the result at `recv`. In place: `recv` is `send` plus this rank times
/// `recv_count` elements.
///
/// # Safety
/// `send` is valid for reading `recv_count` elements for each rank, `recv` for writing `recv_count`; `comm`
/// is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_reduce_scatter(
    send: *const c_void,
    recv: *mut c_void,
    recv_count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_reduce_scatter", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce.
    unsafe { call.run(stream, |buffers| buffers.reduce_scatter(recv_count, op)) }
}

/// Concatenates the `send_count` elements at `send` of all ranks, in the order of ranks, at `recv` on every
/// rank. In place: `send` is `recv` plus this rank times `send_count` elements.
///
/// # Safety
/// `send` is valid for reading `send_count` elements, `recv` for writing `send_count` for each rank; `comm`
/// is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_gather(
    send: *const c_void,
    recv: *mut c_void,
    send_count: usize,
    dtype: flexring_dtype,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_all_gather", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce.
    unsafe { call.run(stream, |buffers| buffers.all_gather(send_count)) }
}

/// Copies the `count` elements at `send` of the rank `root` to `recv` on every rank. In place: `recv` is
/// `send`. `send` of other ranks is ignored.
///
/// # Safety
/// On the root `send` is valid for reading, everywhere `recv` for writing `count` elements; `comm` is NULL or
/// a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_broadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    root: c_int,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_broadcast", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce.
    unsafe { call.run(stream, |buffers| buffers.broadcast(count, root)) }
}

/// Reduces the `count` elements at `send` of all ranks into `recv` on the rank `root`. In place: `recv` is
/// `send`. `recv` of other ranks is ignored.
///
/// # Safety
/// `send` is valid for reading, on the root `recv` for writing `count` elements; `comm` is NULL or a live
/// handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_reduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
    root: c_int,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_reduce", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce.
    unsafe { call.run(stream, |buffers| buffers.reduce(count, op, root)) }
}

/// An asynchronous call. Made by flexring_all_reduce_async and the other functions of that kind, freed by
/// flexring_wait. In a forked child of the process that made it, flexring_wait and flexring_test return
/// FLEXRING_INVALID_ARGUMENT at once.
#[allow(non_camel_case_types, reason = "named as C names types")]
pub struct flexring_request {
    /// Those of all calls that it stands for.
    outcomes: Vec<Arc<CallOutcome>>,
}

/// The requests that were not waited for.
static REQUESTS: HandleTable<flexring_request> = HandleTable::new("request", "waited for");

/// Writes a request for calls with these outcomes to `out`.
///
/// # Safety
/// `out` may be written.
pub(super) unsafe fn return_request(
    out: *mut *mut flexring_request,
    outcomes: Vec<Arc<CallOutcome>>,
) -> Result<()> {
    match REQUESTS.insert(flexring_request { outcomes }) {
        Ok(request) => {
            // SAFETY: the caller guarantees that it may be written.
            unsafe { out.write(request) };
            Ok(())
        }
        Err((request, error)) => {
            // The calls have begun, and their buffers are the caller's as soon as this returns.
            request.outcomes.iter().for_each(|outcome| drop(outcome.wait()));
            Err(error)
        }
    }
}

/// Waits until the call is over, frees the request, and returns the call's result. If a signal handler or a
/// callback calls it during a call of the same communicator, and the request is not over, it returns
/// FLEXRING_INVALID_ARGUMENT and does not free the request.
///
/// # Safety
/// No other thread uses `request`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_wait(request: *mut flexring_request) -> flexring_result {
    const FUNCTION: &str = "flexring_wait";
    guarded(|| {
        // SAFETY: the caller guarantees that no other thread takes it.
        let waits = unsafe { REQUESTS.get(request) }.map_err(|error| error.context(FUNCTION))?;
        waits.outcomes.iter().try_for_each(|outcome| outcome.check_not_nested())?;
        let request = REQUESTS.take(request).map_err(|error| error.context(FUNCTION))?;
        // All of them end, whether one fails or not: their buffers are the caller's afterwards.
        request.outcomes.iter().map(|outcome| outcome.wait()).fold(Ok(()), Result::and)
    })
}

/// Writes 1 to `done` if the call is over, with success or not, and 0 if it is not. flexring_wait must be
/// called in either case.
///
/// # Safety
/// No other thread waits for `request`; `done` is NULL or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_test(
    request: *const flexring_request,
    done: *mut c_int,
) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller guarantees that no other thread takes it.
        let request = unsafe { REQUESTS.get(request) }.map_err(|error| error.context("flexring_test"))?;
        check_pointer(done, "flexring_test", "done")?;
        request.outcomes.iter().try_for_each(|outcome| outcome.check_process())?;
        let is_over = request.outcomes.iter().all(|outcome| outcome.is_over());
        // SAFETY: `done` is not NULL, and the caller guarantees that it may be written.
        unsafe { done.write(c_int::from(is_over)) };
        Ok(())
    })
}
