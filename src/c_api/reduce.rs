//! The all-reduce, blocking and not.

use super::comm::{borrow, flexring_comm};
use super::status::{flexring_result, guarded, refused};
use crate::communicator::{Asked, Outcome};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Piece;
use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

/// The type of one element; one of FLEXRING_INT8 and so on. Numbered as NCCL numbers them.
#[allow(non_camel_case_types, reason = "named as C names types")]
pub type flexring_dtype = c_int;
/// How elements are combined: one of FLEXRING_SUM and so on, or what flexring_op_create_premul_sum returns.
#[allow(non_camel_case_types, reason = "named as C names types")]
pub type flexring_op = u64;

/// Signed 8-bit integers.
pub const FLEXRING_INT8: flexring_dtype = 0;
/// Unsigned 8-bit integers.
pub const FLEXRING_UINT8: flexring_dtype = 1;
/// Signed 32-bit integers.
pub const FLEXRING_INT32: flexring_dtype = 2;
/// Unsigned 32-bit integers.
pub const FLEXRING_UINT32: flexring_dtype = 3;
/// Signed 64-bit integers.
pub const FLEXRING_INT64: flexring_dtype = 4;
/// Unsigned 64-bit integers.
pub const FLEXRING_UINT64: flexring_dtype = 5;
/// IEEE 754 binary16.
pub const FLEXRING_FLOAT16: flexring_dtype = 6;
/// IEEE 754 binary32.
pub const FLEXRING_FLOAT32: flexring_dtype = 7;
/// IEEE 754 binary64.
pub const FLEXRING_FLOAT64: flexring_dtype = 8;
/// bfloat16.
pub const FLEXRING_BFLOAT16: flexring_dtype = 9;

/// The sum over all ranks.
pub const FLEXRING_SUM: flexring_op = 0;
/// The product over all ranks.
pub const FLEXRING_PROD: flexring_op = 1;
/// The largest element; NaN if any is NaN.
pub const FLEXRING_MAX: flexring_op = 2;
/// The smallest element; NaN if any is NaN.
pub const FLEXRING_MIN: flexring_op = 3;
/// The sum divided by the number of ranks; integers truncate toward zero.
pub const FLEXRING_AVG: flexring_op = 4;

fn dtype_of(code: flexring_dtype) -> Result<DType> {
    let dtype = u8::try_from(code).ok().and_then(DType::from_code);
    dtype.ok_or_else(|| refused(format!("{code} is no flexring_dtype: there are 0 (int8) to 9 (bfloat16)")))
}

fn op_of(code: flexring_op) -> Result<ReduceOp> {
    Ok(match code {
        FLEXRING_SUM => ReduceOp::Sum,
        FLEXRING_PROD => ReduceOp::Prod,
        FLEXRING_MAX => ReduceOp::Max,
        FLEXRING_MIN => ReduceOp::Min,
        FLEXRING_AVG => ReduceOp::Avg,
        _ => ReduceOp::PreMulSum(factor_of(code).ok_or_else(|| {
            refused(format!("{code} is no flexring_op: there are 0 (sum) to 4 (avg) and those of flexring_op_create_premul_sum"))
        })?),
    })
}

/// What marks an operation that carries a factor. The factor's f32 bits are in the lower half, so that an
/// operation is a plain number, belongs to no communicator and needs not be freed.
const PREMUL_SUM: u64 = 0x464c_5831 << 32;

fn factor_of(code: flexring_op) -> Option<f64> {
    (code >> 32 == PREMUL_SUM >> 32).then(|| f64::from(f32::from_bits(code as u32)))
}

/// Makes an operation that sums each rank's elements times that rank's own `factor`; ranks may give different
/// factors. For integer types the factor must be a whole number that the type can hold. The operation needs
/// not be freed.
///
/// # Safety
/// `out` is NULL or points to a flexring_op that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_op_create_premul_sum(
    factor: f32,
    out: *mut flexring_op,
) -> flexring_result {
    guarded(|| {
        if out.is_null() {
            return Err(refused("flexring_op_create_premul_sum: out is NULL"));
        }
        // SAFETY: `out` is not NULL, and the caller vouches that it may be written.
        unsafe { out.write(PREMUL_SUM | u64::from(factor.to_bits())) };
        Ok(())
    })
}

/// Checks the arguments of an all-reduce. Once this has succeeded, the pieces are what the caller vouches for.
///
/// # Safety
/// `send` and `receive` are NULL or valid for `count` elements until the call is over.
unsafe fn ask(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    dtype: flexring_dtype,
    op: flexring_op,
    stream: *mut c_void,
) -> Result<Asked> {
    let (dtype, op) = (dtype_of(dtype)?, op_of(op)?);
    if !stream.is_null() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "stream is not NULL, but this build of flexring reduces host memory only",
        ));
    }
    // No object is larger than that, so no honest count is.
    let bytes = count.checked_mul(dtype.size()).filter(|bytes| *bytes <= isize::MAX as usize);
    let bytes =
        bytes.ok_or_else(|| refused(format!("{count} x {} is more than any memory holds", dtype.name())))?;
    let piece = |pointer: *mut c_void, name: &str| {
        if bytes == 0 {
            return Ok(Piece::EMPTY);
        }
        let start =
            NonNull::new(pointer.cast()).ok_or_else(|| refused(format!("the {name} buffer is NULL")))?;
        if (start.as_ptr() as usize).checked_add(bytes).is_none() {
            return Err(refused(format!("{bytes} bytes at {pointer:p} reach beyond the address space")));
        }
        // SAFETY: the caller vouches for `count` elements, which are these bytes.
        Ok(unsafe { Piece::new(start, bytes) })
    };
    Asked::new(piece(send.cast_mut(), "send")?, piece(receive, "receive")?, dtype, op)
}

/// Reduces the `count` elements at `send` of all ranks into `recv` on every rank. The two may be the same
/// (in place) or apart, not overlap otherwise. With stream NULL both are host memory, and the call returns
/// when the result is there.
///
/// # Safety
/// `send` is valid for reading and `recv` for writing `count` elements; `comm` is NULL or a live handle.
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
    guarded(|| {
        // SAFETY: the caller vouches for the handle, and for the buffers until this function returns, which it
        // does after the call is over.
        unsafe {
            let comm = borrow(comm, "flexring_all_reduce")?;
            comm.communicator.run(&ask(send, recv, count, dtype, op, stream)?)
        }
    })
}

/// A call under way. Made by flexring_all_reduce_async, ended by flexring_wait.
#[allow(non_camel_case_types, reason = "named as C names types")]
pub struct flexring_request {
    outcome: Arc<Outcome>,
}

/// The same without waiting: the call runs while the caller goes on, after all earlier calls of this
/// communicator. The buffers belong to flexring until flexring_wait has returned for the request.
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
            return Err(refused("flexring_all_reduce_async: out is NULL"));
        }
        // SAFETY: the caller vouches for the handle, for `out`, and for the buffers until the request is over.
        unsafe {
            let comm = borrow(comm, "flexring_all_reduce_async")?;
            let outcome =
                comm.communicator.submit(ask(send, recv, count, dtype, op, std::ptr::null_mut())?)?;
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
            return Err(refused("flexring_wait: the request is NULL"));
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
        let request =
            unsafe { request.as_ref() }.ok_or_else(|| refused("flexring_test: the request is NULL"))?;
        if done.is_null() {
            return Err(refused("flexring_test: done is NULL"));
        }
        // SAFETY: `done` is not NULL, and the caller vouches that it may be written.
        unsafe { done.write(c_int::from(request.outcome.is_over())) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_carry_their_factor() {
        let mut op = 0;
        // SAFETY: `op` may be written.
        let result = unsafe { flexring_op_create_premul_sum(-0.25, &raw mut op) };
        assert_eq!(result, flexring_result::FLEXRING_SUCCESS);
        assert_eq!(op_of(op), Ok(ReduceOp::PreMulSum(-0.25)));
        for unknown in [5, 17, u64::MAX] {
            assert!(op_of(unknown).is_err());
        }
        assert_eq!(op_of(FLEXRING_AVG), Ok(ReduceOp::Avg));
        assert!(dtype_of(-1).is_err() && dtype_of(10).is_err());
    }
}
