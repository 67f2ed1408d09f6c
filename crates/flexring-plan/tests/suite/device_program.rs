//! Lists of items, run as a kernel runs them: by a random number of CTAs for each rank, which read, write and
//! publish one place at a time in a random order. Slots of links and numbers of messages go on from call to
//! call, and ranks begin the next call when they are done with one. Many seeds look for lists that never end,
//! for items and slots that are used too early, and for contributions that are lost or counted twice. Each
//! rule of the protocol is also broken, which must be found.
//!
//! What a GPU does besides: it reorders accesses to memory, which the kernel's fences and their models are
//! for.

use fastrand::Rng;
use flexring_plan::Rank;
use flexring_plan::device_program::{ItemPlace, ListItem};
use flexring_plan::test_util::{ListedCall, contribution, factor, listed_calls, random_plan};
use flexring_testkit::effort::cases;

/// The rules that a kernel keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rule {
    None,
    /// An item begins after the items that it waits for.
    WaitsForItems,
    /// An item reads a slot after its message was sent.
    WaitsForMessages,
    /// An item writes to a slot after the message before it there was used.
    WaitsForSlots,
    /// CTAs take items in the order of the list, not from its end.
    TakesInOrder,
}

/// A direction of a link.
struct Slots {
    values: Vec<Vec<u64>>,
    /// By slot, the number of the message that was sent last, from 1.
    sent: Vec<u64>,
    /// By slot, the number of the message that was used last.
    used: Vec<u64>,
}

/// What a CTA does next with its item.
#[derive(Clone)]
enum Phase {
    Wait,
    Read(usize, Vec<u64>),
    Write(usize, Vec<u64>),
    Publish(usize),
}

struct SimulatedRank {
    calls: Vec<ListedCall>,
    /// The call that it is in.
    now: usize,
    next: usize,
    done: Vec<bool>,
    /// By CTA, its item.
    ctas: Vec<Option<(usize, Phase)>>,
    /// By link of the call, messages before it: to the peer and from it.
    before: Vec<[u64; 2]>,
    input: Vec<u64>,
    output: Vec<u64>,
    /// In place of both, if they share memory: the whole vector.
    whole: Vec<u64>,
    scratch: Vec<u64>,
    copy: Vec<u64>,
}

struct World {
    ranks: Vec<SimulatedRank>,
    links: Vec<Vec<Slots>>,
    broken: Rule,
}

impl SimulatedRank {
    /// Begins the call `now`, if there is one.
    fn begin(&mut self, rank: Rank) {
        let Some(call) = self.calls.get(self.now) else { return };
        self.next = 0;
        self.done = vec![false; call.program.items.len()];
        self.input = call.input.clone().map(|at| contribution(rank, at)).collect();
        self.output = vec![u64::MAX; (call.output.end - call.output.start) as usize];
        self.whole = vec![u64::MAX; call.count as usize];
        self.whole[call.input.start as usize..call.input.end as usize].copy_from_slice(&self.input);
        self.scratch = vec![u64::MAX; call.program.scratch as usize];
        self.copy = vec![u64::MAX; call.program.copied as usize];
    }

    fn memory(&mut self, place: ItemPlace, elements: usize) -> &mut [u64] {
        let call = &self.calls[self.now];
        let (memory, at) = match place {
            ItemPlace::Input(at) if call.in_place => (&mut self.whole, call.input.start + at),
            ItemPlace::Output(at) if call.in_place => (&mut self.whole, call.output.start + at),
            ItemPlace::Input(at) => (&mut self.input, at),
            ItemPlace::Output(at) => (&mut self.output, at),
            ItemPlace::Scratch(at) => (&mut self.scratch, at),
            ItemPlace::InputCopy(at) => (&mut self.copy, at),
            ItemPlace::Message { .. } => unreachable!("slots belong to links"),
        };
        &mut memory[at as usize..at as usize + elements]
    }

    /// Numbers of messages are counted over all calls.
    fn message(&self, link: u32, number: u32, received: bool) -> (Rank, u64) {
        let peer = self.calls[self.now].program.links[link as usize].peer;
        (peer, self.before[peer][usize::from(received)] + u64::from(number) + 1)
    }
}

impl World {
    /// The slots of a message at one end of its link, and its number.
    fn slot(&mut self, rank: Rank, place: ItemPlace, received: bool) -> Option<(&mut Slots, usize, u64)> {
        let ItemPlace::Message { link, number } = place else { return None };
        let (peer, number) = self.ranks[rank].message(link, number, received);
        let (from, to) = if received { (peer, rank) } else { (rank, peer) };
        let slots = &mut self.links[from][to];
        let slot = number as usize % slots.values.len();
        Some((slots, slot, number))
    }

    /// One step of a CTA; false if there is none. The error says what went wrong.
    fn step(&mut self, rank: Rank, cta: usize) -> Result<bool, String> {
        let broken = self.broken;
        let state = &mut self.ranks[rank];
        let Some(call) = state.calls.get(state.now) else { return Ok(false) };
        let Some((index, phase)) = state.ctas[cta].clone() else {
            let left = call.program.items.len().checked_sub(state.next + 1);
            let index = left.map(|left| if broken == Rule::TakesInOrder { left } else { state.next });
            state.ctas[cta] = index.map(|index| (index, Phase::Wait));
            state.next += usize::from(index.is_some());
            return Ok(index.is_some());
        };
        let item = call.program.items[index].clone();
        let next = match phase {
            Phase::Wait if !self.is_due(rank, &item) => return Ok(false),
            // The item behind those that copy the input.
            Phase::Wait if item.elements == 0 => Some(Phase::Publish(0)),
            Phase::Wait => Some(Phase::Read(0, vec![0; item.elements as usize])),
            Phase::Read(nth, sum) => Some(self.read(rank, &item, nth, sum)?),
            Phase::Write(nth, sum) => Some(self.write(rank, &item, nth, sum)),
            Phase::Publish(nth) => self.publish(rank, &item, index, nth),
        };
        self.ranks[rank].ctas[cta] = next.map(|phase| (index, phase));
        self.end_call(rank)?;
        Ok(true)
    }

    fn places(&self, rank: Rank, item: &ListItem) -> (Vec<ItemPlace>, Vec<ItemPlace>) {
        let state = &self.ranks[rank];
        let program = &state.calls[state.now].program;
        (program.sources(item).to_vec(), program.destinations(item).to_vec())
    }

    fn is_due(&mut self, rank: Rank, item: &ListItem) -> bool {
        let state = &self.ranks[rank];
        let waits = state.calls[state.now].program.waits(item);
        if self.broken != Rule::WaitsForItems && waits.iter().any(|on| !state.done[*on as usize]) {
            return false;
        }
        let (broken, (sources, destinations)) = (self.broken, self.places(rank, item));
        let mut sent = |place: &ItemPlace| {
            self.slot(rank, *place, true).is_none_or(|(slots, slot, number)| slots.sent[slot] >= number)
        };
        let arrived = broken == Rule::WaitsForMessages || sources.iter().all(&mut sent);
        let mut free = |place: &ItemPlace| {
            self.slot(rank, *place, false)
                .is_none_or(|(slots, slot, number)| slots.used[slot] + slots.values.len() as u64 >= number)
        };
        arrived && (broken == Rule::WaitsForSlots || destinations.iter().all(&mut free))
    }

    fn read(&mut self, rank: Rank, item: &ListItem, nth: usize, mut sum: Vec<u64>) -> Result<Phase, String> {
        let place = self.places(rank, item).0[nth];
        let values = match self.slot(rank, place, true) {
            Some((slots, slot, number)) if slots.sent[slot] > number => {
                return Err(format!("message {number} to rank {rank} was overwritten"));
            }
            Some((slots, slot, _)) => slots.values[slot][..sum.len()].to_vec(),
            None => self.ranks[rank].memory(place, sum.len()).to_vec(),
        };
        let scaled = item.scales && matches!(place, ItemPlace::Input(_) | ItemPlace::InputCopy(_));
        let by = factor(rank, scaled);
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.wrapping_add(value.wrapping_mul(by)));
        let sources = self.places(rank, item).0.len();
        Ok(if nth + 1 < sources { Phase::Read(nth + 1, sum) } else { Phase::Write(0, sum) })
    }

    fn write(&mut self, rank: Rank, item: &ListItem, nth: usize, sum: Vec<u64>) -> Phase {
        let destinations = self.places(rank, item).1;
        match self.slot(rank, destinations[nth], false) {
            Some((slots, slot, _)) => slots.values[slot][..sum.len()].copy_from_slice(&sum),
            None => self.ranks[rank].memory(destinations[nth], sum.len()).copy_from_slice(&sum),
        }
        if nth + 1 < destinations.len() { Phase::Write(nth + 1, sum) } else { Phase::Publish(0) }
    }

    /// First the messages that were sent, then those that were used, then that the item is done.
    fn publish(&mut self, rank: Rank, item: &ListItem, index: usize, nth: usize) -> Option<Phase> {
        let (sources, destinations) = self.places(rank, item);
        if let Some(place) = destinations.get(nth) {
            if let Some((slots, slot, number)) = self.slot(rank, *place, false) {
                slots.sent[slot] = number;
            }
        } else if let Some(place) = sources.get(nth - destinations.len()) {
            if let Some((slots, slot, number)) = self.slot(rank, *place, true) {
                slots.used[slot] = number;
            }
        } else {
            self.ranks[rank].done[index] = true;
            return None;
        }
        Some(Phase::Publish(nth + 1))
    }

    /// While its call is over, checks the rank's output, counts the messages, and begins the next call.
    fn end_call(&mut self, rank: Rank) -> Result<(), String> {
        let state = &mut self.ranks[rank];
        while let Some(call) = state.calls.get(state.now).filter(|_| state.done.iter().all(|done| *done)) {
            let output = if call.in_place {
                &state.whole[call.output.start as usize..call.output.end as usize]
            } else {
                &state.output
            };
            for ((at, value), must) in call.output.clone().zip(output).zip(call.expected()) {
                if must.is_some_and(|must| *value != must) {
                    return Err(format!("rank {rank}, element {at} is {value:#x}: {:?}", call.spec));
                }
            }
            let unchanged =
                call.input.clone().map(|at| contribution(rank, at)).eq(state.input.iter().copied());
            assert!(unchanged, "rank {rank}'s input was written to");
            for link in &call.program.links {
                let [sent, received] = &mut state.before[link.peer];
                *sent += u64::from(link.sends);
                *received += u64::from(link.receives);
            }
            state.now += 1;
            state.begin(rank);
        }
        Ok(())
    }

    fn run(&mut self, random: &mut Rng) -> Result<(), String> {
        let steps: Vec<(Rank, usize)> = self
            .ranks
            .iter()
            .enumerate()
            .flat_map(|(rank, state)| (0..state.ctas.len()).map(move |cta| (rank, cta)))
            .collect();
        for rank in 0..self.ranks.len() {
            self.end_call(rank)?;
        }
        let mut idle = 0;
        while self.ranks.iter().any(|state| state.now < state.calls.len()) {
            let (rank, cta) = steps[random.usize(..steps.len())];
            idle = if self.step(rank, cta)? { 0 } else { idle + 1 };
            if idle > 20 * steps.len() {
                let mut moved = false;
                for (rank, cta) in &steps {
                    moved |= self.step(*rank, *cta)?;
                }
                if !moved {
                    return Err("a deadlock".to_owned());
                }
                idle = 0;
            }
        }
        Ok(())
    }
}

/// Runs some calls of a random plan in a random order of steps. What went wrong is the error.
fn simulate(seed: u64, broken: Rule) -> Result<(), String> {
    let mut random = Rng::with_seed(seed);
    let (_, plan, spec) = random_plan(&mut random);
    let world = plan.schedule().world();
    let lag = (spec.in_waves() && random.bool()).then_some(1);
    let most_places = if random.bool() { 64 } else { random.usize(3..6) };
    let calls: Option<Vec<_>> = (0..1 + random.usize(..3))
        .map(|_| listed_calls(&mut random, &plan, spec, lag, 5, most_places))
        .collect();
    let Some(calls) = calls else { return Ok(()) };
    let mut by_rank: Vec<Vec<ListedCall>> = (0..world).map(|_| Vec::new()).collect();
    calls
        .into_iter()
        .for_each(|call| by_rank.iter_mut().zip(call).for_each(|(calls, call)| calls.push(call)));
    let (most_ctas, most_slots) = (1 + random.usize(..4), 1 + random.usize(..4));
    let ranks = (0..).zip(by_rank).map(|(rank, calls)| {
        let mut state = SimulatedRank {
            calls,
            now: 0,
            next: 0,
            done: Vec::new(),
            ctas: vec![None; 1 + random.usize(..most_ctas)],
            before: vec![[0; 2]; world],
            input: Vec::new(),
            output: Vec::new(),
            whole: Vec::new(),
            scratch: Vec::new(),
            copy: Vec::new(),
        };
        state.begin(rank);
        state
    });
    let ranks = ranks.collect();
    let mut slots = |_| {
        let slots = 1 + random.usize(..most_slots);
        Slots { values: vec![vec![u64::MAX; 8]; slots], sent: vec![0; slots], used: vec![0; slots] }
    };
    let links = (0..world).map(|_| (0..world).map(&mut slots).collect()).collect();
    World { ranks, links, broken }.run(&mut random)
}

#[test]
fn random_orders_of_ctas_end_in_the_right_sums() {
    for seed in 0..cases(4_000) {
        simulate(seed, Rule::None).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn a_rule_that_is_broken_is_found() {
    for broken in [Rule::WaitsForItems, Rule::WaitsForMessages, Rule::WaitsForSlots, Rule::TakesInOrder] {
        let found = (0..2_000).find(|seed| simulate(*seed, broken).is_err());
        assert!(found.is_some(), "{broken:?} is never missed");
    }
}

#[test]
fn an_item_has_no_more_places_than_it_may() {
    for seed in 0..cases(2000) {
        let mut random = Rng::with_seed(seed);
        let (_, plan, spec) = random_plan(&mut random);
        let most_places = random.usize(3..6);
        for ListedCall { program, .. } in
            listed_calls(&mut random, &plan, spec, None, 8, most_places).into_iter().flatten()
        {
            for item in &program.items {
                let places = program.sources(item).len() + program.destinations(item).len();
                assert!(places <= most_places, "seed {seed}, {spec:?}: {places} of {most_places} places");
            }
        }
    }
}
