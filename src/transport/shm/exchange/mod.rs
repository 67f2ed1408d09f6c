//! How the ranks of one node exchange the descriptors of their arenas and wake-ups.
//!
//! The rank at place 0 is the leader. Every other rank connects to the leader's socket and sends its
//! descriptors; when all have come, the leader sends each rank those of all others. So the number of packets
//! grows with the number of ranks, not with its square.
//!
//! Every rank draws the name of its socket and a secret at random, and the ranks exchange both at the
//! rendezvous. The name is public, as the system lists abstract sockets; only ranks of the job have the
//! secret. Owns who may take part in the exchange: processes of this user that have the secret, one for each
//! place.
//!
//! | file | owns |
//! |---|---|
//! | `channel` | sockets, and descriptors in packets |
//! | `gathering` | what both sides use: addresses, own descriptors, waits and errors |
//! | `message` | the contents of packets, and their authentication |
//! | `leader`, `member` | both sides of the exchange |

pub(super) mod channel;
mod gathering;
mod leader;
mod member;
mod message;
#[cfg(test)]
mod tests;

pub use gathering::ExchangeAddress;

use super::node_memory::{NodeKey, NodeMemory, OwnMemory, PeerMemory};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::secret::random_bytes;
use crate::transport::Rank;
use crate::wake::WakeFd;
use channel::ChannelListener;
use gathering::{Gathering, OwnDescriptors};
use std::sync::Arc;
use std::time::Instant;

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

    /// Exchanges the descriptors of this process's memory for those of all neighbours. `node` lists the ranks
    /// of the node with their addresses, in the same order on all of them, and `key` identifies them.
    ///
    /// # Errors
    /// `Rendezvous`, naming the missing ranks, if some have not sent theirs by `deadline`; `System` if the
    /// leader cannot be reached or descriptors run out; `PeerLost` if a rank ends meanwhile; or the error of
    /// `fault` if it is raised meanwhile.
    pub fn run(
        self,
        me: Rank,
        node: &[(Rank, ExchangeAddress)],
        memory: &Arc<OwnMemory>,
        key: NodeKey,
        deadline: Instant,
        fault: &Fault,
    ) -> Result<NodeMemory> {
        let place = node.iter().position(|(rank, _)| *rank == me).expect("this rank is on its node");
        let own = OwnDescriptors::new(memory)?;
        let ranks: Vec<Rank> = node.iter().map(|(rank, _)| *rank).collect();
        let (per_rank, watch) = (own.list().len(), fault.watch()?);
        let gathering = Gathering { ranks: &ranks, place, per_rank, deadline, fault, watch };
        let received = if place == 0 {
            leader::lead(&gathering, self.listener, &self.address.key(), &own)?
        } else {
            member::follow(&gathering, &node[0].1, &own)?
        };
        let wakes = memory.lanes().eventfds().len();
        let mut peers: Vec<Option<PeerMemory>> = ranks.iter().map(|_| None).collect();
        for (place, descriptors) in received {
            let mut descriptors = descriptors.into_iter();
            let file = descriptors
                .next()
                .ok_or_else(|| Error::internal("a neighbour's descriptors are incomplete"))?;
            let wakes = descriptors.by_ref().take(wakes).map(WakeFd::from).collect();
            let prefault = descriptors.next().map(WakeFd::from);
            let peer = PeerMemory::new(file, wakes, prefault, ranks.len());
            peers[place] = Some(peer.map_err(|error| error.context(format_args!("rank {}", ranks[place])))?);
        }
        NodeMemory::new(key, place, Arc::clone(memory), peers)
    }
}
