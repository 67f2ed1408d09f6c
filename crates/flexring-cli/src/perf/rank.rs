//! One rank of a measurement: it joins the world and measures row by row; rank 0 also prints.
//!
//! Owns the order of rows, which is the same on all ranks.

use super::bench::{Bench, MeasuredRow};
use super::collective;
use super::exact_element::ExactElement;
use super::gpu;
use super::model::Gradients;
use super::options::{Memory, PerfOptions, VectorDevice};
use super::progress_output::ProgressOutput;
use super::redop::RedOp;
use super::report::{RankGpu, RankInfo};
use super::step::{MeasuredModel, StepBench};
use crate::local_ranks::die_with_parent;
use flexring::internal::bootstrap::host_name;
use flexring::{Boolean, Communicator, DType, Error, Identity, Owned, RailStatistics, ReduceOp, Result};
use flexring_core::call::Collective;
use flexring_core::config::{Config, Size};
use flexring_core::float8::{F8E4M3, F8E5M2};
use flexring_core::peer_text::PeerText;
use flexring_simulator::cost_model::lower_bound::lower_bound;
use half::{bf16, f16};

/// Length in bytes of a host or GPU name as ranks exchange it; longer names are cut.
const NAME_BYTES: usize = 64;

/// Length in bytes of the counters of a rank's ports as ranks exchange them: enough for the most ports that a
/// rank uses.
const RAILS_BYTES: usize = 4096;

/// Measures as the rank that the environment names, and returns the number of wrong elements that the checks
/// found.
///
/// # Errors
/// Any error of joining or of a call; `System` if rank 0 cannot write its output.
pub fn run(options: &PerfOptions) -> Result<u64> {
    if let Some(parent) = options.rank_of {
        die_with_parent(parent)?;
    }
    let mut config = Config::from_env()?;
    let identity = Identity::from_env(&config)?;
    // The communicator prepares this GPU while it is created, so the first call is not slower.
    config.gpu = gpu::of_rank(options, &config, identity.rank)?.or(config.gpu);
    let mut output =
        (identity.rank == 0).then(|| ProgressOutput::new(options, &config, identity.world)).transpose()?;
    let outcome = measure(options, &config, &identity, output.as_mut());
    if let Some(output) = output {
        let error = match &outcome {
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        let closed = output.close(error);
        return outcome.and_then(|wrong| closed.map(|()| wrong));
    }
    outcome
}

fn measure(
    options: &PerfOptions,
    config: &Config,
    identity: &Identity,
    mut output: Option<&mut ProgressOutput>,
) -> Result<u64> {
    let comm = Communicator::with_config(config, identity)?;
    let gpu = config.gpu.filter(|_| options.device == VectorDevice::Cuda);
    let ranks = gather_ranks(&comm, gpu.map(gpu::facts).transpose()?)?;
    let mut ranks_per_core = [comm.ranks_per_core() as u64];
    comm.all_reduce(&mut ranks_per_core, ReduceOp::Max)?;
    let has_rates = config.topology.is_some() || config.tuning.is_some();
    let is_bounded = has_rates && options.collective == Collective::AllReduce;
    let bound = is_bounded.then(|| lower_bound(comm.topology())).flatten();
    let least = bound.map(|bound| bound.seconds_per_byte);
    if let Some(output) = output.as_mut() {
        output.open(options, comm.summary(), ranks_per_core[0] as usize, ranks, least)?;
    }
    let mut measurement = Measurement { comm: &comm, options, gpu, output, wrong: 0 };
    for dtype in &options.datatype.0 {
        match dtype {
            DType::I8 => measurement.rows::<i8>(),
            DType::U8 => measurement.rows::<u8>(),
            DType::I32 => measurement.rows::<i32>(),
            DType::U32 => measurement.rows::<u32>(),
            DType::I64 => measurement.rows::<i64>(),
            DType::U64 => measurement.rows::<u64>(),
            DType::F16 => measurement.rows::<f16>(),
            DType::F32 => measurement.rows::<f32>(),
            DType::F64 => measurement.rows::<f64>(),
            DType::BF16 => measurement.rows::<bf16>(),
            DType::F8E4M3 => measurement.rows::<F8E4M3>(),
            DType::F8E5M2 => measurement.rows::<F8E5M2>(),
            DType::I16 => measurement.rows::<i16>(),
            DType::U16 => measurement.rows::<u16>(),
            DType::Bool => measurement.rows::<Boolean>(),
        }?;
    }
    let Measurement { mut output, wrong, .. } = measurement;
    if let (Some(output), Some(statistics)) = (output.as_mut(), comm.adaptation_statistics()) {
        output.set_adaptation(statistics);
    }
    if options.json.is_some() {
        let rails = gather_rails(&comm)?;
        if let Some(output) = output {
            output.set_rails(rails);
        }
    }
    Ok(wrong)
}

/// The state of one rank's measurement.
struct Measurement<'a> {
    comm: &'a Communicator,
    options: &'a PerfOptions,
    /// The index of the GPU that holds the vectors; `None` for vectors on the host.
    gpu: Option<usize>,
    output: Option<&'a mut ProgressOutput>,
    /// Wrong elements that the checks found so far, on all ranks together.
    wrong: u64,
}

impl Measurement<'_> {
    /// Measures all rows of one element type.
    fn rows<T: ExactElement>(&mut self) -> Result<()> {
        let comm = self.comm;
        match (&self.options.model, self.options.memory) {
            (Some(gradients), None | Some(Memory::Pool)) => {
                return self.model(gradients, |count| comm.alloc::<T>(count));
            }
            (Some(gradients), Some(Memory::Heap | Memory::Registered)) => {
                return self.model(gradients, |count| Ok(vec![T::default(); count]));
            }
            (None, _) => {}
        }
        let Some(largest) = self.options.sizes().last() else {
            return Ok(());
        };
        let count = largest / size_of::<T>();
        let mut bench = Bench::<T>::new(self.comm, self.options, self.gpu, count)?;
        for op in self.options.ops_of(T::DTYPE) {
            for bytes in self.options.sizes() {
                self.row(&mut bench, op, bytes)?;
            }
        }
        Ok(())
    }

    fn row<T: ExactElement>(&mut self, bench: &mut Bench<'_, T>, op: RedOp, bytes: usize) -> Result<()> {
        let mut calls = 0;
        let redop = collective::redop(self.options.collective, op);
        let MeasuredRow { row, notes } = bench.measure(op, bytes, &mut |now| {
            calls += 1;
            if let Some(output) = self.output.as_mut() {
                output.show(now, || format!("{} {} {redop}: call {calls}", Size(bytes), T::DTYPE.name()));
            }
        })?;
        let wrong =
            [&row.out_of_place, &row.in_place].into_iter().filter_map(|timing| timing.wrong).sum::<u64>();
        if let Some(output) = self.output.as_mut() {
            output.row(row, &notes)?;
        } else {
            self.print_first(&notes, || format!("{} {} of {}", Size(bytes), T::DTYPE.name(), redop));
        }
        self.wrong += wrong;
        Ok(())
    }

    /// Measures the training steps of one element type, with vectors that `vector` makes.
    fn model<T: ExactElement, B: Owned<Item = T>>(
        &mut self,
        gradients: &Gradients,
        vector: impl Fn(usize) -> Result<B>,
    ) -> Result<()> {
        let mut bench = StepBench::new(self.comm, self.options, gradients, vector)?;
        for op in self.options.ops_of(T::DTYPE) {
            let name = || {
                format!(
                    "{} {} of {}",
                    gradients.name,
                    T::DTYPE.name(),
                    collective::redop(Collective::AllReduce, op)
                )
            };
            let MeasuredModel { row, notes } = bench.measure(op, &mut |now| {
                if let Some(output) = self.output.as_mut() {
                    output.show(now, name);
                }
            })?;
            let wrong =
                [&row.bucketed, &row.fused].into_iter().filter_map(|timing| timing.wrong).sum::<u64>();
            if let Some(output) = self.output.as_mut() {
                output.model(row, &notes)?;
            } else {
                self.print_first(&notes, name);
            }
            self.wrong += wrong;
        }
        Ok(())
    }

    /// Prints what this rank, which is not rank 0, found. The other ranks mostly find the same as rank 0, so
    /// they print only their first finding.
    fn print_first(&self, notes: &[String], name: impl Fn() -> String) {
        if self.wrong == 0 {
            notes.iter().for_each(|note| eprintln!("{}, {note}", name()));
        }
    }
}

/// Gathers process id, host and GPU of every rank with all-reduces: each rank adds its own entry to zeros, so
/// no other collective is needed.
fn gather_ranks(comm: &Communicator, gpu: Option<RankGpu>) -> Result<Vec<RankInfo>> {
    let numbers = [std::process::id(), gpu.as_ref().map_or(0, |gpu| gpu.number)];
    let mut all = vec![0u32; 2 * comm.world_size()];
    all[2 * comm.rank()..][..2].copy_from_slice(&numbers);
    comm.all_reduce(&mut all, ReduceOp::Sum)?;
    let hosts = gather_names(comm, &host_name())?;
    let (name, address) = gpu.as_ref().map_or(("", ""), |gpu| (&gpu.name, &gpu.address));
    let (names, addresses) = (gather_names(comm, name)?, gather_names(comm, address)?);
    let gpus = names.into_iter().zip(addresses).zip(all.chunks(2));
    let gpus = gpus.map(|((name, address), numbers)| {
        (!address.is_empty()).then_some(RankGpu { number: numbers[1], address, name })
    });
    let ranks = all.chunks(2).zip(hosts).zip(gpus).enumerate();
    Ok(ranks
        .map(|(rank, ((numbers, host), gpu))| RankInfo {
            rank,
            pid: numbers[0],
            host,
            gpu,
            rails: Vec::new(),
        })
        .collect())
}

/// Gathers what the RDMA ports of every rank have carried. Either all ranks have such ports, or none has any.
fn gather_rails(comm: &Communicator) -> Result<Vec<Vec<RailStatistics>>> {
    let mine = comm.rail_statistics();
    if mine.is_empty() {
        return Ok(Vec::new());
    }
    let text = serde_json::to_string(&mine)
        .map_err(|cause| Error::internal(format!("cannot write JSON: {cause}")))?;
    let texts = gather_cut_texts(comm, &text, RAILS_BYTES)?;
    // A text that was cut is left out.
    Ok(texts.iter().map(|text| serde_json::from_str(text).unwrap_or_default()).collect())
}

/// The name of every rank, each cut to [`NAME_BYTES`] and safe to print.
fn gather_names(comm: &Communicator, name: &str) -> Result<Vec<String>> {
    let names = gather_cut_texts(comm, name, NAME_BYTES)?;
    Ok(names.iter().map(|name| PeerText::from(&**name).into()).collect())
}

/// The text of every rank, each cut to this many bytes.
fn gather_cut_texts(comm: &Communicator, text: &str, most: usize) -> Result<Vec<String>> {
    let mut all = vec![0u8; comm.world_size() * most];
    all[comm.rank() * most..].iter_mut().zip(text.bytes().take(most)).for_each(|(to, byte)| *to = byte);
    comm.all_reduce(&mut all, ReduceOp::Sum)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
    Ok(all.chunks(most).map(text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ranks_are_safe_to_print() {
        let comms = Communicator::local(2).expect("two ranks");
        let names = ["node-1", "node\u{1b}[2J\u{202e}2\n"];
        let gathered = std::thread::scope(|scope| {
            let gather = |comm: &Communicator| gather_names(comm, names[comm.rank()]).expect("names");
            let ranks: Vec<_> = comms.iter().map(|comm| scope.spawn(move || gather(comm))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Vec<_>>()
        });
        assert_eq!(gathered, [["node-1", "node?[2J?2?"], ["node-1", "node?[2J?2?"]]);
    }
}
