//! Fixtures for the tests of all transports: a call, a piece of a test's own memory, random numbers.

use crate::call::{Call, Collective};
use crate::dtype::DType;
use crate::memory::Piece;
use std::ptr::NonNull;

/// A call with this sequence number. Equal for equal numbers.
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

/// A piece of a test's own memory. The test keeps the memory until the links that use it are done, dropped or aborted.
pub(super) fn piece(bytes: &mut [u8]) -> Piece {
    // SAFETY: the tests keep their memory while a link may hold the piece.
    unsafe { Piece::new(NonNull::from(&mut *bytes).cast(), bytes.len()) }
}

/// A seeded source of random numbers (splitmix64).
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

    /// `len` random bytes.
    pub(super) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.next().to_le_bytes()[..word.len()]);
        }
        bytes
    }

    /// True with a probability of 1 in `times`.
    #[cfg(feature = "verbs")]
    pub(super) fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}
