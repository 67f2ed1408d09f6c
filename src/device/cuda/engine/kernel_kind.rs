//! Which kernel a call needs.
//!
//! Owns that choice and its number. Must not know how kernels are loaded or launched.

use crate::device::Arithmetic;
use crate::dtype::DType;

/// The kernel of a call. Each kernel also copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelKind {
    /// Copies only.
    Copy,
    /// Reduces this type with this arithmetic.
    Reduce(DType, Arithmetic),
}

impl KernelKind {
    /// All kinds, in the order of [`index`](Self::index).
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let reductions = DType::ALL.into_iter().flat_map(|dtype| {
            Arithmetic::ALL.into_iter().map(move |arithmetic| Self::Reduce(dtype, arithmetic))
        });
        std::iter::once(Self::Copy).chain(reductions)
    }

    /// Its number among all kinds.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Copy => 0,
            Self::Reduce(dtype, arithmetic) => {
                1 + dtype as usize * Arithmetic::ALL.len() + arithmetic as usize
            }
        }
    }

    /// A number that is not 0.
    pub(super) fn code(self) -> u64 {
        self.index() as u64 + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_the_order_of_all_kinds() {
        for (index, kind) in KernelKind::all().enumerate() {
            assert_eq!(kind.index(), index, "{kind:?}");
            assert_ne!(kind.code(), 0);
        }
    }
}
