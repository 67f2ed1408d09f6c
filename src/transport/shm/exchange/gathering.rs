//! What both sides of the exchange use: addresses, a rank's own descriptors, waits and errors.
//!
//! Owns their contents.

use super::channel::SocketName;
use crate::descriptor_limit;
use crate::error::{Error, Result};
use crate::fault::{Fault, FaultWatch};
use crate::interrupt::longest_sleep;
use crate::rank::RankList;
use crate::secret::SecretKey;
use crate::transport::Rank;
use crate::transport::shm::node_memory::OwnMemory;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The longest sleep, so that a missed wake-up costs no more than that.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Descriptors that a process has besides those of its neighbours: estimated.
const OTHER_DESCRIPTORS: usize = 64;

/// By what the ranks of a node reach a rank's socket: its public name, and the secret by which both sides
/// authenticate their packets.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
pub struct ExchangeAddress {
    pub(super) name: SocketName,
    pub(super) secret: [u8; 32],
}

impl ExchangeAddress {
    pub(super) fn key(&self) -> SecretKey {
        SecretKey::from_bytes(self.secret)
    }
}

/// The descriptors that a process gives to its neighbours.
pub(super) struct OwnDescriptors<'a> {
    /// Its arena, for reading only.
    file: OwnedFd,
    memory: &'a OwnMemory,
}

impl<'a> OwnDescriptors<'a> {
    pub(super) fn new(memory: &'a OwnMemory) -> Result<Self> {
        Ok(Self { file: memory.arena().read_only_file()?, memory })
    }

    /// The arena's, and those that neighbours write to, because notifying is writing: those of the executors,
    /// and that of the thread that prefaults.
    pub(super) fn list(&self) -> Vec<BorrowedFd<'_>> {
        let mut list = vec![self.file.as_fd()];
        list.extend(self.memory.lanes().eventfds().iter().map(|eventfd| eventfd.as_fd()));
        list.extend(self.memory.prefault().map(|prefault| prefault.as_fd()));
        list
    }
}

/// The circumstances of one exchange.
pub(super) struct Gathering<'a> {
    /// The ranks of the node, by place.
    pub(super) ranks: &'a [Rank],
    /// This rank's place.
    pub(super) place: usize,
    /// Descriptors of each rank.
    pub(super) per_rank: usize,
    pub(super) deadline: Instant,
    pub(super) fault: &'a Fault,
    /// Wakes this rank when the fault is raised.
    pub(super) watch: FaultWatch,
}

impl Gathering<'_> {
    /// Whether a rank other than this one may be at this place.
    pub(super) fn is_other(&self, place: usize) -> bool {
        place < self.ranks.len() && place != self.place
    }

    /// Sleeps until one of `sockets` is readable, the fault is raised, or `longest` is over. The caller
    /// checks everything again, whatever ended the sleep.
    pub(super) fn wait<'a>(&'a self, sockets: impl Iterator<Item = BorrowedFd<'a>>, longest: Duration) {
        let longest = longest.min(LONGEST_SLEEP).min(longest_sleep());
        let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let fault = [self.watch.as_fd()].into_iter();
        let mut descriptors: Vec<PollFd<'_>> =
            fault.chain(sockets).map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
        let _ = poll(&mut descriptors, Some(&longest));
    }

    pub(super) fn missing(&self, places: &[usize]) -> Error {
        let missing: Vec<Rank> = places.iter().filter_map(|place| self.ranks.get(*place).copied()).collect();
        Error::rendezvous(format!(
            "{} on this node did not share their memory before FLEXRING_CONNECT_TIMEOUT_MS ran out",
            RankList::new(&missing)
        ))
    }

    /// The kernel discarded descriptors that a rank has sent, because this process has too many.
    pub(super) fn out_of_descriptors(&self) -> Error {
        let ranks = self.ranks.len();
        let limit = descriptor_limit::current().map_or_else(|| "none".to_owned(), |limit| limit.to_string());
        Error::system(format!(
            "rank {} has no descriptors left to share memory with the {ranks} ranks of this node: it needs {} for them and about \
             {OTHER_DESCRIPTORS} others, and its limit is {limit} (fix: raise the limit, `ulimit -n`)",
            self.ranks[self.place],
            // The leader also has a connection to each.
            (self.per_rank + 1) * ranks,
        ))
    }
}
