//! Unique ids, and the calls that make communicators: of an id, of the GPUs of a process, and of other
//! communicators.

use crate::comm::{Comm, Live, Origin, WorldKey, made_by};
use crate::config;
use crate::cuda::{self, Device};
use crate::group::{self, Creation};
use crate::handles;
use crate::status::{Failure, Outcome, check, check_out, nccl_functions};
use crate::types::{ncclComm_t, ncclConfig_t, ncclResult_t, ncclUniqueId};
use flexring_ffi::comm::{
    FLEXRING_NO_COLOR, flexring_comm_abort, flexring_comm_init_rank, flexring_comm_shrink,
    flexring_comm_split,
};
use flexring_ffi::unique_id::{FLEXRING_UNIQUE_ID_BYTES, flexring_get_unique_id, flexring_unique_id};
use std::ffi::c_int;
use std::sync::Arc;

const _: () = assert!(FLEXRING_UNIQUE_ID_BYTES == size_of::<ncclUniqueId>(), "both ids have 128 bytes");

/// The most ranks that a call can ask for, so that lists of ranks fit into memory.
const MOST_RANKS: c_int = 1 << 20;

/// Ends ongoing calls before a communicator shrinks.
const SHRINK_ABORT: c_int = 1;

nccl_functions! {
    /// Creates an id, which all ranks of one communicator pass to `ncclCommInitRank`. The process must live
    /// until all ranks have joined.
    fn ncclGetUniqueId / pncclGetUniqueId(uniqueId: *mut ncclUniqueId) {
        check_out(uniqueId, "uniqueId")?;
        let id = new_id()?;
        // SAFETY: the pointer is not NULL, and the caller guarantees that it may be written.
        unsafe { uniqueId.write(id) };
        Ok(ncclResult_t::ncclSuccess)
    }
}

nccl_functions! { guarded_in_group:
    /// Joins the communicator of an id. It works with the GPU that is current on this thread.
    fn ncclCommInitRank / pncclCommInitRank(comm: *mut ncclComm_t, nranks: c_int, commId: ncclUniqueId, rank: c_int) {
        // SAFETY: the caller guarantees `comm`.
        unsafe { init_rank(comm, nranks, commId, rank, true) }
    }

    /// `ncclCommInitRank` with a configuration, of which `blocking` has an effect.
    fn ncclCommInitRankConfig / pncclCommInitRankConfig(
        comm: *mut ncclComm_t,
        nranks: c_int,
        commId: ncclUniqueId,
        rank: c_int,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: the caller guarantees `config` and `comm`.
        unsafe { init_rank(comm, nranks, commId, rank, config::blocking(config)?.unwrap_or(true)) }
    }

    /// Makes a communicator whose ranks are `ndev` GPUs of this process.
    fn ncclCommInitAll / pncclCommInitAll(comm: *mut ncclComm_t, ndev: c_int, devlist: *const c_int) {
        // SAFETY: the caller guarantees both lists.
        unsafe { init_all(comm, ndev, devlist) }
    }

    /// Makes one communicator for each color.
    fn ncclCommSplit / pncclCommSplit(
        comm: ncclComm_t,
        color: c_int,
        key: c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
    ) {
        // SAFETY: the caller guarantees `config` and `newcomm`.
        unsafe { split(comm, color, key, newcomm, config) }
    }

    /// Makes a communicator without some of the ranks. Ranks that died are left out in any case, and the list
    /// may be empty.
    fn ncclCommShrink / pncclCommShrink(
        comm: ncclComm_t,
        excludeRanksList: *mut c_int,
        excludeRanksCount: c_int,
        newcomm: *mut ncclComm_t,
        config: *mut ncclConfig_t,
        shrinkFlags: c_int,
    ) {
        let exclude = (excludeRanksList.cast_const(), excludeRanksCount);
        // SAFETY: the caller guarantees the list, `config` and `newcomm`.
        unsafe { shrink(comm, exclude, newcomm, config, shrinkFlags) }
    }
}

fn new_id() -> Outcome<ncclUniqueId> {
    let mut id = flexring_unique_id { internal: [0; FLEXRING_UNIQUE_ID_BYTES] };
    // SAFETY: the id may be written.
    check(unsafe { flexring_get_unique_id(&raw mut id) })?;
    Ok(ncclUniqueId { internal: id.internal })
}

/// Checks the number of ranks.
fn check_world(name: &str, world: c_int) -> Outcome {
    if (1..=MOST_RANKS).contains(&world) {
        return Ok(());
    }
    Err(Failure::argument(format!("{name} is {world}, but must be from 1 to {MOST_RANKS}")))
}

/// # Safety
/// `out` is NULL or may be written, in a group until its end.
unsafe fn init_rank(
    out: *mut ncclComm_t,
    world: c_int,
    id: ncclUniqueId,
    rank: c_int,
    blocking: bool,
) -> Outcome<ncclResult_t> {
    check_out(out, "comm")?;
    check_world("nranks", world)?;
    if !(0..world).contains(&rank) {
        let message =
            format!("rank is {rank}, but must be from 0 to {}, because nranks is {world}", world - 1);
        return Err(Failure::argument(message));
    }
    let device = cuda::current()?;
    // SAFETY: the caller guarantees `out`.
    unsafe { group::create(joining(out, world, id, rank, blocking, device)) }
}

fn joining(
    out: *mut ncclComm_t,
    world: c_int,
    id: ncclUniqueId,
    rank: c_int,
    blocking: bool,
    device: Option<Device>,
) -> Creation {
    let id = flexring_unique_id { internal: id.internal };
    let make = move || {
        // SAFETY: flexring writes a new handle.
        unsafe { made_by(|comm| flexring_comm_init_rank(comm, world, id, rank)) }
    };
    Creation {
        out,
        comm: Comm::joining(blocking, device, WorldKey::new(id.internal), None),
        make: Box::new(make),
        has_handle: true,
        parent: None,
    }
}

/// # Safety
/// `out` is NULL or points to `count` handles that may be written; `devices` is NULL or points to `count`
/// numbers.
unsafe fn init_all(out: *mut ncclComm_t, count: c_int, devices: *const c_int) -> Outcome<ncclResult_t> {
    check_out(out, "comm")?;
    check_world("ndev", count)?;
    if !devices.is_aligned() {
        return Err(Failure::argument("devlist is not aligned"));
    }
    let ordinal = |at: c_int| {
        // SAFETY: the list is not NULL, and the caller guarantees as many numbers.
        if devices.is_null() { at } else { unsafe { devices.add(at as usize).read() } }
    };
    let devices = cuda::devices((0..count).map(ordinal))?;
    let id = new_id()?;
    group::start();
    for (rank, device) in (0..count).zip(devices) {
        // SAFETY: the caller guarantees as many handles.
        unsafe { group::create(joining(out.add(rank as usize), count, id, rank, true, Some(device)))? };
    }
    group::end()
}

/// # Safety
/// `config` is NULL or a configuration; `out` is NULL or may be written, in a group until its end.
unsafe fn split(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    out: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> Outcome<ncclResult_t> {
    let (parent, live) = parent(comm)?;
    check_out(out, "newcomm")?;
    if color < 0 && color != FLEXRING_NO_COLOR {
        return Err(Failure::argument(format!(
            "color is {color}, neither NCCL_SPLIT_NOCOLOR nor a number from 0"
        )));
    }
    let make = move || {
        // SAFETY: the parent is live, and flexring writes a new handle or NULL.
        unsafe { made_by(|comm| flexring_comm_split(live.handle(), color, key, comm)) }
    };
    let has_handle = color != FLEXRING_NO_COLOR;
    // SAFETY: the caller guarantees `config` and `out`.
    unsafe {
        let comm = parent.child(config::blocking(config)?, Origin::Split(color));
        group::create(Creation { out, comm, make: Box::new(make), has_handle, parent: Some(parent) })
    }
}

/// # Safety
/// `exclude` is a list of as many ranks; `config` is NULL or a configuration; `out` is NULL or may be
/// written, in a group until its end.
unsafe fn shrink(
    comm: ncclComm_t,
    exclude: (*const c_int, c_int),
    out: *mut ncclComm_t,
    config: *const ncclConfig_t,
    flags: c_int,
) -> Outcome<ncclResult_t> {
    let (parent, live) = parent(comm)?;
    check_out(out, "newcomm")?;
    let (list, count) = exclude;
    if !(0..=live.world).contains(&count) || (count > 0 && (list.is_null() || !list.is_aligned())) {
        return Err(Failure::argument(format!(
            "excludeRanksList at {list:p} has {count} ranks of {}",
            live.world
        )));
    }
    if flags & !SHRINK_ABORT != 0 {
        return Err(Failure::argument(format!(
            "shrinkFlags is {flags}: expected NCCL_SHRINK_DEFAULT or NCCL_SHRINK_ABORT"
        )));
    }
    // SAFETY: the list is not NULL if it has ranks, and the caller guarantees as many.
    let excluded: Vec<c_int> = (0..count as usize).map(|at| unsafe { list.add(at).read() }).collect();
    let make = move || {
        // SAFETY: the parent is live, the list has as many ranks, and flexring writes a new handle.
        unsafe {
            if flags & SHRINK_ABORT != 0 {
                check(flexring_comm_abort(live.handle()))?;
            }
            made_by(|comm| flexring_comm_shrink(live.handle(), excluded.as_ptr(), excluded.len(), comm))
        }
    };
    // SAFETY: the caller guarantees `config` and `out`.
    unsafe {
        let comm = parent.child(config::blocking(config)?, Origin::Shrink);
        group::create(Creation { out, comm, make: Box::new(make), has_handle: true, parent: Some(parent) })
    }
}

/// The communicator that is split or shrunk. It must not be freed meanwhile, nor be split or shrunk in the
/// background: its ranks make communicators of it in the same order.
fn parent(handle: ncclComm_t) -> Outcome<(Arc<Comm>, Arc<Live>)> {
    let comm = handles::find(handle)?;
    let live = comm.idle()?;
    Ok((comm, live))
}
