//! The state of communicators: questions, errors, and their end.

use crate::comm::{Comm, Live};
use crate::handles;
use crate::status::{Failure, Outcome, check, check_out, nccl_functions, record};
use crate::threads::spawn;
use crate::types::{ncclComm_t, ncclResult_t};
use flexring_ffi::comm::{flexring_comm_abort, flexring_comm_synchronize};
use std::ffi::c_int;
use std::sync::Arc;

nccl_functions! {
    /// Waits until all calls of this rank are over. The communicator makes no more calls.
    fn ncclCommFinalize / pncclCommFinalize(comm: ncclComm_t) {
        let comm = handles::find(comm)?;
        let live = comm.ready()?;
        if comm.blocking {
            finalize(&comm, &live)?;
            return Ok(ncclResult_t::ncclSuccess);
        }
        let busy = comm.busy();
        spawn("flexring-finalize", move || {
            let _ = finalize(&comm, &live).inspect_err(record);
            drop((live, busy));
        })?;
        Ok(ncclResult_t::ncclInProgress)
    }

    /// Frees a communicator, after its calls are over. NULL is allowed.
    fn ncclCommDestroy / pncclCommDestroy(comm: ncclComm_t) {
        if !comm.is_null() {
            let comm = handles::remove(comm)?;
            drop(comm.end_settled());
        }
        Ok(ncclResult_t::ncclSuccess)
    }

    /// Ends the calls of a communicator on all ranks, and frees it. Also ends its making. NULL is allowed.
    fn ncclCommAbort / pncclCommAbort(comm: ncclComm_t) {
        if !comm.is_null() {
            let comm = handles::remove(comm)?;
            comm.cancel();
            if let Some(live) = comm.end_made() {
                // SAFETY: the handle is live as long as its owner.
                check(unsafe { flexring_comm_abort(live.handle()) })?;
            }
        }
        Ok(ncclResult_t::ncclSuccess)
    }

    /// Writes the code of the failure that ended the communicator, or ncclInProgress, or ncclSuccess.
    fn ncclCommGetAsyncError / pncclCommGetAsyncError(comm: ncclComm_t, asyncError: *mut ncclResult_t) {
        let comm = handles::find(comm)?;
        check_out(asyncError, "asyncError")?;
        let code = comm.progress().unwrap_or_else(|failure| {
            record(&failure);
            failure.code
        });
        // SAFETY: the pointer is not NULL, and the caller guarantees that it may be written.
        unsafe { asyncError.write(code) };
        Ok(ncclResult_t::ncclSuccess)
    }

    /// Writes the number of ranks.
    fn ncclCommCount / pncclCommCount(comm: ncclComm_t, count: *mut c_int) {
        // SAFETY: the caller guarantees `count`.
        unsafe { write_number(count, "count", || Ok(handles::find(comm)?.made()?.world)) }
    }

    /// Writes the number of the GPU that was current when the communicator was made.
    fn ncclCommCuDevice / pncclCommCuDevice(comm: ncclComm_t, device: *mut c_int) {
        let ordinal = || {
            let comm = handles::find(comm)?;
            comm.made()?;
            let device = comm.device.ok_or_else(|| Failure::usage("the communicator has no GPU: there is none"))?;
            Ok(device.ordinal)
        };
        // SAFETY: the caller guarantees `device`.
        unsafe { write_number(device, "device", ordinal) }
    }

    /// Writes this rank.
    fn ncclCommUserRank / pncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) {
        // SAFETY: the caller guarantees `rank`.
        unsafe { write_number(rank, "rank", || Ok(handles::find(comm)?.made()?.rank)) }
    }
}

fn finalize(comm: &Comm, live: &Arc<Live>) -> Outcome {
    // SAFETY: the handle is live as long as its owner.
    let outcome = check(unsafe { flexring_comm_synchronize(live.handle()) });
    comm.finalized(&outcome);
    outcome
}

/// # Safety
/// `out` is NULL or may be written.
unsafe fn write_number(
    out: *mut c_int,
    name: &str,
    number: impl FnOnce() -> Outcome<c_int>,
) -> Outcome<ncclResult_t> {
    let number = number()?;
    check_out(out, name)?;
    // SAFETY: the pointer is not NULL, and the caller guarantees that it may be written.
    unsafe { out.write(number) };
    Ok(ncclResult_t::ncclSuccess)
}
