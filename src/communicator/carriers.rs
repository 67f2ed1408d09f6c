//! The control connections of this process that further communicators can use.
//!
//! Owns the list of them, and which of them a new communicator uses. Must not know how a world is opened over one.

use crate::bootstrap::ControlConnection;
use crate::process::PerProcess;
use crate::rank::Rank;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How many connections a rank offers: the newest ones.
const MOST: usize = 32;

/// Identifies the connections of one rendezvous: equal on all its ranks. Random.
pub(super) type CarrierKey = [u8; 16];

/// A control connection that a world of this process uses.
struct Carrier {
    key: CarrierKey,
    connection: Weak<ControlConnection>,
}

/// Oldest first.
static CARRIERS: PerProcess<Mutex<Vec<Carrier>>> = PerProcess::new();

/// Lets later communicators of this process use the connection of this world, as long as the world lives. `key` is that of the
/// rendezvous that the connection was made in.
pub(super) fn keep(key: CarrierKey, connection: &Arc<ControlConnection>) {
    let mut carriers = CARRIERS.get().lock().unwrap_or_else(PoisonError::into_inner);
    carriers.retain(|carrier| carrier.connection.strong_count() > 0);
    carriers.push(Carrier { key, connection: Arc::downgrade(connection) });
}

/// What a rank offers to use together with the other ranks of a new communicator: the key of each connection, and its rank in the
/// rendezvous.
pub(super) type OfferedRanks = Vec<(CarrierKey, Rank)>;

/// The connections that this process offers. They live until the offer is dropped.
pub(super) struct CarrierOffer(Vec<(CarrierKey, Arc<ControlConnection>)>);

impl CarrierOffer {
    /// The connections of this process that ranks who meet in `meeting` can use, one world of each, but for rendezvous in which this
    /// process has several ranks: a new rank could not tell which is its own.
    pub(super) fn of_this_process(meeting: &ControlConnection) -> Self {
        let carriers = CARRIERS.get().lock().unwrap_or_else(PoisonError::into_inner);
        let alive = |carrier: &Carrier| Some((carrier.key, carrier.connection.upgrade()?));
        let all: Vec<(CarrierKey, Arc<ControlConnection>)> =
            carriers.iter().rev().filter_map(alive).collect();
        drop(carriers);
        let mut offered: Vec<(CarrierKey, Arc<ControlConnection>)> = Vec::new();
        for (key, connection) in &all {
            let is_other = |other: &(CarrierKey, Arc<ControlConnection>)| {
                other.0 == *key && other.1.rank_of_connection() != connection.rank_of_connection()
            };
            let is_usable = connection.can_replace(meeting) && !offered.iter().any(|(known, _)| known == key);
            if offered.len() < MOST && is_usable && !all.iter().any(is_other) {
                offered.push((*key, Arc::clone(connection)));
            }
        }
        Self(offered)
    }

    /// What the other ranks need to know of it.
    pub(super) fn ranks(&self) -> OfferedRanks {
        self.0.iter().map(|(key, connection)| (*key, connection.rank_of_connection())).collect()
    }

    /// The connection over which the ranks that made these offers, in the order of the new ranks, can open their world, its key, and
    /// their ranks there; `None` if there is none. All find the same.
    pub(super) fn common(
        &self,
        offers: &[&OfferedRanks],
    ) -> Option<(CarrierKey, &Arc<ControlConnection>, Vec<Rank>)> {
        let rank_in = |offer: &OfferedRanks, key: &CarrierKey| {
            offer.iter().find(|(offered, _)| offered == key).map(|(_, rank)| *rank)
        };
        offers.first()?.iter().find_map(|(key, _)| {
            let members: Vec<Rank> = offers.iter().map(|offer| rank_in(offer, key)).collect::<Option<_>>()?;
            let are_different = members.iter().collect::<BTreeSet<_>>().len() == members.len();
            let (_, connection) = self.0.iter().find(|(known, _)| known == key)?;
            let can_open = are_different && connection.can_open_over_connection(&members);
            can_open.then_some((*key, connection, members))
        })
    }
}
