//! How the ranks of one node exchange the descriptors of their arenas and wake-ups.
//!
//! The rank at place 0 is the leader. Every other rank connects to the leader's socket and sends its descriptors; when all have come, the
//! leader sends each rank those of all others. So the number of packets grows with the number of ranks, not with its square.
//!
//! Every rank draws the name of its socket and a secret at random, and the ranks exchange both at the rendezvous. The name is
//! public, as the system lists abstract sockets; only ranks of the job have the secret. Owns who may take part in
//! the exchange: processes of this user that have the secret, one for each place. Must not know what is done with the
//! arenas afterwards.
//!
//! | file | owns |
//! |---|---|
//! | `channel` | sockets, and descriptors in packets |
//! | `message` | the contents of packets, and their authentication |
//! | `leader`, `member` | both sides of the exchange |

mod channel;
mod leader;
mod member;
mod message;
#[cfg(test)]
mod tests;

use super::layout::ArenaLayout;
use super::neighbours::{Neighbour, Neighbours};
use crate::descriptor_limit;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::interrupt::longest_sleep;
use crate::memory::Arena;
use crate::rank::RankList;
use crate::secret::{SecretKey, random_bytes};
use crate::transport::Rank;
use crate::wake::WakeFd;
use channel::{ChannelListener, SocketName};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest sleep, so that a missed wake-up costs no more than that.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Descriptors that a process has besides those of its neighbours: estimated.
const OTHER_DESCRIPTORS: usize = 64;

/// By what the ranks of a node reach a rank's socket: its public name, and the secret by which both sides authenticate their packets.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
pub struct ExchangeAddress {
    name: SocketName,
    secret: [u8; 32],
}

impl ExchangeAddress {
    fn key(&self) -> SecretKey {
        SecretKey::from_bytes(self.secret)
    }
}

/// A rank's socket. Created before the ranks exchange its address at the rendezvous.
pub struct DescriptorExchange {
    listener: ChannelListener,
    address: ExchangeAddress,
}

impl DescriptorExchange {
    /// Opens a socket with a random name and a random secret.
    ///
    /// # Errors
    /// `System` if no socket can be created or the system has no random numbers.
    pub fn new() -> Result<Self> {
        let address = ExchangeAddress { name: random_bytes()?, secret: random_bytes()? };
        Ok(Self { listener: ChannelListener::new(&address.name)?, address })
    }

    /// The address that all ranks of the node need. It contains the secret.
    #[must_use]
    pub fn address(&self) -> ExchangeAddress {
        self.address.clone()
    }

    /// Exchanges the descriptors of this rank's arena and wake-ups for those of all neighbours. `node` lists the ranks of the node
    /// with their addresses, in the same order on all of them; all arenas are laid out by `layout`.
    ///
    /// # Errors
    /// `Rendezvous`, naming the missing ranks, if some have not sent theirs by `deadline`; `System` if the leader cannot be
    /// reached or descriptors run out; `PeerLost` if a rank ends meanwhile; or the error of `fault` if it is raised meanwhile.
    pub fn run(
        self,
        me: Rank,
        node: &[(Rank, ExchangeAddress)],
        arena: &Arena,
        layout: ArenaLayout,
        deadline: Instant,
        fault: &Fault,
    ) -> Result<Neighbours> {
        let place = node.iter().position(|(rank, _)| *rank == me).expect("this rank is on its node");
        let own = OwnDescriptors::new(arena, layout)?;
        let ranks: Vec<Rank> = node.iter().map(|(rank, _)| *rank).collect();
        let gathering = Gathering { ranks: &ranks, place, per_rank: own.list().len(), deadline, fault };
        let received = if place == 0 {
            leader::lead(&gathering, self.listener, &self.address.key(), &own)?
        } else {
            member::follow(&gathering, &node[0].1, &own)?
        };
        let neighbour = |(place, descriptors): (usize, Vec<OwnedFd>)| {
            let mut descriptors = descriptors.into_iter();
            let (Some(file), Some(wake)) = (descriptors.next(), descriptors.next()) else {
                return Err(Error::internal("a neighbour's descriptors are incomplete"));
            };
            let prefault = descriptors.next().map(WakeFd::from);
            Neighbour::new(ranks[place], place, file, wake.into(), prefault, layout)
        };
        let mut others = received.into_iter().map(neighbour).collect::<Result<Vec<_>>>()?;
        others.sort_by_key(|other| other.local_rank);
        Ok(Neighbours { local_rank: place, wake: own.wake, prefault: own.prefault, others })
    }
}

/// The descriptors that a rank gives to its neighbours.
struct OwnDescriptors {
    /// Its arena, for reading only.
    file: OwnedFd,
    /// Neighbours write to these two: notifying is writing.
    wake: Arc<WakeFd>,
    prefault: Option<Arc<WakeFd>>,
}

impl OwnDescriptors {
    fn new(arena: &Arena, layout: ArenaLayout) -> Result<Self> {
        Ok(Self {
            file: arena.read_only_file()?,
            wake: Arc::new(WakeFd::new()?),
            prefault: layout.is_prefaulted().then(WakeFd::new).transpose()?.map(Arc::new),
        })
    }

    fn list(&self) -> Vec<BorrowedFd<'_>> {
        let mut list = vec![self.file.as_fd(), self.wake.as_fd()];
        list.extend(self.prefault.as_ref().map(|prefault| prefault.as_fd()));
        list
    }
}

/// The circumstances of one exchange.
struct Gathering<'a> {
    /// The ranks of the node, by place.
    ranks: &'a [Rank],
    /// This rank's place.
    place: usize,
    /// Descriptors of each rank.
    per_rank: usize,
    deadline: Instant,
    fault: &'a Fault,
}

impl Gathering<'_> {
    /// Whether a rank other than this one may be at this place.
    fn is_other(&self, place: usize) -> bool {
        place < self.ranks.len() && place != self.place
    }

    /// Sleeps until one of `sockets` is readable, the fault is raised, or `longest` is over. The caller checks everything
    /// again, whatever ended the sleep.
    fn wait<'a>(&'a self, sockets: impl Iterator<Item = BorrowedFd<'a>>, longest: Duration) {
        let longest = longest.min(LONGEST_SLEEP).min(longest_sleep());
        let longest = Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        let fault = [self.fault.wake_fd()].into_iter();
        let mut descriptors: Vec<PollFd<'_>> =
            fault.chain(sockets).map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
        let _ = poll(&mut descriptors, Some(&longest));
    }

    fn missing(&self, places: &[usize]) -> Error {
        let missing: Vec<Rank> = places.iter().filter_map(|place| self.ranks.get(*place).copied()).collect();
        Error::rendezvous(format!(
            "{} on this node did not share their memory before FLEXRING_CONNECT_TIMEOUT_MS ran out",
            RankList::new(&missing)
        ))
    }

    /// The kernel discarded descriptors that a rank has sent, because this process has too many.
    fn out_of_descriptors(&self) -> Error {
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
