//! The collectives, blocking and not. Counts and in-place pointers mean what they mean in NCCL.

use super::buffer::piece_in;
use super::comm::{borrow, flexring_comm};
use super::status::{flexring_result, guarded, invalid_argument};
use super::types::{dtype_of, flexring_dtype, flexring_op, op_of};
use crate::communicator::{CallOutcome, CallValidator, CheckedCall, Communicator};
use crate::device::CallerStream;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::memory::Piece;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

/// The vectors of one call, not yet checked against each other.
struct CallBuffers<'a> {
    communicator: &'a Communicator,
    dtype: DType,
    send: *mut c_void,
    receive: *mut c_void,
}

impl<'a> CallBuffers<'a> {
    fn new(
        communicator: &'a Communicator,
        send: *const c_void,
        receive: *mut c_void,
        dtype: flexring_dtype,
    ) -> Result<Self> {
        Ok(Self { communicator, dtype: dtype_of(dtype)?, send: send.cast_mut(), receive })
    }

    /// `count` elements of what is sent, times `parts`.
    ///
    /// # Safety
    /// The send buffer is NULL or valid for them until the call is over.
    unsafe fn send(&self, count: usize, parts: usize) -> Result<Piece> {
        // SAFETY: as this function's.
        unsafe { self.piece(self.send, count, parts, "send") }
    }

    /// `count` elements of what is received, times `parts`.
    ///
    /// # Safety
    /// The receive buffer is NULL or valid for writing them until the call is over.
    unsafe fn receive(&self, count: usize, parts: usize) -> Result<Piece> {
        // SAFETY: as this function's.
        unsafe { self.piece(self.receive, count, parts, "receive") }
    }

    /// # Safety
    /// `pointer` is NULL or valid for `count * parts` elements until the call is over.
    unsafe fn piece(&self, pointer: *mut c_void, count: usize, parts: usize, name: &str) -> Result<Piece> {
        let elements = count.checked_mul(parts).and_then(|count| count.checked_mul(self.dtype.size()));
        // No object is larger than that, so no honest count is.
        let bytes = elements.filter(|bytes| *bytes <= isize::MAX as usize).ok_or_else(|| {
            invalid_argument(format!("{count} x {} is more than any memory holds", self.dtype.name()))
        })?;
        if bytes == 0 {
            return Ok(Piece::EMPTY);
        }
        let start = NonNull::new(pointer.cast())
            .ok_or_else(|| invalid_argument(format!("the {name} buffer is NULL")))?;
        if (start.as_ptr() as usize).checked_add(bytes).is_none() {
            return Err(invalid_argument(format!(
                "{bytes} bytes at {pointer:p} reach beyond the address space"
            )));
        }
        let located = self.communicator.memory_of(start.as_ptr(), bytes);
        let memory = located.map_err(|error| error.context(format_args!("the {name} buffer")))?;
        // SAFETY: the caller vouches for the elements, which are these bytes, and they are where the driver says.
        Ok(unsafe { piece_in(memory, start, bytes) })
    }
}

fn root_of(root: c_int) -> Result<usize> {
    usize::try_from(root).map_err(|_| invalid_argument(format!("root {root} is not a rank")))
}

/// Checks what `validate` makes of the caller's vectors, and runs it to its end, or has it take effect in the stream if they
/// are on a GPU.
///
/// # Safety
/// `comm` is NULL or a live handle, `stream` is live or NULL, and vectors on a GPU stay valid until it has passed.
unsafe fn call(
    comm: *mut flexring_comm,
    name: &str,
    stream: *mut c_void,
    validate: impl FnOnce(&Communicator, CallValidator) -> Result<CheckedCall>,
) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller vouches for the handle.
        let communicator: &Communicator = unsafe { &borrow(comm, name)?.communicator };
        let checked = validate(communicator, communicator.validator())?;
        if stream.is_null() && checked.is_on_host() {
            return communicator.run(&checked);
        }
        // SAFETY: the caller vouches for the stream.
        communicator.run_in_stream(checked, unsafe { CallerStream::new(stream) })
    })
}

/// # Safety
/// `send` and `recv` are NULL or valid for `count` elements until the call is over.
unsafe fn all_reduce(
    communicator: &Communicator,
    (send, recv): (*const c_void, *mut c_void),
    count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
) -> Result<CheckedCall> {
    let vectors = CallBuffers::new(communicator, send, recv, dtype)?;
    let op: ReduceOp = op_of(op)?;
    let validator = communicator.validator();
    // SAFETY: as this function's.
    unsafe { validator.all_reduce(vectors.send(count, 1)?, vectors.receive(count, 1)?, vectors.dtype, op) }
}

/// Reduces the `count` elements at `send` of all ranks into `recv` on every rank. The two may be the same
/// (in place) or apart, not overlap otherwise. Both are memory of the host or both of one GPU.
///
/// On the host, with stream NULL, the call returns when the result is there. On a GPU it returns at once and takes
/// effect in `stream`, a cudaStream_t or CUstream, NULL being the default stream: behind what is in it, and before
/// what comes later, as cudaMemcpyAsync does. Whose memory it is CUDA's driver tells; managed memory is invalid_argument, and so
/// is a stream that is being captured, and one of another context than the GPU's primary one. A call that fails later
/// lets the stream go on without a result: flexring_comm_status, flexring_comm_synchronize and all later calls
/// return why. Ranks that are threads of one process and share a GPU give a stream each, not NULL: in the same stream
/// one would wait for the other, and the other for the one.
///
/// All this is so for the other collectives, too.
///
/// # Safety
/// `send` is valid for reading and `recv` for writing `count` elements; `comm` is NULL or a live handle; `stream` is
/// live. Memory of a GPU, and the stream, stay valid until the stream has passed the call.
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
    // SAFETY: the caller vouches for the handle, and for the buffers until this function returns, which it
    // does after the call is over, or on a GPU until the stream has passed it.
    unsafe {
        call(comm, "flexring_all_reduce", stream, |communicator, _| {
            all_reduce(communicator, (send, recv), count, dtype, op)
        })
    }
}

/// Reduces the vectors at `send` of all ranks, `recv_count` elements for each rank; rank r ends with the r-th
/// `recv_count` of them at `recv`. In place: `recv` is `send` plus this rank times `recv_count` elements.
///
/// # Safety
/// `send` is valid for reading `recv_count` elements for each rank, `recv` for writing `recv_count`; `comm` is
/// NULL or a live handle.
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
    // SAFETY: as for flexring_all_reduce.
    unsafe {
        call(comm, "flexring_reduce_scatter", stream, |communicator, validator| {
            let vectors = CallBuffers::new(communicator, send, recv, dtype)?;
            let (input, output) =
                (vectors.send(recv_count, validator.world)?, vectors.receive(recv_count, 1)?);
            validator.reduce_scatter(input, output, vectors.dtype, op_of(op)?)
        })
    }
}

/// Gathers the `send_count` elements at `send` of all ranks, in the order of ranks, at `recv` on every rank. In
/// place: `send` is `recv` plus this rank times `send_count` elements.
///
/// # Safety
/// `send` is valid for reading `send_count` elements, `recv` for writing `send_count` for each rank; `comm` is
/// NULL or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_gather(
    send: *const c_void,
    recv: *mut c_void,
    send_count: usize,
    dtype: flexring_dtype,
    comm: *mut flexring_comm,
    stream: *mut c_void,
) -> flexring_result {
    // SAFETY: as for flexring_all_reduce.
    unsafe {
        call(comm, "flexring_all_gather", stream, |communicator, validator| {
            let vectors = CallBuffers::new(communicator, send, recv, dtype)?;
            let (input, output) =
                (vectors.send(send_count, 1)?, vectors.receive(send_count, validator.world)?);
            validator.all_gather(input, output, vectors.dtype)
        })
    }
}

/// Copies the `count` elements at `send` of the rank `root` to `recv` on every rank. In place: `recv` is `send`.
/// The `send` of other ranks is not looked at.
///
/// # Safety
/// On the root `send` is valid for reading, everywhere `recv` for writing `count` elements; `comm` is NULL or a
/// live handle.
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
    // SAFETY: as for flexring_all_reduce.
    unsafe {
        call(comm, "flexring_broadcast", stream, |communicator, validator| {
            let (vectors, root) = (CallBuffers::new(communicator, send, recv, dtype)?, root_of(root)?);
            let input = if validator.rank == root { vectors.send(count, 1)? } else { Piece::EMPTY };
            validator.broadcast(input, vectors.receive(count, 1)?, vectors.dtype, root)
        })
    }
}

/// Reduces the `count` elements at `send` of all ranks into `recv` on the rank `root`. In place: `recv` is `send`.
/// The `recv` of other ranks is not looked at.
///
/// # Safety
/// `send` is valid for reading, on the root `recv` for writing `count` elements; `comm` is NULL or a live handle.
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
    // SAFETY: as for flexring_all_reduce.
    unsafe {
        call(comm, "flexring_reduce", stream, |communicator, validator| {
            let (vectors, root) = (CallBuffers::new(communicator, send, recv, dtype)?, root_of(root)?);
            let output = if validator.rank == root { vectors.receive(count, 1)? } else { Piece::EMPTY };
            validator.reduce(vectors.send(count, 1)?, output, vectors.dtype, op_of(op)?, root)
        })
    }
}

/// A call under way. Made by flexring_all_reduce_async, ended by flexring_wait.
#[allow(non_camel_case_types, reason = "named as C names types")]
pub struct flexring_request {
    outcome: Arc<CallOutcome>,
}

/// flexring_all_reduce without waiting: the call runs while the caller goes on, after all earlier calls of this
/// communicator. The buffers belong to flexring until flexring_wait has returned for the request. On a GPU the call
/// takes effect in the default stream.
///
/// # Safety
/// As for flexring_all_reduce, but the buffers must stay valid until flexring_wait has returned; `out` is
/// NULL or points to a pointer that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_all_reduce_async(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
    comm: *mut flexring_comm,
    out: *mut *mut flexring_request,
) -> flexring_result {
    guarded(|| {
        if out.is_null() {
            return Err(invalid_argument("flexring_all_reduce_async: out is NULL"));
        }
        // SAFETY: the caller vouches for the handle, for `out`, and for the buffers until the request is over.
        unsafe {
            let comm = borrow(comm, "flexring_all_reduce_async")?;
            let communicator = &comm.communicator;
            let checked = all_reduce(communicator, (send, recv), count, dtype, op)?;
            let outcome = if checked.is_on_host() {
                communicator.submit(checked)?
            } else {
                communicator.submit_in_stream(checked, CallerStream::DEFAULT, None)?
            };
            out.write(Box::into_raw(Box::new(flexring_request { outcome })));
        }
        Ok(())
    })
}

/// Waits until the call is over, frees the request, and returns the call's result.
///
/// # Safety
/// `request` is NULL or came from flexring_all_reduce_async and was not waited for yet; it is dead afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_wait(request: *mut flexring_request) -> flexring_result {
    guarded(|| {
        if request.is_null() {
            return Err(invalid_argument("flexring_wait: the request is NULL"));
        }
        // SAFETY: the caller vouches that the request is live and used by nobody else, so it is owned here.
        unsafe { Box::from_raw(request) }.outcome.wait()
    })
}

/// Writes 1 to `done` if the call is over, well or not, and 0 if not. flexring_wait must follow all the same.
///
/// # Safety
/// `request` is NULL or live; `done` is NULL or points to an int that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_test(
    request: *const flexring_request,
    done: *mut c_int,
) -> flexring_result {
    guarded(|| {
        // SAFETY: the caller vouches that a request that is not NULL is live.
        let request = unsafe { request.as_ref() }
            .ok_or_else(|| invalid_argument("flexring_test: the request is NULL"))?;
        if done.is_null() {
            return Err(invalid_argument("flexring_test: done is NULL"));
        }
        // SAFETY: `done` is not NULL, and the caller vouches that it may be written.
        unsafe { done.write(c_int::from(request.outcome.is_over())) };
        Ok(())
    })
}
