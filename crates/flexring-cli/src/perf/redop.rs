//! The reduction operations as the flags of `flexring perf` name them.
//!
//! Owns their nccl-tests names.

use flexring::{DType, ReduceOp};

/// A reduction operation, without the factor of a pre-multiplied sum, which depends on rank and element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedOp {
    /// Sum of the elements.
    Sum,
    /// Product of the elements.
    Prod,
    /// Minimum of the elements.
    Min,
    /// Maximum of the elements.
    Max,
    /// Arithmetic mean of the elements.
    Avg,
    /// Sum of the elements, each multiplied by a factor of its rank.
    PreMulSum,
    /// Bits that all elements have.
    BitAnd,
    /// Bits that any element has.
    BitOr,
    /// Bits that an odd number of elements have.
    BitXor,
}

impl RedOp {
    /// All operations, in the order in which `-o all` measures them.
    pub const ALL: [Self; 9] = [
        Self::Sum,
        Self::Prod,
        Self::Min,
        Self::Max,
        Self::Avg,
        Self::PreMulSum,
        Self::BitAnd,
        Self::BitOr,
        Self::BitXor,
    ];

    /// The operation's name in nccl-tests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::PreMulSum => "mulsum",
            Self::BitAnd => "band",
            Self::BitOr => "bor",
            Self::BitXor => "bxor",
        }
    }

    /// Whether elements of this type can be reduced by the operation.
    pub fn is_defined_for(self, dtype: DType) -> bool {
        self.of(dtype, 1.0).check(dtype).is_ok()
    }

    /// Whether it is an operation on bits, or on truth values.
    pub fn is_bitwise(self) -> bool {
        matches!(self, Self::BitAnd | Self::BitOr | Self::BitXor)
    }

    /// The library's operation for elements of this type; `factor` is used by `PreMulSum` only. Averages of
    /// integers wrap, as in nccl-tests.
    pub fn of(self, dtype: DType, factor: f64) -> ReduceOp {
        match self {
            Self::Sum => ReduceOp::Sum,
            Self::Prod => ReduceOp::Prod,
            Self::Min => ReduceOp::Min,
            Self::Max => ReduceOp::Max,
            Self::Avg if dtype.is_float() => ReduceOp::Avg,
            Self::Avg => ReduceOp::WrappingAvg,
            Self::PreMulSum => ReduceOp::PreMulSum(factor),
            Self::BitAnd => ReduceOp::BitAnd,
            Self::BitOr => ReduceOp::BitOr,
            Self::BitXor => ReduceOp::BitXor,
        }
    }
}
