//! Element types and operations, with their numbers in C.

use super::status::{check_pointer, flexring_result, guarded};
use flexring_core::dtype::{DType, ReduceOp};
use flexring_core::error::{Error, Result};
use flexring_core::process::DefaultFloatEnvironment;
use std::ffi::c_int;
use std::hint::black_box;

/// The type of one element: FLEXRING_INT8 and so on. The numbers below 12 are those of ncclDataType_t.
#[allow(non_camel_case_types, reason = "named as C names types")]
pub type flexring_dtype = c_int;
/// How elements are combined: FLEXRING_SUM and so on, or an operation of flexring_op_create_premul_sum.
/// Floats of 16 and 8 bits are added as 32-bit floats, and each partial sum that travels is rounded:
/// docs/schedules.md, "How sums are rounded".
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
/// OCP 8-bit floats with four bits of exponent: no infinities, results beyond 448 are NaN.
pub const FLEXRING_FLOAT8E4M3: flexring_dtype = 10;
/// OCP 8-bit floats with five bits of exponent.
pub const FLEXRING_FLOAT8E5M2: flexring_dtype = 11;
/// Signed 16-bit integers.
pub const FLEXRING_INT16: flexring_dtype = 12;
/// Unsigned 16-bit integers.
pub const FLEXRING_UINT16: flexring_dtype = 13;
/// Bytes that are true if they are not 0. A sum, a maximum and FLEXRING_BOR are true if any element is, a
/// product, a minimum and FLEXRING_BAND if all are; results are 0 or 1.
pub const FLEXRING_BOOL: flexring_dtype = 14;

/// The sum over all ranks.
pub const FLEXRING_SUM: flexring_op = 0;
/// The product over all ranks.
pub const FLEXRING_PROD: flexring_op = 1;
/// The largest element; NaN if any is NaN.
pub const FLEXRING_MAX: flexring_op = 2;
/// The smallest element; NaN if any is NaN.
pub const FLEXRING_MIN: flexring_op = 3;
/// The sum divided by the number of ranks. For floats only: the sum of integers may wrap around, and the
/// quotient would be wrong. Sum them in a type with room for it, and divide.
pub const FLEXRING_AVG: flexring_op = 4;
/// The bits that all elements have; for integers and FLEXRING_BOOL, as the following two.
pub const FLEXRING_BAND: flexring_op = 6;
/// The bits that any element has.
pub const FLEXRING_BOR: flexring_op = 7;
/// The bits that an odd number of elements have.
pub const FLEXRING_BXOR: flexring_op = 8;
/// The sum, which wraps around, divided by the number of ranks, toward zero: what ncclAvg is for integers.
/// For integers only.
pub const FLEXRING_WRAPPING_AVG: flexring_op = 9;

#[inline]
pub(super) fn dtype_of(code: flexring_dtype) -> Result<DType> {
    let dtype = u8::try_from(code).ok().and_then(DType::from_code);
    dtype.ok_or_else(|| {
        Error::invalid_argument(format!("{code} is no flexring_dtype: expected 0 (int8) to 14 (bool)"))
    })
}

#[inline]
pub(super) fn op_of(code: flexring_op) -> Result<ReduceOp> {
    Ok(match code {
        FLEXRING_SUM => ReduceOp::Sum,
        FLEXRING_PROD => ReduceOp::Prod,
        FLEXRING_MAX => ReduceOp::Max,
        FLEXRING_MIN => ReduceOp::Min,
        FLEXRING_AVG => ReduceOp::Avg,
        FLEXRING_BAND => ReduceOp::BitAnd,
        FLEXRING_BOR => ReduceOp::BitOr,
        FLEXRING_BXOR => ReduceOp::BitXor,
        FLEXRING_WRAPPING_AVG => ReduceOp::WrappingAvg,
        _ => ReduceOp::PreMulSum(factor_of(code).ok_or_else(|| {
            Error::invalid_argument(format!("{code} is no flexring_op: expected 0 (sum) to 4 (avg), 6 (band) to 9 (wrapping avg), or an operation of flexring_op_create_premul_sum"))
        })?),
    })
}

/// The upper half of an operation that carries a factor. The lower half has the bits of the factor as f32. So
/// an operation is a plain number, which belongs to no communicator and need not be freed.
const PREMUL_SUM: u64 = 0x464c_5831 << 32;

fn factor_of(code: flexring_op) -> Option<f64> {
    if code >> 32 != PREMUL_SUM >> 32 {
        return None;
    }
    // Otherwise the conversion would flush a subnormal factor where the program's thread flushes.
    let _default = DefaultFloatEnvironment::enter();
    Some(f64::from(f32::from_bits(black_box(code) as u32)))
}

/// Makes an operation that sums each rank's elements times that rank's own `factor`. Ranks may give different
/// factors. For integer types the factor must be a whole number that the type can represent. The operation
/// need not be freed.
///
/// # Safety
/// `out` is NULL or points to a flexring_op that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flexring_op_create_premul_sum(
    factor: f32,
    out: *mut flexring_op,
) -> flexring_result {
    guarded(|| {
        check_pointer(out, "flexring_op_create_premul_sum", "out")?;
        // SAFETY: `out` is not NULL, and the caller guarantees that it may be written.
        unsafe { out.write(PREMUL_SUM | u64::from(factor.to_bits())) };
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
        assert!(dtype_of(-1).is_err() && dtype_of(15).is_err());
    }
}
