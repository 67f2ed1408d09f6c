//! The reduction itself, written once for all types, operations and instruction sets.
//!
//! Owns the order in which memory is touched: in one pass, a group of elements at a time, each group read from
//! all operands, combined in registers, and written. That order makes it all the same whether the destination
//! is one of the operands. Groups are plain arrays of a fixed length, all loops over which the compiler unrolls
//! and turns into vectors. Must not know which instruction set it is compiled for.

use super::instructions::{Instructions, LINE};
use super::lane::{GROUP, Lane};
use super::number::{Combine, Number};
use crate::device::{Finish, Job, Operand};
use std::ops::Range;
use std::ptr::copy_nonoverlapping;
use std::sync::atomic::{Ordering, compiler_fence};

/// Runs a job.
///
/// # Safety
/// The job's pieces are valid and of one length, a multiple of the size of `L`, and aligned to it. There is
/// an operand. The destination is one of the operands or overlaps none. The processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn reduce<I: Instructions, L: Lane, C: Combine>(job: &Job<'_>) {
    let reduction = Reduction::<L> {
        into: job.into.as_ptr().cast(),
        count: job.into.len() / size_of::<L>(),
        operands: job.operands,
        divisor: match job.finish {
            Finish::Divide(ranks) if ranks > 1 => Some(L::Acc::divisor(ranks)),
            _ => None,
        },
    };
    let plain = reduction.divisor.is_none() && job.operands.iter().all(|operand| operand.factor.is_none());
    // A line that was read is in the cache already: then writing past it saves nothing, and costs some.
    // Measured in place with k=2, f32, 64 MiB each, Cascade Lake: 14 GB/s, but 11 GB/s past the cache.
    let streaming = job.streaming && !job.operands.iter().any(|operand| operand.piece == job.into);
    // SAFETY: passed on to the caller; there are as many operands as each is told.
    unsafe {
        match job.operands.len() {
            2 if plain => reduction.exactly::<I, C, 2>(streaming),
            3 if plain => reduction.exactly::<I, C, 3>(streaming),
            4 if plain => reduction.exactly::<I, C, 4>(streaming),
            8 if plain => reduction.exactly::<I, C, 8>(streaming),
            _ => reduction.any::<I, C>(streaming),
        }
    }
}

/// Copies bytes past the cache.
///
/// # Safety
/// `from` is valid for reads of `len` bytes, `into` for writes; they do not overlap. The processor has the
/// instructions `I`.
#[inline(always)]
pub(super) unsafe fn copy_past_cache<I: Instructions>(into: *mut u8, from: *const u8, len: usize) {
    const STEP: usize = GROUP * size_of::<u64>();
    let head = to_line(into.addr()).min(len);
    let tail = head + (len - head) / STEP * STEP;
    // SAFETY: 0 <= head <= tail <= len, for which the caller vouches; all groups in between begin with a line.
    unsafe {
        copy_nonoverlapping(from, into, head);
        for at in (head..tail).step_by(STEP) {
            let group = from.add(at).cast::<[u64; GROUP]>().read_unaligned();
            I::store_past_cache(into.add(at).cast(), group);
        }
        copy_nonoverlapping(from.add(tail), into.add(tail), len - tail);
    }
    I::fence();
}

/// How many bytes it is from an address to the next line.
#[inline(always)]
fn to_line(address: usize) -> usize {
    address.wrapping_neg() % LINE
}

/// A job whose type is known.
struct Reduction<'a, L: Lane> {
    into: *mut L,
    count: usize,
    operands: &'a [Operand],
    divisor: Option<<L::Acc as Number>::Divisor>,
}

// The safety of all of these is that of `reduce`.
impl<L: Lane> Reduction<'_, L> {
    /// `K` operands without factors, nothing to be divided: what a step of a chain and the root of a small group
    /// do. A known number lets the compiler unroll. (Measured with k=4, f16, in
    /// the cache: 26 GB/s, but 19 GB/s in `any`.)
    #[inline(always)]
    unsafe fn exactly<I: Instructions, C: Combine, const K: usize>(&self, streaming: bool) {
        let from: [*const L; K] = std::array::from_fn(|nth| elements(&self.operands[nth]));
        let group = |at| {
            // SAFETY: the walk asks for whole groups within the operands.
            unsafe {
                let mut values = L::load::<I>(from[0].add(at));
                for source in &from[1..] {
                    combine::<_, C>(&mut values, L::load::<I>(source.add(at)));
                }
                L::round::<I>(values)
            }
        };
        // SAFETY: passed on to the caller.
        unsafe { self.walk::<I, C>(streaming, group) }
    }

    /// Any number of operands, with factors if need be.
    #[inline(always)]
    unsafe fn any<I: Instructions, C: Combine>(&self, streaming: bool) {
        let load = |operand: &Operand, at| {
            // SAFETY: the walk asks for whole groups within the operands.
            let mut values = unsafe { L::load::<I>(elements::<L>(operand).add(at)) };
            if let Some(factor) = operand.factor {
                let factor = L::Acc::factor(factor);
                for value in &mut values {
                    *value = value.product(factor);
                }
            }
            values
        };
        let group = |at| {
            let mut values = load(&self.operands[0], at);
            for operand in &self.operands[1..] {
                combine::<_, C>(&mut values, load(operand, at));
            }
            if let Some(divisor) = self.divisor {
                for value in &mut values {
                    *value = value.quotient(divisor);
                }
            }
            // SAFETY: the caller vouches for the instructions.
            unsafe { L::round::<I>(values) }
        };
        // SAFETY: passed on to the caller.
        unsafe { self.walk::<I, C>(streaming, group) }
    }

    /// Writes whole groups as `group` makes them, given their first element's number, and what is left over at the ends
    /// element by element.
    #[inline(always)]
    unsafe fn walk<I: Instructions, C: Combine>(&self, streaming: bool, group: impl Fn(usize) -> [L; GROUP]) {
        let head = if streaming { to_line(self.into.addr()) / size_of::<L>() } else { 0 };
        let head = head.min(self.count);
        let tail = head + (self.count - head) / GROUP * GROUP;
        for at in (head..tail).step_by(GROUP) {
            let values = group(at);
            // Keeps the compiler from vectorising this loop, too, across groups, with all the shuffling that
            // it takes. (Measured with k=2, f32, 64 MiB each: 3.4 GB/s without this, 10.5 GB/s with it.)
            compiler_fence(Ordering::SeqCst);
            // SAFETY: at + GROUP <= tail <= count, for which the caller vouches. When streaming, the first of
            // the groups begins with a line, so that all are aligned to their size or to a line.
            unsafe {
                let into = self.into.add(at);
                if streaming {
                    I::store_past_cache(into, values);
                } else {
                    into.cast::<[L; GROUP]>().write_unaligned(values);
                }
            }
        }
        if streaming {
            I::fence();
        }
        // SAFETY: neither reaches beyond count, for which the caller vouches.
        unsafe {
            self.one_by_one::<C>(0..head);
            self.one_by_one::<C>(tail..self.count);
        }
    }

    /// Makes and writes these elements of the result. Compiled once for all instruction sets: it is for the few
    /// that are no whole group.
    #[inline(never)]
    unsafe fn one_by_one<C: Combine>(&self, range: Range<usize>) {
        for at in range {
            let load = |operand: &Operand| {
                // SAFETY: the caller vouches for all operands within the range.
                let value = unsafe { *elements::<L>(operand).add(at) }.widen();
                operand.factor.map_or(value, |factor| value.product(L::Acc::factor(factor)))
            };
            let first = load(&self.operands[0]);
            let value =
                self.operands[1..].iter().fold(first, |value, operand| C::combine(value, load(operand)));
            let value = self.divisor.map_or(value, |divisor| value.quotient(divisor));
            // SAFETY: the caller vouches for the destination within the range.
            unsafe { *self.into.add(at) = L::narrow(value) };
        }
    }
}

/// Where an operand's elements are.
#[inline(always)]
fn elements<L>(operand: &Operand) -> *const L {
    operand.piece.as_ptr().cast_const().cast()
}

#[inline(always)]
fn combine<N: Number, C: Combine>(values: &mut [N; GROUP], others: [N; GROUP]) {
    for (value, other) in values.iter_mut().zip(others) {
        *value = C::combine(*value, other);
    }
}
