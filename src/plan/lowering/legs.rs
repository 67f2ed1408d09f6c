//! What a rank does in each group of each level: its legs, phase after phase.
//!
//! Owns the hops of chains and direct exchanges, and the way from owners to users. Must not know what a leg
//! waits for.

use super::{Form, Piece, Plan, Purpose};
use crate::call::Collective;
use crate::plan::Rank;
use crate::plan::fraction::{Fraction, Span};
use crate::plan::schedule::Group;

/// A group's part in a program: what happens at which hop.
pub(super) struct Leg {
    pub(super) depth: u32,
    pub(super) group: usize,
    pub(super) piece: Piece,
    /// Whether all that is left to be added is added here.
    pub(super) completes: bool,
    pub(super) act: Act,
}

#[derive(Clone)]
pub(super) enum Act {
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

pub(super) struct Lower<'a> {
    pub(super) plan: &'a Plan,
    pub(super) rank: Rank,
    pub(super) purpose: Purpose,
    pub(super) pieces: Vec<Piece>,
}

impl Lower<'_> {
    /// All that the rank does, phase after phase.
    pub(super) fn legs(&self) -> Vec<Leg> {
        let mut legs = Vec::new();
        if self.purpose.everywhere {
            self.reduce_everywhere(&mut legs);
            return legs;
        }
        let reduced = match self.purpose.collective {
            Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce => {
                if self.purpose.reproducible {
                    self.reduce_at_once(&mut legs)
                } else {
                    self.reduce(&mut legs)
                }
            }
            // What is gathered begins with the owners.
            Collective::AllGather | Collective::Broadcast => self.hand(0, false, &mut legs),
        };
        match self.purpose.collective {
            Collective::AllReduce | Collective::AllGather | Collective::Broadcast => {
                self.gather(reduced, &mut legs);
            }
            Collective::ReduceScatter | Collective::Reduce => {
                self.hand(reduced, true, &mut legs);
            }
        }
        legs
    }

    /// Down the levels. Returns the depth that comes after.
    fn reduce(&self, legs: &mut Vec<Leg>) -> u32 {
        let mut depth = 0;
        for (number, level) in self.plan.schedule.levels().iter().enumerate() {
            for index in level.groups_of(self.rank) {
                let group = &level.groups()[index];
                self.reduce_hops(group, self.plan.forms[number][index], |hop, act| {
                    for piece in self.pieces_of(group.span) {
                        // Wherever else a part of the sum is made, others are still to be added.
                        let completes = group.root == self.rank && piece.home.level == Some(number);
                        legs.push(Leg {
                            depth: depth + hop as u32,
                            group: index,
                            piece,
                            completes,
                            act: act.clone(),
                        });
                    }
                });
            }
            depth += self.plan.hops[number];
        }
        depth
    }

    fn reduce_hops(&self, group: &Group, form: Form, mut leg: impl FnMut(usize, Act)) {
        let rank = self.rank;
        match form {
            Form::Direct if rank == group.root => leg(0, Act::Reduce(group.participants().collect())),
            Form::Direct => leg(0, Act::Send(vec![group.root])),
            Form::Chain => {
                let place = chain_place(group, rank);
                if place > 0 {
                    let before = chain_rank(group, place - 1);
                    let adds = group.place_of(rank).is_some();
                    leg(place - 1, Act::Reduce(if adds { vec![before, rank] } else { vec![before] }));
                }
                if place + 1 < chain_len(group) {
                    leg(place, Act::Send(vec![chain_rank(group, place + 1)]));
                }
            }
        }
    }

    /// Everybody's contribution straight to the owner, who adds them in the order of the ranks.
    fn reduce_at_once(&self, legs: &mut Vec<Leg>) -> u32 {
        let world = self.plan.schedule.world();
        let homes = self.plan.schedule.homes().iter().filter(|_| world > 1);
        for (index, home) in homes.enumerate() {
            let completes = home.owner == self.rank;
            let act = if completes { Act::Reduce((0..world).collect()) } else { Act::Send(vec![home.owner]) };
            for piece in self.pieces_of(home.span) {
                legs.push(Leg { depth: 0, group: index, piece, completes, act: act.clone() });
            }
        }
        1
    }

    /// Everybody's contribution straight to everybody, who all add them in the order of the ranks.
    fn reduce_everywhere(&self, legs: &mut Vec<Leg>) {
        let world = self.plan.schedule.world();
        let others: Vec<Rank> = (0..world).filter(|rank| *rank != self.rank).collect();
        let acts = [Act::Send(others), Act::Reduce((0..world).collect())];
        for act in acts.into_iter().filter(|_| world > 1) {
            let completes = matches!(act, Act::Reduce(_));
            legs.extend(self.pieces.iter().map(|piece| Leg {
                depth: 0,
                group: 0,
                piece: *piece,
                completes,
                act: act.clone(),
            }));
        }
    }

    /// Back up the levels, beginning at `depth`.
    fn gather(&self, mut depth: u32, legs: &mut Vec<Leg>) {
        for (number, level) in self.plan.schedule.levels().iter().enumerate().rev() {
            for index in level.groups_of(self.rank) {
                let group = &level.groups()[index];
                self.gather_hops(group, self.plan.forms[number][index], |hop, act| {
                    for piece in self.pieces_of(group.span) {
                        let depth = depth + hop as u32;
                        legs.push(Leg { depth, group: index, piece, completes: false, act: act.clone() });
                    }
                });
            }
            depth += self.plan.hops[number];
        }
    }

    fn gather_hops(&self, group: &Group, form: Form, mut leg: impl FnMut(usize, Act)) {
        let rank = self.rank;
        match form {
            Form::Direct if rank == group.root => {
                leg(0, Act::Send(group.participants().filter(|other| *other != rank).collect()));
            }
            Form::Direct => leg(0, Act::Copy(group.root)),
            Form::Chain => {
                // The chain goes on around: from the root to the first participant and so to the last.
                let len = chain_len(group);
                let place = (chain_place(group, rank) + 1) % len;
                let at = |place: usize| chain_rank(group, (place + len - 1) % len);
                if place > 0 {
                    leg(place - 1, Act::Copy(at(place - 1)));
                }
                if place + 1 < len {
                    leg(place, Act::Send(vec![at(place + 1)]));
                }
            }
        }
    }

    /// Each part of the vector from its owner to the rank that shall have it, or back.
    fn hand(&self, depth: u32, out: bool, legs: &mut Vec<Leg>) -> u32 {
        let (rank, world) = (self.rank, self.plan.schedule.world());
        let homes = self.plan.schedule.homes();
        let mut home = 0;
        // Pieces that are sent whole may have several homes.
        for piece in &self.pieces {
            while homes[home].span.end <= piece.span.start {
                home += 1;
            }
            for part in homes[home..].iter().take_while(|part| part.span.start < piece.span.end) {
                let span = part.span.intersection(piece.span);
                let user = match self.purpose.collective {
                    Collective::Reduce | Collective::Broadcast => self.purpose.root,
                    _ => user_of(span.start, world),
                };
                let (from, to) = if out { (part.owner, user) } else { (user, part.owner) };
                if from == to || (rank != from && rank != to) {
                    continue;
                }
                let act = if rank == from { Act::Send(vec![to]) } else { Act::Copy(from) };
                let piece = Piece { span, ..*piece };
                legs.push(Leg { depth, group: 0, piece, completes: false, act });
            }
        }
        depth + 1
    }

    fn pieces_of(&self, span: Span) -> impl Iterator<Item = Piece> + '_ {
        let first = self.pieces.partition_point(|piece| piece.span.end <= span.start);
        let over = self.pieces[first..].iter().take_while(move |piece| piece.span.start < span.end);
        over.map(move |piece| Piece { span: piece.span.intersection(span), ..*piece })
    }
}

/// The rank whose part of `world` equal parts the point is in.
fn user_of(point: Fraction, world: usize) -> Rank {
    point.element(world as u64, 1) as Rank
}
