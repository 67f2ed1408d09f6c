//! Communicators as handles.

use super::handles::HandleTable;
use super::status::{check_pointer, flexring_result, guarded};
use super::unique_id::flexring_unique_id;
use flexring::internal::calls::abort_unfinished;
use flexring::{Communicator, Identity, UniqueId};
use flexring_core::error::{Error, Result};
use flexring_core::process;
use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

/// A group of ranks that reduce vectors together. Made by flexring_comm_init_*, freed by flexring_comm_free.
///
/// A forked child of the process that made it cannot use it, because threads and connections do not survive a
/// fork: its calls return FLEXRING_INVALID_ARGUMENT. The child may free it, which has no effect on the
/// parent, and may make communicators of its own.
#[allow(non_camel_case_types, reason = "named as C names types")]
pub struct flexring_comm {
    pub(super) communicator: Communicator,
}

/// The live communicators.
static COMMS: HandleTable<flexring_comm> = HandleTable::new("communicator", "freed");

/// A handle of this communicator.
pub(super) fn handle_of(communicator: Communicator) -> Result<*mut flexring_comm> {
    process::at_exit(|| {
        flexring_abort_unfinished(0);
    });
    COMMS.insert(flexring_comm { communicator }).map_err(|(_, error)| error)
}

/// The communicator behind a handle. Fails in a forked child of the process that created it.
///
/// # Safety
/// No other thread frees `comm` meanwhile.
pub(super) unsafe fn borrow<'a>(comm: *const flexring_comm, function: &str) -> Result<&'a flexring_comm> {
    // SAFETY: the caller's contract is the same.
    let comm = unsafe { borrow_anywhere(comm, function)? };
    comm.communicator.check_process().map_err(|error| error.context(function))?;
    Ok(comm)
}

/// [`borrow`], but succeeds in a forked child, too.
///
/// # Safety
/// As for [`borrow`].
unsafe fn borrow_anywhere<'a>(comm: *const flexring_comm, function: &str) -> Result<&'a flexring_comm> {
    // SAFETY: the caller's contract is the same.
    unsafe { COMMS.get(comm) }.map_err(|error| error.context(function))
}

/// [`borrow`], but `None` in a forked child.
///
/// # Safety
/// As for [`borrow`].
pub(super) unsafe fn borrow_in_creator<'a>(
    comm: *const flexring_comm,
    function: &str,
) -> Result<Option<&'a flexring_comm>> {
    // SAFETY: the caller's contract is the same.
    let comm = unsafe { borrow_anywhere(comm, function)? };
    Ok(comm.communicator.is_in_creator().then_some(comm))
}

/// Writes a handle of a new communicator to `out`.
///
/// # Safety
/// `out` is NULL or may be written.
unsafe fn return_handle(
    out: *mut *mut flexring_comm,
    function: &str,
    make: impl FnOnce() -> Result<Communicator>,
) -> Result<()> {
    check_pointer(out, function, "out")?;
    let handle = handle_of(make()?)?;
    // SAFETY: `out` is not NULL, and the caller guarantees that it may be written.
    unsafe { out.write(handle) };
    Ok(())
}

/// Joins the world that the environment describes: FLEXRING_RANK, FLEXRING_WORLD_SIZE, FLEXRING_MASTER_ADDR
/// and FLEXRING_MASTER_PORT, or the variables of torchrun, Open MPI, MPICH or Slurm. Returns when all ranks
/// have joined and all links are ready.
///
/// A communicator works with one GPU: the one that FLEXRING_GPU names, or whose context is current on this
/// thread. That GPU is initialized here. Without either it is the GPU of the first vector on a GPU, and the
/// call on that vector is slower than later ones.
///
/// # Safety
/// `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_init_from_env(out: *mut *mut flexring_comm) -> flexring_result {
    // SAFETY: the caller's contract is the one of `return_handle`.
    guarded(|| unsafe { return_handle(out, "flexring_comm_init_from_env", Communicator::from_env) })
}

/// Joins the world of `world` ranks that share `id`, as `rank`.
///
/// # Safety
/// `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_init_rank(
    out: *mut *mut flexring_comm,
    world: c_int,
    id: flexring_unique_id,
    rank: c_int,
) -> flexring_result {
    let make = || join("flexring_comm_init_rank", world, &id, rank, None);
    // SAFETY: the caller's contract is the one of `return_handle`.
    guarded(|| unsafe { return_handle(out, "flexring_comm_init_rank", make) })
}

/// flexring_comm_init_rank, with a limit of its own in milliseconds, from 1, instead of FLEXRING_TIMEOUT_MS
/// and FLEXRING_CONNECT_TIMEOUT_MS. All ranks must pass the same limit.
///
/// # Safety
/// `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_init_rank_timeout(
    out: *mut *mut flexring_comm,
    world: c_int,
    id: flexring_unique_id,
    rank: c_int,
    timeout_ms: c_int,
) -> flexring_result {
    const FUNCTION: &str = "flexring_comm_init_rank_timeout";
    let make = || {
        let milliseconds = u64::try_from(timeout_ms).ok().filter(|milliseconds| *milliseconds > 0);
        let Some(milliseconds) = milliseconds else {
            let message = format!("{FUNCTION}: timeout_ms is {timeout_ms}, but must be at least 1");
            return Err(Error::invalid_argument(message));
        };
        let timeout = Duration::from_millis(milliseconds);
        join(FUNCTION, world, &id, rank, Some(timeout))
    };
    // SAFETY: the caller's contract is the one of `return_handle`.
    guarded(|| unsafe { return_handle(out, FUNCTION, make) })
}

/// Joins a world by its id, with this limit instead of those of the settings. `function` is named in errors.
fn join(
    function: &str,
    world: c_int,
    id: &flexring_unique_id,
    rank: c_int,
    limit: Option<Duration>,
) -> Result<Communicator> {
    let number = |value: c_int, name: &str| {
        usize::try_from(value).map_err(|_| Error::invalid_argument(format!("{function}: {name} is {value}")))
    };
    let (world, rank) = (number(world, "world")?, number(rank, "rank")?);
    let id = UniqueId::from_bytes(&id.internal)?;
    let (mut config, identity) = Communicator::settings(|_| Identity::from_unique_id(world, &id, rank))?;
    if let Some(limit) = limit {
        (config.timeout, config.connect_timeout) = (limit, limit);
    }
    Communicator::with_config(&config, &identity)
}

/// Makes a communicator of the ranks that are left, in their order, usually after `comm` has failed because a
/// rank died. Every rank that is alive must call it with the same list of ranks to leave out, except those
/// ranks, and ranks that have freed `comm`. Ranks that died, were stopped or cannot be reached are left out,
/// too; a rank that continues later gets FLEXRING_RENDEZVOUS_FAILED here. Calls on `comm` end first. After a
/// failure the vectors of the failed calls have undefined contents. `comm` must still be freed.
///
/// # Safety
/// `comm` is NULL or a live handle; `exclude` points to `exclude_count` ranks, and may be NULL if there are
/// none; `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_shrink(
    comm: *const flexring_comm,
    exclude: *const c_int,
    exclude_count: usize,
    out: *mut *mut flexring_comm,
) -> flexring_result {
    const FUNCTION: &str = "flexring_comm_shrink";
    guarded(|| {
        // SAFETY: the caller guarantees the handle.
        let comm = unsafe { borrow(comm, FUNCTION)? };
        if exclude_count > 0 {
            check_pointer(exclude, FUNCTION, "exclude")?;
        }
        if exclude_count > comm.communicator.world_size() {
            let message = format!("{FUNCTION}: exclude_count is {exclude_count}, more than there are ranks");
            return Err(Error::invalid_argument(message));
        }
        let excluded: &[c_int] = if exclude_count == 0 {
            &[]
        } else {
            // SAFETY: `exclude` is not NULL, and the caller guarantees that it points to that many ranks.
            unsafe { std::slice::from_raw_parts(exclude, exclude_count) }
        };
        let rank = |rank: &c_int| {
            usize::try_from(*rank)
                .map_err(|_| Error::invalid_argument(format!("{FUNCTION}: exclude contains {rank}")))
        };
        let excluded: Vec<usize> = excluded.iter().map(rank).collect::<Result<_>>()?;
        // SAFETY: the caller's contract is the one of `return_handle`.
        unsafe { return_handle(out, FUNCTION, || comm.communicator.shrink(&excluded)) }
    })
}

/// Passed to flexring_comm_split by a rank that is in no new communicator.
pub const FLEXRING_NO_COLOR: c_int = -1;
const _: () = assert!(FLEXRING_NO_COLOR == Communicator::NO_COLOR, "the C ABI gives the value");

/// Makes one communicator for each color, of the ranks that pass that color, ordered by `key` and then by
/// their rank in `comm`. `out` is set to NULL if `color` is FLEXRING_NO_COLOR. All ranks must call it,
/// between the same two calls on `comm`.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_split(
    comm: *const flexring_comm,
    color: c_int,
    key: c_int,
    out: *mut *mut flexring_comm,
) -> flexring_result {
    const FUNCTION: &str = "flexring_comm_split";
    guarded(|| {
        // SAFETY: the caller guarantees the handle.
        let comm = unsafe { borrow(comm, FUNCTION)? };
        check_pointer(out, FUNCTION, "out")?;
        let made = comm.communicator.split(color, key)?;
        let handle = made.map(handle_of).transpose()?;
        // SAFETY: `out` is not NULL, and the caller guarantees that it may be written.
        unsafe { out.write(handle.unwrap_or(std::ptr::null_mut())) };
        Ok(())
    })
}

/// Writes this process's rank to `out`.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_rank(comm: *const flexring_comm, out: *mut c_int) -> flexring_result {
    // SAFETY: the caller's contract is the one of `write_number`.
    guarded(|| unsafe { write_number(comm, out, "flexring_comm_rank", Communicator::rank) })
}

/// Writes the number of ranks to `out`.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_size(comm: *const flexring_comm, out: *mut c_int) -> flexring_result {
    // SAFETY: the caller's contract is the one of `write_number`.
    guarded(|| unsafe { write_number(comm, out, "flexring_comm_size", Communicator::world_size) })
}

/// Writes this rank's place among those of its node, from 0, to `out`: the usual number of its GPU, modulo
/// the GPUs that there are.
///
/// # Safety
/// As for [`flexring_comm_rank`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_local_rank(
    comm: *const flexring_comm,
    out: *mut c_int,
) -> flexring_result {
    // SAFETY: the caller's contract is the one of `write_number`.
    guarded(|| unsafe { write_number(comm, out, "flexring_comm_local_rank", Communicator::local_rank) })
}

/// Writes a property of the communicator to `out`.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or may be written.
unsafe fn write_number(
    comm: *const flexring_comm,
    out: *mut c_int,
    function: &str,
    property: impl FnOnce(&Communicator) -> usize,
) -> Result<()> {
    // SAFETY: the caller guarantees the handle.
    let comm = unsafe { borrow(comm, function)? };
    check_pointer(out, function, "out")?;
    let number = c_int::try_from(property(&comm.communicator))
        .map_err(|_| Error::invalid_argument("the number does not fit into an int"))?;
    // SAFETY: `out` is not NULL, and the caller guarantees that it may be written.
    unsafe { out.write(number) };
    Ok(())
}

/// Waits until all earlier calls of this rank are over, including those that take effect in streams. Returns
/// the error that ended the communicator, if it has failed.
///
/// # Safety
/// `comm` is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_synchronize(comm: *const flexring_comm) -> flexring_result {
    // SAFETY: the caller guarantees the handle.
    guarded(|| unsafe { borrow(comm, "flexring_comm_synchronize")? }.communicator.synchronize())
}

/// Returns the error that ended the communicator, if it has failed. Does not wait. Calls that take effect in
/// streams return before they are over; use this function to find out whether one has failed.
///
/// # Safety
/// `comm` is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_status(comm: *const flexring_comm) -> flexring_result {
    // SAFETY: the caller guarantees the handle.
    guarded(|| unsafe { borrow(comm, "flexring_comm_status")? }.communicator.status())
}

/// Ends the communicator on all ranks. May be called from any thread, and takes effect at once: running calls
/// return FLEXRING_ABORTED on every rank. The communicator must still be freed.
///
/// # Safety
/// `comm` is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_abort(comm: *mut flexring_comm) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller guarantees the handle.
        unsafe { borrow(comm, "flexring_comm_abort")? }.communicator.abort();
        Ok(())
    })
}

/// Ends the communicator on all ranks because this process is about to exit. `cause` completes a sentence
/// that begins with the rank, such as "raised ValueError: no data (train.py:20)"; the errors of the other
/// ranks contain it. Ranks on this machine get them when this process has exited, or 5 seconds later, so that
/// a launcher sees which process failed first. Otherwise as flexring_comm_abort.
///
/// # Safety
/// `comm` is NULL or a live handle. `cause` is NULL or a string that ends with a NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_abort_on_exit(
    comm: *mut flexring_comm,
    cause: *const c_char,
) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller guarantees the handle.
        let comm = unsafe { borrow(comm, "flexring_comm_abort_on_exit")? };
        check_pointer(cause, "flexring_comm_abort_on_exit", "cause")?;
        // SAFETY: `cause` is not NULL, and the caller guarantees that it ends with a NUL.
        let cause = unsafe { CStr::from_ptr(cause) };
        comm.communicator.abort_on_exit(&cause.to_string_lossy());
        Ok(())
    })
}

/// Frees a communicator, also after errors; NULL is allowed. Waits for asynchronous calls. Memory of
/// flexring_alloc must have been freed by flexring_free. In a forked child it only frees the handle.
///
/// # Safety
/// No other thread uses `comm`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_comm_free(comm: *mut flexring_comm) -> flexring_result {
    const FUNCTION: &str = "flexring_comm_free";
    guarded(|| {
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: the caller guarantees that no other thread frees it.
        unsafe { borrow_anywhere(comm, FUNCTION)? }.communicator.check_not_nested()?;
        let comm = COMMS.take(comm).map_err(|error| error.context(FUNCTION))?;
        if comm.communicator.is_abandoned() {
            // Threads that the exit ends may be in its calls.
            std::mem::forget(comm);
        }
        Ok(())
    })
}

/// Aborts, on all ranks, the communicators of this process that have calls which are not over within
/// `patience_ms` milliseconds; freeing them waits for nothing afterwards. For the exit of a program, which
/// must not wait for other ranks. exit() calls it, with 0, before it runs the destructors of objects that
/// were made before the first communicator.
#[unsafe(no_mangle)]
pub extern "C" fn flexring_abort_unfinished(patience_ms: c_int) -> flexring_result {
    guarded(|| {
        abort_unfinished(Duration::from_millis(u64::try_from(patience_ms).unwrap_or(0)));
        Ok(())
    })
}
