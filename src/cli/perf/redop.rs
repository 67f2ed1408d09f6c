//! The reduction operations as the flags of `flexring perf` name them.
//!
//! Owns their nccl-tests names. Must not know which element types or collectives they are used with.

use flexring::ReduceOp;

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
}

impl RedOp {
    /// All operations, in the order in which `-o all` measures them.
    pub const ALL: [Self; 6] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg, Self::PreMulSum];

    /// The operation's name in nccl-tests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
            Self::PreMulSum => "mulsum",
        }
    }

    /// The library's operation; `factor` is used by `PreMulSum` only.
    pub fn with_factor(self, factor: f64) -> ReduceOp {
        match self {
            Self::Sum => ReduceOp::Sum,
            Self::Prod => ReduceOp::Prod,
            Self::Min => ReduceOp::Min,
            Self::Max => ReduceOp::Max,
            Self::Avg => ReduceOp::Avg,
            Self::PreMulSum => ReduceOp::PreMulSum(factor),
        }
    }
}
