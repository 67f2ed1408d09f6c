//! Memory and calls for the hot paths.

use flexring::internal::device::Arithmetic;
use flexring::internal::executor::BoundCall;
use flexring::internal::memory::Piece;
use flexring_core::call::{Call, Collective};
use flexring_core::dtype::DType;
use flexring_plan::call_layout::CallFacts;
use std::ptr::NonNull;

/// Zeros that are never freed.
pub fn zeros(bytes: usize) -> Piece {
    let bytes: &mut [u64] = vec![0; bytes.div_ceil(8)].leak();
    // SAFETY: the bytes live as long as the process, and only this piece leads to them.
    unsafe { Piece::new(NonNull::from(&mut *bytes).cast(), size_of_val(bytes)) }
}

/// An all-reduce of `count` floats.
pub fn all_reduce(sequence: u64, count: usize) -> Call {
    Call {
        sequence,
        collective: Collective::AllReduce,
        dtype: DType::F32,
        op: 0,
        root: 0,
        count: count as u64,
        program: 0,
        on_gpu: false,
        factor: 1.0,
    }
}

/// What the layout of the sum of `vector` over `world` ranks depends on, in place, in sub-chunks of
/// `subchunk` bytes.
pub fn facts(call: &Call, vector: Piece, subchunk: usize, world: usize) -> CallFacts {
    CallFacts {
        collective: call.collective,
        count: call.count,
        element_bytes: call.dtype.size(),
        world,
        in_place: true,
        output_bytes: vector.len(),
        slot_bytes: subchunk,
    }
}

/// The sum of `vector` over all ranks, in place.
pub fn bound(call: Call, vector: Piece) -> BoundCall {
    BoundCall {
        call,
        input: vector,
        output: vector,
        scratch: Piece::EMPTY,
        in_place: true,
        arithmetic: Arithmetic::Sum,
        average: false,
        prescale: false,
        blocks: None,
    }
}
