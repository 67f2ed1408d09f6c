//! A model of what devices write to a GPU, under every order that PCI Express allows.
//!
//! Owns the evidence for the rules of `flush.rs` and `write_ordering.rs`: no message is stale that this
//! rank's GPU or one of its devices reads after it was reported, and each broken rule lets one be. Must not
//! depend on `flush.rs`.
//!
//! | what is read after a device's completion of a write | is ordered behind the write by |
//! |---|---|
//! | the completion, in host memory | nothing: another path |
//! | by a later read of the same device | PCI Express: reads do not pass writes, not even relaxed ones |
//! | by the GPU | the GPU, if its driver says so and the completion takes the same way |
//! | by another device | nothing |
//! | after a read of the same device has ended | that read |

use super::write_ordering::{OWNER, WriteOrdering, needs_flush};
use std::collections::HashSet;

const MESSAGES: usize = 3;
const RAILS: usize = 2;

/// What a mutant breaks.
#[derive(Clone, Copy)]
struct Rules {
    needs_flush: fn(WriteOrdering, usize) -> bool,
    /// The rail that reads, of one over which messages came.
    flushes_by: fn(usize) -> usize,
    /// Whether every rail is read over which messages came, or the first.
    flushes_all: bool,
    /// Whether what arrives during a flush waits for the next one.
    waits_for_next: bool,
    /// Whether a flush is over when the last of its reads ends, or the first.
    waits_for_all: bool,
    /// Whether a flush covers what had arrived when it began, or what has when it ends.
    counts_at_start: bool,
}

const PROTOCOL: Rules = Rules {
    needs_flush,
    flushes_by: |rail| rail,
    flushes_all: true,
    waits_for_next: true,
    waits_for_all: true,
    counts_at_start: true,
};

#[derive(Clone, Copy, Debug)]
struct World {
    gpu: WriteOrdering,
    rails: usize,
    /// By message, the rail that it comes over.
    rail_of: [usize; MESSAGES],
    /// Whether writes of a device may pass each other.
    relaxed: bool,
}

/// A set of messages, by bit.
type Messages = u8;

#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct State {
    /// Written by the device; there; their completions polled.
    written: Messages,
    arrived: Messages,
    completed: Messages,
    /// As in `FlushQueue`.
    waiting: Messages,
    flushing: Messages,
    reported: Messages,
    /// By rail, what a read in progress comes behind.
    reads: [Option<Messages>; RAILS],
    arrivals: [u8; RAILS],
    flushed: [u8; RAILS],
}

impl World {
    fn of_rail(&self, rail: usize) -> Messages {
        (0..MESSAGES)
            .filter(|message| self.rail_of[*message] == rail)
            .fold(0, |set, message| set | 1 << message)
    }

    /// The next message of each rail that is not in a set: things that happen in order.
    fn next_of(&self, set: Messages) -> impl Iterator<Item = usize> {
        let next = move |rail| (0..MESSAGES).find(|message| self.of_rail(rail) & !set & 1 << message != 0);
        (0..self.rails).filter_map(next)
    }

    /// Reports messages, which the GPU and all devices may then read. Whether none of them is stale.
    fn report(&self, state: &mut State, messages: Messages) -> bool {
        state.reported |= messages;
        let WriteOrdering { ordering, compute_major, coherent } = self.gpu;
        let keeps_order = ordering.map_or(compute_major >= 9, |ordering| ordering >= OWNER) && !coherent;
        (0..MESSAGES).filter(|message| messages & !state.arrived & 1 << message != 0).all(|message| {
            let is_fresh_for_devices = (0..self.rails).all(|rail| rail == self.rail_of[message]);
            keeps_order && is_fresh_for_devices
        })
    }

    /// All states that may follow, and whether no message is stale.
    fn steps(&self, rules: &Rules, state: &State) -> Vec<(State, bool)> {
        let mut steps = Vec::new();
        for message in self.next_of(state.written) {
            steps.push((State { written: state.written | 1 << message, ..state.clone() }, true));
        }
        let arriving: Vec<usize> =
            if self.relaxed { (0..MESSAGES).collect() } else { self.next_of(state.arrived).collect() };
        for message in
            arriving.into_iter().filter(|message| state.written & !state.arrived & 1 << message != 0)
        {
            steps.push((State { arrived: state.arrived | 1 << message, ..state.clone() }, true));
        }
        for message in self.next_of(state.completed).filter(|message| state.written & 1 << message != 0) {
            let mut next = State { completed: state.completed | 1 << message, ..state.clone() };
            next.arrivals[self.rail_of[message]] += 1;
            let mut is_fresh = true;
            if !(rules.needs_flush)(self.gpu, self.rails) {
                is_fresh = self.report(&mut next, 1 << message);
            } else if state.flushing != 0 && !rules.waits_for_next {
                next.flushing |= 1 << message;
            } else {
                next.waiting |= 1 << message;
            }
            steps.push((next, is_fresh));
        }
        for rail in 0..self.rails {
            let Some(behind) = state.reads[rail] else { continue };
            let mut next = State { arrived: state.arrived | behind, ..state.clone() };
            next.reads[rail] = None;
            let mut is_fresh = true;
            if !rules.waits_for_all || next.reads == [None; RAILS] {
                is_fresh = self.end_flush(rules, &mut next);
            }
            steps.push((next, is_fresh));
        }
        if state.flushing == 0 && state.waiting != 0 {
            let mut next = State { flushing: state.waiting, waiting: 0, ..state.clone() };
            let due = (0..self.rails).filter(|rail| state.arrivals[*rail] != state.flushed[*rail]);
            for rail in due.take(if rules.flushes_all { RAILS } else { 1 }) {
                let by = (rules.flushes_by)(rail) % self.rails;
                next.reads[by] = Some(self.of_rail(by) & state.written);
                next.flushed[rail] = state.arrivals[rail];
            }
            let is_fresh = next.reads != [None; RAILS] || self.end_flush(rules, &mut next);
            steps.push((next, is_fresh));
        }
        steps
    }

    fn end_flush(&self, rules: &Rules, state: &mut State) -> bool {
        if !rules.counts_at_start {
            state.flushed = state.arrivals;
        }
        let flushed = std::mem::take(&mut state.flushing);
        self.report(state, flushed)
    }
}

/// Runs every world under every order. Whether no message is ever stale; all are reported in the end.
fn is_right(rules: &Rules) -> bool {
    let gpu = |ordering, compute_major, coherent| WriteOrdering { ordering, compute_major, coherent };
    let gpus = [
        gpu(Some(0), 8, false),
        gpu(None, 8, false),
        gpu(None, 9, false),
        gpu(Some(OWNER), 9, false),
        gpu(Some(OWNER), 9, true),
    ];
    let worlds = gpus.into_iter().flat_map(|gpu| {
        let of_rails = move |rails: usize| {
            let choices = rails.pow(MESSAGES as u32);
            (0..2 * choices).map(move |choice| {
                let rail_of = std::array::from_fn(|message| choice / rails.pow(message as u32) % rails);
                World { gpu, rails, rail_of, relaxed: choice >= choices }
            })
        };
        (1..=RAILS).flat_map(of_rails)
    });
    worlds.into_iter().all(|world| {
        let mut known = HashSet::new();
        let mut open = vec![State::default()];
        while let Some(state) = open.pop() {
            let steps = world.steps(rules, &state);
            assert!(!steps.is_empty() || state.reported == (1 << MESSAGES) - 1, "{world:?} comes to no end");
            for (next, is_fresh) in steps {
                if !is_fresh {
                    return false;
                }
                if known.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        true
    })
}

#[test]
fn no_reader_of_a_reported_message_finds_it_stale() {
    assert!(is_right(&PROTOCOL));
}

#[test]
fn each_broken_rule_lets_a_message_be_stale() {
    let mutants = [
        ("no flush", Rules { needs_flush: |_, _| false, ..PROTOCOL }),
        ("several rails as one", Rules { needs_flush: |gpu, _| needs_flush(gpu, 1), ..PROTOCOL }),
        (
            "coherent as others",
            Rules {
                needs_flush: |gpu, rails| needs_flush(WriteOrdering { coherent: false, ..gpu }, rails),
                ..PROTOCOL
            },
        ),
        ("a read by another rail", Rules { flushes_by: |rail| rail + 1, ..PROTOCOL }),
        ("a read by one of the rails", Rules { flushes_all: false, ..PROTOCOL }),
        ("messages that join a flush", Rules { waits_for_next: false, ..PROTOCOL }),
        ("a flush that ends with its first read", Rules { waits_for_all: false, ..PROTOCOL }),
        ("what arrives during a flush counts as flushed", Rules { counts_at_start: false, ..PROTOCOL }),
    ];
    for (what, rules) in mutants {
        assert!(!is_right(&rules), "{what}");
    }
}
