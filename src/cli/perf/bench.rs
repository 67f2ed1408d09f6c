//! One row of the table: the calls that are timed, and those that are checked.
//!
//! Owns the vectors of one element type. Must not know how a row is shown, nor which rows there are.

use super::data::{Finding, Pattern};
use super::number::Number;
use super::options::{Memory, Op, Options};
use super::report::{Row, Timing};
use flexring::{Communicator, ReduceOp, Result};
use std::ops::DerefMut;
use std::time::Instant;

/// Two vectors, and a world to reduce them in.
pub struct Bench<'a, T> {
    comm: &'a Communicator,
    options: &'a Options,
    send: Box<dyn DerefMut<Target = [T]>>,
    receive: Box<dyn DerefMut<Target = [T]>>,
}

/// Where the result goes.
#[derive(Clone, Copy, Debug)]
enum Placement {
    Apart,
    InPlace,
}

/// A row and what its check found on this rank, if anything: out of place and in place.
pub struct Measured {
    pub row: Row,
    pub notes: Vec<String>,
}

impl<'a, T: Number> Bench<'a, T> {
    /// Vectors for up to `count` elements.
    ///
    /// # Errors
    /// `System` if there is not enough memory.
    pub fn new(comm: &'a Communicator, options: &'a Options, count: usize) -> Result<Self> {
        let vector = || -> Result<Box<dyn DerefMut<Target = [T]>>> {
            Ok(match options.memory {
                Memory::Pool => Box::new(comm.alloc::<T>(count)?),
                Memory::Heap => Box::new(vec![T::default(); count]),
            })
        };
        Ok(Self { comm, options, send: vector()?, receive: vector()? })
    }

    /// Measures and checks one size. `step` is told the time after each call.
    ///
    /// # Errors
    /// Whatever a call fails with.
    pub fn measure(&mut self, op: Op, count: usize, step: &mut dyn FnMut(Instant)) -> Result<Measured> {
        let pattern = Pattern::<T>::new(op, self.comm.world_size());
        let mut notes = Vec::new();
        let mut timed = |placement, words: &str| -> Result<Timing> {
            pattern.fill(self.comm.rank(), 0, &mut self.send[..count]);
            pattern.fill(self.comm.rank(), 0, &mut self.receive[..count]);
            let mut timing = self.time(op, count, placement, step)?;
            if self.options.check > 0 {
                let finding = self.check(&pattern, op, count, placement)?;
                timing.wrong = Some(self.total(finding.wrong)?);
                notes.extend(finding.sentence.map(|sentence| format!("{words}: {sentence}")));
            }
            Ok(timing)
        };
        let row = Row {
            size: count * size_of::<T>(),
            count,
            dtype: T::DTYPE.name(),
            redop: op.name(),
            out_of_place: timed(Placement::Apart, "out-of-place")?,
            in_place: timed(Placement::InPlace, "in-place")?,
        };
        Ok(Measured { row, notes })
    }

    fn call(&mut self, op: Op, count: usize, placement: Placement) -> Result<()> {
        let op = op.with_factor(T::factor(self.comm.rank()));
        match placement {
            Placement::Apart => {
                self.comm.all_reduce_into(&self.send[..count], &mut self.receive[..count], op)
            }
            Placement::InPlace => self.comm.all_reduce(&mut self.receive[..count], op),
        }
    }

    fn time(
        &mut self,
        op: Op,
        count: usize,
        placement: Placement,
        step: &mut dyn FnMut(Instant),
    ) -> Result<Timing> {
        let warmup = self.options.warmup_iters;
        let mut times = vec![0.0; warmup + self.options.iters.get()];
        // Ranks that come late from filling their vectors would be measured as slow calls of the others.
        self.comm.all_reduce(&mut [0u8], ReduceOp::Sum)?;
        for time in &mut times {
            let start = Instant::now();
            self.call(op, count, placement)?;
            let end = Instant::now();
            *time = (end - start).as_secs_f64() * 1e6;
            step(end);
        }
        self.comm.all_reduce(&mut times, ReduceOp::Avg)?;
        Ok(Timing::of(&times, warmup, count * size_of::<T>(), self.comm.world_size()))
    }

    fn check(&mut self, pattern: &Pattern<T>, op: Op, count: usize, placement: Placement) -> Result<Finding> {
        let rank = self.comm.rank();
        let mut finding = Finding::default();
        for _ in 0..self.options.check {
            for round in 0..pattern.rounds(count) {
                match placement {
                    Placement::Apart => {
                        pattern.fill(rank, round, &mut self.send[..count]);
                        // What an earlier call left here must not pass for a result.
                        self.receive[..count].fill(T::default());
                    }
                    Placement::InPlace => pattern.fill(rank, round, &mut self.receive[..count]),
                }
                self.call(op, count, placement)?;
                finding = finding.and(pattern.verify(round, &self.receive[..count]));
                if matches!(placement, Placement::Apart) {
                    finding = finding.and(pattern.verify_input(rank, round, &self.send[..count]));
                }
            }
        }
        Ok(finding)
    }

    /// How many elements are wrong on all ranks, or on this one if those that cannot add cannot add this either.
    fn total(&self, wrong: u64) -> Result<u64> {
        let mut total = [wrong];
        self.comm.all_reduce(&mut total, ReduceOp::Sum)?;
        Ok(total[0].max(wrong))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What rank 0 of three finds if rank 2 contributes by another pattern.
    fn find(placement: Placement, strange: &Pattern<f32>) -> Finding {
        let options = Options::parse("--memory heap").expect("valid flags");
        let comms = Communicator::local(3).expect("a local world");
        let check = |comm: Communicator| {
            let pattern = Pattern::new(Op::Sum, 3);
            let pattern = if comm.rank() == 2 { strange.clone() } else { pattern };
            let mut bench = Bench::<f32>::new(&comm, &options, 1000).expect("memory");
            bench.check(&pattern, Op::Sum, 1000, placement).expect("the call succeeds")
        };
        std::thread::scope(|scope| {
            let check = &check;
            let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || check(comm))).collect();
            let mut findings = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            findings.next().expect("three ranks")
        })
    }

    #[test]
    fn right_results_leave_nothing_to_say() {
        for placement in [Placement::Apart, Placement::InPlace] {
            assert_eq!(find(placement, &Pattern::new(Op::Sum, 3)), Finding::default());
        }
    }

    #[test]
    fn a_rank_that_contributes_nothing_is_named() {
        for placement in [Placement::Apart, Placement::InPlace] {
            let finding = find(placement, &Pattern::new(Op::Sum, 3).muted());
            assert_eq!(finding.wrong, 1000);
            assert!(finding.sentence.is_some_and(|sentence| sentence.ends_with(": rank 2 is missing")));
        }
    }
}
