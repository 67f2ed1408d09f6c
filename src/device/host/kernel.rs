//! The reduction itself, written once for all types, operations and instruction sets.
//!
//! Owns the order of memory accesses: one pass, a group of elements at a time, each group read from all
//! operands, combined in registers, and written. With this order the destination may be one of the operands.
//! Groups are arrays of a fixed length; the compiler unrolls and vectorizes all loops over them. Must not
//! know which instruction set it is compiled for.

use super::conversion::GROUP;
use super::instructions::{Instructions, LINE};
use super::lane::Lane;
use super::number::{Combine, Number};
use crate::device::{Finish, Job, Operand};
use crate::memory::LONG_COPY;
use std::ops::Range;
use std::ptr::copy_nonoverlapping;
use std::sync::atomic::{Ordering, compiler_fence};

/// Runs a job.
///
/// # Safety
/// The job's pieces are valid, all of one length, which is a multiple of the size of `L`, and aligned to that
/// size. There is at least one operand. The destination is one of the operands or overlaps none. The
/// processor has the instructions `I`.
#[inline(always)]
pub(super) unsafe fn reduce<I: Instructions, L: Lane, C: Combine<L::Acc>>(job: &Job<'_>) {
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
    // In place, the lines of the destination are in the cache already, so non-temporal stores only cost time.
    // Measured in place with k=2, f32, 64 MiB each, Cascade Lake: 14 GB/s, and 11 GB/s with non-temporal
    // stores.
    let streaming = job.streaming && !job.operands.iter().any(|operand| operand.piece == job.into);
    // SAFETY: the caller has the same obligations; the constant is the number of operands.
    unsafe {
        match job.operands.len() {
            2 if plain => reduction.fixed::<I, C, 2>(streaming),
            3 if plain => reduction.fixed::<I, C, 3>(streaming),
            4 if plain => reduction.fixed::<I, C, 4>(streaming),
            8 if plain => reduction.fixed::<I, C, 8>(streaming),
            _ => reduction.general::<I, C>(streaming),
        }
    }
}

/// Copies bytes, with non-temporal stores if `streaming`.
///
/// Vectors shorter than [`LONG_COPY`] are left to memcpy, which is as fast. From about 2 KiB on, glibc's
/// memcpy uses `rep movsb` on processors that report it as fast. On AMD's Zen 3 and Zen 4 that takes up to 20
/// times as long if the destination is not aligned to 32 bytes and lies a few bytes after the source in their
/// pages ([glibc bug 30994](https://sourceware.org/bugzilla/show_bug.cgi?id=30994)), as a vector of malloc
/// does, 16 bytes into its page, and a slot, at the start of one. Measured for 128 KiB in the cache, AMD
/// EPYC, glibc 2.36: 43 us, and 2.8 us by a loop.
///
/// # Safety
/// `from` is valid for reads of `len` bytes, `into` for writes; they do not overlap. The processor has the
/// instructions `I`.
#[inline(always)]
pub(super) unsafe fn copy<I: Instructions>(into: *mut u8, from: *const u8, len: usize, streaming: bool) {
    const STEP: usize = GROUP * size_of::<u64>();
    if len < LONG_COPY {
        // SAFETY: the caller has the same obligations.
        return unsafe { copy_nonoverlapping(from, into, len) };
    }
    let head = to_line(into.addr());
    let tail = head + (len - head) / STEP * STEP;
    // SAFETY: 0 <= head <= tail <= len, which the caller guarantees; every group in between starts a cache
    // line.
    unsafe {
        copy_nonoverlapping(from, into, head);
        for at in (head..tail).step_by(STEP) {
            let group = from.add(at).cast::<[u64; GROUP]>().read_unaligned();
            let into = into.add(at).cast::<u64>();
            if streaming {
                I::store_non_temporal(into, group);
            } else {
                into.cast::<[u64; GROUP]>().write_unaligned(group);
            }
        }
        copy_nonoverlapping(from.add(tail), into.add(tail), len - tail);
    }
    if streaming {
        I::fence();
    }
}

/// Bytes from an address to the next start of a cache line.
#[inline(always)]
fn to_line(address: usize) -> usize {
    address.wrapping_neg() % LINE
}

/// A job with its element type.
struct Reduction<'a, L: Lane> {
    into: *mut L,
    count: usize,
    operands: &'a [Operand],
    divisor: Option<<L::Acc as Number>::Divisor>,
}

// The safety requirements of these methods are those of `reduce`.
impl<L: Lane> Reduction<'_, L> {
    /// `K` operands without factors, and no division: the case of a step in a chain and of the root of a
    /// small group. A constant number lets the compiler unroll the loop. (Measured with k=4, f16, in the
    /// cache: 26 GB/s, and 19 GB/s in `general`.)
    #[inline(always)]
    unsafe fn fixed<I: Instructions, C: Combine<L::Acc>, const K: usize>(&self, streaming: bool) {
        let from: [*const L; K] = std::array::from_fn(|nth| elements(&self.operands[nth]));
        let group = |at| {
            // SAFETY: `walk` passes only positions of whole groups within the operands.
            unsafe {
                let mut values = L::load::<I>(from[0].add(at));
                for source in &from[1..] {
                    combine::<_, C>(&mut values, L::load::<I>(source.add(at)));
                }
                L::round::<I>(values)
            }
        };
        // SAFETY: the caller has the same obligations; `walk` passes ranges within the operands.
        unsafe {
            let rest = |range| self.one_by_one_of::<C, K>(&from, range);
            self.walk::<I>(streaming, group, rest);
        }
    }

    /// Any number of operands, with factors and a division if the job has them.
    #[inline(always)]
    unsafe fn general<I: Instructions, C: Combine<L::Acc>>(&self, streaming: bool) {
        let load = |operand: &Operand, at| {
            // SAFETY: `walk` passes only positions of whole groups within the operands.
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
            // SAFETY: the caller guarantees the instructions.
            unsafe { L::round::<I>(values) }
        };
        // SAFETY: the caller has the same obligations; `walk` passes ranges within the operands.
        unsafe { self.walk::<I>(streaming, group, |range| self.one_by_one::<C>(range)) }
    }

    /// Writes whole groups, which `group` computes from the position of their first element, and has `rest`
    /// write the elements at both ends.
    #[inline(always)]
    unsafe fn walk<I: Instructions>(
        &self,
        streaming: bool,
        group: impl Fn(usize) -> [L; GROUP],
        rest: impl Fn(Range<usize>),
    ) {
        let head = if streaming { to_line(self.into.addr()) / size_of::<L>() } else { 0 };
        let head = head.min(self.count);
        let tail = head + (self.count - head) / GROUP * GROUP;
        for at in (head..tail).step_by(GROUP) {
            let values = group(at);
            // Keeps the compiler from vectorizing across groups, which takes many shuffles. (Measured with
            // k=2, f32, 64 MiB each: 3.4 GB/s without this, 10.5 GB/s with it.)
            compiler_fence(Ordering::SeqCst);
            // SAFETY: at + GROUP <= tail <= count, which the caller guarantees. When streaming, the first
            // group starts a cache line, so all are aligned to their size or to a line.
            unsafe {
                let into = self.into.add(at);
                if streaming {
                    I::store_non_temporal(into, values);
                } else {
                    into.cast::<[L; GROUP]>().write_unaligned(values);
                }
            }
        }
        if streaming {
            I::fence();
        }
        if head > 0 {
            rest(0..head);
        }
        if tail < self.count {
            rest(tail..self.count);
        }
    }

    /// Computes and writes the elements in `range` of `K` operands without factors. Compiled once for all
    /// instruction sets, because it handles only the few elements outside of whole groups; in a call of fewer
    /// than [`GROUP`] elements these are all.
    #[inline(never)]
    unsafe fn one_by_one_of<C: Combine<L::Acc>, const K: usize>(
        &self,
        from: &[*const L; K],
        range: Range<usize>,
    ) {
        for at in range {
            // SAFETY: the caller guarantees all operands and the destination within the range.
            unsafe {
                let first = (*from[0].add(at)).widen();
                let value = from[1..]
                    .iter()
                    .fold(first, |value, operand| C::combine(value, (*operand.add(at)).widen()));
                *self.into.add(at) = L::narrow(value);
            }
        }
    }

    /// Computes and writes the elements in `range`. Compiled once for all instruction sets, too.
    #[inline(never)]
    unsafe fn one_by_one<C: Combine<L::Acc>>(&self, range: Range<usize>) {
        for at in range {
            let load = |operand: &Operand| {
                // SAFETY: the caller guarantees all operands within the range.
                let value = unsafe { *elements::<L>(operand).add(at) }.widen();
                operand.factor.map_or(value, |factor| value.product(L::Acc::factor(factor)))
            };
            let first = load(&self.operands[0]);
            let value =
                self.operands[1..].iter().fold(first, |value, operand| C::combine(value, load(operand)));
            let value = self.divisor.map_or(value, |divisor| value.quotient(divisor));
            // SAFETY: the caller guarantees the destination within the range.
            unsafe { *self.into.add(at) = L::narrow(value) };
        }
    }
}

/// The first element of an operand.
#[inline(always)]
fn elements<L>(operand: &Operand) -> *const L {
    operand.piece.as_ptr().cast_const().cast()
}

#[inline(always)]
fn combine<N: Number, C: Combine<N>>(values: &mut [N; GROUP], others: [N; GROUP]) {
    for (value, other) in values.iter_mut().zip(others) {
        *value = C::combine(*value, other);
    }
}
