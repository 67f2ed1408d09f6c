//! What the tests of all transports have in common: a call, a piece of a test's own memory, random numbers.

use crate::call::{Call, Collective};
use crate::dtype::DType;
use crate::memory::Piece;
use std::ptr::NonNull;

/// Some call, the same for all who ask for one of this number.
pub(super) fn call(sequence: u64) -> Call {
    Call {
        sequence,
        collective: Collective::AllReduce,
        dtype: DType::F32,
        op: 0,
        root: 0,
        count: 5,
        program: 6,
        on_gpu: false,
        factor: 1.0,
    }
}

/// A test's own memory. The test keeps it until the links that use the piece are done, dropped or given up.
pub(super) fn piece(bytes: &mut [u8]) -> Piece {
    // SAFETY: the tests keep their memory for as long as a link may hold the piece.
    unsafe { Piece::new(NonNull::from(&mut *bytes).cast(), bytes.len()) }
}

/// A seeded source of numbers (splitmix64).
#[derive(Clone, Copy)]
pub(super) struct Random(pub u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// This many bytes.
    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes()[..word.len()]);
        }
        bytes
    }

    /// Happens once in so many times.
    #[cfg(feature = "verbs")]
    pub(super) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}
