//! Groups: calls between ncclGroupStart and ncclGroupEnd of one thread.
//!
//! Owns what is deferred, and how it runs at the end: first all communicators are made, each on a thread of its own; then the
//! calls of each communicator in their order (sends and receives together, after the others), and those of different communicators at the same time, because one thread may
//! make the calls of all ranks. Must not know what a call does.

use crate::calls::Call;
use crate::comm::{Comm, Make};
use crate::handles;
use crate::status::{Failure, Outcome, check, nccl_functions, record};
use crate::threads::{run_together, spawn};
use crate::types::{CUDA_STREAM_PER_THREAD, ncclComm_t, ncclResult_t};
use flexring::c_api::groups::{flexring_group_end, flexring_group_start};
use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// A communicator that is to be made.
pub(crate) struct Creation {
    /// Where its handle is written: at once, because the program may abort it meanwhile. NULL if it cannot be made.
    pub out: *mut ncclComm_t,
    pub comm: Arc<Comm>,
    pub make: Make,
    /// `false` for a rank that is in no part of a split.
    pub has_handle: bool,
    /// The communicator that it is made of.
    pub parent: Option<Arc<Comm>>,
}

/// A creation whose handle is written.
struct Begun {
    out: *mut ncclComm_t,
    handle: ncclComm_t,
    comm: Arc<Comm>,
    make: Make,
    parent: Option<Arc<Comm>>,
}

/// A call on a communicator.
struct Deferred {
    comm: Arc<Comm>,
    call: Call,
}

#[derive(Default)]
struct Group {
    depth: usize,
    creations: Vec<Begun>,
    calls: Vec<Deferred>,
    /// The first call in the group that failed. Nothing is run then.
    failure: Option<Failure>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

nccl_functions! {
    /// Defers the calls of this thread until the matching `ncclGroupEnd`.
    fn ncclGroupStart / pncclGroupStart() {
        start();
        Ok(ncclResult_t::ncclSuccess)
    }

    /// Runs the deferred calls. Returns when all are in their streams, and communicators are made, except those whose
    /// configuration says otherwise. If a call in the group was refused, returns that error, and runs none.
    fn ncclGroupEnd / pncclGroupEnd() {
        end()
    }

    /// Not supported. Ends the group, and drops its calls.
    fn ncclGroupSimulateEnd / pncclGroupSimulateEnd(simInfo: *mut c_void) {
        let _ = simInfo;
        let group = GROUP.take();
        group.creations.into_iter().for_each(Begun::drop_handle);
        Err(Failure::usage("not supported by flexring: `flexring plan` shows what a call would do"))
    }
}

/// Begins a group of this thread, or one within it.
pub(crate) fn start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Notes that a call failed, if this thread is in a group.
pub(crate) fn fail(failure: Failure) {
    let _ = GROUP.try_with(|group| {
        // Borrowed already if borrowing panicked, which is a failure that is returned.
        if let Ok(mut group) = group.try_borrow_mut()
            && group.depth > 0
        {
            group.failure.get_or_insert(failure);
        }
    });
}

/// Makes a communicator: at once, in the background, or at the end of the group.
///
/// # Safety
/// `out` may be written until the communicator is made, or this function, or the group's end, reports that it is not.
pub(crate) unsafe fn create(creation: Creation) -> Outcome<ncclResult_t> {
    let Creation { out, comm, make, has_handle, parent } = creation;
    let handle = if has_handle { handles::insert(Arc::clone(&comm)) } else { null_mut() };
    // SAFETY: the caller guarantees it.
    unsafe { out.write(handle) };
    let begun = Begun { out, handle, comm, make, parent };
    let alone = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(begun);
        }
        group.creations.push(begun);
        None
    });
    match alone {
        None => Ok(ncclResult_t::ncclSuccess),
        Some(begun) if begun.comm.blocking => {
            let Begun { out, handle, comm, make, .. } = begun;
            comm.make(make).inspect_err(|_| forget(out, handle))?;
            Ok(ncclResult_t::ncclSuccess)
        }
        Some(begun) => make_all(vec![begun]),
    }
}

impl Begun {
    /// Takes the handle back.
    fn drop_handle(self) {
        self.comm.end();
        forget(self.out, self.handle);
    }
}

/// Takes the handle of a communicator back that was not made.
fn forget(out: *mut ncclComm_t, handle: ncclComm_t) {
    let _ = handles::remove(handle);
    // SAFETY: the caller of `create` guarantees that it may be written until now.
    unsafe { out.write(null_mut()) };
}

/// Makes communicators at the same time.
fn make_all(creations: Vec<Begun>) -> Outcome<ncclResult_t> {
    // The first in time: the others fail because they are cancelled then.
    let failure: Arc<Mutex<Option<Failure>>> = Arc::default();
    let note = |failure: &Mutex<Option<Failure>>, error: Failure| {
        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    };
    let (mut in_background, mut is_failed) = (false, false);
    let comms: Vec<Arc<Comm>> = creations.iter().map(|begun| Arc::clone(&begun.comm)).collect();
    let mut threads = Vec::new();
    for Begun { out, handle, comm, make, parent } in creations {
        let (maker, peers, first) = (Arc::clone(&comm), comms.clone(), Arc::clone(&failure));
        let busy = parent.map(|parent| parent.busy());
        let body = move || {
            let outcome = maker.make(make);
            drop(busy);
            let is_made = outcome.is_ok();
            if let Err(error) = outcome {
                note(&first, error);
                // The others may wait for this one until their timeout.
                peers.iter().for_each(|peer| peer.cancel());
            }
            is_made
        };
        match spawn("flexring-init", body) {
            Ok(thread) if comm.blocking => threads.push((thread, out, handle)),
            Ok(_) => in_background = true,
            Err(error) => {
                comms.iter().for_each(|peer| peer.cancel());
                comm.end();
                forget(out, handle);
                note(&failure, error);
                is_failed = true;
            }
        }
    }
    for (thread, out, handle) in threads {
        let is_made = thread.join().unwrap_or_else(|_| {
            note(&failure, Failure::panicked());
            false
        });
        if !is_made {
            forget(out, handle);
            is_failed = true;
        }
    }
    // A failure in the background is the state of its communicator.
    let failure = failure.lock().unwrap_or_else(PoisonError::into_inner).take().filter(|_| is_failed);
    match failure {
        Some(failure) => Err(failure),
        None if in_background => Ok(ncclResult_t::ncclInProgress),
        None => Ok(ncclResult_t::ncclSuccess),
    }
}

/// Makes a call: at once, or at the end of the group.
///
/// # Safety
/// The buffers and the stream of the call are valid until the stream has passed it.
pub(crate) unsafe fn call(comm: Arc<Comm>, call: Call) -> Outcome<ncclResult_t> {
    let alone = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some((comm, call));
        }
        group.calls.push(Deferred { comm, call });
        None
    });
    if let Some((comm, call)) = alone {
        let live = comm.ready()?;
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.run(&live)? };
    }
    Ok(ncclResult_t::ncclSuccess)
}

/// Ends a group of this thread, or one within it.
pub(crate) fn end() -> Outcome<ncclResult_t> {
    let ended = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(Failure::usage("there was no ncclGroupStart"));
        }
        group.depth -= 1;
        Ok((group.depth == 0).then(|| std::mem::take(group)))
    })?;
    let Some(Group { creations, calls, failure, .. }) = ended else {
        return Ok(ncclResult_t::ncclSuccess);
    };
    if let Some(failure) = failure {
        creations.into_iter().for_each(Begun::drop_handle);
        return Err(failure.context("a call in the group failed, and none was run"));
    }
    let result = if creations.is_empty() { ncclResult_t::ncclSuccess } else { make_all(creations)? };
    run_all(calls)?;
    Ok(result)
}

/// Runs the calls of all communicators.
fn run_all(calls: Vec<Deferred>) -> Outcome {
    let mut parts: Vec<(Arc<Comm>, Vec<Call>)> = Vec::new();
    for Deferred { comm, call } in calls {
        match parts.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &comm)) {
            Some((_, calls)) => calls.push(call),
            None => parts.push((comm, vec![call])),
        }
    }
    if parts.len() < 2 {
        return parts.into_iter().try_for_each(|(comm, calls)| run_part(&comm, calls));
    }
    if parts.iter().flat_map(|(_, calls)| calls).any(|call| call.stream.addr() == CUDA_STREAM_PER_THREAD) {
        return Err(Failure::usage(
            "cudaStreamPerThread in a group of several communicators, whose calls run on several threads: use streams",
        ));
    }
    let tasks = parts.into_iter().map(|(comm, calls)| -> Box<dyn FnOnce() -> Outcome<()> + Send> {
        Box::new(move || run_part(&comm, calls).inspect_err(record))
    });
    run_together(tasks.collect())?.into_iter().collect()
}

/// Runs calls of one communicator: first the collectives in their order, then the sends and receives together. Ranks may list
/// them in any order in their groups, and the calls of a communicator run one after the other.
fn run_part(comm: &Comm, calls: Vec<Call>) -> Outcome {
    let live = comm.ready()?;
    let run = |call: Call| {
        let function = call.function;
        // SAFETY: the callers of `call` guarantee buffers and streams.
        unsafe { call.run(&live) }.map_err(|failure| failure.context(function))
    };
    let (messages, collectives): (Vec<Call>, Vec<Call>) = calls.into_iter().partition(Call::is_message);
    collectives.into_iter().try_for_each(run)?;
    if messages.is_empty() {
        return Ok(());
    }
    check(flexring_group_start())?;
    let noted: Outcome = messages.into_iter().try_for_each(run);
    // It also ends the group, without making a message, if one was refused.
    // SAFETY: the same.
    let ended = unsafe { flexring_group_end() };
    noted.and_then(|()| check(ended))
}
