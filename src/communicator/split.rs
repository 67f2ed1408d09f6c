//! Split: the ranks make one communicator for each color.
//!
//! Owns who is in which, and in which order.

use super::Communicator;
use super::control_plane::{ControlPlane, LocalMember};
use super::join::ConnectionOrigin;
use super::local_gathering::{GatheringRequest, LocalGathering};
use super::shrink::distribute;
use super::world_template::{LocalRank, WorldTemplate};
use crate::bootstrap::{ControlConnection, Coordinator, Identity, UniqueId};
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::process::DefaultFloatEnvironment;
use crate::rank::{Rank, RankList};
use crate::secret::random_bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

impl Communicator {
    /// A color for [`split`](Self::split): the rank takes part in the call, and is in no new communicator.
    pub const NO_COLOR: i32 = -1;

    /// Makes one communicator for each color, of the ranks that pass that color, ordered by `key` and then by
    /// their rank here. Returns `None` for [`NO_COLOR`](Self::NO_COLOR). All ranks must call it between the
    /// same two calls, as any collective.
    ///
    /// # Errors
    /// `InvalidArgument` for another negative color, before any other rank is affected; `PeerLost` if a rank
    /// has left; the error that ended this communicator, if it has failed; the errors of
    /// [`from_env`](Self::from_env).
    pub fn split(&self, color: i32, key: i32) -> Result<Option<Self>> {
        let _default = DefaultFloatEnvironment::enter();
        if color < 0 && color != Self::NO_COLOR {
            let message = format!("the color is {color}, neither NO_COLOR nor a number from 0");
            return Err(Error::invalid_argument(message));
        }
        self.synchronize()?;
        match (&self.runner.control, &self.template.gathering) {
            (ControlPlane::Threads(member), Some(gathering)) => {
                split_threads(&self.template, member, gathering, color, key)
            }
            (ControlPlane::Processes(connection), _) => self.split_processes(connection, color, key),
            (ControlPlane::Threads(_), None) => Err(Error::internal("threads without a place to meet")),
        }
    }

    fn split_processes(&self, connection: &ControlConnection, color: i32, key: i32) -> Result<Option<Self>> {
        let mine = SplitOffer { choice: ColorChoice { color, key }, id: random_bytes()? };
        let label = "colors and keys";
        let offers = connection.all_gather(label, &mine.to_bytes())?;
        let offer = |(rank, bytes): (Rank, &Vec<u8>)| {
            SplitOffer::from_bytes(bytes).ok_or_else(|| ControlConnection::unreadable(label, rank))
        };
        let offers: Vec<SplitOffer> = offers.iter().enumerate().map(offer).collect::<Result<_>>()?;
        let choices = || offers.iter().map(|offer| offer.choice).enumerate();
        let members = members_of(color, choices());
        let leader = members.first().copied().filter(|_| color >= 0);
        // Worlds that the control connections of this one cannot carry need a unique id. All ranks find the
        // same colors.
        let needs_id = |color: i32| color >= 0 && !connection.can_open(&members_of(color, choices()));
        let mut unique_id = None;
        if choices().any(|(_, choice)| needs_id(choice.color)) {
            unique_id = self.exchange_ids(connection, leader.filter(|_| needs_id(color)))?;
        }
        let Some(leader) = leader else { return Ok(None) };
        let mut spec = self.template.for_members(&members);
        // Nothing is left behind: the ranks keep this communicator.
        spec.ancestors.clear();
        let fault = Arc::new(Fault::new());
        let Some((id, _created)) = unique_id else {
            let id = u128::from_le_bytes(offers[leader].id);
            let opened = connection.open_world(id, &members, &spec.config, Arc::clone(&fault))?;
            let origin =
                self.template.connection_key.map_or(ConnectionOrigin::Address, ConnectionOrigin::Opened);
            return Self::join_over(spec, opened, origin, fault)
                .map(Some)
                .map_err(|error| self.cause_of(error));
        };
        let position = members.iter().position(|member| *member == self.rank());
        let rank = position.ok_or_else(|| Error::internal("this rank is no member of its new world"))?;
        let identity = Identity::from_unique_id(members.len(), &id, rank)?;
        // The coordinator serves the new world without its handle.
        Self::join(spec, &identity, fault).map(Some).map_err(|error| self.cause_of(error))
    }

    /// Why no communicator could be made of ranks of this one: the failure of this one, which knows their
    /// ranks, or `error`.
    fn cause_of(&self, error: Error) -> Error {
        self.runner.fault.get().cloned().unwrap_or(error)
    }

    /// Takes part in the exchange of unique ids, which the first rank of each color creates that needs one.
    /// Returns that of `leader`, the first rank of this rank's color, with its coordinator if this is the
    /// leader. A failure is exchanged, too.
    fn exchange_ids(
        &self,
        connection: &ControlConnection,
        leader: Option<Rank>,
    ) -> Result<Option<(UniqueId, Option<Coordinator>)>> {
        let label = "unique ids";
        let key = connection.secret().derive("split", &[]);
        let created = (leader == Some(self.rank())).then(|| Coordinator::create(&self.template.config));
        let mine: Option<Result<Vec<u8>>> = created.as_ref().map(|created| match created {
            Ok((_, id)) => id.hide(&key),
            Err(error) => Err(error.clone()),
        });
        let mut ids = connection.gather_values(label, &mine)?;
        let Some(leader) = leader else { return Ok(None) };
        let id = ids.swap_remove(leader).ok_or_else(|| ControlConnection::unreadable(label, leader))?;
        let id = UniqueId::reveal(&id.map_err(|error| error.context(format_args!("rank {leader}")))?, &key)?;
        Ok(Some((id, created.and_then(Result::ok).map(|(coordinator, _)| coordinator))))
    }
}

/// What a rank sends to all others in a split: its choice, and a random number for the world that it may be
/// the first rank of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SplitOffer {
    choice: ColorChoice,
    id: [u8; 16],
}

impl SplitOffer {
    fn to_bytes(self) -> Vec<u8> {
        [self.choice.to_bytes().as_slice(), &self.id].concat()
    }

    /// `None` if the bytes are too few or too many.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (choice, id) = bytes.split_first_chunk()?;
        Some(Self { choice: ColorChoice::from_bytes(*choice), id: id.try_into().ok()? })
    }
}

/// What a rank passes to a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ColorChoice {
    color: i32,
    key: i32,
}

impl ColorChoice {
    fn to_bytes(self) -> [u8; 8] {
        (u64::from(self.color as u32) << 32 | u64::from(self.key as u32)).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 8]) -> Self {
        let both = u64::from_le_bytes(bytes);
        Self { color: (both >> 32) as u32 as i32, key: both as u32 as i32 }
    }
}

/// The ranks with this color, in their new order.
fn members_of(color: i32, choices: impl Iterator<Item = (Rank, ColorChoice)>) -> Vec<Rank> {
    let mut members: Vec<(i32, Rank)> = choices
        .filter(|(_, choice)| choice.color == color)
        .map(|(rank, choice)| (choice.key, rank))
        .collect();
    members.sort_unstable();
    members.into_iter().map(|(_, rank)| rank).collect()
}

/// Splits a communicator whose ranks are threads of this process.
fn split_threads(
    template: &WorldTemplate,
    member: &LocalMember,
    gathering: &LocalGathering<LocalRank>,
    color: i32,
    key: i32,
) -> Result<Option<Communicator>> {
    let world = member.group.world();
    let missing = |requests: &BTreeMap<Rank, GatheringRequest>| {
        let missing: Vec<Rank> = (0..world).filter(|rank| !requests.contains_key(rank)).collect();
        let present = member.group.present();
        match missing.iter().find(|rank| !present.contains(rank)) {
            Some(left) => {
                let message = format!("rank {left} has left without this split: all ranks must call it");
                Err(Error::peer_lost(message).with_suspect(*left))
            }
            None => Ok(missing),
        }
    };
    let late = |missing: &[Rank]| {
        let missing = RankList::new(missing);
        let have = missing.have();
        Error::timeout(format!("{missing} {have} not called split: all ranks must call it"))
    };
    let deadline = Instant::now() + template.config.connect_timeout;
    let request = GatheringRequest::Split { color, key };
    let finish = |requests| split_for_all(template, &requests);
    let made = gathering.gather(member.rank, request, missing, finish, deadline, late)?;
    Ok(made.map(|made| Communicator::new(made.runner, made.template)))
}

/// Acts for all ranks.
fn split_for_all(
    template: &WorldTemplate,
    requests: &BTreeMap<Rank, GatheringRequest>,
) -> BTreeMap<Rank, Result<Option<LocalRank>>> {
    let mut choices: Vec<(Rank, ColorChoice)> = Vec::new();
    for (rank, request) in requests {
        let GatheringRequest::Split { color, key } = *request else {
            let error = Error::disagreement(format!("rank {rank} calls {request:?} while other ranks split"));
            return requests.keys().map(|rank| (*rank, Err(error.clone()))).collect();
        };
        choices.push((*rank, ColorChoice { color, key }));
    }
    let mut colors: Vec<i32> =
        choices.iter().map(|(_, choice)| choice.color).filter(|color| *color >= 0).collect();
    colors.sort_unstable();
    colors.dedup();
    let mut results: BTreeMap<Rank, Result<Option<LocalRank>>> =
        requests.keys().map(|rank| (*rank, Ok(None))).collect();
    for color in colors {
        let members = members_of(color, choices.iter().copied());
        let made = Communicator::local_ranks(template.for_members(&members), members.len());
        results.append(&mut distribute(&members, made));
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colors_and_keys_survive_the_exchange() {
        for choice in [(0, 0), (7, -3), (i32::MAX, i32::MIN), (-1, i32::MAX)] {
            let offer = SplitOffer { choice: ColorChoice { color: choice.0, key: choice.1 }, id: [7; 16] };
            assert_eq!(SplitOffer::from_bytes(&offer.to_bytes()), Some(offer));
        }
        assert!(SplitOffer::from_bytes(&[0; 23]).is_none() && SplitOffer::from_bytes(&[0; 25]).is_none());
    }

    #[test]
    fn members_are_ordered_by_key_and_then_by_rank() {
        let choices = [(1, 5), (0, 0), (1, -2), (1, 5), (-1, 0)];
        let choices = choices.map(|(color, key)| ColorChoice { color, key });
        assert_eq!(members_of(1, choices.into_iter().enumerate()), [2, 0, 3]);
        assert_eq!(members_of(0, choices.into_iter().enumerate()), [1]);
        assert!(members_of(3, choices.into_iter().enumerate()).is_empty());
    }
}
