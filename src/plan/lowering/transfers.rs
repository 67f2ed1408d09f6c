//! What a rank does in each group of each level: its transfers, phase after phase.
//!
//! Owns the hops of chains and direct exchanges, and the way from owners to users. Must not know what a transfer
//! waits for.

use super::{ExchangePattern, Plan, ProgramSpec, Segment};
use crate::call::Collective;
use crate::plan::Rank;
use crate::plan::fraction::{Fraction, Span};
use crate::plan::schedule::Group;

/// A group's part in a program: what happens at which hop.
pub(super) struct Transfer {
    pub(super) depth: u32,
    pub(super) group: usize,
    pub(super) segment: Segment,
    /// Whether all that is left to be added is added here.
    pub(super) completes: bool,
    pub(super) op: TransferOp,
}

#[derive(Clone)]
pub(super) enum TransferOp {
    /// Send what is held here to the ranks.
    Send(Vec<Rank>),
    /// Add what the ranks hold, in this order.
    Reduce(Vec<Rank>),
    /// Take what that rank has.
    Copy(Rank),
}

/// How many ranks a chain visits: the participants, and the root last.
pub(super) fn chain_len(group: &Group) -> usize {
    group.len() + usize::from(group.place_of(group.root).is_none())
}

/// The `place`-th rank that a chain visits.
fn chain_rank(group: &Group, place: usize) -> Rank {
    match group.place_of(group.root) {
        _ if place + 1 == chain_len(group) => group.root,
        Some(root) if place >= root => group.participant(place + 1),
        _ => group.participant(place),
    }
}

/// The place of `rank` in the chain.
fn chain_place(group: &Group, rank: Rank) -> usize {
    let root = group.place_of(group.root);
    match group.place_of(rank) {
        _ if rank == group.root => chain_len(group) - 1,
        Some(place) => place - usize::from(root.is_some_and(|root| root < place)),
        None => unreachable!("the rank is in the group"),
    }
}

pub(super) struct RankLowering<'a> {
    pub(super) plan: &'a Plan,
    pub(super) rank: Rank,
    pub(super) spec: ProgramSpec,
    pub(super) segments: Vec<Segment>,
}

impl RankLowering<'_> {
    /// All that the rank does, phase after phase.
    pub(super) fn transfers(&self) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        if self.spec.one_shot {
            self.reduce_everywhere(&mut transfers);
            return transfers;
        }
        let reduced = match self.spec.collective {
            Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce => {
                if self.spec.reproducible {
                    self.reduce_at_once(&mut transfers)
                } else {
                    self.reduce(&mut transfers)
                }
            }
            // What is gathered begins with the owners.
            Collective::AllGather | Collective::Broadcast => self.hand(0, false, &mut transfers),
        };
        match self.spec.collective {
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast => {
                self.gather(reduced, &mut transfers);
            }
            Collective::ReduceScatter | Collective::Reduce => {
                self.hand(reduced, true, &mut transfers);
            }
        }
        transfers
    }

    /// Down the levels. Returns the depth that comes after.
    fn reduce(&self, transfers: &mut Vec<Transfer>) -> u32 {
        let mut depth = 0;
        for (number, level) in self.plan.schedule.levels().iter().enumerate() {
            for index in level.groups_of(self.rank) {
                let group = &level.groups()[index];
                self.reduce_hops(group, self.plan.patterns[number][index], |hop, op| {
                    for segment in self.segments_of(group.span) {
                        // Wherever else a part of the sum is made, others are still to be added.
                        let completes = group.root == self.rank && segment.shard.level == Some(number);
                        transfers.push(Transfer {
                            depth: depth + hop as u32,
                            group: index,
                            segment,
                            completes,
                            op: op.clone(),
                        });
                    }
                });
            }
            depth += self.plan.hops[number];
        }
        depth
    }

    fn reduce_hops(
        &self,
        group: &Group,
        pattern: ExchangePattern,
        mut transfer: impl FnMut(usize, TransferOp),
    ) {
        let rank = self.rank;
        match pattern {
            ExchangePattern::Direct if rank == group.root => {
                transfer(0, TransferOp::Reduce(group.participants().collect()))
            }
            ExchangePattern::Direct => transfer(0, TransferOp::Send(vec![group.root])),
            ExchangePattern::Chain => {
                let place = chain_place(group, rank);
                if place > 0 {
                    let before = chain_rank(group, place - 1);
                    let adds = group.place_of(rank).is_some();
                    transfer(
                        place - 1,
                        TransferOp::Reduce(if adds { vec![before, rank] } else { vec![before] }),
                    );
                }
                if place + 1 < chain_len(group) {
                    transfer(place, TransferOp::Send(vec![chain_rank(group, place + 1)]));
                }
            }
        }
    }

    /// Everybody's contribution straight to the owner, who adds them in the order of the ranks.
    fn reduce_at_once(&self, transfers: &mut Vec<Transfer>) -> u32 {
        let world = self.plan.schedule.world();
        let shards = self.plan.schedule.shards().iter().filter(|_| world > 1);
        for (index, shard) in shards.enumerate() {
            let completes = shard.owner == self.rank;
            let op = if completes {
                TransferOp::Reduce((0..world).collect())
            } else {
                TransferOp::Send(vec![shard.owner])
            };
            for segment in self.segments_of(shard.span) {
                transfers.push(Transfer { depth: 0, group: index, segment, completes, op: op.clone() });
            }
        }
        1
    }

    /// Everybody's contribution straight to everybody, who all add them in the order of the ranks.
    fn reduce_everywhere(&self, transfers: &mut Vec<Transfer>) {
        let world = self.plan.schedule.world();
        let others: Vec<Rank> = (0..world).filter(|rank| *rank != self.rank).collect();
        let acts = [TransferOp::Send(others), TransferOp::Reduce((0..world).collect())];
        for op in acts.into_iter().filter(|_| world > 1) {
            let completes = matches!(op, TransferOp::Reduce(_));
            transfers.extend(self.segments.iter().map(|segment| Transfer {
                depth: 0,
                group: 0,
                segment: *segment,
                completes,
                op: op.clone(),
            }));
        }
    }

    /// Back up the levels, beginning at `depth`.
    fn gather(&self, mut depth: u32, transfers: &mut Vec<Transfer>) {
        for (number, level) in self.plan.schedule.levels().iter().enumerate().rev() {
            for index in level.groups_of(self.rank) {
                let group = &level.groups()[index];
                self.gather_hops(group, self.plan.patterns[number][index], |hop, op| {
                    for segment in self.segments_of(group.span) {
                        let depth = depth + hop as u32;
                        transfers.push(Transfer {
                            depth,
                            group: index,
                            segment,
                            completes: false,
                            op: op.clone(),
                        });
                    }
                });
            }
            depth += self.plan.hops[number];
        }
    }

    fn gather_hops(
        &self,
        group: &Group,
        pattern: ExchangePattern,
        mut transfer: impl FnMut(usize, TransferOp),
    ) {
        let rank = self.rank;
        match pattern {
            ExchangePattern::Direct if rank == group.root => {
                transfer(0, TransferOp::Send(group.participants().filter(|other| *other != rank).collect()));
            }
            ExchangePattern::Direct => transfer(0, TransferOp::Copy(group.root)),
            ExchangePattern::Chain => {
                // The chain goes on around: from the root to the first participant and so to the last.
                let len = chain_len(group);
                let place = (chain_place(group, rank) + 1) % len;
                let at = |place: usize| chain_rank(group, (place + len - 1) % len);
                if place > 0 {
                    transfer(place - 1, TransferOp::Copy(at(place - 1)));
                }
                if place + 1 < len {
                    transfer(place, TransferOp::Send(vec![at(place + 1)]));
                }
            }
        }
    }

    /// Each part of the vector from its owner to the rank that shall have it, or back.
    fn hand(&self, depth: u32, out: bool, transfers: &mut Vec<Transfer>) -> u32 {
        let (rank, world) = (self.rank, self.plan.schedule.world());
        let shards = self.plan.schedule.shards();
        let mut shard = 0;
        // Pieces that are sent whole may have several shards.
        for segment in &self.segments {
            while shards[shard].span.end <= segment.span.start {
                shard += 1;
            }
            for part in shards[shard..].iter().take_while(|part| part.span.start < segment.span.end) {
                let span = part.span.intersection(segment.span);
                let user = match self.spec.collective {
                    Collective::Reduce | Collective::Broadcast => self.spec.root,
                    _ => user_of(span.start, world),
                };
                let (from, to) = if out { (part.owner, user) } else { (user, part.owner) };
                if from == to || (rank != from && rank != to) {
                    continue;
                }
                let op = if rank == from { TransferOp::Send(vec![to]) } else { TransferOp::Copy(from) };
                let segment = Segment { span, ..*segment };
                transfers.push(Transfer { depth, group: 0, segment, completes: false, op });
            }
        }
        depth + 1
    }

    fn segments_of(&self, span: Span) -> impl Iterator<Item = Segment> + '_ {
        let first = self.segments.partition_point(|segment| segment.span.end <= span.start);
        let over = self.segments[first..].iter().take_while(move |segment| segment.span.start < span.end);
        over.map(move |segment| Segment { span: segment.span.intersection(span), ..*segment })
    }
}

/// The rank whose part of `world` equal parts the point is in.
fn user_of(point: Fraction, world: usize) -> Rank {
    point.element(world as u64, 1) as Rank
}
