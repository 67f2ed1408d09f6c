//! Which rails of two ranks are connected.
//!
//! Owns which rails can reach each other, and the message if none can.

use super::rail::{MAX_RAILS, Rail};
use crate::rank::Rank;
use crate::transport::verbs::inventory::{GidKind, LinkLayer};
use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;

/// The rails of two ranks that are connected, as positions in the two lists; each is used at most once.
///
/// Rails of the same network and the same position on their nodes are paired first, as networks of several
/// rails connect these by the fewest switches; then others of the same network, then those that routers may
/// connect, each in the order of the lists. Reserves are used only if no two other rails have a network in
/// common: then the two ranks meet in the networks of either. The pairs are in the order of `mine`, so both
/// ranks pass the lower rank's list first.
///
/// Only the first [`MAX_RAILS`] of each list count: what a peer publishes is not trusted, and keys are
/// exchanged for that many.
#[must_use]
pub fn pair_rails(mine: &[Rail], theirs: &[Rail]) -> Vec<(usize, usize)> {
    let [mine, theirs] = [mine, theirs].map(|rails| &rails[..rails.len().min(MAX_RAILS)]);
    pair_all(mine, theirs)
}

/// Which rails of several ranks reach each other, all of them: groups that have, by rank, the position of the
/// rank's rail in its list, if it has one in the group. Each rail is in one group, alone if need be. A rank's
/// rails join groups as [`pair_rails`] pairs them with the first rail of each.
#[must_use]
pub fn match_rails(rails: &[Vec<Rail>]) -> Vec<Vec<Option<usize>>> {
    let (mut firsts, mut groups): (Vec<Rail>, Vec<Vec<Option<usize>>>) = (Vec::new(), Vec::new());
    for (rank, of_rank) in rails.iter().enumerate() {
        let pairs = pair_all(&firsts, of_rank);
        for (at, rail) in of_rank.iter().enumerate() {
            let joined = pairs.iter().find(|(_, mine)| *mine == at).map(|(group, _)| *group);
            let group = joined.unwrap_or_else(|| {
                firsts.push(rail.clone());
                groups.push(vec![None; rails.len()]);
                groups.len() - 1
            });
            groups[group][rank] = Some(at);
        }
    }
    groups
}

/// [`pair_rails`] of any number of rails.
fn pair_all(mine: &[Rail], theirs: &[Rail]) -> Vec<(usize, usize)> {
    type Relation = fn(&Rail, &Rail) -> bool;
    let owned: Relation = |one, other| !one.is_reserve && !other.is_reserve;
    let half_owned: Relation = |one, other| !one.is_reserve || !other.is_reserve;
    let same_position: Relation = |one, other| is_near(one, other) && one.position == other.position;
    let pair = |pairs: &mut Vec<(usize, usize)>, admitted: Relation, related: Relation| {
        for (at, rail) in mine.iter().enumerate() {
            if pairs.iter().any(|(used, _)| *used == at) {
                continue;
            }
            let free = |index: &usize| pairs.iter().all(|(_, used)| used != index);
            let fits = |index: &usize| admitted(rail, &theirs[*index]) && related(rail, &theirs[*index]);
            let partner = (0..theirs.len()).filter(free).find(fits);
            pairs.extend(partner.map(|partner| (at, partner)));
        }
    };
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    for admitted in [owned, half_owned, |_, _| true] {
        if pairs.is_empty() {
            pair(&mut pairs, admitted, same_position);
            pair(&mut pairs, admitted, is_near);
        }
    }
    // Routers may connect the ranks' own rails besides, unless both meet in a network by reserves.
    if pairs.iter().all(|(one, other)| owned(&mine[*one], &theirs[*other])) {
        pair(&mut pairs, owned, are_routed);
    }
    pairs.sort_unstable();
    pairs
}

/// Whether the rails reach each other without a router.
fn is_near(one: &Rail, other: &Rail) -> bool {
    agree(one, other) && one.network == other.network
}

/// Whether routers may connect the rails.
fn are_routed(one: &Rail, other: &Rail) -> bool {
    // A LID is valid in its subnet only, and RoCE version 1 is no IP.
    agree(one, other)
        && match one.layer {
            LinkLayer::Ethernet => one.gid_kind == GidKind::RoceV2,
            _ => one.flid != 0 && other.flid != 0,
        }
}

/// Whether the rails have the same packet format.
fn agree(one: &Rail, other: &Rail) -> bool {
    one.layer == other.layer
        && match one.layer {
            LinkLayer::InfiniBand => share_partition(one, other),
            LinkLayer::Ethernet => one.gid_kind == other.gid_kind && family(one) == family(other),
            LinkLayer::Other => false,
        }
}

/// Whether ports with these partition keys accept each other's packets: the partition is the same, and one of
/// them is a full member.
fn share_partition(one: &Rail, other: &Rail) -> bool {
    const FULL: u16 = 0x8000;
    let (one, other) = (one.partition, other.partition);
    one == 0 || other == 0 || ((one ^ other) & !FULL == 0 && (one | other) & FULL != 0)
}

fn family(rail: &Rail) -> &'static str {
    match Ipv6Addr::from(rail.gid).to_ipv4_mapped() {
        Some(_) => "IPv4",
        None => "IPv6",
    }
}

/// Two ranks of a world with these rails that are linked by RDMA and that no rails connect: those of the
/// lowest numbers, if there are any. `nodes` has the name of each rank's node, if ranks of one node are not
/// linked by RDMA.
///
/// Ranks with rails of the same kinds are compared once, as a large world has few different ones.
#[must_use]
pub fn first_unreachable(rails: &[Vec<Rail>], nodes: Option<&[&str]>) -> Option<(Rank, Rank)> {
    type Class<'a> = (Option<&'a str>, BTreeSet<String>);
    let mut classes: BTreeMap<Class<'_>, Vec<Rank>> = BTreeMap::new();
    for (rank, rails) in rails.iter().enumerate() {
        let kinds = rails.iter().take(MAX_RAILS).map(properties).collect();
        let ranks = classes.entry((nodes.map(|nodes| nodes[rank]), kinds)).or_default();
        // A class is compared with itself, too.
        if ranks.len() < 2 {
            ranks.push(rank);
        }
    }
    let ranks: Vec<Rank> = classes.into_values().flatten().collect();
    let mut lowest: Option<(Rank, Rank)> = None;
    for (at, one) in ranks.iter().enumerate() {
        for other in &ranks[at + 1..] {
            let pair = (*one.min(other), *one.max(other));
            let is_linked = nodes.is_none_or(|nodes| nodes[pair.0] != nodes[pair.1]);
            let is_lower = lowest.is_none_or(|lowest| pair < lowest);
            if is_linked && is_lower && pair_rails(&rails[pair.0], &rails[pair.1]).is_empty() {
                lowest = Some(pair);
            }
        }
    }
    lowest
}

/// The message that no rail of one rank can be connected with any of the other, with a fix.
#[must_use]
pub fn describe_mismatch(one: (Rank, &[Rail]), other: (Rank, &[Rail])) -> String {
    let describe = |(rank, rails): (Rank, &[Rail])| {
        let each: BTreeSet<String> = rails.iter().map(properties).collect();
        let each: Vec<String> = each.into_iter().collect();
        match each.len() {
            0 => format!("rank {rank} has no rails"),
            _ => format!("rank {rank}'s rails are {}", each.join(" and ")),
        }
    };
    let layers = |rails: &[Rail]| rails.iter().map(|rail| rail.layer.name()).collect::<BTreeSet<_>>();
    let (mine, theirs) = (layers(one.1), layers(other.1));
    let fix = if mine.is_empty() || theirs.is_empty() || mine.is_disjoint(&theirs) {
        "name ports of one kind in FLEXRING_IB_HCA, or set FLEXRING_TRANSPORT=tcp"
    } else if mine.contains("Ethernet") && theirs.contains("Ethernet") {
        "set FLEXRING_IB_GID_INDEX and FLEXRING_IB_FAMILY so that both have the same kind of address, or set FLEXRING_TRANSPORT=tcp"
    } else if one.1.iter().any(|one| other.1.iter().any(|other| one.network == other.network)) {
        "set FLEXRING_IB_PKEY on each node to the index of a partition that both have, one of them as a full member, or set \
         FLEXRING_TRANSPORT=tcp"
    } else {
        "name ports of one subnet in FLEXRING_IB_HCA, or set FLEXRING_TRANSPORT=tcp"
    };
    format!("{}, and {}: {fix}", describe(one), describe(other))
}

/// The properties that must be equal, for messages.
fn properties(rail: &Rail) -> String {
    match rail.layer {
        LinkLayer::Ethernet => {
            let network = match rail.gid_kind {
                GidKind::RoceV1 => format!(", network {}", rail.network),
                _ => String::new(),
            };
            format!("Ethernet ({}, {}{network})", rail.gid_kind.name(), family(rail))
        }
        layer => {
            let partition = match rail.partition {
                0 => ", unknown partition key".to_owned(),
                0xffff => String::new(),
                key => format!(", partition key {key:#06x}"),
            };
            let flid = if rail.flid == 0 { "" } else { ", with FLID" };
            format!("{} (subnet {}{partition}{flid})", layer.name(), rail.network)
        }
    }
}
