//! The test harness: `spawn(setup, body)` runs `body` on every rank of a world, over any transport, under a
//! watchdog.
//!
//! Owns the kinds of test worlds, their settings, and threads or processes for their ranks.

#![allow(dead_code, unused_imports, reason = "the tests of the feature `cust` use a part of it")]

mod element;
mod rank;
mod rank_process;

pub use element::TestElement;
pub use rank::Rank;
pub use rank_process::RankProcess;

pub use flexring_testkit::port::free_port;

use flexring::internal::bootstrap::Coordinator;
use flexring::{Communicator, Error, Identity, ReduceOp, Result};
use flexring_core::config::{Config, Lowering, Registration, Size, Switch, TransportChoice};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How the ranks of a test world are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum World {
    /// Threads of one process, connected without rendezvous.
    Local,
    /// Ranks of one node that use shared memory.
    Shm,
    /// Ranks of one node that use TCP.
    Tcp,
    /// Ranks of two nodes, a third of them on the first: shared memory within, TCP between them.
    Mixed,
    /// Ranks of one node that use RDMA over one device, and register memory for each sub-chunk.
    Verbs,
    /// Ranks of one node that use RDMA over all devices, and copy unregistered memory through slots.
    VerbsStaged,
    /// Ranks of two nodes: shared memory within, RDMA between them, with two queue pairs per device.
    VerbsMixed,
    /// Ranks of one node with vectors on GPUs, which are shared by CUDA IPC.
    Gpu,
    /// Ranks of one node with vectors on GPUs, whose messages pass through pinned host memory. The first call
    /// opens the GPU.
    GpuPinned,
    /// Ranks of one node with vectors on GPUs, over TCP.
    GpuTcp,
    /// Ranks of two nodes with vectors on GPUs: CUDA IPC within, TCP between them.
    GpuMixed,
}

impl World {
    const WITHOUT_DEVICES: [Self; 4] = [Self::Local, Self::Shm, Self::Tcp, Self::Mixed];
    const VERBS: [Self; 3] = [Self::Verbs, Self::VerbsStaged, Self::VerbsMixed];
    const GPU: [Self; 4] = [Self::Gpu, Self::GpuPinned, Self::GpuTcp, Self::GpuMixed];

    /// The worlds that this run tests: those that need RDMA devices if the variable WORLDS is `verbs`, those
    /// that need a GPU if it is `gpu`, else those that need neither.
    pub fn enabled() -> &'static [Self] {
        match std::env::var("WORLDS").as_deref() {
            Ok("verbs") => &Self::VERBS,
            Ok("gpu") => &Self::GPU,
            _ => &Self::WITHOUT_DEVICES,
        }
    }

    /// One of the enabled worlds, picked by `number`.
    pub fn any(number: usize) -> Self {
        Self::enabled()[number % Self::enabled().len()]
    }

    /// Whether this run tests this world. Prints that it is skipped if not.
    pub fn is_enabled(self) -> bool {
        let here = Self::enabled().contains(&self);
        if !here {
            let worlds = match self {
                _ if self.is_verbs() => "verbs",
                _ if self.is_gpu() => "gpu",
                _ => "",
            };
            eprintln!("skipped: {self:?} is tested where WORLDS={worlds}");
        }
        here
    }

    /// Whether the ranks are on two nodes.
    pub fn is_mixed(self) -> bool {
        matches!(self, Self::Mixed | Self::VerbsMixed | Self::GpuMixed)
    }

    /// Whether vectors are on GPUs.
    pub fn is_gpu(self) -> bool {
        Self::GPU.contains(&self)
    }

    /// Whether this world usually runs on an emulated processor or a simulated GPU, where everything takes
    /// longer.
    pub fn is_simulated(self) -> bool {
        self.is_verbs() || self.is_gpu()
    }

    /// Whether ranks use RDMA.
    pub fn is_verbs(self) -> bool {
        Self::VERBS.contains(&self)
    }
}

/// A test world: the kind of its connections, its size and its settings.
#[derive(Clone, Debug)]
pub struct Setup {
    pub world: World,
    pub ranks: usize,
    pub config: Config,
    /// By rank, the name of its node in a world with several nodes. Empty for two nodes.
    pub nodes: &'static [&'static str],
}

impl Setup {
    /// A world with small sub-chunks, so that small vectors have many of them.
    pub fn new(world: World, ranks: usize) -> Self {
        let config = Config {
            subchunk: Size(4096),
            small: Size(256),
            mailbox: Size(256),
            slots: 8,
            timeout: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(20),
            socket_ifname: Some("lo".to_owned()),
            transport: match world {
                World::Tcp | World::GpuTcp => TransportChoice::Tcp,
                World::Verbs | World::VerbsStaged => TransportChoice::Verbs,
                _ => TransportChoice::Auto,
            },
            // An emulated machine on a busy host may not acknowledge for long, which must not fail the test.
            ib_timeout: Some(18),
            gpu_ipc: Switch(world != World::GpuPinned),
            register_shared: Switch(true),
            ib_rails: if world == World::Verbs { 1 } else { 4 },
            ib_qps_per_rail: (world == World::VerbsMixed).then_some(2),
            ib_register: match world {
                World::Verbs => Registration::Subchunk,
                World::VerbsStaged => Registration::Stage,
                _ => Registration::Auto,
            },
            ..Config::default()
        };
        Self { world, ranks, config, nodes: &[] }
    }

    pub fn lowering(mut self, lowering: Lowering) -> Self {
        self.config.lowering = lowering;
        self
    }

    /// The settings of one rank, with its node where the world has two.
    pub fn config_of(&self, rank: usize) -> Config {
        let mut config = self.config.clone();
        if self.world.is_mixed() {
            let first = rank < self.ranks.div_ceil(3);
            let usual = if first { "first" } else { "second" };
            config.node = Some(self.nodes.get(rank).unwrap_or(&usual).to_string());
        }
        // Otherwise the first call opens the GPU, and the ranks do not share its memory.
        #[cfg(feature = "cuda")]
        if self.world.is_gpu() && self.world != World::GpuPinned && config.gpu.is_none() {
            config.gpu = Some(rank::gpu_of(rank));
        }
        config
    }
}

/// Number of random cases of a property test: `usual` scaled by `FLEXRING_TEST_EFFORT`, and a third of it on
/// an emulated processor or a simulated GPU.
pub fn cases(usual: u32) -> u32 {
    let usual = if World::enabled()[0].is_simulated() { usual / 3 } else { usual };
    flexring_testkit::effort::cases(usual.into()).try_into().unwrap_or(u32::MAX)
}

/// What `observe` returns once it has been the same for 300 ms.
pub fn once_unchanged<T: PartialEq>(observe: impl Fn() -> T) -> T {
    let (mut last, mut since) = (observe(), Instant::now());
    while since.elapsed() < Duration::from_millis(300) {
        std::thread::sleep(Duration::from_millis(10));
        let now = observe();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    last
}

/// How long the ranks of a world may run. A call that hangs ends sooner, by its timeout; a thousand calls of
/// ranks that share a busy processor take long.
const LIMIT: Duration = Duration::from_secs(240);

/// Runs `body` on every rank of a world, each in its own thread, and returns the results by rank.
pub fn spawn<R: Send>(setup: &Setup, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    with_watchdog(LIMIT, || {
        // The coordinator of the rendezvous, alive until all ranks have ended.
        let meeting =
            (setup.world != World::Local).then(|| Coordinator::create(&setup.config).expect("a coordinator"));
        let joiners: Vec<Box<dyn FnOnce() -> Communicator + Send>> = match setup.world {
            World::Local => Communicator::local_with(&setup.config, setup.ranks)
                .expect("a local world")
                .into_iter()
                .map(|communicator| Box::new(move || communicator) as _)
                .collect(),
            _ => {
                let (_, id) = meeting.as_ref().expect("ranks that are no threads meet somewhere");
                (0..setup.ranks)
                    .map(|rank| {
                        let identity = Identity::from_unique_id(setup.ranks, id, rank).expect("an identity");
                        let config = setup.config_of(rank);
                        let world = setup.world;
                        Box::new(move || {
                            let comm = join(&config, &identity).expect("the world meets");
                            // Fail if a fallback replaced the transport under test.
                            let verbs = comm.summary().contains("verbs");
                            let alone = !comm.summary().contains(" to ");
                            assert!(verbs == world.is_verbs() || alone, "{world:?}: {}", comm.summary());
                            comm
                        }) as _
                    })
                    .collect()
            }
        };
        std::thread::scope(|scope| {
            let body = &body;
            let threads: Vec<_> = joiners
                .into_iter()
                .map(|joiner| scope.spawn(move || body(Rank::new(joiner(), setup.world))))
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
        })
    })
}

/// Joins a world with the settings `config`.
pub fn join(config: &Config, identity: &Identity) -> Result<Communicator> {
    Communicator::with_config(config, identity)
}

/// Runs `test` and aborts the process if it takes longer than `limit`, because a broken collective hangs.
/// Functions that run at the exit of a process may hang too: CUDA's wait for the GPU.
pub fn with_watchdog<R>(limit: Duration, test: impl FnOnce() -> R) -> R {
    let (done, watch) = mpsc::channel::<()>();
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    std::thread::spawn(move || {
        if watch.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("watchdog: {name} hung for {limit:?}");
            std::process::abort();
        }
    });
    let result = test();
    drop(done);
    result
}

/// Full name of the test `name` in the module at `path` (`module_path!()`), as `--exact` expects it.
pub fn test_name(path: &str, name: &str) -> String {
    match path.split_once("::") {
        Some((_, module)) => format!("{module}::{name}"),
        None => name.to_owned(),
    }
}

/// Runs `body` as every rank of a world of processes. Each process runs this test binary with the test whose
/// full name is `name`, which must do nothing but call this function. Returns the output of each process, by
/// rank.
pub fn spawn_processes(name: &str, setup: &Setup, body: impl FnOnce(Rank)) -> Vec<std::process::Output> {
    spawn_processes_with(name, setup, &[], body)
}

/// As [`spawn_processes`], with additional environment variables for the ranks.
pub fn spawn_processes_with(
    name: &str,
    setup: &Setup,
    variables: &[(&str, &str)],
    body: impl FnOnce(Rank),
) -> Vec<std::process::Output> {
    const RANK: &str = "FLEXRING_RANK";
    if std::env::var_os(RANK).is_some() {
        with_watchdog(LIMIT, || {
            body(Rank::new(Communicator::from_env().expect("the world meets"), setup.world));
        });
        std::process::exit(0);
    }
    with_watchdog(LIMIT, || {
        let (_coordinator, id) = Coordinator::create(&setup.config).expect("a coordinator");
        let (id, transport) = (id.to_hex(), setup.config.transport.name());
        let (rails, timeout) =
            (setup.config.ib_rails.to_string(), setup.config.ib_timeout.unwrap_or(18).to_string());
        let gpu = if setup.world == World::Gpu { "0" } else { "" };
        let own = [
            ("FLEXRING_GPU", gpu),
            ("FLEXRING_UNIQUE_ID", &*id),
            ("FLEXRING_TRANSPORT", transport),
            ("FLEXRING_IB_RAILS", &*rails),
            ("FLEXRING_IB_TIMEOUT", &*timeout),
        ];
        let variables: Vec<(&str, &str)> = own.into_iter().chain(variables.iter().copied()).collect();
        let outputs: Vec<std::process::Output> = start_processes(name, setup.ranks, &variables)
            .into_iter()
            .map(|child| child.wait_with_output().expect("a rank that ended"))
            .collect();
        for output in &outputs {
            let stdout = String::from_utf8_lossy(&output.stdout);
            assert!(!stdout.contains("running 0 tests"), "there is no test called {name}");
        }
        outputs
    })
}

/// Sends this process a signal.
pub fn signal_self(signal: rustix::process::Signal) {
    let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
}

/// A call that a rank makes before it ends itself: when it returns there, all others have finished their
/// earlier calls. It may fail on the others.
pub fn let_others_finish(comm: &Communicator) -> Result<()> {
    comm.all_reduce(&mut [1u64], ReduceOp::Sum)
}

/// Makes calls until one fails, and returns the error. A rank that was killed is noticed in a call.
pub fn call_until_failure(comm: &Communicator) -> Error {
    loop {
        if let Err(error) = comm.all_reduce(&mut [1u64; 1000], ReduceOp::Sum) {
            return error;
        }
    }
}

/// Starts this test binary once per rank of a world of `ranks`, with the test whose full name is `name`, and
/// with `variables` beside rank and world size. Does not wait.
pub fn start_processes(name: &str, ranks: usize, variables: &[(&str, &str)]) -> Vec<std::process::Child> {
    let binary = std::env::current_exe().expect("this binary");
    let pair = |rank: usize| (rank / 2).to_string();
    let start = |rank: usize| {
        std::process::Command::new(&binary)
            .args([name, "--exact", "--nocapture"])
            .env("FLEXRING_RANK", rank.to_string())
            .env("FLEXRING_WORLD_SIZE", ranks.to_string())
            .env("FLEXRING_SOCKET_IFNAME", "lo")
            .envs(variables.iter().map(|(name, value)| (*name, value.replace("{pair}", &pair(rank)))))
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .expect("a process for the rank")
    };
    (0..ranks).map(start).collect()
}

/// Makes calls until one fails. Returns its error.
pub fn reduce_until_failure(comm: &Communicator) -> Error {
    loop {
        if let Err(error) = comm.all_reduce(&mut vec![1f32; 100_000], ReduceOp::Sum) {
            return error;
        }
    }
}

/// Checks that the processes of all ranks but this one succeeded. `world` is for the message.
pub fn only_failed(rank: usize, world: World, outputs: &[std::process::Output]) {
    for (each, output) in outputs.iter().enumerate() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), each != rank, "{world:?}: rank {each}: {stderr}");
    }
}

/// Kills this process 300 ms later, without notice to any code that runs then.
pub fn kill_self_soon() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(300));
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    });
}

/// Binds this thread, and those that it starts, to one core.
pub fn share_a_core() {
    let allowed = rustix::thread::sched_getaffinity(None).expect("the cores of this thread");
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).expect("a core");
    let mut core = rustix::thread::CpuSet::new();
    core.set(first);
    rustix::thread::sched_setaffinity(None, &core).expect("a core of this thread");
}
