//! One row of the table: its timed calls and its checked calls.
//!
//! Owns the vectors of one element type.

use super::check::{CallCheck, Placement};
use super::collective::{self, Extent};
use super::exact_element::ExactElement;
use super::gpu::{self, GpuCall, LaunchGraph};
use super::options::{CallCount, Memory, PerfOptions, VectorDevice};
use super::pattern::CheckResult;
use super::redop::RedOp;
use super::report::{self, PerfRow, Timing};
use flexring::{Communicator, Operation, ReduceOp, Result};
use flexring_core::call::Collective;
use std::num::NonZeroUsize;
use std::ops::DerefMut;
use std::time::{Duration, Instant};

/// The vectors of one element type and the communicator whose calls use them. For calls on a GPU, the host
/// vectors are the source and the target of the GPU's copies.
pub struct Bench<'a, T: ExactElement> {
    comm: &'a Communicator,
    options: &'a PerfOptions,
    send: Vector<'a, T>,
    receive: Vector<'a, T>,
    on_gpu: Option<gpu::Vectors<'a, T>>,
}

/// A vector, however it was allocated.
type Vector<'a, T> = Box<dyn DerefMut<Target = [T]> + 'a>;

/// A row, and what its checks found on this rank: at most one note each for out of place and in place.
pub struct MeasuredRow {
    pub row: PerfRow,
    pub notes: Vec<String>,
}

impl<'a, T: ExactElement> Bench<'a, T> {
    /// Allocates vectors for up to `count` elements, and copies on the GPU of index `gpu` if given.
    ///
    /// # Errors
    /// `System` if there is not enough memory.
    pub fn new(
        comm: &'a Communicator,
        options: &'a PerfOptions,
        gpu: Option<usize>,
        count: usize,
    ) -> Result<Self> {
        let vector = || -> Result<Vector<'a, T>> {
            Ok(match (options.device, options.memory) {
                (VectorDevice::Host, None | Some(Memory::Pool)) => Box::new(comm.alloc::<T>(count)?),
                (VectorDevice::Host, Some(Memory::Registered)) => {
                    Box::new(comm.register(vec![T::default(); count])?)
                }
                _ => Box::new(vec![T::default(); count]),
            })
        };
        let registrar = (options.memory == Some(Memory::Registered)).then_some(comm);
        let on_gpu = gpu.map(|gpu| gpu::Vectors::new(gpu, count, registrar)).transpose()?;
        Ok(Self { comm, options, send: vector()?, receive: vector()?, on_gpu })
    }

    /// Measures and checks vectors of `bytes` bytes. `step` is called with the time after each timed call.
    ///
    /// # Errors
    /// Any error of a call.
    pub fn measure(&mut self, op: RedOp, bytes: usize, step: &mut dyn FnMut(Instant)) -> Result<MeasuredRow> {
        let (rank, world) = (self.comm.rank(), self.comm.world_size());
        let PerfOptions { collective, root, .. } = *self.options;
        let extent = Extent::new(collective, bytes, size_of::<T>(), world);
        let check = CallCheck::<T>::new(collective, op, root, rank, world);
        let mut notes = Vec::new();
        let mut timed = |placement, label: &str| -> Result<Timing> {
            let placement =
                if collective::has_in_place(collective) { placement } else { Placement::OutOfPlace };
            self.fill(&check, 0, extent, placement)?;
            let mut timing = self.time(op, extent, placement, step)?;
            if self.options.check > 0 {
                let finding = self.check(&check, op, extent, placement)?;
                timing.wrong = Some(self.total(finding.wrong)?);
                notes.extend(finding.sentence.map(|sentence| format!("{label}: {sentence}")));
            }
            Ok(timing)
        };
        let row = PerfRow {
            size: extent.whole * size_of::<T>(),
            count: extent.part,
            dtype: T::DTYPE.name(),
            redop: collective::redop(collective, op),
            root: collective::root(collective, root),
            least_us: None,
            out_of_place: timed(Placement::OutOfPlace, "out-of-place")?,
            in_place: timed(Placement::InPlace, "in-place")?,
        };
        Ok(MeasuredRow { row, notes })
    }

    fn fill(
        &mut self,
        check: &CallCheck<T>,
        round: usize,
        extent: Extent,
        placement: Placement,
    ) -> Result<()> {
        check.fill(round, extent, placement, &mut self.send, &mut self.receive);
        match &mut self.on_gpu {
            Some(on_gpu) => on_gpu.write(&self.send[..extent.whole], &self.receive[..extent.whole]),
            None => Ok(()),
        }
    }

    fn verify(
        &mut self,
        check: &CallCheck<T>,
        round: usize,
        extent: Extent,
        placement: Placement,
    ) -> Result<CheckResult> {
        if let Some(on_gpu) = &mut self.on_gpu {
            on_gpu.read(&mut self.send[..extent.whole], &mut self.receive[..extent.whole])?;
        }
        Ok(check.verify(round, extent, placement, &self.send, &self.receive))
    }

    /// A call on the GPU's vectors.
    fn on_gpu(&self, op: RedOp, extent: Extent, placement: Placement) -> GpuCall<'a> {
        let op = op.of(T::DTYPE, T::factor(self.comm.rank()));
        let PerfOptions { collective, root, .. } = *self.options;
        GpuCall { comm: self.comm, collective, op, root, extent, placement }
    }

    fn call(&mut self, op: RedOp, extent: Extent, placement: Placement) -> Result<()> {
        let call = self.on_gpu(op, extent, placement);
        if let Some(on_gpu) = &mut self.on_gpu {
            return on_gpu.call(call);
        }
        let GpuCall { collective, op, root, .. } = call;
        let Extent { whole, part } = extent;
        let (comm, send, receive) = (self.comm, &mut self.send, &mut self.receive);
        match (collective, placement) {
            (Collective::AllReduce, Placement::OutOfPlace) => {
                comm.all_reduce_into(&send[..whole], &mut receive[..whole], op)
            }
            (Collective::AllReduce, Placement::InPlace) => comm.all_reduce(&mut receive[..whole], op),
            (Collective::ReduceScatter, Placement::OutOfPlace) => {
                comm.reduce_scatter(&send[..whole], &mut receive[..part], op)
            }
            (Collective::ReduceScatter, Placement::InPlace) => {
                comm.reduce_scatter_in_place(&mut receive[..whole], op)
            }
            (Collective::AllGather, Placement::OutOfPlace) => {
                comm.all_gather(&send[..part], &mut receive[..whole])
            }
            (Collective::AllGather, Placement::InPlace) => comm.all_gather_in_place(&mut receive[..whole]),
            (Collective::Broadcast, Placement::OutOfPlace) => {
                comm.broadcast_into(&send[..whole], &mut receive[..whole], root)
            }
            (Collective::Broadcast, Placement::InPlace) => comm.broadcast(&mut receive[..whole], root),
            (Collective::Reduce, Placement::OutOfPlace) => {
                comm.reduce_into(&send[..whole], &mut receive[..whole], op, root)
            }
            (Collective::Reduce, Placement::InPlace) => comm.reduce(&mut receive[..whole], op, root),
            (Collective::Gather, Placement::OutOfPlace) => {
                comm.gather(&send[..part], &mut receive[..whole], root)
            }
            (Collective::Gather, Placement::InPlace) => comm.gather_in_place(&mut receive[..whole], root),
            (Collective::Scatter, Placement::OutOfPlace) => {
                comm.scatter(&send[..whole], &mut receive[..part], root)
            }
            (Collective::Scatter, Placement::InPlace) => comm.scatter_in_place(&mut receive[..whole], root),
            (Collective::AllToAll | Collective::AllToAllV, _) => {
                comm.all_to_all(&send[..whole], &mut receive[..whole])
            }
            (Collective::SendRecv, _) => {
                let (rank, world) = (comm.rank(), comm.world_size());
                let send = Operation::send(&send[..whole], (rank + 1) % world);
                comm.group([send, Operation::recv(&mut receive[..whole], (rank + world - 1) % world)])
            }
            (Collective::Barrier, _) => comm.barrier(),
        }
    }

    /// Waits until all enqueued calls are complete. Calls on host vectors are complete when they return.
    fn wait(&self) -> Result<()> {
        match &self.on_gpu {
            Some(on_gpu) => on_gpu.wait().and_then(|()| self.comm.synchronize()),
            None => Ok(()),
        }
    }

    /// With `--blocking`, waits until the call before is complete on all ranks.
    fn wait_for_all(&self) -> Result<()> {
        if self.options.blocking == 0 {
            return Ok(());
        }
        self.wait()?;
        self.comm.barrier()
    }

    /// Replaces the times of this rank by what `--average` asks for.
    fn over_ranks(&self, times: &mut [f64]) -> Result<()> {
        match self.options.average {
            0 => self.comm.broadcast(times, 0),
            2 => self.comm.all_reduce(times, ReduceOp::Min),
            3 => self.comm.all_reduce(times, ReduceOp::Max),
            _ => self.comm.all_reduce(times, ReduceOp::Avg),
        }
    }

    fn time(
        &mut self,
        op: RedOp,
        extent: Extent,
        placement: Placement,
        step: &mut dyn FnMut(Instant),
    ) -> Result<Timing> {
        if self.on_gpu.is_some() {
            return self.time_enqueued(op, extent, placement, step);
        }
        let mut times = Vec::new();
        // A barrier: a rank that fills its vectors late would show up as slow calls of the other ranks.
        self.comm.all_reduce(&mut [0u8], ReduceOp::Sum)?;
        let mut calls = |bench: &mut Self, calls| {
            let first = Instant::now();
            for _ in 0..calls {
                let start = Instant::now();
                bench.call(op, extent, placement)?;
                let end = Instant::now();
                times.push((end - start).as_secs_f64() * 1e6);
                step(end);
                bench.wait_for_all()?;
            }
            Ok(first.elapsed())
        };
        let (warmup, _) = self.repeat(self.options.warmup(), &mut calls)?;
        self.repeat(self.options.iterations(), &mut calls)?;
        self.over_ranks(&mut times)?;
        let factor = collective::bus_factor(self.options.collective, self.comm.world_size());
        Ok(Timing::of(&times, warmup, extent.whole * size_of::<T>(), factor))
    }

    /// Makes `count` calls by `calls`, which makes a number of them and returns the time that they took. All
    /// ranks make as many. Returns the number of calls and their time on this rank.
    fn repeat(
        &mut self,
        count: CallCount,
        calls: &mut dyn FnMut(&mut Self, usize) -> Result<Duration>,
    ) -> Result<(usize, Duration)> {
        let (mut made, mut own, mut longest) = (0, Duration::ZERO, Duration::ZERO);
        loop {
            let further = count.further(made, longest);
            if further == 0 {
                return Ok((made, own));
            }
            own += calls(self, further)?;
            made += further;
            if !count.time.is_zero() {
                let mut nanoseconds = [own.as_nanos() as u64];
                self.comm.all_reduce(&mut nanoseconds, ReduceOp::Max)?;
                longest = Duration::from_nanos(nanoseconds[0]);
            }
        }
    }

    /// Times enqueued calls, or launches of a graph of calls, as nccl-tests does: from the first to the
    /// completion of the last.
    fn time_enqueued(
        &mut self,
        op: RedOp,
        extent: Extent,
        placement: Placement,
        step: &mut dyn FnMut(Instant),
    ) -> Result<Timing> {
        let captured = self.options.graph.map_or(1, NonZeroUsize::get);
        let graph = self.capture(captured, op, extent, placement)?;
        let mut calls = |bench: &mut Self, calls| {
            let start = Instant::now();
            for _ in 0..calls {
                bench.enqueue(graph.as_ref(), op, extent, placement)?;
                step(Instant::now());
                bench.wait_for_all()?;
            }
            bench.wait()?;
            Ok(start.elapsed())
        };
        let warmup = self.options.warmup();
        let first = calls(self, warmup.least.min(1))?;
        self.repeat(CallCount { least: warmup.least.saturating_sub(1), ..warmup }, &mut calls)?;
        self.comm.all_reduce(&mut [0u8], ReduceOp::Sum)?;
        let (launches, elapsed) = self.repeat(self.options.iterations(), &mut calls)?;
        let iterations = launches * captured;
        let us = |elapsed: Duration, calls: usize| elapsed.as_secs_f64() * 1e6 / calls as f64;
        let mut times = vec![us(first, captured), us(elapsed, iterations)];
        if graph.is_none() {
            times.extend(self.time_single(op, extent, placement)?);
        }
        self.over_ranks(&mut times)?;
        let (first, mean) = (times[0], times[1]);
        let factor = collective::bus_factor(self.options.collective, self.comm.world_size());
        let first = if warmup.least == 0 { mean } else { first };
        Ok(Timing {
            waited_us: times.get(2).copied(),
            caller_us: times.get(3).copied(),
            ..Timing::of_batch(first, mean, iterations, extent.whole * size_of::<T>(), factor)
        })
    }

    /// The median times of calls each of which is awaited: until its result is there, and until it returns.
    fn time_single(&mut self, op: RedOp, extent: Extent, placement: Placement) -> Result<[f64; 2]> {
        let (mut waited, mut caller) = (Vec::new(), Vec::new());
        for _ in 0..self.options.iterations().least {
            let start = Instant::now();
            self.call(op, extent, placement)?;
            caller.push(start.elapsed().as_secs_f64() * 1e6);
            self.on_gpu.as_ref().map_or(Ok(()), gpu::Vectors::wait)?;
            waited.push(start.elapsed().as_secs_f64() * 1e6);
        }
        self.wait()?;
        Ok([waited, caller].map(|mut times| {
            times.sort_by(f64::total_cmp);
            report::median(&times)
        }))
    }

    /// With `--graph`, captures `calls` calls.
    fn capture(
        &mut self,
        calls: usize,
        op: RedOp,
        extent: Extent,
        placement: Placement,
    ) -> Result<Option<LaunchGraph>> {
        let call = self.on_gpu(op, extent, placement);
        let on_gpu = self.on_gpu.as_mut().filter(|_| self.options.graph.is_some());
        on_gpu.map(|on_gpu| on_gpu.capture(calls, call)).transpose()
    }

    /// Launches a graph, or makes a call.
    fn enqueue(
        &mut self,
        graph: Option<&LaunchGraph>,
        op: RedOp,
        extent: Extent,
        placement: Placement,
    ) -> Result<()> {
        match graph {
            Some(launch) => launch(),
            None => self.call(op, extent, placement),
        }
    }

    fn check(
        &mut self,
        check: &CallCheck<T>,
        op: RedOp,
        extent: Extent,
        placement: Placement,
    ) -> Result<CheckResult> {
        // A second call in place would reduce the result of the first.
        let calls = match placement {
            Placement::OutOfPlace => self.options.graph.map_or(1, NonZeroUsize::get),
            Placement::InPlace => 1,
        };
        let graph = if self.options.check > 0 { self.capture(calls, op, extent, placement)? } else { None };
        let mut finding = CheckResult::default();
        for _ in 0..self.options.check {
            for round in 0..check.rounds(extent) {
                self.fill(check, round, extent, placement)?;
                self.enqueue(graph.as_ref(), op, extent, placement)?;
                self.wait()?;
                finding = finding.and(self.verify(check, round, extent, placement)?);
            }
        }
        Ok(finding)
    }

    /// The number of wrong elements on all ranks. Never below that of this rank, even if the all-reduce
    /// itself is wrong.
    fn total(&self, wrong: u64) -> Result<u64> {
        let mut total = [wrong];
        self.comm.all_reduce(&mut total, ReduceOp::Sum)?;
        Ok(total[0].max(wrong))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::pattern::CheckPattern;

    /// The check result of rank 0 of 3 if rank 2 contributes the values of `strange`.
    fn find(collective: &str, placement: Placement, strange: &CheckPattern<f32>) -> CheckResult {
        let options =
            PerfOptions::parse(&format!("--memory heap --collective {collective}")).expect("valid flags");
        let comms = Communicator::local(3).expect("a local world");
        let extent = Extent::new(options.collective, 4800, 4, 3);
        let find = |comm: Communicator| {
            let mut check = CallCheck::new(options.collective, RedOp::Sum, 0, comm.rank(), 3);
            if comm.rank() == 2 {
                check.pattern = strange.clone();
            }
            let mut bench = Bench::<f32>::new(&comm, &options, None, extent.whole).expect("memory");
            bench.check(&check, RedOp::Sum, extent, placement).expect("the call succeeds")
        };
        std::thread::scope(|scope| {
            let find = &find;
            let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || find(comm))).collect();
            let mut findings = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            findings.next().expect("three ranks")
        })
    }

    #[test]
    fn correct_results_give_an_empty_check_result() {
        for collective in collective::measurable() {
            for placement in [Placement::OutOfPlace, Placement::InPlace] {
                if placement == Placement::InPlace && !collective::has_in_place(collective) {
                    continue;
                }
                let finding = find(collective.name(), placement, &CheckPattern::new(RedOp::Sum, 3));
                assert_eq!(finding, CheckResult::default(), "{collective:?} {placement:?}");
            }
        }
    }

    #[test]
    fn a_missing_contribution_is_attributed_to_its_rank() {
        for (collective, wrong) in [("all-reduce", 1200), ("reduce-scatter", 400), ("reduce", 1200)] {
            for placement in [Placement::OutOfPlace, Placement::InPlace] {
                let finding = find(collective, placement, &CheckPattern::new(RedOp::Sum, 3).muted());
                assert_eq!(finding.wrong, wrong);
                assert!(finding.sentence.is_some_and(|sentence| sentence.ends_with(": rank 2 is missing")));
            }
        }
    }
}
