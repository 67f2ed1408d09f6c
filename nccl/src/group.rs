//! Groups: calls between ncclGroupStart and ncclGroupEnd of one thread.
//!
//! Owns what is deferred, and how communicators are made at the end, before the calls run.

use crate::calls::Call;
use crate::comm::{Comm, Make};
use crate::group_calls::{self, Deferred};
use crate::handles;
use crate::status::{Failure, Outcome, nccl_functions};
use crate::threads::spawn;
use crate::types::{ncclComm_t, ncclResult_t};
use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

/// A communicator that is to be made.
pub(crate) struct Creation {
    /// Where its handle is written: at once, because the program may abort it meanwhile. NULL if it cannot be
    /// made.
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

    /// Runs the deferred calls. Returns when all are in their streams, and communicators are made, except
    /// those whose configuration says otherwise. If a call in the group was refused, returns that error, and
    /// runs none.
    fn ncclGroupEnd / pncclGroupEnd() {
        end()
    }

    /// Not supported. Ends the group, and drops its calls. In another group it ends one level, and fails the
    /// whole.
    fn ncclGroupSimulateEnd / pncclGroupSimulateEnd(simInfo: *mut c_void) {
        let _ = simInfo;
        let refusal = Failure::usage("not supported by flexring: `flexring plan` shows what a call would do");
        if let Some(group) = end_level()? {
            group.creations.into_iter().for_each(Begun::drop_handle);
        } else {
            fail(refusal.clone().context("ncclGroupSimulateEnd"));
        }
        Err(refusal)
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
/// `out` may be written until the communicator is made, or this function, or the group's end, reports that it
/// is not.
pub(crate) unsafe fn create(creation: Creation) -> Outcome<ncclResult_t> {
    let Creation { out, comm, make, has_handle, parent } = creation;
    let handle = if has_handle { handles::insert(Arc::clone(&comm))? } else { null_mut() };
    // SAFETY: the caller guarantees it.
    unsafe { out.write(handle) };
    let begun = Begun { out, handle, comm, make, parent };
    let alone = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Some(begun);
        }
        begun.comm.defer();
        group.creations.push(begun);
        None
    });
    match alone {
        None => Ok(ncclResult_t::ncclSuccess),
        Some(begun) if begun.comm.blocking => {
            let Begun { out, handle, comm, make, parent } = begun;
            comm.make(counted(make, parent)).inspect_err(|_| forget(out, handle))?;
            Ok(ncclResult_t::ncclSuccess)
        }
        Some(begun) => make_all(vec![begun]),
    }
}

impl Begun {
    /// Takes the handle back.
    fn drop_handle(self) {
        if let Some(parent) = &self.parent {
            parent.forget_child(&self.comm);
        }
        self.comm.end();
        forget(self.out, self.handle);
    }
}

/// Takes the handle of a communicator back that was not made, unless the program has done so.
fn forget(out: *mut ncclComm_t, handle: ncclComm_t) {
    if handles::remove(handle).is_ok() {
        // SAFETY: the caller of `create` guarantees that it may be written until now.
        unsafe { out.write(null_mut()) };
    }
}

/// Makes communicators at the same time, those of one parent one after the other: all its ranks make them in
/// the same order.
fn make_all(creations: Vec<Begun>) -> Outcome<ncclResult_t> {
    // The first in time: the others fail because they are cancelled then.
    let failure: Arc<Mutex<Option<Failure>>> = Arc::default();
    let note = |failure: &Mutex<Option<Failure>>, error: Failure| {
        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    };
    let (mut in_background, mut is_failed) = (false, false);
    // The program may have aborted some of them in the group.
    let creations: Vec<Begun> = creations.into_iter().filter(|begun| begun.comm.begin()).collect();
    let comms: Vec<Arc<Comm>> = creations.iter().map(|begun| Arc::clone(&begun.comm)).collect();
    let mut threads = Vec::new();
    for chain in chains_of(creations) {
        let mut handles = Vec::new();
        let mut steps = Vec::new();
        for Begun { out, handle, comm, make, parent } in chain {
            handles.push((out, handle, comm.blocking));
            steps.push((comm, counted(make, parent)));
        }
        let (peers, first) = (comms.clone(), Arc::clone(&failure));
        let own: Vec<Arc<Comm>> = steps.iter().map(|(comm, _)| Arc::clone(comm)).collect();
        let step = move |(comm, make): (Arc<Comm>, Make)| {
            let outcome = comm.make(make);
            let is_made = outcome.is_ok();
            if let Err(error) = outcome {
                note(&first, error);
                // The others may wait for this one until their timeout.
                peers.iter().for_each(|peer| peer.cancel());
            }
            is_made
        };
        let body = move || steps.into_iter().map(step).collect::<Vec<bool>>();
        in_background |= handles.iter().any(|(.., blocking)| !blocking);
        match spawn("flexring-init", body) {
            Ok(thread) => threads.push((thread, handles)),
            Err(error) => {
                comms.iter().for_each(|peer| peer.cancel());
                own.iter().for_each(|comm| drop(comm.end()));
                handles.into_iter().for_each(|(out, handle, _)| forget(out, handle));
                note(&failure, error);
                is_failed = true;
            }
        }
    }
    for (thread, handles) in threads {
        if handles.iter().all(|(.., blocking)| !blocking) {
            continue;
        }
        let made = thread.join().unwrap_or_else(|_| {
            note(&failure, Failure::panicked());
            vec![false; handles.len()]
        });
        for ((out, handle, blocking), is_made) in handles.into_iter().zip(made) {
            if blocking && !is_made {
                forget(out, handle);
                is_failed = true;
            }
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

/// The creations that are made one after the other, in their order: those that have the same parent.
fn chains_of(creations: Vec<Begun>) -> Vec<Vec<Begun>> {
    let mut chains: Vec<Vec<Begun>> = Vec::new();
    for begun in creations {
        let is_same = |chain: &&mut Vec<Begun>| match (&chain[0].parent, &begun.parent) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        };
        match chains.iter_mut().find(is_same) {
            Some(chain) => chain.push(begun),
            None => chains.push(vec![begun]),
        }
    }
    chains
}

/// A creation during which its parent is busy. The parent is idle again before the communicator is seen to be
/// made.
fn counted(make: Make, parent: Option<Arc<Comm>>) -> Make {
    let Some(parent) = parent else { return make };
    let busy = parent.busy();
    Box::new(move || {
        let made = make();
        drop(busy);
        made
    })
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
    let Some(Group { creations, calls, failure, .. }) = end_level()? else {
        return Ok(ncclResult_t::ncclSuccess);
    };
    if let Some(failure) = failure {
        creations.into_iter().for_each(Begun::drop_handle);
        return Err(failure.context("a call in the group failed, and none was run"));
    }
    let result = if creations.is_empty() { ncclResult_t::ncclSuccess } else { make_all(creations)? };
    group_calls::run(calls)?;
    Ok(result)
}

/// Ends a level of this thread's group, and returns the group if it was the last one.
fn end_level() -> Outcome<Option<Group>> {
    GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(Failure::usage("there was no ncclGroupStart"));
        }
        group.depth -= 1;
        Ok((group.depth == 0).then(|| std::mem::take(group)))
    })
}
