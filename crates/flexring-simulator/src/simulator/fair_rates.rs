//! Weighted max-min fair rates of flows that share links.
//!
//! Owns the links, which of them limits each flow, and the rates. Must not know transfers, messages or time,
//! nor where weights come from.
//!
//! Each flow has a weight, and its level is its rate divided by its weight. Rates are max-min fair if each
//! flow has a link that limits it: one without spare bandwidth on which no flow has a higher level.
//! (Bertsekas and Gallager, Data Networks, 6.5.2; the links that limit flows and how changes spread among
//! them are the bottleneck structure of Ros-Giralt et al., On the Bottleneck Structure of
//! Congestion-Controlled Networks, SIGMETRICS 2020.)
//!
//! When a flow begins or ends, only the links whose division changes are divided again. These candidates are
//! at first the link of the change alone. Their flows get rates by water-filling; a flow that another link
//! limits gets at most its present rate. Then the other links of flows whose rates have changed are checked.
//! Those with too many bits, with spare bandwidth for flows that they limit, or with a flow of a higher level
//! than these, become candidates too, and the candidates are divided again, until no link is added.
//!
//! Levels and weights are whole numbers. A link that limits flows leaves fewer units unused than the sum of
//! its flows' weights, and gives each flow a level of at least one, even if it has fewer units than that.

use super::event_queue::{ChannelId, LinkId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::ops::Range;

/// In place of the limiting link of a flow without a rate, or of one that shares no link.
const NO_LINK: LinkId = LinkId::MAX;

/// A flow's way through the network.
#[derive(Clone, Debug)]
pub struct FlowPath {
    /// At least one.
    pub links: Vec<LinkId>,
    /// Its part of a link that several flows share, in relation to theirs; at least 1.
    pub weight: u32,
}

/// The links, the flows and their rates.
#[derive(Debug)]
pub struct FairRates {
    links: Vec<SharedLink>,
    flows: Vec<RatedFlow>,
    /// The links of all flows that may limit them, by [`RatedFlow::path`].
    paths: Vec<PathLink>,
    /// Flows that began since rates were computed.
    begun: Vec<ChannelId>,
    /// Links that limit flows, and from which others have ended since then, and links whose capacities have
    /// changed.
    freed: Vec<LinkId>,
    /// Flows whose rates have changed since then.
    changed: Vec<ChannelId>,
    /// Links with varying capacities whose use has changed since then, some of them more than once.
    use_changed: Vec<LinkId>,
    division: Division,
}

/// The state while some links are divided again. Keeps its memory.
#[derive(Debug, Default)]
struct Division {
    /// Number of the division, which marks its candidates and members.
    number: u64,
    /// Number of the check, which marks the links that it has found.
    check: u64,
    candidates: Vec<LinkId>,
    /// The flows on candidates.
    members: Vec<ChannelId>,
    /// Members that other links limit, by level.
    limited: Vec<(u64, ChannelId)>,
    /// Candidates by the level that they can give each flow, at least.
    order: BinaryHeap<Reverse<(u64, LinkId)>>,
    /// Links that are not candidates and have flows whose rates change.
    touched: Vec<LinkId>,
}

#[derive(Debug)]
struct SharedLink {
    /// A rate.
    capacity: u64,
    /// Whether the capacity may change.
    varies: bool,
    /// The active flows.
    flows: Vec<ChannelId>,
    /// The sums of their weights and rates.
    weight: u64,
    used: u128,
    /// Number of flows that this link limits, and their level.
    limits: u32,
    level: u64,
    /// The division of which the link is a candidate.
    candidate_of: u64,
    /// The check that found the link.
    found_by: u64,
    /// While rates are computed: capacity that is not given away, and the weights of flows without a rate.
    left: u64,
    waiting: u64,
    /// The values that follow from the rates being computed.
    next_used: u128,
    next_limits: u32,
    next_level: u64,
}

/// A link on the way of a flow.
#[derive(Clone, Copy, Debug)]
struct PathLink {
    link: LinkId,
    /// The flow's place among the link's flows, if it is active.
    place: u32,
}

#[derive(Debug)]
struct RatedFlow {
    /// The links that it shares with other flows, and the narrowest of the others if it is narrower than
    /// those.
    path: Range<u32>,
    weight: u32,
    /// The rate if no other flow is active.
    most: u64,
    /// 0 if it is not active or not computed.
    rate: u64,
    /// The link that limits it.
    limit: LinkId,
    /// What is being computed; 0 as long as it is unknown.
    next_rate: u64,
    next_limit: LinkId,
    /// The division of which the flow is a member.
    member_of: u64,
}

impl FairRates {
    /// No active flows on links of these capacities, of which each may vary or not.
    pub fn new(capacities: impl Iterator<Item = (u64, bool)>, paths: impl Iterator<Item = FlowPath>) -> Self {
        let mut links: Vec<SharedLink> =
            capacities.map(|(capacity, varies)| SharedLink::new(capacity, varies)).collect();
        let paths: Vec<FlowPath> = paths.collect();
        let mut users = vec![0_u32; links.len()];
        paths.iter().flat_map(|path| &path.links).for_each(|link| users[*link as usize] += 1);
        let is_shared = |link: &LinkId| users[*link as usize] > 1 || links[*link as usize].varies;
        let capacity = |link: &LinkId| links[*link as usize].capacity;
        let (mut flows, mut used) = (Vec::with_capacity(paths.len()), Vec::new());
        for FlowPath { links: path, weight } in paths {
            let own = path.iter().filter(|link| !is_shared(link)).min_by_key(|link| capacity(link));
            let narrowest_shared = path.iter().filter(|link| is_shared(link)).map(capacity).min();
            // A link of this flow alone cannot limit it if a shared link has no more bandwidth.
            let own = own.filter(|own| narrowest_shared.is_some_and(|shared| capacity(own) < shared));
            let start = used.len() as u32;
            let limits = path.iter().filter(|link| is_shared(link) || Some(*link) == own);
            used.extend(limits.map(|link| PathLink { link: *link, place: 0 }));
            flows.push(RatedFlow {
                path: start..used.len() as u32,
                weight,
                most: path.iter().map(capacity).min().expect("a path has links"),
                rate: 0,
                limit: NO_LINK,
                next_rate: 0,
                next_limit: NO_LINK,
                member_of: 0,
            });
        }
        used.shrink_to_fit();
        links.shrink_to_fit();
        Self {
            links,
            flows,
            paths: used,
            begun: Vec::new(),
            freed: Vec::new(),
            changed: Vec::new(),
            use_changed: Vec::new(),
            division: Division::default(),
        }
    }

    /// Number of flows, whether they are active or not.
    pub fn flows(&self) -> usize {
        self.flows.len()
    }

    /// A flow becomes active. [`update`](Self::update) computes its rate.
    pub fn begin(&mut self, id: ChannelId) {
        self.begun.push(id);
        let flow = &self.flows[id as usize];
        for on_path in &mut self.paths[flow.path()] {
            let link = &mut self.links[on_path.link as usize];
            link.weight += u64::from(flow.weight);
            on_path.place = link.flows.len() as u32;
            link.flows.push(id);
        }
    }

    /// An active flow with a rate ends. [`update`](Self::update) divides the bandwidth that it leaves.
    pub fn end(&mut self, id: ChannelId) {
        let flow = &mut self.flows[id as usize];
        let (rate, limit) = (std::mem::take(&mut flow.rate), std::mem::replace(&mut flow.limit, NO_LINK));
        let weight = u64::from(flow.weight);
        for at in flow.path() {
            let PathLink { link: number, place } = self.paths[at];
            let link = &mut self.links[number as usize];
            link.used -= u128::from(rate);
            link.weight -= weight;
            if link.varies {
                self.use_changed.push(number);
            }
            link.limits -= u32::from(limit == number);
            // Other flows do not wait for this link.
            if link.limits > 0 {
                self.freed.push(number);
            }
            link.flows.swap_remove(place as usize);
            if let Some(moved) = link.flows.get(place as usize) {
                let path = &mut self.paths[self.flows[*moved as usize].path()];
                let moved = path.iter_mut().find(|other| other.link == number);
                moved.expect("the flow uses the link").place = place;
            }
        }
    }

    /// The link has another capacity from now on, at most the one that it began with.
    /// [`update`](Self::update) computes the rates of its flows. Only for links that vary.
    pub fn set_capacity(&mut self, id: LinkId, capacity: u64) {
        let link = &mut self.links[id as usize];
        debug_assert!(link.varies, "a flow may not list it");
        link.capacity = capacity;
        self.freed.push(id);
    }

    /// Whether the link limits a flow.
    pub fn limits_flows(&self, id: LinkId) -> bool {
        self.links[id as usize].limits > 0
    }

    /// The sum of the rates of a link's flows.
    pub fn used(&self, id: LinkId) -> u64 {
        self.links[id as usize].used as u64
    }

    /// Moves the links with varying capacities whose use has changed since the last time to `links`, each
    /// once.
    pub fn take_changed_use(&mut self, links: &mut Vec<LinkId>) {
        links.clear();
        links.append(&mut self.use_changed);
        links.sort_unstable();
        links.dedup();
    }

    /// Computes the rates that have changed. Returns these flows, some of them more than once, with their
    /// rates.
    pub fn update(&mut self) -> impl Iterator<Item = (ChannelId, u64)> + '_ {
        self.changed.clear();
        let mut begun = std::mem::take(&mut self.begun);
        for id in begun.drain(..) {
            let flow = &mut self.flows[id as usize];
            if flow.rate > 0 {
                continue;
            }
            if flow.path.is_empty() {
                flow.rate = flow.most;
                self.changed.push(id);
                continue;
            }
            let link = self.narrowest(id);
            self.divide(link);
        }
        self.begun = begun;
        let mut freed = std::mem::take(&mut self.freed);
        for link in freed.drain(..) {
            let SharedLink { used, limits, level, .. } = self.links[link as usize];
            if self.links[link as usize].is_unfair(used, limits, level) {
                self.divide(link);
            }
        }
        self.freed = freed;
        self.changed.iter().map(|id| (*id, self.flows[*id as usize].rate))
    }

    /// The link on the way of a flow that would give its flows the lowest level. It probably limits the flow.
    fn narrowest(&self, id: ChannelId) -> LinkId {
        let links = self.paths[self.flows[id as usize].path()].iter().map(|on_path| on_path.link);
        let level = |link: &LinkId| {
            let link = &self.links[*link as usize];
            link.capacity / link.weight
        };
        links.min_by_key(level).expect("the flow shares links")
    }

    /// Computes the rates of flows on this link, and all others that change with them.
    fn divide(&mut self, link: LinkId) {
        self.division.number += 1;
        self.division.candidates.clear();
        self.division.members.clear();
        self.add_candidate(link);
        loop {
            self.fill();
            if self.check() {
                break;
            }
        }
        self.apply();
    }

    fn add_candidate(&mut self, id: LinkId) {
        let Division { number, candidates, members, .. } = &mut self.division;
        let link = &mut self.links[id as usize];
        link.candidate_of = *number;
        candidates.push(id);
        for id in &link.flows {
            if std::mem::replace(&mut self.flows[*id as usize].member_of, *number) != *number {
                members.push(*id);
            }
        }
    }

    /// Water-filling: the candidate that can give its flows the lowest level determines their rates; the rest
    /// is divided among the others.
    fn fill(&mut self) {
        let Self { links, flows, paths, division, .. } = self;
        let Division { number, candidates, members, limited, order, .. } = division;
        order.clear();
        for id in candidates {
            let link = &mut links[*id as usize];
            (link.left, link.waiting) = (link.capacity, link.weight);
            (link.next_used, link.next_limits, link.next_level) = (0, 0, 0);
            order.push(Reverse((link.possible_level(), *id)));
        }
        limited.clear();
        for id in members {
            let flow = &mut flows[*id as usize];
            flow.next_rate = 0;
            if flow.limit != NO_LINK && links[flow.limit as usize].candidate_of != *number {
                limited.push((flow.level(flow.rate), *id));
            }
        }
        limited.sort_unstable();
        let mut limited = limited.iter().copied().peekable();
        let give = |links: &mut [SharedLink], flow: &mut RatedFlow, level: u64, limit: LinkId| {
            let rate = level * u64::from(flow.weight);
            (flow.next_rate, flow.next_limit) = (rate, limit);
            for on_path in &paths[flow.path()] {
                let link = &mut links[on_path.link as usize];
                if link.candidate_of == *number {
                    link.left = link.left.saturating_sub(rate);
                    link.waiting -= u64::from(flow.weight);
                    link.next_used += u128::from(rate);
                }
            }
        };
        while let Some(mut least) = order.peek_mut() {
            let Reverse((level, id)) = *least;
            let link = &links[id as usize];
            if link.waiting == 0 {
                PeekMut::pop(least);
                continue;
            }
            // Levels only grow when other flows get theirs.
            let present = link.possible_level();
            if present > level {
                *least = Reverse((present, id));
                continue;
            }
            while limited.next_if(|(_, id)| flows[*id as usize].next_rate > 0).is_some() {}
            if let Some((present, id)) = limited.next_if(|(present, _)| *present <= level) {
                let flow = &mut flows[id as usize];
                let limit = flow.limit;
                give(links, flow, present, limit);
                continue;
            }
            PeekMut::pop(least);
            for place in 0..links[id as usize].flows.len() {
                let flow = &mut flows[links[id as usize].flows[place] as usize];
                if flow.next_rate == 0 {
                    give(links, flow, level, id);
                    links[id as usize].next_limits += 1;
                }
            }
            links[id as usize].next_level = level;
        }
    }

    /// Whether the rates are fair on all other links. Those on which they are not become candidates.
    fn check(&mut self) -> bool {
        let Self { links, flows, paths, division, .. } = self;
        division.check += 1;
        division.touched.clear();
        for id in &division.members {
            let flow = &flows[*id as usize];
            if (flow.next_rate, flow.next_limit) == (flow.rate, flow.limit) {
                continue;
            }
            for PathLink { link: id, .. } in &paths[flow.path()] {
                let link = &mut links[*id as usize];
                if link.candidate_of == division.number {
                    continue;
                }
                if std::mem::replace(&mut link.found_by, division.check) != division.check {
                    (link.next_used, link.next_limits, link.next_level) = (link.used, link.limits, 0);
                    division.touched.push(*id);
                }
                link.next_used += u128::from(flow.next_rate);
                link.next_used -= u128::from(flow.rate);
                link.next_limits -= u32::from(flow.limit == *id && flow.next_limit != *id);
                link.next_level = link.next_level.max(flow.level(flow.next_rate));
            }
        }
        let mut is_fair = true;
        for at in 0..self.division.touched.len() {
            let id = self.division.touched[at];
            let link = &self.links[id as usize];
            if link.is_unfair(link.next_used, link.next_limits, link.next_level) {
                is_fair = false;
                self.add_candidate(id);
            }
        }
        is_fair
    }

    /// Makes the computed rates the present ones.
    fn apply(&mut self) {
        let Self { links, flows, changed, use_changed, division, .. } = self;
        for id in &division.members {
            let flow = &mut flows[*id as usize];
            if flow.rate != flow.next_rate {
                changed.push(*id);
            }
            (flow.rate, flow.limit) = (flow.next_rate, flow.next_limit);
        }
        for id in &division.candidates {
            let link = &mut links[*id as usize];
            (link.used, link.limits, link.level) = (link.next_used, link.next_limits, link.next_level);
        }
        for id in &division.touched {
            let link = &mut links[*id as usize];
            (link.used, link.limits) = (link.next_used, link.next_limits);
        }
        let varying = division.candidates.iter().chain(&division.touched);
        use_changed.extend(varying.filter(|id| links[**id as usize].varies));
    }
}

impl SharedLink {
    fn new(capacity: u64, varies: bool) -> Self {
        Self {
            capacity,
            varies,
            flows: Vec::new(),
            weight: 0,
            used: 0,
            limits: 0,
            level: 0,
            candidate_of: 0,
            found_by: 0,
            left: 0,
            waiting: 0,
            next_used: 0,
            next_limits: 0,
            next_level: 0,
        }
    }

    /// The level that it can give the flows without a rate.
    fn possible_level(&self) -> u64 {
        (self.left / self.waiting.max(1)).max(1)
    }

    /// Whether rates with this sum are unfair on the link, if it limits this many flows and the highest level
    /// of a new rate is `highest`.
    fn is_unfair(&self, used: u128, limits: u32, highest: u64) -> bool {
        let capacity = u128::from(self.capacity);
        let is_full = used + u128::from(self.weight) > capacity;
        used > capacity || limits > 0 && (!is_full || highest > self.level)
    }
}

impl RatedFlow {
    fn path(&self) -> Range<usize> {
        self.path.start as usize..self.path.end as usize
    }

    /// The level of a rate that one of its links has given it, which is a multiple of the weight.
    fn level(&self, rate: u64) -> u64 {
        rate / u64::from(self.weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Flows on these paths, all of which have begun.
    fn divided(capacities: &[u64], paths: &[Vec<LinkId>]) -> FairRates {
        weighted(capacities, paths, &vec![1; paths.len()])
    }

    fn weighted(capacities: &[u64], paths: &[Vec<LinkId>], weights: &[u32]) -> FairRates {
        let paths = paths.iter().zip(weights);
        let paths = paths.map(|(links, weight)| FlowPath { links: links.clone(), weight: *weight });
        let capacities = capacities.iter().map(|capacity| (*capacity, false));
        let mut rates = FairRates::new(capacities, paths.clone());
        (0..paths.len()).for_each(|flow| rates.begin(flow as ChannelId));
        rates.update().for_each(drop);
        rates
    }

    fn of(rates: &FairRates) -> Vec<u64> {
        rates.flows.iter().map(|flow| flow.rate).collect()
    }

    /// Checks that the active flows have weighted max-min fair rates but for rounding, and all that is stored
    /// about links.
    fn check(rates: &FairRates) -> Result<(), TestCaseError> {
        for (number, link) in (0..).zip(&rates.links) {
            let flows = || link.flows.iter().map(|id| &rates.flows[*id as usize]);
            let used: u64 = flows().map(|flow| flow.rate).sum();
            prop_assert_eq!(link.used, u128::from(used));
            let weight: u64 = flows().map(|flow| u64::from(flow.weight)).sum();
            prop_assert_eq!(link.weight, weight);
            prop_assert!(used <= link.capacity, "{} of {}", used, link.capacity);
            let limited = || flows().filter(|flow| flow.limit == number);
            prop_assert_eq!(link.limits as usize, limited().count());
            if link.limits > 0 {
                prop_assert!(used + weight > link.capacity, "{} of {}", used, link.capacity);
                let level = |flow: &RatedFlow| flow.rate / u64::from(flow.weight);
                prop_assert!(limited().all(|flow| level(flow) == link.level));
                prop_assert!(flows().all(|flow| level(flow) <= link.level));
                prop_assert!(flows().all(|flow| flow.rate == level(flow) * u64::from(flow.weight)));
            }
            for (place, id) in link.flows.iter().enumerate() {
                let flow = &rates.flows[*id as usize];
                let path = &rates.paths[flow.path()];
                prop_assert!(path.iter().any(|on_path| on_path.link == flow.limit));
                prop_assert!(
                    path.iter().any(|on_path| on_path.link == number && on_path.place as usize == place)
                );
            }
        }
        Ok(())
    }

    #[test]
    fn flows_share_the_narrowest_link_and_divide_what_others_leave() {
        let (a, b, c) = (0, 1, 2);
        let rates = divided(&[300, 1_000, 100], &[vec![a, c], vec![a, b], vec![b]]);
        assert_eq!(of(&rates), [100, 200, 800]);
    }

    #[test]
    fn flows_share_a_link_in_proportion_to_their_weights() {
        let (a, b) = (0, 1);
        let rates = weighted(&[600, 1_000], &[vec![a, b], vec![a], vec![b], vec![b]], &[1, 2, 5, 3]);
        // The second link would give the first flow a ninth, 111, and does: the first link would give it 200.
        assert_eq!(of(&rates), [111, 488, 555, 333]);
    }

    #[test]
    fn a_link_of_one_flow_alone_limits_it_only_if_it_is_the_narrowest() {
        let (a, b, c) = (0, 1, 2);
        let rates = divided(&[300, 50, 1_000], &[vec![b, a], vec![c, a], vec![a]]);
        assert_eq!(of(&rates), [50, 125, 125]);
        let lengths: Vec<usize> = rates.flows.iter().map(|flow| flow.path.len()).collect();
        assert_eq!(lengths, [2, 1, 1]);
    }

    #[test]
    fn only_links_whose_division_changes_are_divided_again() {
        let (narrow, wide, other) = (0, 1, 2);
        let paths = [vec![narrow, wide], vec![narrow, wide], vec![wide], vec![wide, other], vec![other]];
        let mut rates = divided(&[200, 10_000, 6_000], &paths);
        assert_eq!(of(&rates), [100, 100, 6_800, 3_000, 3_000]);
        // The narrow link limits its flows, so they keep their rates.
        rates.end(2);
        assert_eq!(rates.update().count(), 0);
        rates.begin(2);
        assert_eq!(rates.update().collect::<Vec<_>>(), [(2, 6_800)]);
        // The flow that keeps the whole narrow link leaves as much on the wide one as both did.
        rates.end(0);
        assert_eq!(rates.update().collect::<Vec<_>>(), [(1, 200)]);
        // What another link leaves is divided here.
        rates.end(4);
        rates.update().for_each(drop);
        assert_eq!(of(&rates), [0, 200, 4_900, 4_900, 0]);
    }

    #[test]
    fn more_flows_than_units_get_one_each() {
        let mut rates = divided(&[3, 100], &vec![vec![0, 1]; 5]);
        assert_eq!(of(&rates), [1; 5]);
        rates.end(2);
        rates.end(4);
        rates.end(3);
        rates.update().for_each(drop);
        assert_eq!(of(&rates), [1, 1, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn rates_are_max_min_fair(
            capacities in proptest::collection::vec(1_000u64..1_000_000_000_000, 6),
            paths in proptest::collection::vec((proptest::collection::btree_set(0u32..6, 1..4), 1u32..20), 1..24),
            are_equal in any::<bool>(),
            varies in proptest::collection::vec(any::<bool>(), 6),
            changes in proptest::collection::vec((0usize..24, any::<bool>(), 0usize..12, 1u64..100), 0..40),
        ) {
            let flow_path = |(links, weight): (BTreeSet<LinkId>, u32)| {
                FlowPath { links: links.into_iter().collect(), weight: if are_equal { 1 } else { weight } }
            };
            let paths: Vec<FlowPath> = paths.into_iter().map(flow_path).collect();
            let varying = capacities.iter().zip(&varies).map(|(capacity, varies)| (*capacity, *varies));
            let mut rates = FairRates::new(varying, paths.iter().cloned());
            let mut active = vec![false; paths.len()];
            for (flow, then_updates, link, divisor) in changes {
                if link < 6 && varies[link] {
                    rates.set_capacity(link as LinkId, capacities[link] / divisor + 1);
                }
                let flow = flow % paths.len();
                if !active[flow] {
                    rates.begin(flow as ChannelId);
                    active[flow] = true;
                } else if rates.flows[flow].rate > 0 {
                    rates.end(flow as ChannelId);
                    active[flow] = false;
                }
                if then_updates {
                    rates.update().for_each(drop);
                    check(&rates)?;
                }
            }
        }
    }
}
