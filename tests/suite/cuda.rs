//! Vectors on GPUs, beyond what the other tests check on them: the kernels' bits, the order of calls in busy
//! streams, and failures. Runs only with `WORLDS=gpu`.

use crate::harness::{
    Rank, Setup, World, join, kill_self_soon, only_failed, spawn, spawn_processes_with, test_name,
};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use flexring::gpu::{GpuBuffer, gpu_count, gpu_info};
use flexring::{Boolean, Communicator, DType, Element, ErrorKind, ReduceOp};
use flexring_core::config::{Algorithm, Lowering, Size};
use flexring_core::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const OPS: [ReduceOp; 10] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
    ReduceOp::PreMulSum(0.75),
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
    ReduceOp::WrappingAvg,
];

/// Whether the GPU is a simulated one, which is slow.
fn is_simulated() -> bool {
    gpu_info(0).is_ok_and(|gpu| gpu.name.starts_with("simulated"))
}

/// Elements from any bits, and equality of bits except for the payload of NaNs.
trait Bits: Element + std::fmt::Debug {
    fn of(bits: u64) -> Self;
    fn same(self, other: Self) -> bool;
}

macro_rules! integers {
    ($($ty:ident),*) => {$(
        impl Bits for $ty {
            fn of(bits: u64) -> Self {
                bits as Self
            }
            fn same(self, other: Self) -> bool {
                self == other
            }
        }
    )*};
}

macro_rules! floats {
    ($($ty:ident: $bits:ident, $is_nan:expr;)*) => {$(
        impl Bits for $ty {
            fn of(bits: u64) -> Self {
                Self::from_bits(bits as $bits)
            }
            fn same(self, other: Self) -> bool {
                let is_nan: fn(Self) -> bool = $is_nan;
                self.to_bits() == other.to_bits() || is_nan(self) && is_nan(other)
            }
        }
    )*};
}

impl Bits for Boolean {
    fn of(bits: u64) -> Self {
        Self::from_byte([0, 0, 1, (bits >> 8) as u8][bits as usize % 4])
    }
    fn same(self, other: Self) -> bool {
        self == other
    }
}

integers! { i8, u8, i16, u16, i32, u32, i64, u64 }
floats! {
    f16: u16, f16::is_nan;
    bf16: u16, bf16::is_nan;
    f32: u32, f32::is_nan;
    f64: u64, f64::is_nan;
    F8E4M3: u8, |number| number.to_f32().is_nan();
    F8E5M2: u8, |number| number.to_f32().is_nan();
}

/// The element around a vector, which must not change.
const CANARY: u64 = 0xa5a5_a5a5_a5a5_a5a5;

/// Buffers on the GPU, of which tests use a part at any offset.
struct TestBuffers<T: Element> {
    input: GpuBuffer<T>,
    output: GpuBuffer<T>,
}

/// One reduction onto rank 0, which reduces every span by one task of a kernel, from vectors at any offset.
/// It must give the same bits as the same program on host memory.
fn reduction<T: Bits>(
    comm: &Rank,
    buffers: &mut TestBuffers<T>,
    op: ReduceOp,
    (from, into): (usize, usize),
    count: usize,
) {
    let mut random = fastrand::Rng::with_seed((count * 64 + from * 8 + comm.rank()) as u64);
    let given: Vec<T> = (0..count).map(|_| T::of(random.u64(..))).collect();
    let what = || format!("{} {op:?}, {count} elements from {from} into {into}", T::DTYPE.name());
    let mut wanted = vec![T::of(0); count];
    Communicator::reduce_into(comm, &given, &mut wanted, op, 0)
        .unwrap_or_else(|error| panic!("{}: {error}", what()));

    let around = vec![T::of(CANARY); into + count + 1];
    buffers.output.slice_mut(0..around.len()).write(&around).expect("room");
    let mut input = buffers.input.slice_mut(from..from + count);
    input.write(&given).expect("room");
    let mut output = buffers.output.slice_mut(into..into + count);
    comm.reduce_into_on_gpu(&input, &mut output, op, 0).unwrap_or_else(|error| panic!("{}: {error}", what()));
    let mut got = vec![T::of(0); count];
    output.read(&mut got).expect("a GPU that works");
    comm.synchronize().unwrap_or_else(|error| panic!("{}: {error}", what()));
    if comm.rank() != 0 {
        return;
    }
    let mut around = vec![T::of(0); into + count + 1];
    buffers.output.slice_mut(0..into + count + 1).read(&mut around).expect("a GPU that works");
    let untouched = |at: usize| around[at].same(T::of(CANARY));
    assert!((0..into).all(untouched) && untouched(into + count), "{}: wrote beyond its range", what());
    if let Some(at) = (0..count).find(|at| !got[*at].same(wanted[*at])) {
        panic!("{}: element {at} is {:?} and not {:?}", what(), got[at], wanted[at]);
    }
}

/// Every operation on elements of a type, from every alignment, at lengths around granules, threads and
/// blocks.
fn reductions<T: Bits>(comm: &Rank, simulated: bool) {
    let size = size_of::<T>();
    let per_granule = 16 / size;
    let around = |bytes: usize| [bytes / size - 1, bytes / size, bytes / size + 1];
    let mut counts = vec![1, 2, 3];
    for bytes in if simulated { vec![64, 1024] } else { vec![32, 64, 1024, 32 << 10, 256 << 10] } {
        counts.extend(around(bytes));
    }
    counts.push(if simulated { 20_011 } else { 1_000_003 } / size);
    let longest = counts.iter().max().expect("there are some") + 2 * per_granule + 1;
    let buffer = || GpuBuffer::<T>::new(0, longest).expect("memory");
    let mut buffers = TestBuffers { input: buffer(), output: buffer() };
    let mut turn = comm.world_size();
    for op in OPS {
        // Integers accept integral factors only.
        let whole = matches!(op, ReduceOp::PreMulSum(_)) && !T::DTYPE.is_float();
        let op = if whole { ReduceOp::PreMulSum(3.0) } else { op };
        if op.check(T::DTYPE).is_err() {
            continue;
        }
        for &count in &counts {
            let places: Vec<(usize, usize)> = if simulated || count * size > 4096 {
                turn += 1;
                vec![(turn % per_granule, turn / 3 % per_granule)]
            } else {
                (0..per_granule).flat_map(|from| [(from, 0), (from, from), (0, from)]).collect()
            };
            for place in places {
                reduction(comm, &mut buffers, op, place, count);
            }
        }
    }
}

fn kernels(ranks: usize) {
    if !World::Gpu.is_enabled() {
        return;
    }
    let mut setup = Setup::new(World::Gpu, ranks).lowering(Lowering::Direct);
    // The root reduces all contributions, each span in one task.
    setup.config.algo = Algorithm::Star;
    setup.config.subchunk = Size(8 << 20);
    // Mailboxes run no program, and round products where a program rounds sums.
    (setup.config.small, setup.config.mailbox) = (Size(0), Size(0));
    setup.config.direct = Size(0);
    let simulated = is_simulated();
    spawn(&setup, |comm| {
        for dtype in DType::ALL {
            match dtype {
                DType::I8 => reductions::<i8>(&comm, simulated),
                DType::U8 => reductions::<u8>(&comm, simulated),
                DType::I32 => reductions::<i32>(&comm, simulated),
                DType::U32 => reductions::<u32>(&comm, simulated),
                DType::I64 => reductions::<i64>(&comm, simulated),
                DType::U64 => reductions::<u64>(&comm, simulated),
                DType::F16 => reductions::<f16>(&comm, simulated),
                DType::F32 => reductions::<f32>(&comm, simulated),
                DType::F64 => reductions::<f64>(&comm, simulated),
                DType::BF16 => reductions::<bf16>(&comm, simulated),
                DType::F8E4M3 => reductions::<F8E4M3>(&comm, simulated),
                DType::F8E5M2 => reductions::<F8E5M2>(&comm, simulated),
                DType::I16 => reductions::<i16>(&comm, simulated),
                DType::U16 => reductions::<u16>(&comm, simulated),
                DType::Bool => reductions::<Boolean>(&comm, simulated),
            }
        }
    });
}

#[test]
fn sums_of_two_vectors_have_the_host_devices_bits() {
    kernels(2);
}

#[test]
fn sums_of_three_vectors_have_the_host_devices_bits() {
    kernels(3);
}

/// A user's stream with work before and after every call.
struct Busy {
    stream: Arc<CudaStream>,
    /// Copied back and forth, which takes longer than a call.
    ballast: (CudaSlice<f32>, CudaSlice<f32>),
    given: Vec<CudaSlice<f32>>,
    /// The vectors of calls: one for all calls, or one for each.
    vectors: Vec<CudaSlice<f32>>,
    results: Vec<CudaSlice<f32>>,
}

impl Busy {
    fn new(context: &Arc<CudaContext>, given: &[Vec<f32>], vectors: usize, ballast: usize) -> Self {
        let stream = context.new_stream().expect("a stream");
        let zeros = |len: usize| stream.alloc_zeros::<f32>(len).expect("memory");
        let this = Self {
            ballast: (zeros(ballast), zeros(ballast)),
            given: given.iter().map(|given| stream.clone_htod(given).expect("memory")).collect(),
            vectors: given[..vectors].iter().map(|given| zeros(given.len())).collect(),
            results: given.iter().map(|given| zeros(given.len())).collect(),
            stream: Arc::clone(&stream),
        };
        stream.synchronize().expect("a GPU that works");
        this
    }

    /// Enqueues a copy to the vector, a call on it, and a copy from it.
    fn enqueue(&mut self, comm: &Rank, call: usize) {
        let Self { stream, ballast, given, vectors, results } = self;
        let vectors_count = vectors.len();
        let vector = &mut vectors[call % vectors_count];
        stream.memcpy_dtod(&ballast.0, &mut ballast.1).expect("a copy");
        stream.memcpy_dtod(&given[call], vector).expect("a copy");
        comm.all_reduce_on_gpu(vector, ReduceOp::Sum).expect("a call");
        stream.memcpy_dtod(vector, &mut results[call]).expect("a copy");
        // Later work must not affect the call.
        stream.memset_zeros(vector).expect("a fill");
        stream.memcpy_dtod(&ballast.1, &mut ballast.0).expect("a copy");
    }

    fn result(&self, call: usize) -> Vec<f32> {
        self.stream.clone_dtoh(&self.results[call]).expect("a copy")
    }
}

#[test]
fn calls_are_ordered_in_busy_streams() {
    const STREAMS: usize = 3;
    if !World::Gpu.is_enabled() {
        return;
    }
    let (rounds, ballast) = if is_simulated() { (8, 1 << 16) } else { (40, 16 << 20) };
    for world in [World::Gpu, World::GpuTcp] {
        let setup = Setup::new(world, 2);
        spawn(&setup, |comm| {
            let context = CudaContext::new(comm.rank() % gpu_count().expect("a driver")).expect("a GPU");
            // Of different lengths, so that calls in other streams overtake each other if that is possible.
            let count = |stream: usize, round: usize| [5000, 70_001, 333][(stream + round) % 3];
            let value = |stream: usize, round: usize, rank: usize, at: usize| {
                ((stream * 7 + round * 3 + rank * 11 + at) % 97) as f32
            };
            let given = |stream: usize, round: usize| -> Vec<f32> {
                (0..count(stream, round)).map(|at| value(stream, round, comm.rank(), at)).collect()
            };
            let mut streams: Vec<Busy> = (0..STREAMS)
                .map(|stream| {
                    let given: Vec<_> = (0..rounds).map(|round| given(stream, round)).collect();
                    Busy::new(&context, &given, rounds, ballast)
                })
                .collect();
            for round in 0..rounds {
                streams.iter_mut().for_each(|stream| stream.enqueue(&comm, round));
            }
            streams.iter().for_each(|busy| busy.stream.synchronize().expect("a GPU that works"));
            comm.synchronize().expect("all calls succeed");
            for (stream, busy) in streams.iter().enumerate() {
                for round in 0..rounds {
                    let got = busy.result(round);
                    let right = |at: usize| (0..2).map(|rank| value(stream, round, rank, at)).sum::<f32>();
                    let wrong = (0..got.len()).find(|at| got[*at] != right(*at));
                    assert_eq!(wrong, None, "{world:?}: stream {stream}, round {round}");
                }
            }
        });
    }
}

#[test]
fn one_stream_runs_many_calls_in_order() {
    if !World::Gpu.is_enabled() {
        return;
    }
    let (calls, ballast) = if is_simulated() { (30, 1 << 14) } else { (300, 4 << 20) };
    let setup = Setup::new(World::Gpu, 2);
    spawn(&setup, |comm| {
        let context = CudaContext::new(comm.rank() % gpu_count().expect("a driver")).expect("a GPU");
        let given: Vec<Vec<f32>> = (0..calls).map(|call| vec![(call + comm.rank()) as f32; 10_007]).collect();
        let mut busy = Busy::new(&context, &given, 1, ballast);
        for call in 0..calls {
            busy.enqueue(&comm, call);
        }
        busy.stream.synchronize().expect("a GPU that works");
        comm.synchronize().expect("all calls succeed");
        for call in 0..calls {
            let got = busy.result(call);
            assert!(got.iter().all(|got| *got == (2 * call + 1) as f32), "call {call}");
        }
    });
}

/// Bytes of GPU memory that this process has taken on all GPUs.
fn taken() -> usize {
    let gpus = 0..gpu_count().expect("a driver");
    let of_gpu = |gpu| {
        let (free, total) = CudaContext::new(gpu).expect("a GPU").mem_get_info().expect("a GPU that works");
        total - free
    };
    gpus.map(of_gpu).sum()
}

/// The element `at` that `rank` contributes.
fn given(rank: usize, at: usize) -> f32 {
    ((rank * 31 + at) % 1009) as f32
}

/// Checks the result of a reduce-scatter of parts of this many elements, and that the input does not change.
fn checked_reduce_scatter(comm: &Rank, part: usize, in_place: bool) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let gpu = rank % gpu_count().expect("a driver");
    let send: Vec<f32> = (0..world * part).map(|at| given(rank, at)).collect();
    let sum = |at: usize| (0..world).map(|rank| given(rank, at)).sum::<f32>();
    let own = rank * part..(rank + 1) * part;
    let mut vector = GpuBuffer::new(gpu, send.len()).expect("memory");
    vector.write(&send).expect("a GPU that works");
    let mut left = vec![0f32; send.len()];
    if in_place {
        comm.reduce_scatter_in_place_on_gpu(&mut vector, ReduceOp::Sum).expect("a sum");
        vector.read(&mut left).expect("a GPU that works");
        let wrong = own.clone().find(|at| left[*at] != sum(*at));
        assert_eq!(wrong, None, "rank {rank}, in place, parts of {part}");
        return;
    }
    let mut result = vec![-1f32; part];
    let mut receive = GpuBuffer::new(gpu, part).expect("memory");
    receive.write(&result).expect("a GPU that works");
    comm.reduce_scatter_on_gpu(&vector, &mut receive, ReduceOp::Sum).expect("a sum");
    receive.read(&mut result).expect("a GPU that works");
    let wrong = own.clone().find(|at| result[*at - own.start] != sum(*at));
    assert_eq!(wrong, None, "rank {rank}, parts of {part}");
    vector.read(&mut left).expect("a GPU that works");
    assert!(left == send, "rank {rank}, parts of {part}: the input has changed");
}

/// Lengths of parts, the longest last: multiples of a cache line and others.
const PARTS: [usize; 4] = [129, 4096, 10_007, 20_480];

/// Bytes of GPU memory that all ranks together keep after reduce-scatters of [`PARTS`].
fn kept_by_reduce_scatters(setup: &Setup) -> usize {
    let all = Barrier::new(setup.ranks);
    let measured = spawn(setup, |comm| {
        // A real GPU loads kernels when they are first used.
        let gpu = comm.rank() % gpu_count().expect("a driver");
        let mut vector = GpuBuffer::new(gpu, 10_000).expect("memory");
        vector.write(&[1f32; 10_000]).expect("a GPU that works");
        comm.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a sum");
        comm.synchronize().expect("all calls succeed");
        let measure = || {
            all.wait();
            let taken = taken();
            all.wait();
            taken
        };
        // A GPU gives memory in pages, and the driver keeps one that was filled.
        drop(Vec::from_iter(
            PARTS.map(|part| GpuBuffer::<f32>::new(gpu, (setup.ranks + 1) * part).expect("memory")),
        ));
        let before = measure();
        for part in PARTS {
            checked_reduce_scatter(&comm, part, false);
            checked_reduce_scatter(&comm, part, true);
        }
        comm.synchronize().expect("all calls succeed");
        measure().checked_sub(before).expect("only the vectors were freed")
    });
    assert!(measured.iter().all(|kept| *kept == measured[0]), "{measured:?}");
    measured[0]
}

/// The most that four ranks keep if each needs memory for half of the longest vector: memory grows by
/// doubling, and what was outgrown is kept, too. A GPU gives memory in pages.
fn most_kept_for_halves() -> usize {
    const PAGE: usize = 2 << 20;
    let half = 2 * PARTS[PARTS.len() - 1] * size_of::<f32>();
    let rounding = if is_simulated() { 0 } else { PAGE * PARTS.len() };
    4 * (2 * half.next_power_of_two() + rounding)
}

#[test]
fn a_reduce_scatter_on_one_node_keeps_no_partial_sums() {
    // The lists by which kernels run it.
    const LISTS: usize = 16 << 10;
    for world in [World::Gpu, World::GpuPinned, World::GpuTcp].into_iter().filter(|world| world.is_enabled())
    {
        for ranks in [2, 4] {
            let kept = kept_by_reduce_scatters(&Setup::new(world, ranks));
            assert!(kept <= ranks * LISTS, "{world:?} with {ranks} ranks: {kept} bytes");
        }
    }
}

#[test]
fn a_reduce_scatter_takes_gpu_memory_for_the_partial_sums_that_a_rank_passes_on() {
    for world in World::enabled().iter().copied().filter(|world| world.is_gpu()) {
        // A chain of four ranks has two ranks in the middle, and two nodes of two ranks reduce halves of the
        // vector first.
        let lowerings =
            if world.is_mixed() { vec![Lowering::Chain, Lowering::Auto] } else { vec![Lowering::Chain] };
        for lowering in lowerings {
            let kept = kept_by_reduce_scatters(&Setup::new(world, 4).lowering(lowering));
            assert!(kept <= most_kept_for_halves(), "{world:?} {lowering:?}: {kept} bytes");
        }
    }
}

#[test]
fn lists_of_ever_new_lengths_take_the_places_of_others_while_kernels_run() {
    // More lengths than lists are kept, each twice.
    const LENGTHS: usize = 100;
    if !World::GpuPinned.is_enabled() {
        return;
    }
    spawn(&Setup::new(World::GpuPinned, 2), |comm| {
        let gpu = comm.rank() % gpu_count().expect("a driver");
        let length = |call: usize| 64 * (call * 7 % LENGTHS + 1);
        let send: Vec<f32> = (0..length(0) + 64 * LENGTHS).map(|at| given(comm.rank(), at)).collect();
        let mut from = GpuBuffer::new(gpu, send.len()).expect("memory");
        from.write(&send).expect("a GPU that works");
        let whole = 2 * (0..LENGTHS).map(length).sum::<usize>();
        let mut into = GpuBuffer::<f32>::new(gpu, whole).expect("memory");
        let mut begin = 0;
        for call in 0..2 * LENGTHS {
            let len = length(call);
            let mut part = into.slice_mut(begin..begin + len);
            comm.all_reduce_into_on_gpu(&from.slice_mut(0..len), &mut part, ReduceOp::Sum).expect("a sum");
            begin += len;
        }
        let mut sums = vec![0f32; whole];
        into.read(&mut sums).expect("a GPU that works");
        let expected =
            (0..2 * LENGTHS).flat_map(|call| (0..length(call)).map(|at| given(0, at) + given(1, at)));
        let wrong = sums.iter().zip(expected).position(|(found, expected)| *found != expected);
        assert_eq!(wrong, None, "of {whole}");
        comm.synchronize().expect("all calls succeed");
    });
}

#[test]
fn impossible_requests_are_rejected_and_the_gpu_still_works() {
    if !World::Gpu.is_enabled() {
        return;
    }
    let error = GpuBuffer::<f32>::new(0, 1 << 50).expect_err("no GPU has so much memory");
    assert_eq!(error.kind(), ErrorKind::System, "{error}");
    assert!(error.message().contains(&format!("{} bytes on", 4u64 << 50)), "{error}");
    let error = GpuBuffer::<f32>::new(0, usize::MAX / 2).expect_err("nor any address");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    let error = GpuBuffer::<f32>::new(99, 1).expect_err("there are fewer");
    assert!(error.message().contains("there is no GPU 99: this process sees"), "{error}");

    let mut vector = GpuBuffer::new(0, 1000).expect("memory");
    let error = vector.write(&[1f32; 999]).expect_err("too short");
    assert!(error.message().contains("999 elements for a vector of 1000"), "{error}");
    vector.write(&[1f32; 1000]).expect("the GPU still works");
    vector.slice_mut(10..20).write(&[7f32; 10]).expect("a part");
    let mut got = vec![0f32; 1000];
    vector.read(&mut got).expect("the GPU still works");
    assert!((0..1000).all(|at| got[at] == if (10..20).contains(&at) { 7.0 } else { 1.0 }));
    let mut part = [0f32; 3];
    vector.slice_mut(9..12).read(&mut part).expect("a part");
    assert_eq!(part, [1.0, 7.0, 7.0]);
    assert!(vector.slice_mut(5..5).is_empty());
}

#[test]
fn a_missing_gpu_is_named_when_the_communicator_is_created() {
    if !World::Gpu.is_enabled() {
        return;
    }
    let mut setup = Setup::new(World::Gpu, 1);
    setup.config.gpu = Some(99);
    let (_coordinator, id) =
        flexring::internal::bootstrap::Coordinator::create(&setup.config).expect("a coordinator");
    let identity = flexring::Identity::from_unique_id(1, &id, 0).expect("an identity");
    let error = join(&setup.config, &identity).expect_err("there are fewer");
    assert!(error.message().contains("FLEXRING_GPU=99"), "{error}");
    assert!(error.message().contains("there is no GPU 99"), "{error}");
}

/// Three processes reduce on GPUs until rank 1 is killed. The others must end with an error that names it,
/// and their streams must continue.
fn survivors_name_the_killed_rank(test: &str, world: World) {
    if !world.is_enabled() {
        return;
    }
    let name = test_name(module_path!(), test);
    let ipc = if world == World::GpuPinned { "0" } else { "1" };
    let variables = [("FLEXRING_GPU", "0"), ("FLEXRING_GPU_IPC", ipc)];
    let ended = spawn_processes_with(&name, &Setup::new(world, 3), &variables, |comm| {
        let mut vector = GpuBuffer::new(0, 100_000).expect("memory");
        vector.write(&vec![0f32; 100_000]).expect("a GPU that works");
        comm.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("all ranks make the first call");
        comm.synchronize().expect("it goes well");
        if comm.rank() == 1 {
            kill_self_soon();
        }
        let (error, ended) = loop {
            let begun = Instant::now();
            let called = comm.all_reduce_on_gpu(&mut vector, ReduceOp::Sum);
            vector.synchronize().expect("the stream goes on");
            let ended = begun.elapsed();
            if let Err(error) = called.and_then(|()| comm.synchronize()) {
                break (error, ended);
            }
        };
        // Within a second of the death, but for a machine that is busy; the time-out of the call is longer.
        assert!(ended < Duration::from_secs(10), "the kernel ended after {ended:?}");
        assert!(error.message().contains("rank 1 (pid"), "{error}");
        let mut left = vec![1f32; 100_000];
        vector.read(&mut left).expect("what is there can be read");
    });
    only_failed(1, world, &ended);
}

#[test]
fn processes_with_vectors_on_gpus_name_a_killed_rank() {
    let test = "processes_with_vectors_on_gpus_name_a_killed_rank";
    survivors_name_the_killed_rank(test, World::Gpu);
}

#[test]
fn processes_with_vectors_on_gpus_name_a_killed_rank_over_tcp() {
    let test = "processes_with_vectors_on_gpus_name_a_killed_rank_over_tcp";
    survivors_name_the_killed_rank(test, World::GpuTcp);
}

#[test]
fn processes_without_access_to_each_others_gpu_memory_name_a_killed_rank() {
    let test = "processes_without_access_to_each_others_gpu_memory_name_a_killed_rank";
    survivors_name_the_killed_rank(test, World::GpuPinned);
}
