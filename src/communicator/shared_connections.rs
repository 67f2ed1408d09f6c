//! The control connections of this process that further communicators can use.
//!
//! Owns the list of them, and which of them a new communicator uses.

use super::resource_offers::{OfferedResources, ResourceKey, common};
use crate::bootstrap::ControlConnection;
use crate::process::PerProcess;
use crate::rank::Rank;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How many connections a rank offers: the newest ones.
const MOST: usize = 32;

/// A control connection that a world of this process uses.
struct OfferedConnection {
    key: ResourceKey,
    connection: Weak<ControlConnection>,
}

/// Oldest first.
static CONNECTIONS: PerProcess<Mutex<Vec<OfferedConnection>>> = PerProcess::new();

/// Lets later communicators of this process use the connection of this world, as long as the world lives.
/// `key` identifies the rendezvous that the connection was made in.
pub(super) fn keep(key: ResourceKey, connection: &Arc<ControlConnection>) {
    let mut connections = CONNECTIONS.get().lock().unwrap_or_else(PoisonError::into_inner);
    connections.retain(|shared| shared.connection.strong_count() > 0);
    connections.push(OfferedConnection { key, connection: Arc::downgrade(connection) });
}

/// Begins to leave the world of this connection, unless a communicator is being made that may use the
/// connection. Then the last of both to be dropped leaves.
pub(super) fn begin_leaving(connection: &Arc<ControlConnection>) {
    let mut connections = CONNECTIONS.get().lock().unwrap_or_else(PoisonError::into_inner);
    connections.retain(|shared| !std::ptr::eq(shared.connection.as_ptr(), Arc::as_ptr(connection)));
    if Arc::strong_count(connection) == 1 {
        connection.begin_leaving();
    }
}

/// The connections that this process offers, with the keys of their rendezvous. They live until the offer is
/// dropped.
#[derive(Default)]
pub(super) struct ConnectionOffer(Vec<(ResourceKey, Arc<ControlConnection>)>);

impl ConnectionOffer {
    /// The connections of this process that ranks who meet in `meeting` can use, one world of each, but for
    /// rendezvous in which this process has several ranks: a new rank could not tell which is its own.
    pub(super) fn of_this_process(meeting: &ControlConnection) -> Self {
        let connections = CONNECTIONS.get().lock().unwrap_or_else(PoisonError::into_inner);
        let alive = |shared: &OfferedConnection| Some((shared.key, shared.connection.upgrade()?));
        let all: Vec<(ResourceKey, Arc<ControlConnection>)> =
            connections.iter().rev().filter_map(alive).collect();
        drop(connections);
        let mut offered: Vec<(ResourceKey, Arc<ControlConnection>)> = Vec::new();
        for (key, connection) in &all {
            let is_other = |other: &(ResourceKey, Arc<ControlConnection>)| {
                other.0 == *key && other.1.rank_of_connection() != connection.rank_of_connection()
            };
            let is_usable = connection.can_replace(meeting) && !offered.iter().any(|(known, _)| known == key);
            if offered.len() < MOST && is_usable && !all.iter().any(is_other) {
                offered.push((*key, Arc::clone(connection)));
            }
        }
        Self(offered)
    }

    /// What the other ranks need to know of it: the rank of this process in each rendezvous.
    pub(super) fn ranks(&self) -> OfferedResources {
        self.0.iter().map(|(key, connection)| (*key, connection.rank_of_connection())).collect()
    }

    /// The connection over which the ranks that made these offers, in the order of the new ranks, can open
    /// their world, its key, and their ranks there; `None` if there is none. All find the same.
    pub(super) fn common(
        &self,
        offers: &[&OfferedResources],
    ) -> Option<(ResourceKey, &Arc<ControlConnection>, Vec<Rank>)> {
        let all: Vec<Rank> = (0..offers.len()).collect();
        common(&all, offers).find_map(|(key, members)| {
            let (_, connection) = self.0.iter().find(|(known, _)| *known == key)?;
            connection.can_open_over_connection(&members).then_some((key, connection, members))
        })
    }
}
