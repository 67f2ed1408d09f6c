//! The reduction operations as the flags of `flexring perf` name them.
//!
//! Owns their nccl-tests names. Must not know which element types or collectives they are used with.

use flexring::ReduceOp;

/// An operation, without the factors that only a rank and a type know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedOp {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The smallest element.
    Min,
    /// The largest element.
    Max,
    /// The average.
    Avg,
    /// The sum with a factor for each rank.
    PreMulSum,
}

impl RedOp {
    /// All operations, in the order of nccl-tests' names.
    pub const ALL: [Self; 6] = [Self::Sum, Self::Prod, Self::Min, Self::Max, Self::Avg, Self::PreMulSum];

    /// The name that nccl-tests gives it.
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

    /// The operation as a rank with this factor calls it.
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
