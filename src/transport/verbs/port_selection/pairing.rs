//! Which rails of two ranks are connected.
//!
//! Owns who can reach whom, and what is said where nobody can.

use super::Rail;
use crate::rank::Rank;
use crate::transport::verbs::inventory::LinkLayer;
use std::collections::BTreeSet;
use std::net::Ipv6Addr;

/// The rails of two ranks that are connected, as positions in the two lists; each is used at most once.
///
/// Rails of one network are connected first, then others that may reach each other through routers, each in the order
/// of the lists. The set of pairs is the same if the lists are exchanged; their order is that of `mine`, so both ranks
/// pass the lower rank's list first.
#[must_use]
pub fn pair_rails(mine: &[Rail], theirs: &[Rail]) -> Vec<(usize, usize)> {
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    // Either relation divides the rails into classes, and the first divides the second's: so within a class the
    // first of one list meets the first of the other, from whichever side one looks.
    let relations: [fn(&Rail, &Rail) -> bool; 2] =
        [|one, other| reaches(one, other) && one.network == other.network, reaches];
    for related in relations {
        for (at, rail) in mine.iter().enumerate() {
            if pairs.iter().any(|(used, _)| *used == at) {
                continue;
            }
            let free = |place: &usize| pairs.iter().all(|(_, used)| used != place);
            let partner = (0..theirs.len()).filter(free).find(|place| related(rail, &theirs[*place]));
            pairs.extend(partner.map(|partner| (at, partner)));
        }
    }
    pairs.sort_unstable();
    pairs
}

/// Whether packets of one can be packets of the other, and a router may know the way.
fn reaches(one: &Rail, other: &Rail) -> bool {
    one.layer == other.layer
        && match one.layer {
            // A LID means nothing in another subnet.
            LinkLayer::InfiniBand => one.network == other.network,
            LinkLayer::Ethernet => one.gid_kind == other.gid_kind && family(one) == family(other),
            LinkLayer::Other => false,
        }
}

fn family(rail: &Rail) -> &'static str {
    match Ipv6Addr::from(rail.gid).to_ipv4_mapped() {
        Some(_) => "IPv4",
        None => "IPv6",
    }
}

/// Why no rail of one rank can be connected with any of the other's.
#[must_use]
pub fn describe_mismatch(one: (Rank, &[Rail]), other: (Rank, &[Rail])) -> String {
    let words = |(rank, rails): (Rank, &[Rail])| {
        let each: BTreeSet<String> = rails.iter().map(described).collect();
        let each: Vec<String> = each.into_iter().collect();
        match each.len() {
            0 => format!("rank {rank} has no rails"),
            _ => format!("rank {rank}'s rails are {}", each.join(" and ")),
        }
    };
    let layers = |rails: &[Rail]| rails.iter().map(|rail| rail.layer.name()).collect::<BTreeSet<_>>();
    let (mine, theirs) = (layers(one.1), layers(other.1));
    let fix = if mine.is_empty() || theirs.is_empty() || mine.is_disjoint(&theirs) {
        "name ports of one kind in FLEXRING_IB_HCA, or use FLEXRING_TRANSPORT=tcp"
    } else if mine.contains("Ethernet") && theirs.contains("Ethernet") {
        "set FLEXRING_IB_ROCE_VERSION and FLEXRING_IB_FAMILY to what both have, or use FLEXRING_TRANSPORT=tcp"
    } else {
        "name ports of one subnet in FLEXRING_IB_HCA, or use FLEXRING_TRANSPORT=tcp"
    };
    format!("{}, and {}: {fix}", words(one), words(other))
}

/// What must be equal, in words.
fn described(rail: &Rail) -> String {
    match rail.layer {
        LinkLayer::Ethernet => format!("Ethernet ({}, {})", rail.gid_kind.name(), family(rail)),
        layer => format!("{} (subnet {})", layer.name(), rail.network),
    }
}
