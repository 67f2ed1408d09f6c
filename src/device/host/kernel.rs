//! The reduction itself, written once for all types, operations and instruction sets.
//!
//! Owns the order in which memory is touched: every input byte is read once and every output byte written
//! once, a tile at a time. A tile's sums are made on the stack and then written out, which makes it all the
//! same whether the destination is one of the inputs, and lets the compiler see that the loops' inputs and
//! outputs do not overlap. Must not know which instruction set it is compiled for.

use super::instructions::{Instructions, LINE};
use super::lane::Lane;
use super::number::{Combine, Number};
use crate::device::{Finish, Job, Operand};
use std::mem::MaybeUninit;
use std::ptr::copy_nonoverlapping;

/// Bytes of accumulators in a tile.
const TILE: usize = 4096;

/// Inputs that are read side by side.
const ABREAST: usize = 4;

/// How far ahead.
const AHEAD: usize = 0;

#[repr(align(64))]
struct Tile(MaybeUninit<[u8; TILE]>);

impl Tile {
    #[inline(always)]
    fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    #[inline(always)]
    fn as_mut<T>(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }
}

/// Runs a job.
///
/// # Safety
/// The job's pieces are valid and of one length, a multiple of the size of `L`, and aligned to it. The
/// destination is one of the operands or overlaps none. The processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn reduce<I: Instructions, L: Lane, C: Combine>(job: &Job<'_>) {
    let into = job.into.as_ptr().cast::<L>();
    let count = job.into.len() / size_of::<L>();
    let divisor = match job.finish {
        Finish::Divide(ranks) if ranks > 1 => Some(L::Acc::divisor(ranks)),
        _ => None,
    };
    let fused = L::DIRECT
        && divisor.is_none()
        && job.operands.len() <= ABREAST
        && job.operands.iter().all(|operand| operand.factor.is_none());
    let (mut acc, mut spare) = (Tile::new(), Tile::new());
    let (acc, spare) = (acc.as_mut::<L::Acc>(), spare.as_mut());

    // The first tile ends where a cache line of the destination does, so that all others are whole lines.
    let most = TILE / size_of::<L::Acc>();
    let mut at = 0;
    let mut len = most - into.addr() % LINE / size_of::<L>();
    while at < count {
        len = len.min(count - at);
        if AHEAD > 0 {
            for operand in job.operands {
                let from = operand.piece.as_ptr().wrapping_add(at * size_of::<L>() + AHEAD);
                for line in (0..len * size_of::<L>()).step_by(LINE) {
                    I::prefetch(from.wrapping_add(line));
                }
            }
        }
        // SAFETY: at + len <= count, so operands and destination are valid there, and a tile has room for
        // `most` accumulators, hence for `len` lanes, which are no larger.
        unsafe {
            let out = if fused {
                let out = spare.cast::<L>();
                side_by_side::<L, C>(out, job.operands, at, len);
                out
            } else {
                one_by_one::<I, L, C>(acc, spare, job.operands, at, len);
                if let Some(divisor) = divisor {
                    for i in 0..len {
                        *acc.add(i) = (*acc.add(i)).quotient(divisor);
                    }
                }
                L::narrow_all::<I>(spare.cast(), acc, len);
                spare.cast()
            };
            write_out::<I>(into.add(at).cast(), out.cast(), len * size_of::<L>(), job.streaming);
        }
        at += len;
        len = most;
    }
    if job.streaming {
        I::fence();
    }
}

/// # Safety
/// As [`reduce`], for the elements `at..at + len`; `out` has room for them.
#[inline(always)]
unsafe fn side_by_side<L: Lane, C: Combine>(out: *mut L, operands: &[Operand], at: usize, len: usize) {
    // SAFETY: the caller vouches for these elements.
    let from = |i: usize| unsafe { operands[i].piece.as_ptr().cast::<L>().cast_const().add(at) };
    // SAFETY: passed on to the caller.
    unsafe {
        match operands.len() {
            2 => combine::<L, C, 2>(out, [from(0), from(1)], len),
            3 => combine::<L, C, 3>(out, [from(0), from(1), from(2)], len),
            4 => combine::<L, C, 4>(out, [from(0), from(1), from(2), from(3)], len),
            _ => combine::<L, C, 1>(out, [from(0)], len),
        }
    }
}

#[inline(always)]
unsafe fn combine<L: Lane, C: Combine, const K: usize>(out: *mut L, from: [*const L; K], len: usize) {
    for i in 0..len {
        unsafe {
            let mut value = (*from[0].add(i)).widen();
            for source in &from[1..] {
                value = C::combine(value, (*source.add(i)).widen());
            }
            *out.add(i) = L::narrow(value);
        }
    }
}

#[inline(always)]
unsafe fn one_by_one<I: Instructions, L: Lane, C: Combine>(
    acc: *mut L::Acc,
    spare: *mut L::Acc,
    operands: &[Operand],
    at: usize,
    len: usize,
) {
    for (nth, operand) in operands.iter().enumerate() {
        unsafe {
            let from = operand.piece.as_ptr().cast::<L>().cast_const().add(at);
            if nth > 0 && L::DIRECT && operand.factor.is_none() {
                for i in 0..len {
                    *acc.add(i) = C::combine(*acc.add(i), (*from.add(i)).widen());
                }
                continue;
            }
            let staged = if nth == 0 { acc } else { spare };
            L::widen_all::<I>(staged, from, len);
            if let Some(factor) = operand.factor {
                let factor = L::Acc::factor(factor);
                for i in 0..len {
                    *staged.add(i) = (*staged.add(i)).product(factor);
                }
            }
            if nth > 0 {
                for i in 0..len {
                    *acc.add(i) = C::combine(*acc.add(i), *staged.add(i));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn write_out<I: Instructions>(into: *mut u8, from: *const u8, len: usize, streaming: bool) {
    unsafe {
        if streaming {
            stream::<I>(into, from, len);
        } else {
            copy_nonoverlapping(from, into, len);
        }
    }
}

#[inline(always)]
unsafe fn stream<I: Instructions>(into: *mut u8, from: *const u8, len: usize) {
    unsafe {
        let head = into.align_offset(LINE).min(len);
        copy_nonoverlapping(from, into, head);
        let mut at = head;
        while at + LINE <= len {
            if AHEAD > 0 {
                I::prefetch(from.wrapping_add(at + AHEAD));
            }
            I::stream_line(into.add(at), from.add(at));
            at += LINE;
        }
        copy_nonoverlapping(from.add(at), into.add(at), len - at);
    }
}

#[inline(always)]
pub(super) unsafe fn copy_past_cache<I: Instructions>(into: *mut u8, from: *const u8, len: usize) {
    unsafe { stream::<I>(into, from, len) };
    I::fence();
}
