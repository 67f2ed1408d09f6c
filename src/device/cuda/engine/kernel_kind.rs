//! Which kernel a call needs.
//!
//! Owns that choice and its number. Must not know how kernels are loaded or launched.

use crate::dtype::DType;

/// The kernel of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelKind {
    /// Copies only.
    Copy,
    /// Reduces elements of this type, and copies.
    Reduce(DType),
    /// Runs a collective on elements of this type.
    Collective(DType),
}

impl KernelKind {
    /// All kinds, in the order of [`index`](Self::index).
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let of_types = |kind: fn(DType) -> Self| DType::ALL.into_iter().map(kind);
        std::iter::once(Self::Copy).chain(of_types(Self::Reduce)).chain(of_types(Self::Collective))
    }

    /// Its number among all kinds.
    pub(super) fn index(self) -> usize {
        match self {
            Self::Copy => 0,
            Self::Reduce(dtype) => 1 + dtype as usize,
            Self::Collective(dtype) => 1 + DType::ALL.len() + dtype as usize,
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
