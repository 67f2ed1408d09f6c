//! Element types and reduction operations: names, numbers and sizes.
//!
//! Owns [`DType`], [`ReduceOp`] and [`Element`].

use crate::error::{Error, Result};
use crate::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// The type of one element. The numbers are those of the C ABI (and of NCCL) and never change.
///
/// ```
/// # use flexring_core::dtype::{DType, Element};
/// assert_eq!(f32::DTYPE, DType::F32);
/// assert_eq!(DType::F32.size(), 4);
/// ```
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    serde::Serialize,
    serde::Deserialize,
    strum::FromRepr,
    strum::IntoStaticStr,
)]
#[repr(u8)]
pub enum DType {
    /// Signed 8-bit integer.
    #[strum(to_string = "int8")]
    I8 = 0,
    /// Unsigned 8-bit integer.
    #[strum(to_string = "uint8")]
    U8 = 1,
    /// Signed 32-bit integer.
    #[strum(to_string = "int32")]
    I32 = 2,
    /// Unsigned 32-bit integer.
    #[strum(to_string = "uint32")]
    U32 = 3,
    /// Signed 64-bit integer.
    #[strum(to_string = "int64")]
    I64 = 4,
    /// Unsigned 64-bit integer.
    #[strum(to_string = "uint64")]
    U64 = 5,
    /// IEEE 754 binary16.
    #[strum(to_string = "half")]
    F16 = 6,
    /// IEEE 754 binary32.
    #[strum(to_string = "float")]
    F32 = 7,
    /// IEEE 754 binary64.
    #[strum(to_string = "double")]
    F64 = 8,
    /// bfloat16: the upper half of a binary32.
    #[strum(to_string = "bfloat16")]
    BF16 = 9,
    /// OCP 8-bit float with four exponent bits and no infinities: [`F8E4M3`].
    #[strum(to_string = "float8e4m3")]
    F8E4M3 = 10,
    /// OCP 8-bit float with five exponent bits: [`F8E5M2`].
    #[strum(to_string = "float8e5m2")]
    F8E5M2 = 11,
    /// Signed 16-bit integer. NCCL has no number for this and the following types.
    #[strum(to_string = "int16")]
    I16 = 12,
    /// Unsigned 16-bit integer.
    #[strum(to_string = "uint16")]
    U16 = 13,
    /// A byte that is true if it is not 0: [`Boolean`].
    #[strum(to_string = "bool")]
    Bool = 14,
}

impl DType {
    /// Every element type, in the order of their numbers.
    pub const ALL: [Self; 15] = [
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::BF16,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::I16,
        Self::U16,
        Self::Bool,
    ];

    /// The type with this number, if there is one.
    #[doc(hidden)]
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::from_repr(code)
    }

    /// Size of one element in bytes, which is also its alignment.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::F8E4M3 | Self::F8E5M2 | Self::Bool => 1,
            Self::F16 | Self::BF16 | Self::I16 | Self::U16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Whether `bytes`, a length or an address, is a multiple of the element's size. Sizes are powers of two,
    /// so this needs no division: one takes up to 90 cycles (Intel before Ice Lake), and a short call would
    /// make five of them.
    #[doc(hidden)]
    #[must_use]
    pub fn divides(self, bytes: usize) -> bool {
        bytes & (self.size() - 1) == 0
    }

    /// The number of whole elements in `bytes`.
    #[doc(hidden)]
    #[must_use]
    pub fn elements_in(self, bytes: usize) -> usize {
        bytes >> self.size().trailing_zeros()
    }

    /// Whether this is a floating-point type, so that arithmetic rounds.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::BF16 | Self::F32 | Self::F64 | Self::F8E4M3 | Self::F8E5M2)
    }

    /// The name in tables, messages and flags.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// A reduction operation.
///
/// Integer arithmetic wraps. Of booleans, a sum, a maximum and an `Or` are true if any element is, a product,
/// a minimum and an `And` if all are. `Min` and `Max` of floats are IEEE 754-2019 `minimum` and `maximum`: a
/// NaN on any rank gives NaN, and -0 is less than +0. 16-bit and 8-bit floats are added in f32, and each
/// partial sum that travels is rounded: for long vectors once on one node, and once more for each hop between
/// nodes (docs/schedules.md, "How sums are rounded").
///
/// ```
/// # use flexring_core::dtype::{DType, ReduceOp};
/// assert!(ReduceOp::Avg.check(DType::F32).is_ok());
/// assert!(ReduceOp::Avg.check(DType::I32).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceOp {
    /// The sum over all ranks.
    Sum,
    /// The product over all ranks.
    Prod,
    /// The largest element.
    Max,
    /// The smallest element.
    Min,
    /// The sum divided by the number of ranks. For floats only: the sum of integers may wrap around, and the
    /// quotient would be wrong. Sum them in a type with room for it, and divide.
    Avg,
    /// The sum of each rank's elements times that rank's factor, which may differ between ranks. For integer
    /// types the factor must be an integer that the type can represent. Not for booleans.
    PreMulSum(f64),
    /// The bits that all elements have. For integers and booleans, as the following two.
    BitAnd,
    /// The bits that any element has.
    BitOr,
    /// The bits that an odd number of elements have.
    BitXor,
    /// The sum, which wraps around, divided by the number of ranks, toward zero: what NCCL's average of
    /// integers is. For integers only.
    WrappingAvg,
}

impl ReduceOp {
    /// The number of this operation in the C ABI (and in NCCL, which numbers pre-multiplied sums from 5).
    #[doc(hidden)]
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Sum => 0,
            Self::Prod => 1,
            Self::Max => 2,
            Self::Min => 3,
            Self::Avg => 4,
            Self::PreMulSum(_) => 5,
            Self::BitAnd => 6,
            Self::BitOr => 7,
            Self::BitXor => 8,
            Self::WrappingAvg => 9,
        }
    }

    /// The name in tables, messages and flags.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::name_of(self.code())
    }

    /// The name of the operation with this number; `unknown` if there is none.
    #[doc(hidden)]
    #[must_use]
    pub fn name_of(code: u8) -> &'static str {
        const NAMES: [&str; 10] =
            ["sum", "prod", "max", "min", "avg", "premulsum", "band", "bor", "bxor", "wrapping avg"];
        NAMES.get(usize::from(code)).copied().unwrap_or("unknown")
    }

    /// The factor that this rank's own elements are multiplied by; 1 for all operations but `PreMulSum`.
    #[doc(hidden)]
    #[must_use]
    pub fn factor(self) -> f64 {
        if let Self::PreMulSum(factor) = self { factor } else { 1.0 }
    }

    /// Checks that this operation is defined for `dtype`.
    ///
    /// # Errors
    /// `InvalidArgument` for a factor that an integer type cannot represent exactly, for bits of floats, for
    /// an average of integers, and for a pre-multiplied sum of booleans.
    #[inline]
    pub fn check(self, dtype: DType) -> Result<()> {
        let is_defined = match self {
            Self::BitAnd | Self::BitOr | Self::BitXor => !dtype.is_float(),
            Self::Avg => dtype.is_float(),
            Self::WrappingAvg => !dtype.is_float() && dtype != DType::Bool,
            Self::PreMulSum(_) => dtype != DType::Bool,
            Self::Sum | Self::Prod | Self::Max | Self::Min => true,
        };
        if !is_defined {
            let why = if self == Self::Avg && dtype != DType::Bool {
                ", as their sum may wrap around (fix: sum them in a type with room for the sum, and divide)"
            } else {
                ""
            };
            let (name, dtype) = (self.name(), dtype.name());
            return Err(Error::invalid_argument(format!(
                "there is no {name} of elements of type {dtype}{why}"
            )));
        }
        let Self::PreMulSum(factor) = self else {
            return Ok(());
        };
        let (low, high) = match dtype {
            DType::I8 => (f64::from(i8::MIN), f64::from(i8::MAX)),
            DType::U8 => (0.0, f64::from(u8::MAX)),
            DType::I16 => (f64::from(i16::MIN), f64::from(i16::MAX)),
            DType::U16 => (0.0, f64::from(u16::MAX)),
            DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
            DType::U32 => (0.0, f64::from(u32::MAX)),
            // Integers are exact in f64 up to 2^53 only, so larger factors are rejected.
            DType::I64 => (-9_007_199_254_740_992.0, 9_007_199_254_740_992.0),
            DType::U64 => (0.0, 9_007_199_254_740_992.0),
            DType::F16
            | DType::F32
            | DType::F64
            | DType::BF16
            | DType::F8E4M3
            | DType::F8E5M2
            | DType::Bool => {
                return Ok(());
            }
        };
        if factor.fract() == 0.0 && (low..=high).contains(&factor) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "a pre-multiplied sum over {} takes an integer factor from {low} to {high}, not {factor}",
            dtype.name()
        )))
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A byte that stands for a truth value, as C and PyTorch store them: false if it is 0, else true. Unlike
/// `bool`, every byte is valid, so ranks need not trust each other's.
///
/// ```
/// # use flexring_core::dtype::Boolean;
/// assert!(Boolean::from(true).is_true());
/// assert_eq!(Boolean::from_byte(7), Boolean::from(true));
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub struct Boolean(u8);

impl Boolean {
    /// The truth value with this byte.
    #[must_use]
    pub fn from_byte(byte: u8) -> Self {
        Self(byte)
    }

    /// Whether it is true.
    #[must_use]
    pub fn is_true(self) -> bool {
        self.0 != 0
    }
}

impl From<bool> for Boolean {
    fn from(value: bool) -> Self {
        Self(value.into())
    }
}

impl PartialEq for Boolean {
    fn eq(&self, other: &Self) -> bool {
        self.is_true() == other.is_true()
    }
}

impl Eq for Boolean {}

impl PartialOrd for Boolean {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        self.is_true().partial_cmp(&other.is_true())
    }
}

impl std::fmt::Display for Boolean {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.is_true().fmt(f)
    }
}

/// A Rust type that flexring can reduce. Sealed: the kernels exist for these fifteen types only.
///
/// ```
/// # use flexring_core::dtype::Element;
/// fn bytes<T: Element>(vector: &[T]) -> usize {
///     vector.len() * T::DTYPE.size()
/// }
/// assert_eq!(bytes(&[1.0f32, 2.0]), 8);
/// ```
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// The element type's number and name.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($ty:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $ty {}
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    i8 => I8, u8 => U8, i32 => I32, u32 => U32, i64 => I64, u64 => U64,
    f16 => F16, f32 => F32, f64 => F64, bf16 => BF16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2,
    i16 => I16, u16 => U16, Boolean => Bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_types_correspond() {
        for (code, dtype) in (0u8..).zip(DType::ALL) {
            assert_eq!(dtype as u8, code);
            assert_eq!(DType::from_code(code), Some(dtype));
        }
        assert_eq!(DType::from_code(15), None);
    }

    #[test]
    fn elements_are_counted_as_by_division() {
        for dtype in DType::ALL {
            assert!(dtype.size().is_power_of_two());
            for bytes in (0..50).chain([usize::MAX - 1, usize::MAX]) {
                assert_eq!(dtype.divides(bytes), bytes % dtype.size() == 0, "{dtype:?} {bytes}");
                assert_eq!(dtype.elements_in(bytes), bytes / dtype.size(), "{dtype:?} {bytes}");
            }
        }
    }

    #[test]
    fn operations_are_defined_for_types_that_have_them() {
        use ReduceOp::{Avg, BitAnd, BitOr, BitXor, Max, PreMulSum, Sum, WrappingAvg};
        for op in [BitAnd, BitOr, BitXor] {
            assert!(op.check(DType::Bool).is_ok() && op.check(DType::U64).is_ok());
            let error = op.check(DType::BF16).expect_err("floats have no such operation");
            assert!(error.message().contains("of elements of type bfloat16"), "{error}");
        }
        assert!([Sum, Max].iter().all(|op| op.check(DType::Bool).is_ok()));
        assert!([Avg, WrappingAvg, PreMulSum(1.0)].iter().all(|op| op.check(DType::Bool).is_err()));
        assert!(Avg.check(DType::F8E5M2).is_ok() && WrappingAvg.check(DType::F8E5M2).is_err());
        assert!(WrappingAvg.check(DType::U8).is_ok());
        let error = Avg.check(DType::U8).expect_err("the sum may wrap around");
        assert!(
            error.message().contains("no avg of elements of type uint8, as their sum may wrap"),
            "{error}"
        );
        assert!(Boolean::from_byte(2) == true.into() && Boolean::default() < Boolean::from_byte(7));
    }

    #[test]
    fn integer_types_take_representable_integer_factors() {
        assert!(ReduceOp::PreMulSum(2.0).check(DType::I8).is_ok());
        assert!(ReduceOp::PreMulSum(0.5).check(DType::F32).is_ok());
        for (factor, dtype) in
            [(0.5, DType::I32), (200.0, DType::I8), (-1.0, DType::U64), (f64::NAN, DType::I64)]
        {
            let error = ReduceOp::PreMulSum(factor).check(dtype).expect_err("must be rejected");
            assert!(error.message().contains(dtype.name()), "{error}");
        }
    }
}
