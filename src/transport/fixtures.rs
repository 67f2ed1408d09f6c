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

/// A piece of a test's own memory. The test keeps the memory until the links that use it are done, dropped or
/// aborted.
pub(super) fn piece(bytes: &mut [u8]) -> Piece {
    // SAFETY: the tests keep their memory while a link may hold the piece.
    unsafe { Piece::new(NonNull::from(&mut *bytes).cast(), bytes.len()) }
}

/// `len` random bytes.
pub(super) fn random_bytes(random: &mut fastrand::Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}
