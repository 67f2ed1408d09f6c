//! The transfers of one rank: what it sends, adds and copies in each group of each level.
//!
//! Owns the hops of chains and direct exchanges, and the extra hop between owners and destinations.

use super::exchange::{ExchangePattern, chain_len, chain_place, chain_rank};
use super::program_spec::ProgramSpec;
use super::segment::Segment;
use crate::Rank;
use crate::block_order::BlockOrder;
use crate::fraction::{Fraction, Span};
use crate::inline_list::InlineList;
use crate::schedule::{Group, Schedule};
use flexring_core::call::Collective;

/// One operation of one rank on one segment.
pub(super) struct Transfer {
    /// Hops of the collective before this one.
    pub(super) depth: u32,
    /// Index of the group in its level; orders transfers of one depth.
    pub(super) group: usize,
    pub(super) segment: Segment,
    /// Whether this is a reduction that completes the sum.
    pub(super) completes: bool,
    pub(super) op: TransferOp,
}

#[derive(Clone)]
pub(super) enum TransferOp {
    /// Send the segment, as this rank holds it, to these ranks.
    Send(InlineList<Rank>),
    /// Receive the segment from these ranks and add it in this order; the list may contain this rank itself.
    Reduce(InlineList<Rank>),
    /// Receive the segment from this rank.
    Copy(Rank),
    /// Keep the segment to pass it on: from this rank, or from the input.
    PassOn(Option<Rank>),
    /// Send the segment, which was kept to pass it on, to this rank.
    Forward(Rank),
    /// Copy the segment, which was kept to pass it on, to the output.
    Deliver,
}

impl TransferOp {
    /// Whether it writes a part of the vector; otherwise it sends one.
    pub(super) fn receives(&self) -> bool {
        !matches!(self, Self::Send(_) | Self::Forward(_))
    }

    /// The ranks that it names.
    pub(super) fn ranks(&self) -> &[Rank] {
        match self {
            Self::Send(ranks) | Self::Reduce(ranks) => ranks,
            Self::Copy(rank) | Self::PassOn(Some(rank)) | Self::Forward(rank) => std::slice::from_ref(rank),
            Self::PassOn(None) | Self::Deliver => &[],
        }
    }

    /// A number that differs between the kinds of operations.
    pub(super) fn kind(&self) -> u64 {
        match self {
            Self::Send(_) => 0,
            Self::Reduce(_) => 1,
            Self::Copy(_) => 2,
            Self::PassOn(_) => 3,
            Self::Forward(_) => 4,
            Self::Deliver => 5,
        }
    }
}

/// The lowering of a plan for one rank.
pub(super) struct RankLowering<'a> {
    pub(super) schedule: &'a Schedule,
    /// By level and group.
    pub(super) patterns: &'a [Vec<ExchangePattern>],
    /// By level, the hops of its longest group.
    pub(super) hops: &'a [u32],
    pub(super) rank: Rank,
    pub(super) spec: ProgramSpec,
    /// The whole vector, in order.
    pub(super) segments: &'a [Segment],
    /// The places of blocks that go by node.
    pub(super) blocks: Option<&'a BlockOrder>,
}

impl RankLowering<'_> {
    /// All transfers of the rank, phase by phase.
    pub(super) fn transfers(&self) -> Vec<Transfer> {
        let mut transfers = Vec::new();
        if self.spec.is_one_shot() {
            self.reduce_one_shot(&mut transfers);
            return transfers;
        }
        if let Some(blocks) = self.blocks {
            self.exchange_by_node(blocks, &mut transfers);
            return transfers;
        }
        if self.spec.collective.is_straight() {
            self.exchange_blocks(&mut transfers);
            return transfers;
        }
        let reduced = match self.spec.collective {
            Collective::AllReduce | Collective::Barrier | Collective::ReduceScatter | Collective::Reduce => {
                if self.spec.reproducible {
                    self.reduce_at_owners(&mut transfers)
                } else {
                    self.reduce(&mut transfers)
                }
            }
            // The gather starts at the owners.
            _ => self.redistribute(0, false, &mut transfers),
        };
        match self.spec.collective {
            Collective::ReduceScatter | Collective::Reduce => {
                self.redistribute(reduced, true, &mut transfers);
            }
            _ => self.gather(reduced, &mut transfers),
        }
        transfers
    }

    /// The reduction, from the first level to the last. Returns the next depth.
    fn reduce(&self, transfers: &mut Vec<Transfer>) -> u32 {
        self.reduce_groups(|number, index, depth, op| {
            let group = &self.schedule.levels()[number].groups()[index];
            for segment in self.segments_of(group.span) {
                // The sum is complete at the last level that reduces the shard; at earlier levels, other
                // contributions are still missing.
                let completes = group.root == self.rank && segment.shard.level == Some(number);
                transfers.push(Transfer { depth, group: index, segment, completes, op: op.clone() });
            }
        })
    }

    /// Calls `push` with the level, the group, the depth and the operation of each hop of the reduction.
    /// Returns the next depth.
    pub(super) fn reduce_groups(&self, mut push: impl FnMut(usize, usize, u32, TransferOp)) -> u32 {
        let mut depth = 0;
        for (number, level) in self.schedule.levels().iter().enumerate() {
            for index in level.groups_of(self.rank) {
                self.reduce_hops(&level.groups()[index], self.patterns[number][index], |hop, op| {
                    push(number, index, depth + hop as u32, op);
                });
            }
            depth += self.hops[number];
        }
        depth
    }

    fn reduce_hops(&self, group: &Group, pattern: ExchangePattern, mut push: impl FnMut(usize, TransferOp)) {
        let rank = self.rank;
        match pattern {
            ExchangePattern::Direct if rank == group.root => {
                push(0, TransferOp::Reduce(group.participants().collect::<Vec<_>>().into()));
            }
            ExchangePattern::Direct => push(0, TransferOp::Send([group.root].into())),
            ExchangePattern::Chain => {
                let place = chain_place(group, rank);
                if place > 0 {
                    let before = chain_rank(group, place - 1);
                    let adds = group.place_of(rank).is_some();
                    push(
                        place - 1,
                        TransferOp::Reduce(if adds { [before, rank].into() } else { [before].into() }),
                    );
                }
                if place + 1 < chain_len(group) {
                    push(place, TransferOp::Send([chain_rank(group, place + 1)].into()));
                }
            }
        }
    }

    /// Every rank sends its contribution to the owner of each shard, which adds them in rank order. Returns
    /// the next depth.
    fn reduce_at_owners(&self, transfers: &mut Vec<Transfer>) -> u32 {
        let world = self.schedule.world();
        let shards = self.schedule.shards().iter().filter(|_| world > 1);
        for (index, shard) in shards.enumerate() {
            let completes = shard.owner == self.rank;
            let op = if completes {
                TransferOp::Reduce((0..world).collect::<Vec<_>>().into())
            } else {
                TransferOp::Send([shard.owner].into())
            };
            for segment in self.segments_of(shard.span) {
                transfers.push(Transfer { depth: 0, group: index, segment, completes, op: op.clone() });
            }
        }
        1
    }

    /// Every rank sends its contribution to all others, and adds all contributions in rank order.
    fn reduce_one_shot(&self, transfers: &mut Vec<Transfer>) {
        let world = self.schedule.world();
        let others: Vec<Rank> = (0..world).filter(|rank| *rank != self.rank).collect();
        let ops =
            [TransferOp::Send(others.into()), TransferOp::Reduce((0..world).collect::<Vec<_>>().into())];
        for op in ops.into_iter().filter(|_| world > 1) {
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

    /// Every rank sends each of its blocks straight to the rank that gets it.
    fn exchange_blocks(&self, transfers: &mut Vec<Transfer>) {
        let Self { rank, spec, .. } = *self;
        let world = self.schedule.world();
        let mut push = |span, op| {
            let segment = Segment { span, ..self.segments[0] };
            transfers.push(Transfer { depth: 0, group: 0, segment, completes: false, op });
        };
        for peer in (0..world).filter(|peer| *peer != rank) {
            let (sends, receives) = match spec.collective {
                Collective::Gather => (peer == spec.root, rank == spec.root),
                Collective::Scatter => (rank == spec.root, peer == spec.root),
                _ => (true, true),
            };
            if sends {
                push(spec.block(rank, peer, world), TransferOp::Send([peer].into()));
            }
            if receives {
                push(spec.block(peer, rank, world), TransferOp::Copy(peer));
            }
        }
    }

    /// The gather, from the last level to the first, starting at `depth`.
    fn gather(&self, depth: u32, transfers: &mut Vec<Transfer>) {
        self.gather_groups(depth, |number, index, depth, op| {
            let Some(op) = self.without_root(op) else { return };
            for segment in self.segments_of(self.schedule.levels()[number].groups()[index].span) {
                transfers.push(Transfer { depth, group: index, segment, completes: false, op: op.clone() });
            }
        });
    }

    /// Calls `push` with the level, the group, the depth and the operation of each hop of the gather.
    pub(super) fn gather_groups(&self, mut depth: u32, mut push: impl FnMut(usize, usize, u32, TransferOp)) {
        for (number, level) in self.schedule.levels().iter().enumerate().rev() {
            for index in level.groups_of(self.rank) {
                self.gather_hops(&level.groups()[index], self.patterns[number][index], |hop, op| {
                    push(number, index, depth + hop as u32, op);
                });
            }
            depth += self.hops[number];
        }
    }

    /// What is left of an operation of the gather. The root of a broadcast has all data, so it receives none.
    fn without_root(&self, op: TransferOp) -> Option<TransferOp> {
        if self.spec.collective != Collective::Broadcast {
            return Some(op);
        }
        let root = self.spec.root;
        match op {
            TransferOp::Send(peers) => {
                let peers: Vec<Rank> = peers.iter().copied().filter(|peer| *peer != root).collect();
                (!peers.is_empty()).then(|| TransferOp::Send(peers.into()))
            }
            op => (self.rank != root).then_some(op),
        }
    }

    fn gather_hops(&self, group: &Group, pattern: ExchangePattern, mut push: impl FnMut(usize, TransferOp)) {
        let rank = self.rank;
        match pattern {
            ExchangePattern::Direct if rank == group.root => {
                let others = group.participants().filter(|other| *other != rank);
                push(0, TransferOp::Send(others.collect::<Vec<_>>().into()));
            }
            ExchangePattern::Direct => push(0, TransferOp::Copy(group.root)),
            ExchangePattern::Chain => {
                // The chain continues as a ring: from the root to the first participant, and on to the last.
                let len = chain_len(group);
                let place = (chain_place(group, rank) + 1) % len;
                let at = |place: usize| chain_rank(group, (place + len - 1) % len);
                if place > 0 {
                    push(place - 1, TransferOp::Copy(at(place - 1)));
                }
                if place + 1 < len {
                    push(place, TransferOp::Send([at(place + 1)].into()));
                }
            }
        }
    }

    /// One hop between the owners of shards and the ranks whose caller provides or receives them: from the
    /// owners if `from_owners`, else to the owners. Returns the next depth.
    fn redistribute(&self, depth: u32, from_owners: bool, transfers: &mut Vec<Transfer>) -> u32 {
        let (rank, world) = (self.rank, self.schedule.world());
        let shards = self.schedule.shards();
        let mut shard = 0;
        // Segments that are sent whole may contain several shards.
        for segment in self.segments {
            while shards[shard].span.end <= segment.span.start {
                shard += 1;
            }
            for part in shards[shard..].iter().take_while(|part| part.span.start < segment.span.end) {
                let span = part.span.intersection(segment.span);
                let user = match self.spec.collective {
                    Collective::Reduce | Collective::Broadcast => self.spec.root,
                    _ => user_of(span.start, world),
                };
                let (from, to) = if from_owners { (part.owner, user) } else { (user, part.owner) };
                if from == to || (rank != from && rank != to) {
                    continue;
                }
                let op = if rank == from { TransferOp::Send([to].into()) } else { TransferOp::Copy(from) };
                let segment = Segment { span, ..*segment };
                transfers.push(Transfer { depth, group: 0, segment, completes: false, op });
            }
        }
        depth + 1
    }

    pub(super) fn segments_of(&self, span: Span) -> impl Iterator<Item = Segment> + '_ {
        let first = self.segments.partition_point(|segment| segment.span.end <= span.start);
        let over = self.segments[first..].iter().take_while(move |segment| segment.span.start < span.end);
        over.map(move |segment| Segment { span: segment.span.intersection(span), ..*segment })
    }
}

/// The rank whose part the point is in, if the vector is divided into `world` equal parts.
fn user_of(point: Fraction, world: usize) -> Rank {
    point.element(world as u64, 1) as Rank
}
