//! The calls of a group, and how they run at its end.
//!
//! Owns their order. All calls are checked before the first one runs. The calls of a communicator run in
//! their order, sends and receives together after the others. Communicators of one GPU (those without one
//! count as one GPU) run one after the other on one thread, in the order in which the group first used their
//! worlds: this is the same in all processes, so kernels that wait for each other are launched in the same
//! order. Ranks of one world run at the same time, because one thread may have made the calls of all of them.

use crate::calls::Call;
use crate::comm::{Comm, Live, WorldKey};
use crate::status::{Failure, Outcome, check, record};
use crate::threads::run_together;
use crate::types::CUDA_STREAM_PER_THREAD;
use flexring_ffi::checks::only_checked;
use flexring_ffi::comm::flexring_comm_abort;
use flexring_ffi::groups::{flexring_group_end, flexring_group_start};
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a part that failed waits for the other ranks of its world, which may fail for the same reason,
/// and then need no abort.
const GRACE: Duration = Duration::from_millis(200);

/// A call on a communicator.
pub(crate) struct Deferred {
    pub comm: Arc<Comm>,
    pub call: Call,
}

/// The calls of one communicator.
struct Part {
    comm: Arc<Comm>,
    live: Arc<Live>,
    calls: Vec<Call>,
}

/// The communicators of one GPU that run on one thread.
struct Lane {
    gpu: Option<c_int>,
    parts: Vec<Part>,
}

/// The ranks of one world in a group.
struct World {
    key: WorldKey,
    state: Mutex<WorldState>,
    changed: Condvar,
}

struct WorldState {
    /// Parts that have not ended yet.
    running: usize,
    /// The communicators of the parts that have not failed.
    intact: Vec<Arc<Live>>,
}

/// Runs the calls of all communicators.
pub(crate) fn run(calls: Vec<Deferred>) -> Outcome {
    let needs_check = calls.len() > 1;
    let parts = parts_of(calls)?;
    if needs_check {
        parts.iter().try_for_each(|part| only_checked(|| part.run()))?;
    }
    let worlds: Arc<[World]> = worlds_of(&parts).into();
    let lanes = lanes_of(parts);
    let mut calls = lanes.iter().flat_map(|lane| &lane.parts).flat_map(|part| &part.calls);
    if lanes.len() > 1 && calls.any(|call| call.stream.addr() == CUDA_STREAM_PER_THREAD) {
        return Err(Failure::usage(
            "cudaStreamPerThread in a group of several GPUs, whose calls run on several threads: use streams",
        ));
    }
    // The first in time: others fail because they are aborted then.
    let first: Arc<Mutex<Option<Failure>>> = Arc::default();
    let tasks = lanes.into_iter().map(|lane| -> Box<dyn FnOnce() -> Outcome<()> + Send> {
        let (worlds, first) = (Arc::clone(&worlds), Arc::clone(&first));
        Box::new(move || {
            for part in lane.parts {
                let outcome = catch_unwind(AssertUnwindSafe(|| part.run()))
                    .unwrap_or_else(|_| Err(Failure::panicked()));
                let is_failed = outcome.is_err();
                if let Err(failure) = outcome {
                    record(&failure);
                    first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
                }
                // The next one runs in any case, because its ranks elsewhere run, too.
                if let Some(world) = worlds.iter().find(|world| world.key == part.comm.world) {
                    world.end_part(&part.live, is_failed);
                }
            }
            Ok(())
        })
    });
    let ended: Outcome = run_together(tasks.collect())?.into_iter().collect();
    let failure = first.lock().unwrap_or_else(PoisonError::into_inner).take();
    failure.map_or(ended, Err)
}

/// The calls by communicator, and the communicators of one world next to each other.
fn parts_of(calls: Vec<Deferred>) -> Outcome<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::new();
    let mut keys: Vec<WorldKey> = Vec::new();
    for Deferred { comm, call } in calls {
        if let Some(part) = parts.iter_mut().find(|part| Arc::ptr_eq(&part.comm, &comm)) {
            part.calls.push(call);
            continue;
        }
        if !keys.contains(&comm.world) {
            keys.push(comm.world);
        }
        let live = comm.ready().map_err(|failure| failure.context(call.function))?;
        parts.push(Part { comm, live, calls: vec![call] });
    }
    parts.sort_by_key(|part| keys.iter().position(|key| *key == part.comm.world));
    Ok(parts)
}

fn worlds_of(parts: &[Part]) -> Vec<World> {
    let chunks = parts.chunk_by(|one, other| one.comm.world == other.comm.world);
    let world = |ranks: &[Part]| {
        let intact = ranks.iter().map(|part| Arc::clone(&part.live)).collect();
        let state = Mutex::new(WorldState { running: ranks.len(), intact });
        World { key: ranks[0].comm.world, state, changed: Condvar::new() }
    };
    chunks.map(world).collect()
}

/// Divides parts among threads. Each lane has at most one rank of a world, and all lanes have the worlds in
/// the same order.
fn lanes_of(parts: Vec<Part>) -> Vec<Lane> {
    let mut lanes: Vec<Lane> = Vec::new();
    for part in parts {
        let gpu = part.comm.device.map(|device| device.ordinal);
        let is_free = |lane: &&mut Lane| {
            lane.gpu == gpu && lane.parts.last().is_none_or(|last| last.comm.world != part.comm.world)
        };
        match lanes.iter_mut().find(is_free) {
            Some(lane) => lane.parts.push(part),
            None => lanes.push(Lane { gpu, parts: vec![part] }),
        }
    }
    lanes
}

impl Part {
    /// Makes the calls: first the collectives in their order, then the sends and receives together. Ranks may
    /// list them in any order in their groups, and the calls of a communicator run one after the other.
    fn run(&self) -> Outcome {
        let run = |call: &Call| {
            // SAFETY: the callers of `group::call` guarantee buffers and streams.
            unsafe { call.run(&self.live) }.map_err(|failure| failure.context(call.function))
        };
        let (messages, collectives): (Vec<&Call>, Vec<&Call>) =
            self.calls.iter().partition(|call| call.is_message());
        collectives.into_iter().try_for_each(run)?;
        if messages.is_empty() {
            return Ok(());
        }
        check(flexring_group_start())?;
        let noted: Outcome = messages.into_iter().try_for_each(run);
        // It also ends the group, without making a message, if one was refused.
        // SAFETY: handles, streams and buffers are those of nccl.h's contract, which the caller keeps.
        let ended = unsafe { flexring_group_end() };
        noted.and_then(|()| check(ended))
    }
}

impl World {
    fn lock(&self) -> MutexGuard<'_, WorldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a part ended. If it failed and others did not, aborts them: they would wait for it until
    /// their timeout.
    fn end_part(&self, live: &Arc<Live>, is_failed: bool) {
        let mut state = self.lock();
        state.running -= 1;
        self.changed.notify_all();
        if !is_failed {
            return;
        }
        state.intact.retain(|other| !Arc::ptr_eq(other, live));
        let is_open = |state: &mut WorldState| state.running > 0 && !state.intact.is_empty();
        let waited = self.changed.wait_timeout_while(state, GRACE, is_open);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let waiting = std::mem::take(&mut state.intact);
        drop(state);
        for live in waiting {
            // SAFETY: the handle is live as long as its owner. It succeeds, or the communicator has failed
            // already.
            unsafe { flexring_comm_abort(live.handle()) };
        }
    }
}
