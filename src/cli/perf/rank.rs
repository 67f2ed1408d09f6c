//! The life of one rank: it joins, measures row by row, and, being rank 0, shows what comes out.
//!
//! Owns the order of rows, which is the same on all ranks. Must not know who started it.

use super::bench::{Bench, Measured};
use super::board::Board;
use super::collective;
use super::gpu;
use super::number::Number;
use super::options::{Device, Op, Options};
use super::report::{Seat, SeatGpu};
use flexring::bootstrap::{Identity, host_name, identity};
use flexring::config::{Config, Size, environment};
use flexring::float8::{F8E4M3, F8E5M2};
use flexring::{Communicator, DType, Error, ErrorKind, ReduceOp, Result};
use half::{bf16, f16};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Bytes of a name that others are told.
const NAME: usize = 64;

/// Takes part as the rank that the environment says, and says how many elements were wrong.
///
/// # Errors
/// Whatever joining or a call fails with; `System` if rank 0 cannot write what it measured.
pub fn run(options: &Options) -> Result<u64> {
    if let Some(parent) = options.rank_of {
        die_with(parent)?;
    }
    let mut config = Config::from_env()?;
    let identity = identity(&config, environment)?;
    // So that it is ready when the communicator is.
    config.gpu = gpu::of_rank(options, &config, identity.rank)?.or(config.gpu);
    let mut board = (identity.rank == 0).then(|| Board::new(options, &config, identity.world)).transpose()?;
    let outcome = take_part(options, &config, &identity, board.as_mut());
    if let Some(board) = board {
        let error = match &outcome {
            Ok(_) => None,
            Err(error) => Some(error.to_string()),
        };
        let closed = board.close(error);
        return outcome.and_then(|wrong| closed.map(|()| wrong));
    }
    outcome
}

fn take_part(
    options: &Options,
    config: &Config,
    identity: &Identity,
    mut board: Option<&mut Board>,
) -> Result<u64> {
    let comm = Communicator::with_config(config, identity)?;
    let gpu = config.gpu.filter(|_| options.device == Device::Cuda);
    let ranks = roll_call(&comm, gpu.map(gpu::facts).transpose()?)?;
    if let Some(board) = board.as_mut() {
        board.open(options, comm.summary(), ranks)?;
    }
    let mut session = Session { comm: &comm, options, gpu, board, wrong: 0 };
    for dtype in &options.datatype.0 {
        match dtype {
            DType::I8 => session.rows::<i8>(),
            DType::U8 => session.rows::<u8>(),
            DType::I32 => session.rows::<i32>(),
            DType::U32 => session.rows::<u32>(),
            DType::I64 => session.rows::<i64>(),
            DType::U64 => session.rows::<u64>(),
            DType::F16 => session.rows::<f16>(),
            DType::F32 => session.rows::<f32>(),
            DType::F64 => session.rows::<f64>(),
            DType::BF16 => session.rows::<bf16>(),
            DType::F8E4M3 => session.rows::<F8E4M3>(),
            DType::F8E5M2 => session.rows::<F8E5M2>(),
        }?;
    }
    Ok(session.wrong)
}

struct Session<'a> {
    comm: &'a Communicator,
    options: &'a Options,
    /// Where vectors are, if they are on a GPU.
    gpu: Option<usize>,
    board: Option<&'a mut Board>,
    /// How many elements were wrong so far.
    wrong: u64,
}

impl Session<'_> {
    /// All rows of one element type.
    fn rows<T: Number>(&mut self) -> Result<()> {
        let Some(largest) = self.options.sizes().last() else {
            return Ok(());
        };
        let mut bench = Bench::<T>::new(self.comm, self.options, self.gpu, largest / size_of::<T>())?;
        for op in self.options.ops() {
            for bytes in self.options.sizes() {
                self.row(&mut bench, *op, bytes)?;
            }
        }
        Ok(())
    }

    fn row<T: Number>(&mut self, bench: &mut Bench<'_, T>, op: Op, bytes: usize) -> Result<()> {
        let mut calls = 0;
        let redop = collective::redop(self.options.collective, op);
        let per_placement = self.options.warmup_iters + self.options.iters.get();
        let message = |call: usize| {
            let size = Size(bytes);
            let placement = if call < per_placement { "out-of-place" } else { "in-place" };
            let iteration = call % per_placement + 1;
            format!("{size} {} {} {placement}: call {iteration} of {per_placement}", T::DTYPE.name(), redop)
        };
        let Measured { row, notes } = bench.measure(op, bytes, &mut |now| {
            if let Some(board) = self.board.as_mut() {
                board.step(now, || message(calls));
            }
            calls += 1;
        })?;
        let wrong =
            [&row.out_of_place, &row.in_place].into_iter().filter_map(|timing| timing.wrong).sum::<u64>();
        if let Some(board) = self.board.as_mut() {
            board.row(row, &notes)?;
        } else if self.wrong == 0 {
            // The other ranks' story is most often that of rank 0, so they tell it once.
            let of = format!("{} {} of {}", Size(bytes), T::DTYPE.name(), redop);
            notes.iter().for_each(|note| eprintln!("{of}, {note}"));
        }
        self.wrong += wrong;
        Ok(())
    }
}

/// Learns where every rank runs, by the means at hand: each adds its own entry to zeros.
fn roll_call(comm: &Communicator, gpu: Option<SeatGpu>) -> Result<Vec<Seat>> {
    let numbers = [std::process::id(), gpu.as_ref().map_or(0, |gpu| gpu.number)];
    let mut all = vec![0u32; 2 * comm.world_size()];
    all[2 * comm.rank()..][..2].copy_from_slice(&numbers);
    comm.all_reduce(&mut all, ReduceOp::Sum)?;
    let hosts = texts(comm, &host_name())?;
    let (name, address) = gpu.as_ref().map_or(("", ""), |gpu| (&gpu.name, &gpu.address));
    let (names, addresses) = (texts(comm, name)?, texts(comm, address)?);
    let gpus = names.into_iter().zip(addresses).zip(all.chunks(2));
    let gpus = gpus.map(|((name, address), numbers)| {
        (!address.is_empty()).then_some(SeatGpu { number: numbers[1], address, name })
    });
    let seats = all.chunks(2).zip(hosts).zip(gpus).enumerate();
    Ok(seats.map(|(rank, ((numbers, host), gpu))| Seat { rank, pid: numbers[0], host, gpu }).collect())
}

/// Every rank's text, as far as there is room for it.
fn texts(comm: &Communicator, text: &str) -> Result<Vec<String>> {
    let mut all = vec![0u8; comm.world_size() * NAME];
    all[comm.rank() * NAME..].iter_mut().zip(text.bytes().take(NAME)).for_each(|(to, byte)| *to = byte);
    comm.all_reduce(&mut all, ReduceOp::Sum)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
    Ok(all.chunks(NAME).map(text).collect())
}

/// Lets the system end this process when the one that started it ends, however that happens.
fn die_with(parent: i32) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|cause| Error::system("cannot ask to be ended with the parent", cause))?;
    // It may have ended before it was asked for.
    if getppid().map(Pid::as_raw_nonzero).is_none_or(|pid| pid.get() != parent) {
        return Err(Error::new(ErrorKind::Aborted, "the process that started this rank is gone"));
    }
    Ok(())
}
