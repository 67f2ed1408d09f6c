//! The harness: `spawn(world, body)` runs the same body as every rank of a world, over any transport, under a
//! watchdog.

#![allow(dead_code, unused_imports, reason = "the tests of the feature `cust` use a part of it")]

mod element;
mod rank;

pub use element::TestElement;
pub use rank::{Kept, Rank};

use flexring::bootstrap::{Coordinator, Identity};
use flexring::config::{Config, Lowering, Registration, Size, Switch, TransportChoice};
use flexring::{Communicator, Result};
use std::sync::mpsc;
use std::time::Duration;

/// How the ranks of a test world are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum World {
    /// Threads of one process that know each other.
    Local,
    /// Ranks of one node.
    Shm,
    /// Ranks that use TCP even within their node.
    Tcp,
    /// Ranks of two nodes, a third of them on the first: shared memory within, TCP between them.
    Mixed,
    /// Ranks that use RDMA even within their node, over one device, and register memory as it comes.
    Verbs,
    /// The same over all devices, and with what is not registered copied through slots.
    VerbsStaged,
    /// Ranks of two nodes: shared memory within, RDMA between them, by two queue pairs over every device.
    VerbsMixed,
    /// Ranks of one node whose vectors are on GPUs.
    Gpu,
    /// The same by pinned memory of the host.
    GpuPinned,
    /// The same over TCP.
    GpuTcp,
    /// The same on two nodes: shared memory within, TCP between them.
    GpuMixed,
}

impl World {
    const EVERYWHERE: [Self; 4] = [Self::Local, Self::Shm, Self::Tcp, Self::Mixed];
    const VERBS: [Self; 3] = [Self::Verbs, Self::VerbsStaged, Self::VerbsMixed];
    const GPU: [Self; 4] = [Self::Gpu, Self::GpuPinned, Self::GpuTcp, Self::GpuMixed];

    /// The worlds that are tested here: where the variable WORLDS is `verbs`, those that need RDMA devices, where it is
    /// `gpu`, those that need a GPU, else those that need nothing.
    pub fn here() -> &'static [Self] {
        match std::env::var("WORLDS").as_deref() {
            Ok("verbs") => &Self::VERBS,
            Ok("gpu") => &Self::GPU,
            _ => &Self::EVERYWHERE,
        }
    }

    /// One of the worlds that are tested here.
    pub fn any(number: usize) -> Self {
        Self::here()[number % Self::here().len()]
    }

    /// Whether this world is tested here; says so if not.
    pub fn is_here(self) -> bool {
        let here = Self::here().contains(&self);
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

    /// Whether it is tested where a processor is emulated or a GPU is simulated, so that everything takes longer.
    pub fn is_simulated(self) -> bool {
        self.is_verbs() || self.is_gpu()
    }

    /// Whether there is RDMA between ranks.
    pub fn is_verbs(self) -> bool {
        Self::VERBS.contains(&self)
    }
}

/// A test world: how it is connected, and the settings that tests like to vary.
#[derive(Clone, Debug)]
pub struct Setup {
    pub world: World,
    pub ranks: usize,
    pub config: Config,
}

impl Setup {
    /// A world whose sub-chunks are small, so that small vectors have many.
    pub fn new(world: World, ranks: usize) -> Self {
        let config = Config {
            subchunk: Size(4096),
            gpu_subchunk: Size(16384),
            small: Size(256),
            slots: 8,
            timeout: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(20),
            socket_ifname: Some("lo".to_owned()),
            transport: match world {
                World::Tcp | World::GpuTcp => TransportChoice::Tcp,
                World::Verbs | World::VerbsStaged => TransportChoice::Verbs,
                _ => TransportChoice::Auto,
            },
            // A machine that is emulated on a busy one may not answer for long, and that is no failure.
            ib_timeout: 18,
            gpu_ipc: Switch(world != World::GpuPinned),
            ib_rails: if world == World::Verbs { 1 } else { 4 },
            ib_qps_per_rail: if world == World::VerbsMixed { 2 } else { 1 },
            ib_register: match world {
                World::Verbs => Registration::Subchunk,
                World::VerbsStaged => Registration::Stage,
                _ => Registration::Auto,
            },
            ..Config::default()
        };
        Self { world, ranks, config }
    }

    pub fn lowering(mut self, lowering: Lowering) -> Self {
        self.config.lowering = lowering;
        self
    }

    /// The settings of one rank.
    pub fn config_of(&self, rank: usize) -> Config {
        let mut config = self.config.clone();
        if self.world.is_mixed() {
            let first = rank < self.ranks.div_ceil(3);
            config.node = Some(if first { "first" } else { "second" }.to_owned());
        }
        config
    }
}

/// Number of random cases of a property test: `usual` scaled by `FLEXRING_TEST_EFFORT`, and a third of it on an emulated
/// processor or a simulated GPU.
pub fn cases(usual: u32) -> u32 {
    let usual = if World::here()[0].is_simulated() { usual / 3 } else { usual };
    crate::effort::cases(usual.into()).try_into().unwrap_or(u32::MAX)
}

/// Runs `body` as every rank of a world, each in a thread of its own, and returns what they return, by rank.
pub fn spawn<R: Send>(setup: &Setup, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
    watched(Duration::from_secs(60), || {
        // Where the ranks of a world meet; alive until they are done.
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
                            // Nothing may quietly be tested over something else.
                            let verbs = comm.summary().contains("verbs");
                            let alone = !comm.summary().contains(" to ");
                            assert!(verbs == world.is_verbs() || alone, "{world:?}: {}", comm.summary());
                            comm
                        }) as _
                    })
                    .collect()
            }
        };
        let kept = Kept::default();
        std::thread::scope(|scope| {
            let (body, kept) = (&body, &kept);
            let threads: Vec<_> = joiners
                .into_iter()
                .map(|joiner| scope.spawn(move || body(Rank::new(joiner(), setup.world, kept))))
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
        })
    })
}

/// Joins a world with settings of one's own.
pub fn join(config: &Config, identity: &Identity) -> Result<Communicator> {
    Communicator::with_config(config, identity)
}

/// Runs `test` and ends the process if it takes longer than `limit`: collectives fail by hanging.
pub fn watched<R>(limit: Duration, test: impl FnOnce() -> R) -> R {
    let (done, watch) = mpsc::channel::<()>();
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    std::thread::spawn(move || {
        if watch.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("watchdog: {name} hung for {limit:?}");
            std::process::exit(101);
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

/// Runs `body` as every rank of a world of processes. Each process runs this test binary with the test whose full name
/// is `name`, which must do nothing but call this function. Returns the output of each process, by rank.
pub fn spawn_processes(name: &str, setup: &Setup, body: impl FnOnce(Rank)) -> Vec<std::process::Output> {
    const RANK: &str = "FLEXRING_RANK";
    if std::env::var_os(RANK).is_some() {
        watched(Duration::from_secs(60), || {
            body(Rank::new(
                Communicator::from_env().expect("the world meets"),
                setup.world,
                &Kept::default(),
            ));
        });
        std::process::exit(0);
    }
    watched(Duration::from_secs(60), || {
        let (_coordinator, id) = Coordinator::create(&setup.config).expect("a coordinator");
        let binary = std::env::current_exe().expect("this binary");
        let transport = setup.config.transport.name();
        let children: Vec<_> = (0..setup.ranks)
            .map(|rank| {
                std::process::Command::new(&binary)
                    .args([name, "--exact", "--nocapture"])
                    .env(RANK, rank.to_string())
                    .env("FLEXRING_WORLD_SIZE", setup.ranks.to_string())
                    .env("FLEXRING_UNIQUE_ID", id.to_hex())
                    .env("FLEXRING_TRANSPORT", transport)
                    .env("FLEXRING_IB_RAILS", setup.config.ib_rails.to_string())
                    .env("FLEXRING_IB_TIMEOUT", setup.config.ib_timeout.to_string())
                    .env("FLEXRING_SOCKET_IFNAME", "lo")
                    .stdout(std::process::Stdio::piped())
                    .stderr(std::process::Stdio::piped())
                    .spawn()
                    .expect("a process for the rank")
            })
            .collect();
        let outputs: Vec<std::process::Output> =
            children.into_iter().map(|child| child.wait_with_output().expect("a rank that ended")).collect();
        for output in &outputs {
            let stdout = String::from_utf8_lossy(&output.stdout);
            assert!(!stdout.contains("running 0 tests"), "there is no test called {name}");
        }
        outputs
    })
}

/// Ends this process a little later, in the midst of whatever it does then, as nothing can be prepared for.
pub fn die_soon() {
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(300));
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    });
}
