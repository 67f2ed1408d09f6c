//! Subworlds over the control connections of one.
//!
//! Owns what a rank checks before it opens a world, and how it waits for the others. Must not know how the
//! coordinator decides (`subworlds`), or what the world is for.

use super::control_connection::{ControlConnection, GRACE};
use super::heartbeat::seconds;
use super::protocol::ToCoordinator;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::rank::Rank;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

impl ControlConnection {
    /// Whether [`open_world`](Self::open_world) is possible with these members: the process of the first one
    /// runs the coordinator.
    #[must_use]
    pub fn can_open(&self, members: &[Rank]) -> bool {
        members.first().and_then(|first| self.first_ranks.get(*first)).is_some_and(|first| self.hosts(*first))
    }

    /// Opens a subworld over this connection, at the same coordinator, and returns when all its members have.
    /// It needs no thread, no descriptor and no rendezvous, and is a world like any other: it fails, and is
    /// left, by itself, and may outlive this one. It does not matter whether this one has failed.
    ///
    /// `members` are ranks of this world, in the order of their new ranks, with the calling rank among them.
    /// `id` must be the same on all members, and unlike that of any other world: draw 16 random bytes.
    /// Several threads may open worlds at once, and members may open several worlds in different orders.
    /// `fault` is raised when the new world fails.
    ///
    /// # Errors
    /// `InvalidArgument` if `members` are not as above, or if this process has opened a world with this id;
    /// `Unsupported` unless [`can_open`](Self::can_open); `Rendezvous`, naming the missing ranks, if not all
    /// members open the world within `connect_timeout`; `Disagreement` if their lists of members differ;
    /// `PeerLost` if one of them, or the coordinator, is gone; `System` if there are too many worlds.
    pub fn open_world(
        &self,
        id: u128,
        members: &[Rank],
        config: &Config,
        fault: Arc<Fault>,
    ) -> Result<ControlConnection> {
        self.service.creator.check("this control connection")?;
        let rank = self.rank_among(members)?;
        if !self.can_open(members) {
            return Err(Error::unsupported(format!(
                "cannot open a communicator over this connection: its rank 0, rank {} of {}, is not in the process that runs \
                 the coordinator; join by a unique id instead",
                members[0], self.world
            )));
        }
        let first_ranks: Vec<Rank> = members.iter().map(|member| self.first_ranks[*member]).collect();
        self.open(id, rank, first_ranks, config, fault)
    }

    /// The rank of this process in the world that the connection was made for.
    #[must_use]
    pub fn rank_of_connection(&self) -> Rank {
        self.service.first.rank
    }

    /// Whether the ranks that meet in `other` may open their world over this connection instead: it works, is
    /// encrypted if that one is, and only members of the job can be at its ends if that is so there.
    #[must_use]
    pub fn can_replace(&self, other: &ControlConnection) -> bool {
        let (own, other) = (&self.service.first.secret, &other.secret);
        let is_as_safe = own.is_encrypted() == other.is_encrypted() && own.is_secret() >= other.is_secret();
        is_as_safe && !self.shared.connection.has_ended()
    }

    /// This connection with the secret of `other`, in which the same ranks have met.
    #[must_use]
    pub fn with_secret_of(mut self, other: &ControlConnection) -> Self {
        self.secret = other.secret.clone();
        self
    }

    /// Whether [`open_world_over_connection`](Self::open_world_over_connection) is possible with these
    /// members.
    #[must_use]
    pub fn can_open_over_connection(&self, members: &[Rank]) -> bool {
        members.first().is_some_and(|first| self.hosts(*first))
    }

    /// Whether this rank of the world that the connection was made for is in the process that runs the
    /// coordinator.
    fn hosts(&self, first_rank: Rank) -> bool {
        self.service.first.host_ranks.contains(&first_rank)
    }

    /// [`open_world`](Self::open_world), but `members` are ranks of the world that the connection was made
    /// for, whichever of its worlds this one is.
    ///
    /// # Errors
    /// As for [`open_world`](Self::open_world).
    pub fn open_world_over_connection(
        &self,
        id: u128,
        members: &[Rank],
        config: &Config,
        fault: Arc<Fault>,
    ) -> Result<ControlConnection> {
        self.service.creator.check("this control connection")?;
        let own = self.rank_of_connection();
        let rank = members.iter().position(|member| *member == own);
        let rank = rank.filter(|_| self.can_open_over_connection(members)).ok_or_else(|| {
            Error::unsupported("these ranks cannot open a communicator over this connection")
        })?;
        self.open(id, rank, members.to_vec(), config, fault)
    }

    /// Opens a world of these ranks of the world that the connection was made for, as `rank` of the new one.
    fn open(
        &self,
        id: u128,
        rank: Rank,
        first_ranks: Vec<Rank>,
        config: &Config,
        fault: Arc<Fault>,
    ) -> Result<ControlConnection> {
        let members = first_ranks.len();
        let shared = Arc::new(self.shared.further(id, rank, fault));
        let timeout = config.connect_timeout;
        let message = ToCoordinator::Open { world: id, members: first_ranks.clone(), timeout };
        shared.connection.begin(id, &shared, message)?;
        // Dropping it withdraws from the attempt.
        let world = Self {
            rank,
            world: members,
            timeout,
            secret: self.service.first.secret.of_world(id),
            shared: Arc::clone(&shared),
            exchanges: Mutex::new(0),
            first_ranks,
            service: Arc::clone(&self.service),
        };
        let mut is_open = false;
        shared.wait(timeout + GRACE, |state| {
            is_open = state.is_open;
            is_open || state.root_cause.is_some() || state.ended
        });
        if is_open {
            return Ok(world);
        }
        shared.fault.check()?;
        if shared.state().ended {
            return Err(shared.coordinator_has_left("cannot open a communicator"));
        }
        Err(Error::timeout(format!(
            "the coordinator did not answer within {} when a communicator of {} ranks was opened",
            seconds(timeout),
            members
        )))
    }

    /// The rank of this process in a world of these members.
    fn rank_among(&self, members: &[Rank]) -> Result<Rank> {
        let refuse = |why: String| {
            Err(Error::invalid_argument(format!(
                "cannot open a communicator of {} ranks: {why}",
                members.len()
            )))
        };
        if let Some(unknown) = members.iter().find(|member| **member >= self.world) {
            return refuse(format!("rank {unknown} is not one of {}", self.world));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = members.iter().find(|member| !seen.insert(**member)) {
            return refuse(format!("rank {twice} is named twice"));
        }
        match members.iter().position(|member| *member == self.rank) {
            Some(rank) => Ok(rank),
            None => refuse(format!("rank {}, which opens it, is not among them", self.rank)),
        }
    }
}
