//! The executor: performs one rank's calls with its links and devices.
//!
//! Owns links, devices and slots, and the guarantee that none of them touches a call's memory after the call.
//! Must not know any algorithm's name, and decides nothing: the pipeline says what moves next,
//! `plan::call_layout` in which lengths and through which memory.
//!
//! | file | owns |
//! |---|---|
//! | `program_path` | calls that run a program: the loop around the pipeline |
//! | `small_path` | small calls, through mailboxes |
//! | `relay_path` | messages of calls that kernels run, with ranks whose GPU memory kernels do not reach |
//! | `group_path` | groups of sends and receives |
//! | `peer_exchange` | their messages with one peer |
//! | `resources` | what all of them use: `links`, `devices`, `slots`, `wait` |
//! | `links` | the transports, and which of them reaches a peer |
//! | `devices` | the device of the host and that of a GPU |
//! | `slots` | the memory of the pool's slots |
//! | `wait` | spinning and sleeping until something happens |
//! | `ticket` | the numbers of jobs in flight |
//! | `bound_call` | a call with its memory |

mod bound_call;
mod devices;
mod group_path;
mod links;
mod peer_exchange;
mod program_path;
mod relay_path;
mod resources;
mod slots;
mod small_path;
#[cfg(test)]
mod tests;
mod ticket;
mod wait;

pub use bound_call::{AnnouncedCall, BoundCall, BoundGroup, CallPath, PeerMessage, ProgramNumber};

use crate::call::Call;
use crate::device::Device;
use crate::device::relay_link::RelayedMessages;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::memory::{NeighbourSlots, Piece, Sharing};
use crate::plan::program::Program;
use crate::rank::Rank;
use crate::trace::{ClockAlignment, Trace};
use crate::transport::AnyTransport;
use crate::transport::shm::Mailbox;
use crate::wake::WakeFd;
use devices::Devices;
use group_path::GroupPath;
use links::Links;
use program_path::ProgramPath;
use relay_path::RelayPath;
use resources::Resources;
use slots::Slots;
use small_path::SmallPath;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use wait::Wait;

/// What an executor is made of.
pub struct ExecutorParts {
    /// The number of this rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world: usize,
    /// At most one transport within the node and one between nodes.
    pub transports: Vec<AnyTransport>,
    /// By rank, the index of the transport that reaches it; any index for this rank itself.
    pub routes: Vec<usize>,
    /// The device that adds and copies in host memory.
    pub device: Box<dyn Device>,
    /// The slots of the pool, all of one size, and one more that is the executor's own.
    pub slots: Vec<Piece>,
    /// The mailboxes for small calls, if all ranks share a node.
    pub mailbox: Option<Mailbox>,
    /// The communicator's fault: ends every wait when it is raised.
    pub fault: Arc<Fault>,
    /// How long a wait spins before it sleeps.
    pub spin: Duration,
    /// How long a call may make no progress.
    pub timeout: Duration,
    /// Number of ranks of this node for each of its cores, rounded up. Equal on all of them.
    pub ranks_per_core: usize,
    /// Records what happens, if the settings ask for it.
    pub trace: Trace,
}

/// One rank's links and devices, and the programs that run on them.
pub struct Executor {
    resources: Resources,
    programs: ProgramPath,
    groups: GroupPath,
    relays: RelayPath,
    small: Option<SmallPath>,
    /// Whether a call has failed.
    failed: bool,
}

/// Reports a failure of this rank to the other ranks, and returns the error that all of them get.
pub type ReportFailure<'a> = &'a dyn Fn(Error) -> Error;

/// Aborts a call that fails, so that no link and no device touches its memory afterwards.
struct CallGuard<'a>(&'a mut Executor);

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        if self.0.failed {
            self.0.resources.abort();
        }
    }
}

impl Executor {
    /// An executor without programs.
    ///
    /// # Errors
    /// `System` if the process has no descriptor left.
    pub fn new(parts: ExecutorParts) -> Result<Self> {
        let links = Links::new(parts.transports, parts.routes);
        let eventfd = links.needs_eventfd().then(WakeFd::new).transpose()?.map(Arc::new);
        Ok(Self {
            programs: ProgramPath::new(&links, parts.world),
            groups: GroupPath::new(&links, parts.world),
            relays: RelayPath::new(&links, parts.world),
            resources: Resources {
                rank: parts.rank,
                world: parts.world,
                devices: Devices::new(parts.device),
                links,
                slots: Slots::new(parts.slots),
                fault: parts.fault,
                wait: Wait::new(parts.spin, parts.timeout, parts.ranks_per_core, eventfd),
                // A step adds at most one operand of each rank.
                operands: Vec::with_capacity(parts.world),
                trace: parts.trace,
            },
            small: parts.mailbox.map(|mailbox| SmallPath::new(mailbox, parts.ranks_per_core)),
            failed: false,
        })
    }

    /// Shares memory of a GPU with the neighbours, if there are any.
    pub fn share_gpu(&mut self, sharing: Box<dyn Sharing>) {
        self.resources.links.share_gpu(sharing);
    }

    /// Opens the GPU memory that neighbours share. All of them have called [`share_gpu`](Self::share_gpu),
    /// if they have a GPU yet.
    pub fn open_neighbours(&mut self) {
        self.resources.links.open_neighbours();
    }

    /// The GPU memory of neighbours that this rank has open, with their ranks.
    #[must_use]
    pub fn opened_gpus(&self) -> Vec<(Rank, Piece)> {
        self.resources.links.opened_gpus()
    }

    /// Never frees what a kernel accesses, because one has not ended.
    pub fn leak(&mut self) {
        self.resources.links.leak();
    }

    /// By peer on the node, the memory of messages that kernels write.
    #[must_use]
    pub fn relay_slots(&self) -> Vec<NeighbourSlots> {
        self.resources.links.relay_slots()
    }

    /// Shows the times of this rank's timeline by the clock of rank 0. What was recorded so far is forgotten.
    pub fn align_trace(&mut self, alignment: ClockAlignment) {
        if let Some(recorder) = self.resources.trace.recorder() {
            recorder.align(alignment);
        }
    }

    /// Writes the timeline of this rank, if it is recorded. Afterwards nothing is written any more.
    pub fn write_trace(&mut self) {
        if let Some(recorder) = self.resources.trace.recorder() {
            recorder.write();
        }
    }

    /// Removes all programs; their numbers may be used again.
    pub fn uninstall_all(&mut self) {
        self.programs.clear();
    }

    /// Adds a program, and allocates all that running it needs for vectors of usual length.
    ///
    /// # Errors
    /// `InvalidSetting` if the pool has no slot for each of the program's links.
    pub fn install(&mut self, program: Arc<Program>) -> Result<ProgramNumber> {
        self.programs.install(&self.resources, program)
    }

    /// Whether links still exchange messages with peers over the control connections, because connections are
    /// broken or not made yet.
    #[must_use]
    pub fn needs_control_connection(&self) -> bool {
        self.resources.links.need_control_connection()
    }

    /// Executes one call. After a failure no link and no device touches the caller's memory, and every later
    /// call fails. `report` gets the error before the links and devices are stopped, because that may take a
    /// device any time.
    ///
    /// # Errors
    /// What `report` returns for the first error of this rank, or for `Aborted` after an earlier call has
    /// failed.
    pub fn run(&mut self, bound: &BoundCall, path: &CallPath, report: ReportFailure<'_>) -> Result<()> {
        self.guarded(&bound.call, report, |executor| {
            let Executor { resources, programs, groups, small, .. } = executor;
            groups.close(resources.rank, &bound.call)?;
            match path {
                CallPath::Small => small
                    .as_mut()
                    .expect("the communicator asks for it only if there is one")
                    .run(resources, bound),
                CallPath::Program { number, facts } => programs.run(resources, bound, *number, facts),
            }
        })
    }

    /// Executes one group of sends and receives. After a failure as [`run`](Self::run).
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn run_group(&mut self, bound: &BoundGroup, report: ReportFailure<'_>) -> Result<()> {
        self.guarded(&bound.call, report, |executor| executor.groups.run(&mut executor.resources, bound))
    }

    /// Carries the messages of one call that kernels run. After a failure as [`run`](Self::run).
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub fn relay(
        &mut self,
        announced: AnnouncedCall<'_>,
        messages: &[RelayedMessages],
        report: ReportFailure<'_>,
    ) -> Result<()> {
        self.guarded(announced.call, report, |executor| {
            let Executor { resources, groups, relays, .. } = executor;
            relays.run(resources, groups, announced, messages)
        })
    }

    /// Executes a call by `body`. If that fails or panics, reports the error and then aborts the call.
    fn guarded(
        &mut self,
        call: &Call,
        report: ReportFailure<'_>,
        body: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        if self.failed {
            return Err(report(Error::aborted("the communicator has failed before")));
        }
        // Assume failure until Ok, so that the guard aborts the call if `report` panics, too.
        self.failed = true;
        let guard = CallGuard(self);
        if let Some(recorder) = guard.0.resources.trace.recorder() {
            recorder.call_begins(call);
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| body(&mut *guard.0))).unwrap_or_else(|panic| {
            Err(Error::panicked(&*panic).context(format_args!("rank {}", guard.0.resources.rank)))
        });
        guard.0.failed = outcome.is_err();
        if let Some(recorder) = guard.0.resources.trace.recorder() {
            recorder.call_ends(outcome.is_err());
        }
        outcome.map_err(report)
    }
}
