//! One row of the table: the calls that are timed, and those that are checked.
//!
//! Owns the vectors of one element type. Must not know how a row is shown, nor which rows there are.

use super::check::{Check, Placement};
use super::collective::{self, Extent};
use super::data::Finding;
use super::number::Number;
use super::options::{Memory, Op, Options};
use super::report::{Row, Timing};
use flexring::call::Collective;
use flexring::{Communicator, ReduceOp, Result};
use std::ops::DerefMut;
use std::time::Instant;

/// Two vectors, and a world to call with them.
pub struct Bench<'a, T> {
    comm: &'a Communicator,
    options: &'a Options,
    send: Box<dyn DerefMut<Target = [T]>>,
    receive: Box<dyn DerefMut<Target = [T]>>,
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

    /// Measures and checks one size, of `bytes` bytes. `step` is told the time after each call.
    ///
    /// # Errors
    /// Whatever a call fails with.
    pub fn measure(&mut self, op: Op, bytes: usize, step: &mut dyn FnMut(Instant)) -> Result<Measured> {
        let (rank, world) = (self.comm.rank(), self.comm.world_size());
        let Options { collective, root, .. } = *self.options;
        let extent = Extent::new(collective, bytes, size_of::<T>(), world);
        let check = Check::<T>::new(collective, op, root, rank, world);
        let mut notes = Vec::new();
        let mut timed = |placement, words: &str| -> Result<Timing> {
            check.fill(0, extent, placement, &mut self.send, &mut self.receive);
            let mut timing = self.time(op, extent, placement, step)?;
            if self.options.check > 0 {
                let finding = self.check(&check, op, extent, placement)?;
                timing.wrong = Some(self.total(finding.wrong)?);
                notes.extend(finding.sentence.map(|sentence| format!("{words}: {sentence}")));
            }
            Ok(timing)
        };
        let row = Row {
            size: extent.whole * size_of::<T>(),
            count: extent.part,
            dtype: T::DTYPE.name(),
            redop: collective::redop(collective, op),
            root: collective::root(collective, root),
            out_of_place: timed(Placement::Apart, "out-of-place")?,
            in_place: timed(Placement::InPlace, "in-place")?,
        };
        Ok(Measured { row, notes })
    }

    fn call(&mut self, op: Op, Extent { whole, part }: Extent, placement: Placement) -> Result<()> {
        let op = op.with_factor(T::factor(self.comm.rank()));
        let (comm, send, receive) = (self.comm, &mut self.send, &mut self.receive);
        let root = self.options.root;
        match (self.options.collective, placement) {
            (Collective::AllReduce, Placement::Apart) => {
                comm.all_reduce_into(&send[..whole], &mut receive[..whole], op)
            }
            (Collective::AllReduce, Placement::InPlace) => comm.all_reduce(&mut receive[..whole], op),
            (Collective::ReduceScatter, Placement::Apart) => {
                comm.reduce_scatter(&send[..whole], &mut receive[..part], op)
            }
            (Collective::ReduceScatter, Placement::InPlace) => {
                comm.reduce_scatter_in_place(&mut receive[..whole], op)
            }
            (Collective::AllGather, Placement::Apart) => {
                comm.all_gather(&send[..part], &mut receive[..whole])
            }
            (Collective::AllGather, Placement::InPlace) => comm.all_gather_in_place(&mut receive[..whole]),
            (Collective::Broadcast, Placement::Apart) => {
                comm.broadcast_into(&send[..whole], &mut receive[..whole], root)
            }
            (Collective::Broadcast, Placement::InPlace) => comm.broadcast(&mut receive[..whole], root),
            (Collective::Reduce, Placement::Apart) => {
                comm.reduce_into(&send[..whole], &mut receive[..whole], op, root)
            }
            (Collective::Reduce, Placement::InPlace) => comm.reduce(&mut receive[..whole], op, root),
        }
    }

    fn time(
        &mut self,
        op: Op,
        extent: Extent,
        placement: Placement,
        step: &mut dyn FnMut(Instant),
    ) -> Result<Timing> {
        let warmup = self.options.warmup_iters;
        let mut times = vec![0.0; warmup + self.options.iters.get()];
        // Ranks that come late from filling their vectors would be measured as slow calls of the others.
        self.comm.all_reduce(&mut [0u8], ReduceOp::Sum)?;
        for time in &mut times {
            let start = Instant::now();
            self.call(op, extent, placement)?;
            let end = Instant::now();
            *time = (end - start).as_secs_f64() * 1e6;
            step(end);
        }
        self.comm.all_reduce(&mut times, ReduceOp::Avg)?;
        let factor = collective::bus_factor(self.options.collective, self.comm.world_size());
        Ok(Timing::of(&times, warmup, extent.whole * size_of::<T>(), factor))
    }

    fn check(&mut self, check: &Check<T>, op: Op, extent: Extent, placement: Placement) -> Result<Finding> {
        let mut finding = Finding::default();
        for _ in 0..self.options.check {
            for round in 0..check.rounds(extent) {
                check.fill(round, extent, placement, &mut self.send, &mut self.receive);
                self.call(op, extent, placement)?;
                finding = finding.and(check.verify(round, extent, placement, &self.send, &self.receive));
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
    use crate::perf::data::Pattern;

    /// What rank 0 of three finds if rank 2 contributes by another pattern.
    fn find(collective: &str, placement: Placement, strange: &Pattern<f32>) -> Finding {
        let options =
            Options::parse(&format!("--memory heap --collective {collective}")).expect("valid flags");
        let comms = Communicator::local(3).expect("a local world");
        let extent = Extent::new(options.collective, 4800, 4, 3);
        let find = |comm: Communicator| {
            let mut check = Check::new(options.collective, Op::Sum, 0, comm.rank(), 3);
            if comm.rank() == 2 {
                check.pattern = strange.clone();
            }
            let mut bench = Bench::<f32>::new(&comm, &options, extent.whole).expect("memory");
            bench.check(&check, Op::Sum, extent, placement).expect("the call succeeds")
        };
        std::thread::scope(|scope| {
            let find = &find;
            let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || find(comm))).collect();
            let mut findings = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            findings.next().expect("three ranks")
        })
    }

    #[test]
    fn right_results_leave_nothing_to_say() {
        for collective in Collective::ALL {
            for placement in [Placement::Apart, Placement::InPlace] {
                let finding = find(collective.name(), placement, &Pattern::new(Op::Sum, 3));
                assert_eq!(finding, Finding::default(), "{collective:?} {placement:?}");
            }
        }
    }

    #[test]
    fn a_rank_that_contributes_nothing_is_named() {
        for (collective, wrong) in [("all-reduce", 1200), ("reduce-scatter", 400), ("reduce", 1200)] {
            for placement in [Placement::Apart, Placement::InPlace] {
                let finding = find(collective, placement, &Pattern::new(Op::Sum, 3).muted());
                assert_eq!(finding.wrong, wrong);
                assert!(finding.sentence.is_some_and(|sentence| sentence.ends_with(": rank 2 is missing")));
            }
        }
    }
}
