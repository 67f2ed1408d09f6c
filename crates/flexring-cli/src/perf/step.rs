//! One training step's gradients: all buckets at once by asynchronous calls, beside one fused vector.
//!
//! Owns the vectors of one element type.

use super::check::{CallCheck, Placement};
use super::collective::{self, Extent};
use super::exact_element::ExactElement;
use super::model::Gradients;
use super::options::PerfOptions;
use super::pattern::CheckResult;
use super::redop::RedOp;
use super::report::{ModelRow, Timing};
use flexring::{Communicator, Owned, ReduceOp, Request, Result};
use flexring_core::call::Collective;
use std::time::Instant;

/// The vectors of one training step and the communicator that reduces them.
pub struct StepBench<'a, B: Owned> {
    comm: &'a Communicator,
    options: &'a PerfOptions,
    gradients: &'a Gradients,
    /// One vector for each bucket, in the order of the calls.
    buckets: Vec<B>,
    /// One vector with all elements.
    fused: Vec<B>,
}

/// A row, and what its checks found on this rank.
pub struct MeasuredModel {
    pub row: ModelRow,
    pub notes: Vec<String>,
}

impl<'a, T: ExactElement, B: Owned<Item = T>> StepBench<'a, B> {
    /// Allocates by `vector`, which makes a vector of a number of elements.
    ///
    /// # Errors
    /// `System` if there is not enough memory.
    pub fn new(
        comm: &'a Communicator,
        options: &'a PerfOptions,
        gradients: &'a Gradients,
        vector: impl Fn(usize) -> Result<B>,
    ) -> Result<Self> {
        let buckets = gradients.buckets(size_of::<T>());
        let buckets = buckets.iter().map(|bucket| vector(bucket.elements)).collect::<Result<_>>()?;
        Ok(Self { comm, options, gradients, buckets, fused: vec![vector(gradients.elements())?] })
    }

    /// Measures the buckets and the fused vector in turn, and checks both. `step` is called with the time
    /// after each of them.
    ///
    /// # Errors
    /// Any error of a call.
    pub fn measure(&mut self, op: RedOp, step: &mut dyn FnMut(Instant)) -> Result<MeasuredModel> {
        let Self { comm, options, gradients, .. } = *self;
        let (warmup, bytes) = (options.warmup().least, gradients.elements() * size_of::<T>());
        let check = CallCheck::<T>::new(Collective::AllReduce, op, 0, comm.rank(), comm.world_size());
        let call_op = op.of(T::DTYPE, T::factor(comm.rank()));
        for vectors in [&mut self.buckets, &mut self.fused] {
            fill(&check, 0, vectors);
        }
        // A barrier: a rank that fills its vectors late would show up as slow calls of the other ranks.
        comm.barrier()?;
        let (mut bucketed, mut fused) = (Vec::new(), Vec::new());
        for _ in 0..warmup + options.iterations().least {
            for (vectors, times) in [(&mut self.buckets, &mut bucketed), (&mut self.fused, &mut fused)] {
                let start = Instant::now();
                reduce(comm, vectors, call_op)?;
                let end = Instant::now();
                times.push((end - start).as_secs_f64() * 1e6);
                step(end);
            }
        }
        let factor = collective::bus_factor(Collective::AllReduce, comm.world_size());
        let mut notes = Vec::new();
        let mut timing = |vectors: &mut Vec<B>, times: &mut [f64], label: &str| -> Result<Timing> {
            comm.all_reduce(times, ReduceOp::Avg)?;
            let mut timing = Timing::of(times, warmup, bytes, factor);
            if options.check > 0 {
                let mut finding = CheckResult::default();
                for _ in 0..options.check {
                    finding = finding.and(check_calls(comm, &check, call_op, vectors)?);
                }
                let mut wrong = [finding.wrong];
                comm.all_reduce(&mut wrong, ReduceOp::Sum)?;
                timing.wrong = Some(wrong[0].max(finding.wrong));
                notes.extend(finding.sentence.map(|sentence| format!("{label}: {sentence}")));
            }
            Ok(timing)
        };
        let row = ModelRow {
            model: gradients.name.clone(),
            size: bytes,
            dtype: T::DTYPE.name(),
            redop: collective::redop(Collective::AllReduce, op),
            gradients: gradients.lengths.len(),
            buckets: gradients
                .buckets(size_of::<T>())
                .iter()
                .map(|bucket| bucket.elements * size_of::<T>())
                .collect(),
            least_us: None,
            bucketed: timing(&mut self.buckets, &mut bucketed, "buckets")?,
            fused: timing(&mut self.fused, &mut fused, "fused")?,
            ratio: ratio(&bucketed[warmup..], &fused[warmup..]),
        };
        Ok(MeasuredModel { row, notes })
    }
}

/// The median of the ratios of times that were measured one after the other.
fn ratio(bucketed: &[f64], fused: &[f64]) -> f64 {
    let mut ratios: Vec<f64> = bucketed.iter().zip(fused).map(|(bucketed, fused)| bucketed / fused).collect();
    ratios.sort_by(f64::total_cmp);
    f64::midpoint(ratios[(ratios.len() - 1) / 2], ratios[ratios.len() / 2])
}

/// Starts an all-reduce of each vector, and waits for all of them.
fn reduce<B: Owned>(comm: &Communicator, vectors: &mut Vec<B>, op: ReduceOp) -> Result<()> {
    let requests = vectors.drain(..).map(|vector| comm.all_reduce_async(vector, op));
    let requests = requests.collect::<Result<Vec<Request<B>>>>()?;
    for request in requests {
        vectors.push(request.wait()?);
    }
    Ok(())
}

fn extent_of<T>(vector: &[T]) -> Extent {
    Extent { whole: vector.len(), part: vector.len() }
}

fn fill<T: ExactElement, B: Owned<Item = T>>(check: &CallCheck<T>, round: usize, vectors: &mut [B]) {
    for vector in vectors.iter_mut().map(Owned::elements) {
        check.fill(round, extent_of(vector), Placement::InPlace, &mut [], vector);
    }
}

/// Reduces the vectors as often as it takes for each rank to contribute a distinguishable value.
fn check_calls<T: ExactElement, B: Owned<Item = T>>(
    comm: &Communicator,
    check: &CallCheck<T>,
    op: ReduceOp,
    vectors: &mut Vec<B>,
) -> Result<CheckResult> {
    let rounds = vectors.iter_mut().map(|vector| check.rounds(extent_of(vector.elements()))).max();
    let mut finding = CheckResult::default();
    for round in 0..rounds.unwrap_or(0) {
        fill(check, round, vectors);
        reduce(comm, vectors, op)?;
        for vector in vectors.iter_mut().map(Owned::elements) {
            finding = finding.and(check.verify(round, extent_of(vector), Placement::InPlace, &[], vector));
        }
    }
    Ok(finding)
}
