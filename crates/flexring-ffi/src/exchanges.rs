//! Gather, scatter, all-to-all and barrier, blocking and asynchronous. Streams, memory and in-place pointers
//! are as for [`flexring_all_reduce`](super::collectives::flexring_all_reduce).

use super::collectives::{CallBuffers, RawCall, flexring_request, root_of};
use super::comm::flexring_comm;
use super::status::flexring_result;
use super::types::{FLEXRING_UINT8, flexring_dtype};
use flexring::internal::calls::CheckedCall;
use flexring::internal::memory::Piece;
use flexring_core::error::{Error, Result};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

impl CallBuffers<'_> {
    /// Validates a gather.
    ///
    /// # Safety
    /// The send buffer is NULL or valid for `send_count` elements until the call is over, on the root the
    /// receive buffer for as many for each rank.
    unsafe fn gather(&self, send_count: usize, root: c_int) -> Result<CheckedCall> {
        let (validator, root) = (self.validator(), root_of(root)?);
        let is_root = validator.rank == root;
        // SAFETY: the caller guarantees the buffers.
        let (input, output) = unsafe {
            let output = if is_root { self.receive(send_count, validator.world)? } else { Piece::EMPTY };
            (self.send(send_count, 1)?, output)
        };
        validator.gather(input, output, self.dtype, root)
    }

    /// Validates a scatter.
    ///
    /// # Safety
    /// The receive buffer is NULL or valid for `recv_count` elements until the call is over, on the root the
    /// send buffer for as many for each rank.
    unsafe fn scatter(&self, recv_count: usize, root: c_int) -> Result<CheckedCall> {
        let (validator, root) = (self.validator(), root_of(root)?);
        let is_root = validator.rank == root;
        // SAFETY: the caller guarantees the buffers.
        let (input, output) = unsafe {
            let input = if is_root { self.send(recv_count, validator.world)? } else { Piece::EMPTY };
            (input, self.receive(recv_count, 1)?)
        };
        validator.scatter(input, output, self.dtype, root)
    }

    /// Validates an all-to-all of equal blocks.
    ///
    /// # Safety
    /// The buffers are NULL or valid for `count` elements for each rank until the call is over.
    unsafe fn all_to_all(&self, count: usize) -> Result<CheckedCall> {
        let validator = self.validator();
        // SAFETY: the caller guarantees the buffers.
        let (input, output) =
            unsafe { (self.send(count, validator.world)?, self.receive(count, validator.world)?) };
        validator.all_to_all(input, output, self.dtype)
    }

    /// Validates an all-to-all of uneven blocks.
    ///
    /// # Safety
    /// The counts are NULL or valid for a number for each rank. The buffers are NULL or valid for the sum of
    /// their counts until the call is over.
    unsafe fn all_to_all_v(
        &self,
        send_counts: *const usize,
        recv_counts: *const usize,
    ) -> Result<CheckedCall> {
        let validator = self.validator();
        let list = |counts: *const usize, name: &str| -> Result<&[usize]> {
            if counts.is_null() || !counts.is_aligned() {
                let message = format!("{name} is {counts:p}, not an array with a count for each rank");
                return Err(Error::invalid_argument(message));
            }
            // SAFETY: the pointer is neither NULL nor misaligned, and the caller guarantees a count for each
            // rank.
            Ok(unsafe { std::slice::from_raw_parts(counts, validator.world) })
        };
        let (sends, receives) = (list(send_counts, "send_counts")?, list(recv_counts, "recv_counts")?);
        // A sum that does not fit is refused by `send` and `receive`, as it is longer than any memory.
        let sum = |counts: &[usize]| counts.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
        // SAFETY: the caller guarantees the buffers.
        let (input, output) = unsafe { (self.send(sum(sends), 1)?, self.receive(sum(receives), 1)?) };
        validator.all_to_all_v((input, sends), (output, receives), self.dtype)
    }
}

/// Concatenates the `send_count` elements at `send` of all ranks, in the order of ranks, at `recv` on the
/// rank `root`. In place: `send` is `recv` plus this rank times `send_count` elements. `recv` of other ranks
/// is ignored.
///
/// # Safety
/// `send` is valid for reading `send_count` elements, on the root `recv` for writing `send_count` for each
/// rank; `comm` is NULL or a live handle. Memory of a GPU, and the stream, stay valid until the stream has
/// passed the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_gather(
    send: *const c_void,
    recv: *mut c_void,
    send_count: usize,
    dtype: flexring_dtype,
    root: c_int,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_gather", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce.
    unsafe { call.run(stream, |buffers| buffers.gather(send_count, root)) }
}

/// Splits the vector at `send` of the rank `root` into `recv_count` elements per rank. Rank r gets the r-th
/// `recv_count` elements at `recv`. In place: `recv` is `send` plus this rank times `recv_count` elements.
/// `send` of other ranks is ignored.
///
/// # Safety
/// on the root `send` is valid for reading `recv_count` elements for each rank, `recv` for writing
/// `recv_count`; `comm` is NULL or a live handle. Memory of a GPU, and the stream, stay valid until the
/// stream has passed the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_scatter(
    send: *const c_void,
    recv: *mut c_void,
    recv_count: usize,
    dtype: flexring_dtype,
    root: c_int,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_scatter", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce.
    unsafe { call.run(stream, |buffers| buffers.scatter(recv_count, root)) }
}

/// Sends the r-th `count` elements at `send` to rank r, and receives the r-th `count` elements at `recv` from
/// it, for every rank r. The two buffers do not overlap; on a GPU they may also be the same (in place).
///
/// # Safety
/// `send` is valid for reading and `recv` for writing `count` elements for each rank; `comm` is NULL
/// or a live handle. Memory of a GPU, and the stream, stay valid until the stream has passed the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_to_all(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_all_to_all", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce.
    unsafe { call.run(stream, |buffers| buffers.all_to_all(count)) }
}

/// flexring_all_to_all with blocks of different lengths: `send_counts[r]` elements go to rank r, and
/// `recv_counts[r]` elements come from it. In both buffers the blocks follow each other without gaps, in the
/// order of ranks. A block that is not as long as the receiver expects is an error on the receiver, and on
/// all ranks in their next call at the latest. All ranks must call this function, or all of them
/// flexring_all_to_all.
///
/// # Safety
/// `send_counts` and `recv_counts` are arrays of one count for each rank; `send` is valid for reading and
/// `recv` for writing as many elements as their counts add up to; `comm` is NULL or a live handle. Memory of
/// a GPU, and the stream, stay valid until the stream has passed the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_to_all_v(
    send: *const c_void,
    send_counts: *const usize,
    recv: *mut c_void,
    recv_counts: *const usize,
    dtype: flexring_dtype,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    let call = RawCall { function: "flexring_all_to_all_v", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce.
    unsafe { call.run(stream, |buffers| buffers.all_to_all_v(send_counts, recv_counts)) }
}

/// Starts flexring_gather and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
///
/// # Safety
/// As for flexring_gather, but the buffers must stay valid until flexring_wait has returned; `out` is NULL or
/// points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_gather_async(
    send: *const c_void,
    recv: *mut c_void,
    send_count: usize,
    dtype: flexring_dtype,
    root: c_int,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_gather_async", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce_async.
    unsafe { call.start(out, |buffers| buffers.gather(send_count, root)) }
}

/// Starts flexring_scatter and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
///
/// # Safety
/// As for flexring_scatter, but the buffers must stay valid until flexring_wait has returned; `out` is NULL
/// or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_scatter_async(
    send: *const c_void,
    recv: *mut c_void,
    recv_count: usize,
    dtype: flexring_dtype,
    root: c_int,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_scatter_async", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce_async.
    unsafe { call.start(out, |buffers| buffers.scatter(recv_count, root)) }
}

/// Starts flexring_all_to_all and returns at once, as flexring_all_reduce_async does for flexring_all_reduce.
///
/// # Safety
/// As for flexring_all_to_all, but the buffers must stay valid until flexring_wait has returned; `out` is
/// NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_to_all_async(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_all_to_all_async", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce_async.
    unsafe { call.start(out, |buffers| buffers.all_to_all(count)) }
}

/// Starts flexring_all_to_all_v and returns at once, as flexring_all_reduce_async does for
/// flexring_all_reduce. The arrays of counts are copied.
///
/// # Safety
/// As for flexring_all_to_all_v, but the buffers must stay valid until flexring_wait has returned; `out` is
/// NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_to_all_v_async(
    send: *const c_void,
    send_counts: *const usize,
    recv: *mut c_void,
    recv_counts: *const usize,
    dtype: flexring_dtype,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    let call = RawCall { function: "flexring_all_to_all_v_async", comm, send, recv, dtype };
    // SAFETY: as for flexring_all_reduce_async.
    unsafe { call.start(out, |buffers| buffers.all_to_all_v(send_counts, recv_counts)) }
}

/// The call of a function that takes no buffers.
fn without_buffers(function: &'static str, comm: *mut flexring_comm) -> RawCall {
    RawCall { function, comm, send: null(), recv: null_mut(), dtype: FLEXRING_UINT8 }
}

/// Returns when all ranks have called it. It concerns the calling thread and no stream: calls that this rank
/// has queued in streams before are over, too.
///
/// # Safety
/// `comm` is NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_barrier(comm: *mut flexring_comm) -> flexring_result {
    // SAFETY: the caller guarantees the handle. There is no stream, and there are no buffers.
    unsafe {
        without_buffers("flexring_barrier", comm).run(null_mut(), |buffers| buffers.validator().barrier())
    }
}

/// Starts flexring_barrier and returns at once. flexring_wait returns when all ranks have called one of the
/// two.
///
/// # Safety
/// `comm` is NULL or a live handle; `out` is NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_barrier_async(
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    // SAFETY: the caller guarantees handle and `out`. There are no buffers.
    unsafe {
        without_buffers("flexring_barrier_async", comm).start(out, |buffers| buffers.validator().barrier())
    }
}
