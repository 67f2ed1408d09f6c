//! How the ranks of a node divide its ports.
//!
//! Owns which of the ports that a rank can use it does use, if all ranks of its node use some. Pure, so that
//! every rank computes the same for all.

use super::rail::{MAX_RAILS, Rail};
use crate::config::GdrLevel;
use crate::transport::verbs::inventory::PciDistance;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Ports of one offer that count. What a peer publishes is not trusted.
const MOST_PORTS: usize = 64;

/// The ports that a rank can use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The best port first: by distance, rate, and position.
    pub rails: Vec<Rail>,
    /// Ports that the rank uses at most.
    pub most: usize,
    /// Whether distances are those from a GPU. A GPU uses the nearest ports only: its link to the PCI switch
    /// carries no more than the ports at that switch, and farther ports are nearer to other GPUs.
    pub is_near_gpu: bool,
}

impl Offer {
    fn ports(&self) -> &[Rail] {
        &self.rails[..self.rails.len().min(MOST_PORTS)]
    }

    fn most(&self) -> usize {
        self.most.min(MAX_RAILS)
    }

    fn nearest(&self) -> Option<PciDistance> {
        self.ports().iter().map(|rail| rail.distance).min()
    }

    /// The networks of all its ports.
    fn networks(&self) -> BTreeSet<&str> {
        self.ports().iter().map(|rail| &*rail.network).collect()
    }
}

/// The ports that each rank of a node uses, as positions in its offer, ascending.
///
/// The rank with the fewest ports takes its best free port, until none is free: first among the nearest ports
/// of each rank, then, for ranks without a GPU, among the others. A rank that has none then shares the
/// nearest port that the fewest use.
#[must_use]
pub fn divide(offers: &[&Offer]) -> Vec<Vec<usize>> {
    let mut shares: Vec<Vec<usize>> = vec![Vec::new(); offers.len()];
    let mut users: BTreeMap<(&str, u8), usize> = BTreeMap::new();
    for is_far in [false, true] {
        loop {
            let mut ranks: Vec<usize> = (0..offers.len()).collect();
            ranks.sort_by_key(|rank| (shares[*rank].len(), *rank));
            let free = |rank: usize| {
                let offer = offers[rank];
                if shares[rank].len() >= offer.most() || (is_far && offer.is_near_gpu) {
                    return None;
                }
                let admitted = |rail: &Rail| is_far || Some(rail.distance) == offer.nearest();
                let ports = offer.ports().iter().enumerate();
                let mut free = ports.filter(|(_, rail)| admitted(rail) && !users.contains_key(&key(rail)));
                free.next().map(|(port, _)| (rank, port))
            };
            let Some((rank, port)) = ranks.into_iter().find_map(free) else { break };
            shares[rank].push(port);
            users.insert(key(&offers[rank].rails[port]), 1);
        }
    }
    for (offer, share) in
        offers.iter().zip(&mut shares).filter(|(offer, share)| share.is_empty() && offer.most > 0)
    {
        let near =
            offer.ports().iter().enumerate().filter(|(_, rail)| Some(rail.distance) == offer.nearest());
        let fewest = near.min_by_key(|(port, rail)| (users.get(&key(rail)).copied().unwrap_or(0), *port));
        if let Some((port, rail)) = fewest {
            *users.entry(key(rail)).or_default() += 1;
            share.push(port);
        }
    }
    shares.iter_mut().for_each(|share| share.sort_unstable());
    shares
}

/// Whether a device at this distance from a GPU may access its memory.
#[must_use]
pub fn reaches_gpu(distance: PciDistance, level: GdrLevel) -> bool {
    let farthest = match level {
        GdrLevel::Loc => return false,
        GdrLevel::Pix => PciDistance::Pix,
        GdrLevel::Pxb => PciDistance::Pxb,
        // NCCL's PHB includes what it calls NODE elsewhere.
        GdrLevel::Phb => PciDistance::Node,
        GdrLevel::Sys => PciDistance::Sys,
    };
    distance <= farthest
}

/// What makes a port the same port for several ranks of a node.
fn key(rail: &Rail) -> (&str, u8) {
    (&rail.device, rail.port)
}

/// The rails of every rank of a world, the best first. `nodes` has the name of each rank's node; ranks of one
/// node are not linked by RDMA if they share memory.
///
/// The ranks of each node divide its ports. If that separates ranks that have ports in one network, as where
/// each port of a node has a network of its own, every rank has the others as reserves: one for each network.
/// Only links to peers whose own ports are in no network of this rank's use them.
#[must_use]
pub fn rails_of_world(offers: &[&Offer], nodes: &[&str], shares_memory: bool) -> Vec<Vec<Rail>> {
    let mut divided: Vec<Vec<Rail>> = vec![Vec::new(); offers.len()];
    let names: BTreeSet<&str> = nodes.iter().copied().collect();
    for name in names {
        let ranks: Vec<usize> = (0..offers.len()).filter(|rank| nodes[*rank] == name).collect();
        let of_node: Vec<&Offer> = ranks.iter().map(|rank| offers[*rank]).collect();
        for (rank, share) in ranks.iter().zip(divide(&of_node)) {
            divided[*rank] = share.into_iter().map(|port| offers[*rank].rails[port].clone()).collect();
        }
    }
    // Many ranks of a node are in the same networks, so there are few different entries.
    type Networks<'a> = BTreeSet<&'a str>;
    let mut places: BTreeSet<(&str, Networks<'_>, Networks<'_>)> = BTreeSet::new();
    for (rank, offer) in offers.iter().enumerate() {
        let used = divided[rank].iter().map(|rail| &*rail.network).collect();
        places.insert((nodes[rank], used, offer.networks()));
    }
    let is_separated = |(one, used, all): &(&str, Networks<'_>, Networks<'_>)| {
        places.iter().any(|(other, others, all_of_other)| {
            let linked = !(shares_memory && one == other);
            linked && used.is_disjoint(others) && !all.is_disjoint(all_of_other)
        })
    };
    if places.iter().any(is_separated) {
        for (offer, rails) in offers.iter().zip(&mut divided) {
            add_reserves(offer, rails);
        }
    }
    divided
}

/// Appends a port of each network that these rails of a rank are not in. The first positions come first, as
/// they are the same for all ranks.
fn add_reserves(offer: &Offer, rails: &mut Vec<Rail>) {
    let mut others: Vec<&Rail> = offer.ports().iter().collect();
    others.sort_by_key(|rail| rail.position);
    for rail in others {
        if rails.len() < MAX_RAILS && rails.iter().all(|used| used.network != rail.network) {
            rails.push(Rail { is_reserve: true, ..rail.clone() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pairing::pair_rails;
    use super::*;
    use proptest::prelude::*;

    /// `a-` is a port of the device `a` at the distance NODE, `b=` one at the distance PIX; a third character
    /// is the network, which is `0` without it.
    fn offer(text: &str, most: usize, is_near_gpu: bool) -> Offer {
        let rail = |(position, word): (u16, &str)| Rail {
            device: word[..1].to_owned(),
            network: word.get(2..).filter(|network| !network.is_empty()).unwrap_or("0").to_owned(),
            position,
            distance: if word[1..].starts_with('=') { PciDistance::Pix } else { PciDistance::Node },
            ..Rail::example()
        };
        let mut rails: Vec<Rail> = (0..).zip(text.split_whitespace()).map(rail).collect();
        rails.sort_by_key(|rail| (rail.distance, rail.position));
        Offer { rails, most, is_near_gpu }
    }

    /// The devices, reserves after a plus.
    fn names(rails: &[Rail]) -> String {
        let name = |(at, rail): (usize, &Rail)| {
            let is_first = rail.is_reserve && !rails[at - 1].is_reserve;
            format!("{}{}", if is_first { "+" } else { "" }, rail.device)
        };
        rails.iter().enumerate().map(name).collect()
    }

    /// The devices of each rank, joined by spaces.
    fn divided(offers: &[Offer]) -> String {
        let shares = divide(&offers.iter().collect::<Vec<_>>());
        let names = |(offer, share): (&Offer, Vec<usize>)| {
            names(&share.into_iter().map(|port| offer.rails[port].clone()).collect::<Vec<_>>())
        };
        offers.iter().zip(shares).map(names).collect::<Vec<_>>().join(" ")
    }

    fn of_gpus(texts: &[&str]) -> String {
        divided(&texts.iter().map(|text| offer(text, 4, true)).collect::<Vec<_>>())
    }

    fn of_processors(texts: &[&str]) -> String {
        divided(&texts.iter().map(|text| offer(text, 4, false)).collect::<Vec<_>>())
    }

    #[test]
    fn gpus_use_their_nearest_ports_and_no_others() {
        assert_eq!(of_gpus(&["a= b- c-", "a- b= c-"]), "a b", "one port at the switch of each");
        assert_eq!(of_gpus(&["a= b= c-", "a= b= c-"]), "a b", "two ports at the switch of two");
        assert_eq!(of_gpus(&["a= b= c= d= e="]), "abcd", "as many as FLEXRING_IB_RAILS");
        assert_eq!(of_gpus(&["a-", "a-", "a-"]), "a a a", "the only port of a node");
        assert_eq!(of_gpus(&["a= b-", "a= b-"]), "a a", "b is nearer to others");
        assert_eq!(of_gpus(&["a- b-", "a- b-", "a- b-", "a- b-"]), "a b a b");
        assert_eq!(of_gpus(&["", "a-"]), " a", "a rank without a port has none");
    }

    #[test]
    fn ranks_without_gpus_use_all_ports_the_near_ones_first() {
        assert_eq!(of_processors(&["a= b-"]), "ab", "a rank that is alone");
        assert_eq!(of_processors(&["a= b-", "a- b="]), "a b", "a rank on each socket");
        assert_eq!(of_processors(&["a= b-", "a= b-"]), "a b", "both on one socket");
        assert_eq!(of_processors(&["a- b- c-", "a- b- c-"]), "ac b");
        assert_eq!(of_processors(&["a= b-", "a= b-", "a- b=", "a- b="]), "a a b b");
    }

    /// The devices of each rank of a world of two nodes with two ranks each, which offer the same.
    fn of_world(text: &str, most: usize, shares_memory: bool) -> String {
        let offers: Vec<Offer> = (0..4).map(|_| offer(text, most, false)).collect();
        let offers: Vec<&Offer> = offers.iter().collect();
        let rails = rails_of_world(&offers, &["x", "x", "y", "y"], shares_memory);
        rails.iter().map(|rails| names(rails)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ports_are_always_divided_and_others_of_the_node_are_reserves_where_ranks_are_separated() {
        assert_eq!(of_world("a- b-", 4, true), "a b a b", "one network");
        let separated = "a+b b+a a+b b+a";
        assert_eq!(of_world("a-1 b-2", 4, true), separated, "the first ranks are in 1, the second in 2");
        assert_eq!(of_world("a-1 b-2 c-3", 1, true), "a+bc b+ac a+bc b+ac", "the same networks for all");
        let one = offer("a-1 b-2", 4, false);
        let other = offer("a-3 b-4", 4, false);
        let rails = rails_of_world(&[&one, &one, &other, &other], &["x", "x", "y", "y"], true);
        assert_eq!(names(&rails[3]), "b", "routers are needed in any case");
        let rails = rails_of_world(&[&one, &one], &["x", "x"], true);
        assert_eq!([names(&rails[0]), names(&rails[1])], ["a", "b"], "they share memory");
        let rails = rails_of_world(&[&one, &one], &["x", "x"], false);
        assert_eq!([names(&rails[0]), names(&rails[1])], ["a+b", "b+a"], "they are linked by RDMA");
    }

    /// Counter-example: with a subnet for each rail, every rank of such nodes used the first four ports.
    #[test]
    fn each_of_eight_gpus_uses_its_own_port_where_every_rail_has_a_subnet() {
        let ports = |near: usize| {
            let port = |at: usize| {
                format!(
                    "{}{}{at}",
                    ["a", "b", "c", "d", "e", "f", "g", "h"][at],
                    if at == near { '=' } else { '-' }
                )
            };
            (0..8).map(port).collect::<Vec<_>>().join(" ")
        };
        let offers: Vec<Offer> = (0..16).map(|rank| offer(&ports(rank % 8), 4, true)).collect();
        let nodes: Vec<&str> = (0..16).map(|rank| if rank < 8 { "x" } else { "y" }).collect();
        let rails = rails_of_world(&offers.iter().collect::<Vec<_>>(), &nodes, true);
        for (rank, rails) in rails.iter().enumerate() {
            assert_eq!((rails.len(), usize::from(rails[0].position)), (8, rank % 8));
            assert!(rails[1..].iter().all(|rail| rail.is_reserve) && !rails[0].is_reserve);
            // The link that a plan uses stays on the rail; another crosses to a port of one of the ends.
            assert_eq!(pair_rails(rails, &rails.clone()), [(0, 0)]);
        }
        let crossing = pair_rails(&rails[0], &rails[9]);
        assert_eq!(crossing.len(), 2, "{crossing:?}");
        for (mine, theirs) in crossing {
            let (mine, theirs) = (&rails[0][mine], &rails[9][theirs]);
            assert!(mine.network == theirs.network && mine.is_reserve != theirs.is_reserve);
        }
    }

    #[test]
    fn the_level_limits_the_distance_of_direct_access() {
        use PciDistance as D;
        let all = [D::Pix, D::Pxb, D::Phb, D::Node, D::Sys];
        let levels = [GdrLevel::Loc, GdrLevel::Pix, GdrLevel::Pxb, GdrLevel::Phb, GdrLevel::Sys];
        let counts = levels.map(|level| all.iter().filter(|distance| reaches_gpu(**distance, level)).count());
        assert_eq!(counts, [0, 1, 2, 4, 5]);
    }

    proptest! {
        #[test]
        fn every_rank_with_a_port_uses_one_and_no_near_port_is_idle(
            texts in proptest::collection::vec(("([abcdef][-=] ){0,6}", 1..5_usize, any::<bool>()), 1..7)
        ) {
            let offers: Vec<Offer> = texts.iter().map(|(text, most, gpu)| offer(text, *most, *gpu)).collect();
            let offers: Vec<&Offer> = offers.iter().collect();
            let shares = divide(&offers);
            let mut used = BTreeSet::new();
            for (offer, share) in offers.iter().zip(&shares) {
                prop_assert_eq!(share.is_empty(), offer.rails.is_empty());
                prop_assert!(share.len() <= offer.most && share.is_sorted());
                used.extend(share.iter().map(|port| key(&offer.rails[*port])));
            }
            for (offer, share) in offers.iter().zip(&shares).filter(|(offer, share)| share.len() < offer.most) {
                let near = offer.rails.iter().filter(|rail| Some(rail.distance) == offer.nearest());
                prop_assert!(near.clone().all(|rail| used.contains(&key(rail))), "{share:?} of {offers:?}");
            }
        }
    }
}
