//! Reduction operations, among them those that programs create.

use crate::collectives::checked_type;
use crate::comm::Comm;
use crate::handles;
use crate::status::{Failure, Outcome, check, check_out, nccl_functions};
use crate::types::{
    NCCL_NUM_OPS, NCCL_SCALAR_DEVICE, NCCL_SCALAR_HOST_IMMEDIATE, ncclComm_t, ncclDataType_t, ncclRedOp_t,
    ncclResult_t, ncclScalarResidence_t,
};
use flexring_core::float8::{F8E4M3, F8E5M2};
use flexring_core::process::DefaultFloatEnvironment;
use flexring_ffi::types::{
    FLEXRING_AVG, FLEXRING_BFLOAT16, FLEXRING_FLOAT8E4M3, FLEXRING_FLOAT8E5M2, FLEXRING_FLOAT16,
    FLEXRING_FLOAT32, FLEXRING_FLOAT64, FLEXRING_INT8, FLEXRING_INT32, FLEXRING_INT64, FLEXRING_UINT8,
    FLEXRING_UINT32, FLEXRING_UINT64, FLEXRING_WRAPPING_AVG, flexring_dtype, flexring_op,
    flexring_op_create_premul_sum,
};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{MutexGuard, PoisonError};

/// The operations that a program has created for one communicator.
#[derive(Default)]
pub(crate) struct RedOps {
    created: BTreeMap<ncclRedOp_t, (flexring_dtype, flexring_op)>,
    last: ncclRedOp_t,
}

/// The operations of a communicator.
pub(crate) fn lock(comm: &Comm) -> MutexGuard<'_, RedOps> {
    comm.ops.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RedOps {
    /// A new number for an operation.
    fn insert(&mut self, dtype: flexring_dtype, op: flexring_op) -> Outcome<ncclRedOp_t> {
        // Numbers are not used again, so that an operation that was destroyed is recognised.
        let number = self.last.max(NCCL_NUM_OPS - 1).checked_add(1);
        let number = number.ok_or_else(|| Failure::usage("there are no more numbers for operations"))?;
        self.last = number;
        self.created.insert(number, (dtype, op));
        Ok(number)
    }

    /// flexring's operation for NCCL's number, on elements of this type.
    pub(crate) fn flexring_op(&self, op: ncclRedOp_t, dtype: flexring_dtype) -> Outcome<flexring_op> {
        if (0..NCCL_NUM_OPS).contains(&op) {
            // Both have the same numbers. NCCL's average of integers wraps, as nccl-tests expects.
            let op = op as flexring_op;
            return Ok(if op == FLEXRING_AVG && dtype < FLEXRING_FLOAT16 {
                FLEXRING_WRAPPING_AVG
            } else {
                op
            });
        }
        match self.created.get(&op) {
            Some((expected, created)) if *expected == dtype => Ok(*created),
            Some((expected, _)) => Err(Failure::argument(format!(
                "operation {op} was created for type {expected}, but the type of the call is {dtype}"
            ))),
            None => Err(Failure::argument(format!(
                "{op} is no ncclRedOp_t of this communicator: expected 0 (ncclSum) to 4 (ncclAvg), or an operation that \
                 ncclRedOpCreatePreMulSum has made and ncclRedOpDestroy has not destroyed"
            ))),
        }
    }
}

nccl_functions! {
    /// Makes an operation that sums each rank's elements times a factor of that rank.
    fn ncclRedOpCreatePreMulSum / pncclRedOpCreatePreMulSum(
        op: *mut ncclRedOp_t,
        scalar: *mut c_void,
        datatype: ncclDataType_t,
        residence: ncclScalarResidence_t,
        comm: ncclComm_t,
    ) {
        let comm = handles::find(comm)?;
        comm.ready()?;
        check_out(op, "op")?;
        let dtype = checked_type(datatype)?;
        match residence {
            NCCL_SCALAR_HOST_IMMEDIATE => {}
            NCCL_SCALAR_DEVICE => {
                return Err(Failure::usage("ncclScalarDevice is not supported by flexring: pass ncclScalarHostImmediate"));
            }
            other => return Err(Failure::argument(format!("{other} is no ncclScalarResidence_t"))),
        }
        if scalar.is_null() {
            return Err(Failure::argument("scalar is NULL"));
        }
        let _default = DefaultFloatEnvironment::enter();
        // SAFETY: the pointer is not NULL, and the caller guarantees an element of this type there.
        let factor = exact(unsafe { read(scalar, dtype) })?;
        let mut created = 0;
        // SAFETY: the operation may be written.
        check(unsafe { flexring_op_create_premul_sum(factor, &raw mut created) })?;
        let number = lock(&comm).insert(dtype, created)?;
        // SAFETY: the pointer is not NULL, and the caller guarantees that it may be written.
        unsafe { op.write(number) };
        Ok(ncclResult_t::ncclSuccess)
    }

    /// Destroys an operation. Calls that were made with it are not affected.
    fn ncclRedOpDestroy / pncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) {
        let comm = handles::find(comm)?;
        let removed = lock(&comm).created.remove(&op);
        removed.ok_or_else(|| {
            Failure::argument(format!("{op} is no operation that ncclRedOpCreatePreMulSum has made for this communicator"))
        })?;
        Ok(ncclResult_t::ncclSuccess)
    }
}

/// A number of any type, without loss.
enum Scalar {
    Float(f64),
    Integer(i128),
}

/// Reads an element.
///
/// # Safety
/// There is an element of this type, one that `checked_type` accepts, at the address.
unsafe fn read(at: *const c_void, dtype: flexring_dtype) -> Scalar {
    // SAFETY: the caller guarantees the element, and it may have any alignment.
    unsafe {
        match dtype {
            FLEXRING_INT8 => Scalar::Integer(at.cast::<i8>().read_unaligned().into()),
            FLEXRING_UINT8 => Scalar::Integer(at.cast::<u8>().read_unaligned().into()),
            FLEXRING_INT32 => Scalar::Integer(at.cast::<i32>().read_unaligned().into()),
            FLEXRING_UINT32 => Scalar::Integer(at.cast::<u32>().read_unaligned().into()),
            FLEXRING_INT64 => Scalar::Integer(at.cast::<i64>().read_unaligned().into()),
            FLEXRING_UINT64 => Scalar::Integer(at.cast::<u64>().read_unaligned().into()),
            FLEXRING_FLOAT16 => Scalar::Float(at.cast::<f16>().read_unaligned().into()),
            FLEXRING_BFLOAT16 => Scalar::Float(at.cast::<bf16>().read_unaligned().into()),
            FLEXRING_FLOAT32 => Scalar::Float(at.cast::<f32>().read_unaligned().into()),
            FLEXRING_FLOAT64 => Scalar::Float(at.cast::<f64>().read_unaligned()),
            FLEXRING_FLOAT8E4M3 => Scalar::Float(f32::from(at.cast::<F8E4M3>().read_unaligned()).into()),
            FLEXRING_FLOAT8E5M2 => Scalar::Float(f32::from(at.cast::<F8E5M2>().read_unaligned()).into()),
            other => unreachable!("{other} was checked"),
        }
    }
}

/// The factor as flexring takes it.
///
/// # Errors
/// `ncclInvalidUsage` if it would be rounded.
fn exact(scalar: Scalar) -> Outcome<f32> {
    let (factor, is_exact, text) = match scalar {
        Scalar::Float(number) => {
            let factor = number as f32;
            (factor, f64::from(factor) == number || number.is_nan(), number.to_string())
        }
        Scalar::Integer(number) => (number as f32, number as f32 as i128 == number, number.to_string()),
    };
    if is_exact {
        return Ok(factor);
    }
    Err(Failure::usage(format!("flexring's factors have 32 bits, and {text} would be rounded to {factor}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_of_every_type_are_read_and_none_is_rounded() {
        let read = |bytes: &[u8], dtype| {
            // SAFETY: the slices below have the bytes of an element.
            exact(unsafe { read(bytes.as_ptr().cast(), dtype) }).map_err(|failure| failure.message)
        };
        assert_eq!(read(&[0xfe], FLEXRING_INT8), Ok(-2.0));
        assert_eq!(read(&[0xfe], FLEXRING_UINT8), Ok(254.0));
        assert_eq!(read(&(-7i32).to_ne_bytes(), FLEXRING_INT32), Ok(-7.0));
        assert_eq!(read(&7u32.to_ne_bytes(), FLEXRING_UINT32), Ok(7.0));
        assert_eq!(read(&(1i64 << 40).to_ne_bytes(), FLEXRING_INT64), Ok((1u64 << 40) as f32));
        assert!(read(&u64::MAX.to_ne_bytes(), FLEXRING_UINT64).is_err());
        assert_eq!(read(&f16::from_f32(0.5).to_ne_bytes(), FLEXRING_FLOAT16), Ok(0.5));
        assert_eq!(read(&bf16::from_f32(0.25).to_ne_bytes(), FLEXRING_BFLOAT16), Ok(0.25));
        assert_eq!(read(&0.1f32.to_ne_bytes(), FLEXRING_FLOAT32), Ok(0.1));
        assert_eq!(read(&0.125f64.to_ne_bytes(), FLEXRING_FLOAT64), Ok(0.125));
        assert!(
            read(&0.1f64.to_ne_bytes(), FLEXRING_FLOAT64)
                .is_err_and(|text| text.contains("0.1 would be rounded"))
        );
        assert_eq!(read(&[0x38], FLEXRING_FLOAT8E4M3), Ok(1.0));
        assert_eq!(read(&[0x3c], FLEXRING_FLOAT8E5M2), Ok(1.0));
    }

    #[test]
    fn operations_belong_to_a_type_and_end() {
        let mut ops = RedOps::default();
        let op = ops.insert(FLEXRING_FLOAT32, 77).expect("a number");
        assert_eq!(op, NCCL_NUM_OPS);
        assert_eq!(ops.flexring_op(op, FLEXRING_FLOAT32).expect("an operation"), 77);
        assert_eq!(ops.flexring_op(4, FLEXRING_FLOAT32).expect("an operation"), FLEXRING_AVG);
        assert_eq!(ops.flexring_op(4, FLEXRING_UINT64).expect("an operation"), FLEXRING_WRAPPING_AVG);
        assert!(ops.flexring_op(op, FLEXRING_FLOAT64).is_err());
        ops.created.remove(&op);
        assert!(
            ops.flexring_op(op, FLEXRING_FLOAT32).is_err() && ops.flexring_op(-1, FLEXRING_FLOAT32).is_err()
        );
        assert_ne!(ops.insert(FLEXRING_FLOAT32, 77).expect("a number"), op);
    }
}
