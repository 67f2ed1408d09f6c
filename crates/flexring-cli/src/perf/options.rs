//! The flags of `flexring perf`: those of nccl-tests, and a few of its own.
//!
//! Owns their names, defaults and meaning.

use super::collective;
use super::model::Gradients;
use super::redop::RedOp;
use crate::settings;
use clap::Args;
use flexring::DType;
use flexring_core::call::Collective;
use flexring_core::config::{Algorithm, Lowering, Size, TransportChoice};
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// Measure collectives and check their results
///
/// Prints the columns of nccl-tests and takes its flags. By default it measures sizes from 8 bytes to 128M in
/// factors of 16, while nccl-tests measures 32M only.
///
/// Times are means over the iterations and over the ranks (see --average). Without -n and -w, each half of a
/// row takes at least 20 ms after at least 5 ms of warm-up, so that one call that waits for a core does not
/// decide the mean. Calls follow each other without a pause, so that a rank may begin one while others are
/// still in the one before (see --blocking). Calls on GPUs are enqueued back to back; the time of one call is
/// the time until the last call of a size completes, divided by their number (see --graph). The report of
/// --json also has the median times of single calls: how long the caller's thread is in one (caller_us), and
/// until its result is there (waited_us). Sizes are binary (1K is 1024 bytes), GB/s are decimal. busbw is
/// algbw * 2 (n - 1) / n for all-reduces of n ranks, algbw * (n - 1) / n for collectives with parts
/// (reduce-scatters, all-gathers, gathers, scatters and all-to-alls), and algbw itself for broadcasts,
/// reduces and send_recv, in which each rank sends to the next one and receives from the one before, in one
/// group. The size of collectives with parts is that of the vector with one part per rank, where the size of
/// a part is rounded down to a multiple of 16 bytes; their count is the length of one part. An all-to-all and
/// a send_recv have no form in place: both halves of a row are measured out of place. A barrier has no size,
/// so it has one row.
///
/// If FLEXRING_TOPOLOGY or a tuning profile has bandwidths of links, the line below the row of an
/// all-reduce has the least time that any schedule takes by them, latencies aside, and the times of the row
/// as multiples of it. It is also in the report of --json (least_us and least_ratio).
///
/// With --ranks N it starts N ranks on this machine, and with --topology alone as many ranks as the topology
/// has. Otherwise it joins the job of torchrun, mpirun or srun, or the job described by FLEXRING_RANK,
/// FLEXRING_WORLD_SIZE and related settings.
#[derive(Args, Clone, Debug)]
pub struct PerfOptions {
    /// Start N ranks on this machine
    #[arg(long, value_name = "N")]
    pub ranks: Option<NonZeroUsize>,

    /// Collective to measure: all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter,
    /// all_to_all, barrier or send_recv
    #[arg(long, value_name = "NAME", default_value = "all_reduce", value_parser = collective::parse)]
    pub collective: Collective,

    /// Measure the all-reduces of a training step instead of single sizes: resnet50, gpt2 (124M parameters),
    /// or the number of elements of each gradient, separated by commas. Gradients are reduced in buckets as
    /// DistributedDataParallel makes them (in reverse order, the first bucket of 1M, the others of 25M), by
    /// asynchronous calls that start together; the time until all are complete is compared with that of one
    /// vector of the same size
    #[arg(long, value_name = "NAME", value_parser = Gradients::parse,
        conflicts_with_all = ["collective", "root", "minbytes", "maxbytes", "stepbytes", "stepfactor", "blocking", "average"])]
    pub model: Option<Gradients>,

    /// Root rank of broadcasts, reduces, gathers and scatters
    #[arg(short = 'r', long, value_name = "RANK", default_value = "0")]
    pub root: usize,

    /// Smallest vector in bytes, such as 4096, 512K or 1G
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "8", value_parser = size)]
    pub minbytes: Size,

    /// Largest vector in bytes
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "128M", value_parser = size)]
    pub maxbytes: Size,

    /// Add this many bytes to get the next size
    #[arg(short = 'i', long, value_name = "SIZE", conflicts_with = "stepfactor", value_parser = size)]
    pub stepbytes: Option<Size>,

    /// Multiply by this factor to get the next size
    #[arg(short = 'f', long, value_name = "FACTOR", default_value = "16")]
    pub stepfactor: NonZeroUsize,

    /// Number of measured calls per size [default: 20, and without --model more until they have taken 20 ms]
    #[arg(short = 'n', long, value_name = "N", value_parser = iterations)]
    pub iters: Option<NonZeroUsize>,

    /// Number of calls per size before the measured ones [default: 5, and without --model more until they
    /// have taken 5 ms]
    #[arg(short = 'w', long = "warmup_iters", value_name = "N", value_parser = warm_up)]
    pub warmup_iters: Option<usize>,

    /// How often the results of each size are checked, in calls that are not measured; 0 for never
    #[arg(short = 'c', long, value_name = "N", default_value = "1")]
    pub check: usize,

    /// Whether all ranks wait for each other after each call (1), so that calls of different ranks do not
    /// overlap, or not (0)
    #[arg(short = 'z', long, value_name = "0|1", default_value = "0", value_parser = clap::value_parser!(u8).range(0..=1))]
    pub blocking: u8,

    /// Which time of a call is reported: that of rank 0 (0), the mean of all ranks (1), the shortest (2) or
    /// the longest (3)
    #[arg(short = 'a', long, value_name = "0-3", default_value = "1", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub average: u8,

    /// Element type: int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16,
    /// float8e4m3, float8e5m2, int16, uint16, bool or all
    #[arg(short = 'd', long, value_name = "TYPE", default_value = "float", value_parser = dtypes)]
    pub datatype: Selection<DType>,

    /// Operation: sum, prod, min, max, avg, mulsum (a sum with a factor for each rank), band, bor, bxor or
    /// all. Operations that a type does not have are left out of all
    #[arg(short = 'o', long, value_name = "OP", default_value = "sum", value_parser = redops)]
    pub op: Selection<RedOp>,

    /// Algorithm that plans the schedule, as FLEXRING_ALGO
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    pub algo: Option<Algorithm>,

    /// Plan for this topology, as FLEXRING_TOPOLOGY; outside of a job, start as many ranks as it has
    #[arg(long, value_name = "TOPOLOGY")]
    pub topology: Option<String>,

    /// How groups become transfers, as FLEXRING_LOWERING
    #[arg(long, value_name = "NAME", value_parser = lowering)]
    pub lowering: Option<Lowering>,

    /// Transport between ranks, as FLEXRING_TRANSPORT
    #[arg(long, value_name = "NAME", value_parser = transport)]
    pub transport: Option<TransportChoice>,

    /// How long a call waits for other ranks before it fails, as FLEXRING_TIMEOUT_MS
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout_ms: Option<u64>,

    /// Memory of the vectors: the host's, or a GPU's; rank r of a node uses GPU r modulo the number of GPUs
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    pub device: VectorDevice,

    /// With --device cuda: capture N calls of each length in a CUDA graph, and measure launches of it. -n and
    /// -w then count launches; times are those of one call. Results are checked from graphs, too
    #[arg(long, value_name = "N", value_parser = graph_calls)]
    pub graph: Option<NonZeroUsize>,

    /// Allocation of vectors: in the communicator's pool, which peers read directly, on the heap, or on the
    /// heap and registered, which peers read directly with FLEXRING_REGISTER_SHARED=1 [default: pool]. With
    /// --device cuda, `registered` registers those on the GPU
    #[arg(long, value_name = "WHERE")]
    pub memory: Option<Memory>,

    /// Also write the measurements to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Record a timeline, as FLEXRING_TRACE. With --ranks the files of all ranks are merged into this one
    #[arg(long, value_name = "FILE", value_parser = trace)]
    pub trace: Option<String>,

    /// Accepted as in nccl-tests: a rank has one GPU and one thread
    #[arg(short = 'g', long, value_name = "1", hide = true, value_parser = one_per_rank)]
    pub ngpus: Option<usize>,

    /// As --ngpus
    #[arg(short = 't', long, value_name = "1", hide = true, value_parser = one_per_rank)]
    pub nthreads: Option<usize>,

    /// Flags of nccl-tests for what flexring's command does not do, accepted with the value that asks for
    /// nothing
    #[arg(short = 'm', long = "agg_iters", value_name = "1", hide = true, value_parser = no_aggregation)]
    pub agg_iters: Option<usize>,

    /// As --agg_iters
    #[arg(short = 'p', long = "parallel_init", value_name = "0", hide = true, value_parser = not_done)]
    pub parallel_init: Option<usize>,

    /// As --agg_iters; see --graph
    #[arg(short = 'G', long, value_name = "0", hide = true, value_parser = other_graph)]
    pub cudagraph: Option<usize>,

    /// As --agg_iters
    #[arg(short = 'C', long = "report_cputime", value_name = "0", hide = true, value_parser = not_done)]
    pub report_cputime: Option<usize>,

    /// As --agg_iters; see --timeout-ms
    #[arg(short = 'T', long = "timeout", value_name = "0", hide = true, value_parser = other_timeout)]
    pub timeout: Option<usize>,

    /// As --agg_iters; --memory registered registers vectors
    #[arg(short = 'R', long = "local_register", value_name = "0", hide = true, value_parser = not_registered)]
    pub local_register: Option<usize>,

    /// Run as a rank that the process PID started
    #[arg(long, value_name = "PID", hide = true)]
    pub rank_of: Option<i32>,

    /// Draw the progress bar on the standard error of the process given by --rank-of
    #[arg(long, requires = "rank_of", hide = true)]
    pub borrow_terminal: bool,
}

/// The memory that holds the vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum VectorDevice {
    /// Host memory
    Host,
    /// GPU memory. Calls are enqueued and timed together, as in nccl-tests
    Cuda,
}

/// The allocation of vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Memory {
    /// Allocated by the communicator
    Pool,
    /// Allocated on the heap
    Heap,
    /// Allocated on the heap and registered with the communicator
    Registered,
}

/// How many calls are made for one half of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallCount {
    /// Least number of calls.
    pub least: usize,
    /// More calls are made until all of them have taken this time on one rank.
    pub time: Duration,
}

impl fmt::Display for CallCount {
    /// A plus means: or more.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.least, if self.time.is_zero() { "" } else { "+" })
    }
}

impl CallCount {
    /// Number of calls to make after `made` calls took `elapsed`: so many that the time is over then, but at
    /// most as many as were made, because the first calls may have been slow or fast. 0 if there are enough.
    pub fn further(&self, made: usize, elapsed: Duration) -> usize {
        if made < self.least {
            return self.least - made;
        }
        let missing = self.time.saturating_sub(elapsed).as_secs_f64();
        if missing == 0.0 || made >= MOST_CALLS {
            return 0;
        }
        let per_call = elapsed.as_secs_f64() / made.max(1) as f64;
        // A conversion of floats saturates.
        ((missing / per_call).ceil() as usize).clamp(1, made.clamp(1, MOST_CALLS - made))
    }
}

/// The values that a flag selects: the one that it names, or all for `all`.
#[derive(Clone, Debug)]
pub struct Selection<T>(pub Vec<T>);

impl PerfOptions {
    /// The sizes to measure, in bytes, in ascending order.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let (last, add, factor) = (self.maxbytes.0, self.stepbytes, self.stepfactor.get());
        let next = move |size: &usize| match add {
            Some(add) => size.checked_add(add.0),
            None => size.checked_mul(factor),
        };
        let mut previous = None;
        let most = if self.collective == Collective::Barrier { 1 } else { usize::MAX };
        // Stop at a step that does not change the size, such as a factor of 1.
        std::iter::successors(Some(self.minbytes.0), next)
            .take_while(move |size| *size <= last && previous.replace(*size) != Some(*size))
            .take(most)
    }

    /// The calls before the measured ones.
    pub fn warmup(&self) -> CallCount {
        CallCount {
            least: self.warmup_iters.unwrap_or(5),
            time: self.least_time(self.warmup_iters.is_some(), 5),
        }
    }

    /// The measured calls.
    pub fn iterations(&self) -> CallCount {
        CallCount {
            least: self.iters.map_or(20, NonZeroUsize::get),
            time: self.least_time(self.iters.is_some(), 20),
        }
    }

    /// `ms` milliseconds, or zero where the number of calls is exact. A training step is long enough without
    /// a time.
    fn least_time(&self, is_given: bool, ms: u64) -> Duration {
        if is_given || self.model.is_some() { Duration::ZERO } else { Duration::from_millis(ms) }
    }

    /// The operations to measure. A collective that does not reduce is measured once, whatever the operation.
    pub fn ops(&self) -> &[RedOp] {
        if self.collective.reduces() { &self.op.0 } else { &self.op.0[..1] }
    }

    /// The operations to measure with elements of this type: those that it has.
    pub fn ops_of(&self, dtype: DType) -> impl Iterator<Item = RedOp> + '_ {
        let reduces = self.collective.reduces();
        self.ops().iter().copied().filter(move |op| !reduces || op.is_defined_for(dtype))
    }

    /// An error message if these flags cannot be used together.
    pub fn contradiction(&self) -> Option<String> {
        if let Some(ranks) = self.ranks.filter(|ranks| self.root >= ranks.get()) {
            return Some(format!("--root {} is not a rank: there are {ranks}, from 0", self.root));
        }
        if self.device == VectorDevice::Cuda && !matches!(self.memory, None | Some(Memory::Registered)) {
            return Some("vectors on GPUs may be registered: give --memory registered with --device cuda, or leave it out".to_owned());
        }
        if self.device == VectorDevice::Cuda && self.model.is_some() {
            return Some("--model measures host vectors: leave out --device cuda".to_owned());
        }
        if self.device == VectorDevice::Host && self.graph.is_some() {
            return Some("--graph captures calls on a GPU: add --device cuda".to_owned());
        }
        if self.collective == Collective::Barrier && self.graph.is_some() {
            return Some("a barrier waits on the host, so no graph has it: leave out --graph".to_owned());
        }
        if self.memory == Some(Memory::Registered) && self.model.is_some() {
            return Some(
                "--model measures vectors of the pool or the heap: leave out --memory registered".to_owned(),
            );
        }
        if let ([dtype], [op]) = (&self.datatype.0[..], self.ops())
            && self.ops_of(*dtype).next().is_none()
        {
            let ops: Vec<&str> =
                RedOp::ALL.iter().filter(|op| op.is_defined_for(*dtype)).map(|op| op.name()).collect();
            return Some(format!(
                "there is no {} of elements of type {}: expected one of {}",
                op.name(),
                dtype.name(),
                ops.join(", ")
            ));
        }
        (self.minbytes > self.maxbytes)
            .then(|| format!("--minbytes {} is more than --maxbytes {}", self.minbytes, self.maxbytes))
    }

    /// The settings that flags override: names of environment variables and their values.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let all = [
            ("FLEXRING_ALGO", self.algo.map(|algo| algo.name().to_owned())),
            // An algorithm that is given replaces a plan of the settings. An empty text is as good as none.
            ("FLEXRING_PLAN_FILE", self.algo.map(|_| String::new())),
            ("FLEXRING_TOPOLOGY", self.topology.clone()),
            ("FLEXRING_LOWERING", self.lowering.map(|lowering| lowering.name().to_owned())),
            ("FLEXRING_TRANSPORT", self.transport.map(|transport| transport.name().to_owned())),
            ("FLEXRING_TIMEOUT_MS", self.timeout_ms.map(|ms| ms.to_string())),
            ("FLEXRING_TRACE", self.trace.clone()),
        ];
        all.into_iter().filter_map(|(name, value)| value.map(|value| (name, value))).collect()
    }
}

/// Most calls of a size: the time of each is kept.
const MOST_CALLS: usize = 10_000_000;

fn iterations(text: &str) -> Result<NonZeroUsize, String> {
    let count = text.parse().ok().filter(|count: &NonZeroUsize| count.get() <= MOST_CALLS);
    count.ok_or_else(|| format!("expected a number of calls from 1 to {MOST_CALLS}"))
}

fn warm_up(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count <= MOST_CALLS);
    count.ok_or_else(|| format!("expected a number of calls up to {MOST_CALLS}"))
}

/// Parses the value of a flag of nccl-tests that is accepted only if it asks for `accepted`.
fn only(accepted: usize, text: &str, otherwise: &str) -> Result<usize, String> {
    if text.parse() == Ok(accepted) { Ok(accepted) } else { Err(otherwise.to_owned()) }
}

fn one_per_rank(text: &str) -> Result<usize, String> {
    only(
        1,
        text,
        "each rank is a process with one thread and one GPU: start more ranks, by --ranks or a launcher",
    )
}

fn no_aggregation(text: &str) -> Result<usize, String> {
    only(1, text, "flexring does not measure several calls as one group; --model measures calls that overlap")
}

fn not_done(text: &str) -> Result<usize, String> {
    only(0, text, "flexring perf has no such measurement; only 0 is accepted")
}

fn other_graph(text: &str) -> Result<usize, String> {
    only(0, text, "give --graph N, the number of calls that a graph has, and its launches by -n")
}

/// Most calls of a graph.
const MOST_CAPTURED: usize = 10_000;

fn graph_calls(text: &str) -> Result<NonZeroUsize, String> {
    let count = text.parse().ok().filter(|count: &NonZeroUsize| count.get() <= MOST_CAPTURED);
    count.ok_or_else(|| format!("expected a number of calls from 1 to {MOST_CAPTURED}"))
}

fn other_timeout(text: &str) -> Result<usize, String> {
    only(0, text, "give --timeout-ms, in milliseconds")
}

fn not_registered(text: &str) -> Result<usize, String> {
    only(0, text, "give --memory registered")
}

fn trace(text: &str) -> Result<String, String> {
    settings::checked("FLEXRING_TRACE", text)
}

fn size(text: &str) -> Result<Size, String> {
    Size::parse(text).ok_or_else(|| "expected a number of bytes such as 4096, 512K or 1M".to_owned())
}

fn dtypes(text: &str) -> Result<Selection<DType>, String> {
    selection(text, &DType::ALL, DType::name, |_| None)
}

fn redops(text: &str) -> Result<Selection<RedOp>, String> {
    selection(text, &RedOp::ALL, RedOp::name, |op| (op == RedOp::PreMulSum).then_some("premulsum"))
}

fn selection<T: Copy>(
    text: &str,
    all: &[T],
    name: fn(T) -> &'static str,
    alias: fn(T) -> Option<&'static str>,
) -> Result<Selection<T>, String> {
    if text == "all" {
        return Ok(Selection(all.to_vec()));
    }
    let named = all.iter().find(|one| name(**one) == text || alias(**one) == Some(text));
    named.map(|one| Selection(vec![*one])).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|one| name(*one)).collect();
        format!("expected {} or all", names.join(", "))
    })
}

fn algorithm(text: &str) -> Result<Algorithm, String> {
    Algorithm::parse(text).ok_or_else(|| settings::expected("FLEXRING_ALGO"))
}

fn lowering(text: &str) -> Result<Lowering, String> {
    Lowering::parse(text).ok_or_else(|| settings::expected("FLEXRING_LOWERING"))
}

fn transport(text: &str) -> Result<TransportChoice, String> {
    TransportChoice::parse(text).ok_or_else(|| settings::expected("FLEXRING_TRANSPORT"))
}

#[cfg(test)]
impl PerfOptions {
    /// Parses flags separated by white space.
    pub fn parse(flags: &str) -> Result<Self, clap::Error> {
        use clap::FromArgMatches;
        let command = Self::augment_args(clap::Command::new("perf"));
        let arguments = std::iter::once("perf").chain(flags.split_whitespace());
        command.try_get_matches_from(arguments).and_then(|matches| Self::from_arg_matches(&matches))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(flags: &str) -> Result<PerfOptions, clap::Error> {
        PerfOptions::parse(flags)
    }

    fn sizes(flags: &str) -> Vec<usize> {
        parse(flags).expect(flags).sizes().collect()
    }

    #[test]
    fn sizes_ascend_by_the_step_or_the_factor() {
        assert_eq!(sizes(""), [8, 128, 2 << 10, 32 << 10, 512 << 10, 8 << 20, 128 << 20]);
        assert_eq!(sizes("-b 1K -e 8K -f 2"), [1 << 10, 2 << 10, 4 << 10, 8 << 10]);
        assert_eq!(sizes("-b 100 -e 350 -i 100"), [100, 200, 300]);
        assert_eq!(sizes("-b 1M -e 1M"), [1 << 20]);
        assert_eq!(sizes("-b 4 -e 9 -f 1"), [4], "a factor of 1 ends the list");
        assert_eq!(sizes("-b 0 -e 9"), [0]);
        assert_eq!(sizes("-b 4 -e 9 -i 0"), [4]);
        assert_eq!(sizes("--collective barrier"), [8], "a barrier has no sizes");
    }

    #[test]
    fn flags_of_nccl_tests_are_accepted() {
        let options = parse(
            "--minbytes 8 --maxbytes 1G --stepfactor 2 --iters 7 --warmup_iters 0 --check 0 -d all -o avg",
        )
        .expect("known flags");
        assert_eq!(options.datatype.0, DType::ALL);
        assert_eq!(options.op.0, [RedOp::Avg]);
        assert_eq!(options.contradiction(), None);
        assert_eq!(options.ops_of(DType::Bool).count(), 0, "a type without the operation is left out");
        assert_eq!(
            (options.iterations().to_string(), options.warmup().to_string()),
            ("7".into(), "0".into())
        );
        assert_eq!(options.check, 0);
        parse("-g 1 -t 1 -m 1 -p 0 -G 0 -C 0 -R 0 -T 0").expect("they ask for nothing");
        for (flags, expected) in [
            ("-g 8", "start more ranks"),
            ("-t 2", "start more ranks"),
            ("-m 4", "--model"),
            ("-G 1", "give --graph N"),
            ("-R 1", "--memory registered"),
            ("-T 30", "--timeout-ms"),
        ] {
            let error = parse(flags).expect_err(flags).to_string();
            assert!(error.contains(expected), "{flags}: {error}");
        }
        assert_eq!(parse("-o premulsum").expect("an alias").op.0, [RedOp::PreMulSum]);
    }

    #[test]
    fn without_counts_calls_are_made_until_a_time_is_over() {
        let count = parse("").expect("valid").iterations();
        assert_eq!(count.to_string(), "20+");
        let ms = Duration::from_millis;
        assert_eq!(count.further(0, ms(0)), 20);
        assert_eq!(count.further(20, ms(20)), 0);
        assert_eq!(count.further(20, ms(10)), 20);
        assert_eq!(count.further(1000, ms(15)), 334);
        assert_eq!(count.further(20, ms(0)), 20, "a time that the clock cannot measure");
        assert_eq!(count.further(MOST_CALLS, ms(1)), 0);
        let exact = parse("-n 3").expect("valid").iterations();
        assert_eq!((exact.further(0, ms(0)), exact.further(3, ms(0))), (3, 0));
        let step = parse("--model 10").expect("valid");
        assert_eq!((step.warmup().to_string(), step.iterations().to_string()), ("5".into(), "20".into()));
        let none = parse("-w 0").expect("valid").warmup();
        assert_eq!((none.to_string(), none.further(0, ms(0))), ("0".to_owned(), 0));
    }

    #[test]
    fn values_that_cannot_be_parsed_are_quoted() {
        for (flags, message) in [
            ("-b 1.5M", "1.5M"),
            ("-d flaot", "bool or all"),
            ("-o sub", "bxor or all"),
            ("-n 0", "expected a number of calls from 1 to 10000000"),
            ("-n 4611686018427387904", "expected a number of calls from 1 to 10000000"),
            ("-w 18446744073709551615", "expected a number of calls up to 10000000"),
            ("--algo rign", "expected auto, ring, rabenseifner, "),
            ("--graph 0", "expected a number of calls from 1 to 10000"),
            ("--ranks 0", "0"),
            ("-i 4 -f 2", "cannot be used with"),
            ("-x", "-x"),
        ] {
            let error = parse(flags).expect_err(flags).to_string();
            assert!(error.contains(message), "{flags}: {error}");
        }
        let contradiction = |flags: &str| parse(flags).expect("valid flags").contradiction();
        assert!(contradiction("-b 2M -e 1M").is_some());
        assert_eq!(
            contradiction("-d float -o band").as_deref(),
            Some(
                "there is no band of elements of type float: expected one of sum, prod, min, max, avg, mulsum"
            )
        );
        assert_eq!(contradiction("-d float -o band --collective broadcast"), None);
    }

    #[test]
    fn vectors_on_gpus_are_registered_or_not() {
        assert_eq!(parse("--device cuda --memory registered").expect("valid").contradiction(), None);
        let options = parse("--device cuda --memory heap").expect("valid flags");
        assert!(options.contradiction().is_some_and(|message| message.contains("--device cuda")));
        assert_eq!(parse("--device cuda").expect("valid").contradiction(), None);
        assert_eq!(parse("").expect("valid").device, VectorDevice::Host);
    }

    #[test]
    fn graphs_are_of_calls_on_gpus() {
        let contradiction = |flags: &str| parse(flags).expect("valid flags").contradiction();
        assert_eq!(contradiction("--graph 4 --device cuda"), None);
        assert!(contradiction("--graph 4").is_some_and(|message| message.contains("add --device cuda")));
        let barrier = contradiction("--graph 4 --device cuda --collective barrier");
        assert!(barrier.is_some_and(|message| message.contains("barrier")));
    }

    #[test]
    fn flags_override_settings() {
        let options = parse("--algo ring --topology 2+3 --transport TCP --timeout-ms 5").expect("valid");
        let settings = [
            ("FLEXRING_ALGO", "ring"),
            ("FLEXRING_PLAN_FILE", ""),
            ("FLEXRING_TOPOLOGY", "2+3"),
            ("FLEXRING_TRANSPORT", "tcp"),
            ("FLEXRING_TIMEOUT_MS", "5"),
        ];
        assert_eq!(options.settings(), settings.map(|(name, value)| (name, value.to_owned())));
    }
}
