//! A model of the words of collectives that kernels run, checked by loom under every interleaving.
//!
//! Owns the evidence for the memory orders and rules of `kernels/collective.cu`: each scenario passes with
//! [`Rules::PROTOCOL`] and fails with each of its rules broken. Must not depend on the code that it models,
//! which is CUDA C++. A CTA is one thread.
//!
//! A poll that does not find what it waits for ends its thread. loom executes the
//! accesses of a thread in the order of its program, and stores to one word in the order in which they were
//! executed.

use super::gpu_model::{Plain, explore, mutants};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use std::sync::atomic::{AtomicU64 as Untracked, Ordering::Relaxed as Unordered};

use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Bits of a packet's half above its flag.
const DATA: u64 = 32;
/// As in `collective.cu`, with less bits.
const NUMBER: u64 = 0xff;
const FAILED: u64 = 1 << 8;
const TICKET: u64 = 1 << 16;

/// The orders and rules that a mutant breaks.
#[derive(Clone, Copy, Debug)]
struct Rules {
    parities: u64,
    both_halves_are_compared: bool,
    entries_of_all: bool,
    stages: u64,
    waits_for_done: bool,
    publishes: Ordering,
    acquires: Ordering,
    one_kernel: bool,
    number_is_compared: bool,
    cta_leaves: Ordering,
    cta_leaves_quietly: Ordering,
    reports: Ordering,
    host_reads: Ordering,
    one_reports: bool,
    looks_for_abort: bool,
}

impl Rules {
    const PROTOCOL: Self = Self {
        parities: 2,
        both_halves_are_compared: true,
        entries_of_all: true,
        stages: 3,
        waits_for_done: true,
        publishes: Release,
        acquires: Acquire,
        one_kernel: true,
        number_is_compared: true,
        cta_leaves: AcqRel,
        cta_leaves_quietly: Acquire,
        reports: Release,
        host_reads: Acquire,
        one_reports: true,
        looks_for_abort: true,
    };
}

/// A packet of two halves, each with the number of its call.
#[derive(Debug, Default)]
struct Packet([AtomicU64; 2]);

impl Packet {
    fn put(&self, call: u64, value: u64, order: Ordering) {
        for half in &self.0 {
            half.store(value << DATA | call, order);
        }
    }

    /// The value, if it is there.
    fn poll(&self, call: u64, rules: &Rules, order: Ordering) -> Option<u64> {
        thread::yield_now();
        let halves = self.0.each_ref().map(|half| half.load(order));
        let calls = halves.map(|half| half & ((1 << DATA) - 1));
        assert!(calls.iter().all(|found| *found <= call), "a packet was overwritten before it was read");
        let compared = if rules.both_halves_are_compared { &calls[..] } else { &calls[..1] };
        if compared.iter().any(|found| *found != call) {
            return None;
        }
        assert_eq!(halves[0] >> DATA, halves[1] >> DATA, "half of a packet is of an earlier call");
        Some(halves[0] >> DATA)
    }
}

/// What other ranks write to a rank, and its stages.
#[derive(Debug, Default)]
struct RankMemory {
    entry: [Packet; 2],
    inbox: [Packet; 2],
    ready: AtomicU64,
    done: AtomicU64,
    /// By stage and rank that owns the part.
    input: [[Plain; 2]; 3],
    output: [[Plain; 2]; 3],
}

/// `CollectiveStatus` and the words of one rank's kernels.
#[derive(Debug, Default)]
struct OwnMemory {
    owner: AtomicU64,
    epoch: AtomicU64,
    stopped: AtomicU64,
    left: AtomicU64,
    waiting_for: AtomicU64,
    waiting_epoch: AtomicU64,
    failed_rank: AtomicU64,
    failed_epoch: AtomicU64,
    failure: AtomicU64,
    completed: AtomicU64,
    aborted: AtomicU64,
    result: [Plain; 2],
    /// In the order of execution: kernels that run, and calls that are complete, in bits.
    running: Untracked,
    complete: Untracked,
}

#[derive(Debug)]
struct Memory {
    rules: Rules,
    ranks: [RankMemory; 2],
    own: OwnMemory,
}

/// Packets of short calls.
impl Memory {
    fn parity(&self, call: u64) -> usize {
        (call % self.rules.parities) as usize
    }

    /// A rank in short broadcasts of the calls' numbers from rank 0.
    fn broadcasts(&self, me: usize, calls: u64) -> Option<()> {
        let peer = 1 - me;
        for call in 1..=calls {
            let at = self.parity(call);
            if me == 0 {
                self.ranks[peer].inbox[at].put(call, call, Relaxed);
            }
            if me == 0 || self.rules.entries_of_all {
                self.ranks[peer].entry[at].put(call, 7, Relaxed);
            }
            if me == 1 || self.rules.entries_of_all {
                assert_eq!(self.ranks[me].entry[at].poll(call, &self.rules, Relaxed)?, 7);
            }
            if me == 1 {
                assert_eq!(self.ranks[me].inbox[at].poll(call, &self.rules, Relaxed)?, call, "a wrong value");
            }
        }
        Some(())
    }
}

/// Rounds through stages.
impl Memory {
    fn stage(&self, round: u64) -> usize {
        (round % self.rules.stages) as usize
    }

    fn publish(&self, word: &AtomicU64, round: u64) {
        word.store(round + 1, self.rules.publishes);
    }

    fn wait(&self, word: &AtomicU64, round: u64) -> Option<()> {
        thread::yield_now();
        (word.load(self.rules.acquires) > round).then_some(())
    }

    fn number(rank: usize, round: u64) -> u64 {
        10 * (round + 1) + rank as u64
    }

    fn fill(&self, me: usize, round: u64) {
        for part in &self.ranks[me].input[self.stage(round)] {
            part.set(Self::number(me, round));
        }
        self.publish(&self.ranks[1 - me].ready, round);
    }

    /// A rank in an all-reduce of two parts, each of which belongs to a rank.
    fn all_reduce(&self, me: usize, rounds: u64) -> Option<()> {
        let (own, peer) = (&self.ranks[me], &self.ranks[1 - me]);
        for filled in 0..rounds + 2 {
            if filled < rounds {
                self.fill(me, filled);
            }
            if let Some(round) = filled.checked_sub(2) {
                if self.rules.waits_for_done {
                    self.wait(&own.done, round)?;
                }
                let expected = Self::number(0, round) + Self::number(1, round);
                let output = &own.output[self.stage(round)];
                assert_eq!([0, 1].map(|part| output[part].get()), [expected; 2], "wrong sums");
            }
            if let Some(round) = filled.checked_sub(1).filter(|round| *round < rounds) {
                let stage = self.stage(round);
                self.wait(&own.ready, round)?;
                let sum = own.input[stage][me].get() + peer.input[stage][me].get();
                own.output[stage][me].set(sum);
                peer.output[stage][me].set(sum);
                self.publish(&peer.done, round);
            }
        }
        Some(())
    }

    /// A rank in a broadcast from rank 0, whose stages the other reads.
    fn staged_broadcast(&self, me: usize, rounds: u64) -> Option<()> {
        let root = &self.ranks[0];
        for round in 0..rounds {
            if me == 1 {
                self.wait(&self.ranks[1].ready, round)?;
                assert_eq!(root.input[self.stage(round)][0].get(), Self::number(0, round), "a wrong value");
                self.publish(&root.done, round);
                continue;
            }
            if round >= self.rules.stages && self.rules.waits_for_done {
                self.wait(&root.done, round - self.rules.stages)?;
            }
            self.fill(0, round);
        }
        Some(())
    }

    /// A rank in direct all-reduces of two parts: it reads both inputs and writes both outputs. Its entry
    /// says that its input is there.
    fn direct(&self, me: usize, calls: u64) -> Option<()> {
        let (own, peer) = (&self.ranks[me], &self.ranks[1 - me]);
        for call in 1..=calls {
            let at = self.parity(call);
            own.input[0].iter().for_each(|part| part.set(Self::number(me, call)));
            peer.entry[at].put(call, 7, self.rules.publishes);
            assert_eq!(own.entry[at].poll(call, &self.rules, self.rules.acquires)?, 7);
            let sum = own.input[0][me].get() + peer.input[0][me].get();
            own.output[0][me].set(sum);
            peer.output[0][me].set(sum);
            self.publish(&peer.done, call);
            if self.rules.waits_for_done {
                self.wait(&own.done, call)?;
            }
            let expected = Self::number(0, call) + Self::number(1, call);
            assert_eq!([0, 1].map(|part| own.output[0][part].get()), [expected; 2], "wrong sums");
        }
        Some(())
    }
}

/// Kernels of one rank, and its host.
impl Memory {
    /// A kernel of one CTA. Its two first operations are under way at the same time. Returns the number of
    /// the call that it completed.
    fn run_kernel(&self, launch: u64, ticket_first: bool) -> Option<u64> {
        let OwnMemory { owner, epoch, running, complete, .. } = &self.own;
        let take = || owner.compare_exchange(0, launch, Relaxed, Relaxed).is_ok();
        let arrive = || epoch.fetch_add(TICKET, Relaxed);
        let (owns, word) = if ticket_first {
            let word = arrive();
            (take(), word)
        } else {
            let owns = take();
            (owns, arrive())
        };
        let owns = owns || !self.rules.one_kernel;
        let call = (word & NUMBER) + 1;
        if !owns || word & FAILED != 0 {
            self.fail(launch, call);
            if owns {
                let _ = owner.compare_exchange(launch, 0, Relaxed, Relaxed);
            }
            return None;
        }
        assert_eq!(running.fetch_add(1, Unordered), 0, "two kernels run at once");
        assert_eq!(
            complete.load(Unordered) >> call & 1,
            0,
            "a kernel has the number of a call that is complete"
        );
        thread::yield_now();
        running.fetch_sub(1, Unordered);
        let expected = (call - 1) | TICKET;
        let is_complete = if self.rules.number_is_compared {
            epoch.compare_exchange(expected, call, Relaxed, Relaxed).is_ok()
        } else {
            epoch.store(call, Relaxed);
            true
        };
        if is_complete {
            complete.fetch_or(1 << call, Unordered);
        } else {
            self.fail(launch, call);
            epoch.fetch_add(FAILED, Relaxed);
        }
        owner.store(0, Relaxed);
        is_complete.then_some(call)
    }

    /// The first failure is reported.
    fn fail(&self, rank: u64, epoch: u64) {
        let own = &self.own;
        if own.stopped.fetch_add(1, AcqRel) != 0 && self.rules.one_reports {
            return;
        }
        own.failed_rank.store(rank, Relaxed);
        own.failed_epoch.store(epoch, Relaxed);
        own.failure.store(1, self.rules.reports);
    }

    /// The rank and the call of the failure.
    fn read_failure(&self) -> Option<[u64; 2]> {
        let own = &self.own;
        thread::yield_now();
        (own.failure.load(self.rules.host_reads) != 0)
            .then(|| [own.failed_rank.load(Relaxed), own.failed_epoch.load(Relaxed)])
    }

    /// A CTA writes its part of the result; the last one to leave reports the end.
    fn leave(&self, cta: u64) {
        self.own.result[cta as usize].set(cta + 1);
        if self.own.left.fetch_add(1, self.rules.cta_leaves) == 1 {
            self.own.completed.store(1, self.rules.reports);
        }
    }

    /// A CTA leaves a call that reports no end. The last one sees whether another has failed.
    fn leave_quietly(&self, failed: bool) {
        let own = &self.own;
        if failed {
            own.stopped.fetch_add(1, AcqRel);
        }
        let order = if failed { self.rules.cta_leaves } else { self.rules.cta_leaves_quietly };
        if own.left.fetch_add(1, order) == 1 {
            assert_ne!(own.stopped.load(Relaxed), 0, "a failure is not seen");
        }
    }

    fn read_result(&self) -> Option<()> {
        thread::yield_now();
        if self.own.completed.load(self.rules.host_reads) == 0 {
            return None;
        }
        assert_eq!(self.own.result.each_ref().map(Plain::get), [1, 2], "a wrong result");
        Some(())
    }

    /// A CTA that waits for rank 3 in call 5, until the host wants it to leave.
    fn wait_in_vain(&self) -> Option<()> {
        self.own.waiting_for.store(3, Relaxed);
        self.own.waiting_epoch.store(5, self.rules.reports);
        thread::yield_now();
        if !self.rules.looks_for_abort || self.own.aborted.load(Relaxed) == 0 {
            return None;
        }
        self.fail(3, 5);
        Some(())
    }

    fn end_wait(&self) -> Option<()> {
        thread::yield_now();
        if self.own.waiting_epoch.load(self.rules.host_reads) == 0 {
            return None;
        }
        assert_eq!(self.own.waiting_for.load(Relaxed), 3, "no rank");
        self.own.aborted.store(1, Release);
        assert_eq!(self.read_failure()?, [3, 5], "a wrong report");
        Some(())
    }
}

/// What two threads do. loom explores the interleavings with at most this number of preemptions; polls switch
/// threads without one.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    preemptions: usize,
    first: fn(&Memory) -> Option<()>,
    second: fn(&Memory) -> Option<()>,
    /// Afterwards.
    end: fn(&Memory) -> Option<()>,
}

const PACKETS: Scenario = Scenario {
    preemptions: 2,
    first: |memory| memory.broadcasts(0, 3),
    second: |memory| memory.broadcasts(1, 3),
    end: |_| Some(()),
};

const REDUCED_STAGES: Scenario = Scenario {
    preemptions: 1,
    first: |memory| memory.all_reduce(0, 4),
    second: |memory| memory.all_reduce(1, 4),
    end: |_| Some(()),
};

const READ_STAGES: Scenario = Scenario {
    preemptions: 2,
    first: |memory| memory.staged_broadcast(0, 4),
    second: |memory| memory.staged_broadcast(1, 4),
    end: |_| Some(()),
};

const DIRECT: Scenario = Scenario {
    preemptions: 2,
    first: |memory| memory.direct(0, 2),
    second: |memory| memory.direct(1, 2),
    end: |_| Some(()),
};

/// Two kernels of one communicator in two streams. In the end both have had their numbers, or a failure is
/// reported.
const OVERLAP: Scenario = Scenario {
    preemptions: 3,
    first: |memory| {
        memory.run_kernel(1, false);
        Some(())
    },
    second: |memory| {
        memory.run_kernel(2, true);
        Some(())
    },
    end: |memory| {
        let (complete, failed) = (memory.own.complete.load(Unordered), memory.own.stopped.load(Relaxed) != 0);
        assert!(failed || complete == 0b110, "a call is not complete, and no failure is reported");
        Some(())
    },
};

const FAILURES: Scenario = Scenario {
    preemptions: 3,
    first: |memory| {
        memory.fail(1, 11);
        Some(())
    },
    second: |memory| {
        memory.fail(2, 12);
        Some(())
    },
    end: |memory| {
        let [rank, epoch] = memory.read_failure()?;
        assert_eq!(epoch, 10 + rank, "a mixture of two reports");
        Some(())
    },
};

const RESULT: Scenario = Scenario {
    preemptions: 3,
    first: |memory| {
        memory.leave(0);
        memory.read_result()
    },
    second: |memory| {
        memory.leave(1);
        Some(())
    },
    end: |_| Some(()),
};

const LEAVING: Scenario = Scenario {
    preemptions: 3,
    first: |memory| {
        memory.leave_quietly(true);
        Some(())
    },
    second: |memory| {
        memory.leave_quietly(false);
        Some(())
    },
    end: |_| Some(()),
};

const WAIT: Scenario =
    Scenario { preemptions: 3, first: Memory::wait_in_vain, second: Memory::end_wait, end: |_| Some(()) };

/// Runs a scenario with changed rules under every interleaving. Panics if one is wrong, or if none runs to
/// its end.
fn check(scenario: Scenario, change: fn(&mut Rules)) {
    let mut rules = Rules::PROTOCOL;
    change(&mut rules);
    let memory = move || Memory { rules, ranks: Default::default(), own: OwnMemory::default() };
    let Scenario { preemptions, first, second, end } = scenario;
    explore(preemptions, memory, move |memory| first(memory), move |memory| second(memory), end);
}

#[test]
fn packets_need_no_fence() {
    check(PACKETS, |_| ());
}

#[test]
fn stages_are_read_before_they_are_filled_again() {
    check(REDUCED_STAGES, |_| ());
    check(READ_STAGES, |_| ());
}

#[test]
fn vectors_are_there_when_ranks_have_entered() {
    check(DIRECT, |_| ());
}

#[test]
fn kernels_that_overlap_have_numbers_of_their_own_or_fail() {
    check(OVERLAP, |_| ());
}

#[test]
fn the_host_sees_one_failure_and_complete_results() {
    check(FAILURES, |_| ());
    check(RESULT, |_| ());
    check(LEAVING, |_| ());
}

#[test]
fn a_wait_is_reported_and_ended() {
    check(WAIT, |_| ());
}

mutants! {
    packets_have_one_place: PACKETS, parities = 1, "overwritten before it was read";
    one_half_is_compared: PACKETS, both_halves_are_compared = false, "half of a packet";
    the_root_awaits_no_entries: PACKETS, entries_of_all = false, "overwritten before it was read";
    sums_have_one_stage: REDUCED_STAGES, stages = 1, "Causality violation";
    sums_are_not_awaited: REDUCED_STAGES, waits_for_done = false, "wrong sums";
    sums_are_published_without_release: REDUCED_STAGES, publishes = Relaxed, "Causality violation";
    sums_are_read_without_acquire: REDUCED_STAGES, acquires = Relaxed, "Causality violation";
    stages_are_filled_early: READ_STAGES, waits_for_done = false, "Causality violation";
    stages_are_published_without_release: READ_STAGES, publishes = Relaxed, "Causality violation";
    stages_are_read_without_acquire: READ_STAGES, acquires = Relaxed, "Causality violation";
    inputs_are_entered_without_release: DIRECT, publishes = Relaxed, "Causality violation";
    inputs_are_read_without_acquire: DIRECT, acquires = Relaxed, "Causality violation";
    readers_are_not_awaited: DIRECT, waits_for_done = false, "wrong sums";
    failures_are_counted_without_release: LEAVING, cta_leaves = Acquire, "a failure is not seen";
    failures_are_counted_without_acquire: LEAVING, cta_leaves_quietly = Relaxed, "a failure is not seen";
    kernels_have_no_owner: OVERLAP, one_kernel = false, "two kernels run at once";
    the_number_is_not_compared: OVERLAP, number_is_compared = false, "the number of a call that is complete";
    every_failure_is_reported: FAILURES, one_reports = false, "a mixture of two reports";
    results_are_counted_without_release: RESULT, cta_leaves = Acquire, "Causality violation";
    results_are_counted_without_acquire: RESULT, cta_leaves = Release, "Causality violation";
    results_are_reported_without_release: RESULT, reports = Relaxed, "Causality violation";
    results_are_read_without_acquire: RESULT, host_reads = Relaxed, "Causality violation";
    waits_are_reported_without_release: WAIT, reports = Relaxed, "no rank";
    waits_are_read_without_acquire: WAIT, host_reads = Relaxed, "no rank";
    aborts_are_not_looked_for: WAIT, looks_for_abort = false, "no interleaving runs to its end";
}
