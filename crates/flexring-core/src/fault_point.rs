//! Named points at which a test makes this process fail.
//!
//! Owns the names, and what may happen there. A process takes part if `FLEXRING_TEST_FAULT_POINT` is
//! `NAME:NTH:ACTION`: when it reaches the point for the NTH time, it writes the time to the file that
//! `FLEXRING_TEST_FAULT_FILE` names, in nanoseconds since 1970, and does what the action says. Only builds
//! with debug assertions read these variables; in others, `reach` is empty.

/// A point in the life of a rank.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, strum::EnumIter, strum::EnumString, strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
pub enum FaultPoint {
    // Bootstrap, in the process that has the coordinator.
    CoordinatorListens,
    CoordinatorAccepted,
    CoordinatorReceivedHello,
    CoordinatorCompletedRendezvous,
    CoordinatorCompletedExchange,
    CoordinatorReceivedHeartbeat,
    CoordinatorDecidedRootCause,
    CoordinatorReceivedGoodbye,
    // Bootstrap, on every rank.
    BootstrapBegins,
    BootstrapConnected,
    BootstrapSentHello,
    BootstrapWelcomed,
    ControlThreadStarted,
    ControlSentHeartbeat,
    ExchangeBegins,
    ExchangeEnds,
    // Joining.
    JoinOpenedSockets,
    JoinKnowsPeers,
    JoinComparedPlans,
    JoinHasArena,
    JoinSharesMemory,
    JoinSentDescriptors,
    JoinReceivedDescriptors,
    JoinHasLinks,
    JoinBuiltRunner,
    JoinEnds,
    TcpConnects,
    TcpConnected,
    TcpAccepted,
    TcpEstablished,
    // Calls.
    CallQueued,
    CallBegins,
    CallEntered,
    CallEnds,
    WorkerTakesCall,
    SmallWritten,
    SmallPosted,
    SmallWaits,
    SmallCollected,
    LeaderCollected,
    LeaderPosted,
    MemberPosted,
    MemberReceived,
    ProgramPrepared,
    ProgramAnnounced,
    ProgramEnds,
    MessageSent,
    ReceivePosted,
    ReadsBegin,
    ReadsEnd,
    ViewReleased,
    CombineDone,
    SleepBegins,
    CallFails,
    // User memory.
    MemoryAllocated,
    MemoryAnnounced,
    MemoryRegistered,
    MemoryDeregistered,
    // Leaving.
    LeaveBegins,
    WorkerEnded,
    ControlLeaves,
    ControlSentGoodbye,
    LeaveEnds,
}

/// What a process does at a point.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, strum::EnumIter, strum::EnumString, strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
pub enum FaultAction {
    /// Ends by SIGKILL.
    Kill,
    /// Stops by SIGSTOP, until another process continues or ends it.
    Stop,
    /// Ends by `exit`, without leaving the world.
    Exit,
    /// Stops, so that another process can shut all of its TCP connections down before any of its threads
    /// notices, and continue it.
    Disconnect,
    /// Lowers the limit of descriptors to those that are open.
    ExhaustDescriptors,
    /// Sets all of its interfaces but loopback down, in a network namespace.
    LinkDown,
    /// Lets its standard error, to which it logs, end on a full disk.
    FullDisk,
}

/// This process is at `point`.
#[inline]
pub fn reach(point: FaultPoint) {
    #[cfg(debug_assertions)]
    planned::reach(point);
    #[cfg(not(debug_assertions))]
    let _ = point;
}

#[cfg(debug_assertions)]
mod planned {
    use super::{FaultAction, FaultPoint};
    use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};
    use std::process::Command;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::SystemTime;

    const POINT: &str = "FLEXRING_TEST_FAULT_POINT";
    const FILE: &str = "FLEXRING_TEST_FAULT_FILE";

    /// The failure that the environment asks for.
    struct PlannedFault {
        point: FaultPoint,
        /// How often the point is still to be reached.
        left: AtomicU32,
        action: FaultAction,
    }

    impl PlannedFault {
        fn from_env() -> Option<Self> {
            let text = std::env::var(POINT).ok()?;
            let parse = || {
                let mut words = text.split(':');
                let point = words.next()?.parse().ok()?;
                let left = AtomicU32::new(words.next()?.parse().ok()?);
                Some(Self { point, left, action: words.next()?.parse().ok()? })
            };
            Some(parse().unwrap_or_else(|| panic!("{POINT}={text} is not NAME:NTH:ACTION")))
        }
    }

    pub(super) fn reach(point: FaultPoint) {
        static PLANNED: OnceLock<Option<PlannedFault>> = OnceLock::new();
        let Some(fault) = PLANNED.get_or_init(PlannedFault::from_env) else { return };
        if fault.point != point || fault.left.fetch_sub(1, Ordering::Relaxed) != 1 {
            return;
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_nanos());
        if let Some(file) = std::env::var_os(FILE) {
            let _ = std::fs::write(file, now.to_string());
        }
        act(fault.action);
    }

    fn act(action: FaultAction) {
        match action {
            FaultAction::Kill => drop(kill_process(getpid(), Signal::KILL)),
            FaultAction::Stop | FaultAction::Disconnect => drop(kill_process(getpid(), Signal::STOP)),
            FaultAction::Exit => std::process::exit(3),
            FaultAction::ExhaustDescriptors => {
                let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
                let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
                let open = numbers.max().map_or(0, |last| last + 1);
                let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(open), maximum: Some(open) });
                // Numbers below the last one may be free.
                #[allow(clippy::disallowed_methods, reason = "the numbers do not matter")]
                while let Ok(file) = std::fs::File::open("/dev/null") {
                    std::mem::forget(file);
                }
            }
            FaultAction::LinkDown => {
                for name in interfaces() {
                    let _ = Command::new("ip").args(["link", "set", &name, "down"]).status();
                }
            }
            FaultAction::FullDisk => {
                #[allow(clippy::disallowed_methods, reason = "it becomes standard error")]
                let full = std::fs::File::options().write(true).open("/dev/full");
                let _ = full.map(rustix::stdio::dup2_stderr);
            }
        }
    }

    /// The network interfaces but loopback.
    fn interfaces() -> Vec<String> {
        let entries = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names.filter(|name| name != "lo").collect()
    }
}
