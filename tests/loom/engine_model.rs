//! A model of the words that order the host and a resident kernel, checked by loom under every interleaving.
//!
//! Owns the evidence for the memory order of `kernels/engine.h`, which docs/gpu.md lists: the model passes
//! with [`Orders::PROTOCOL`] and fails with each of these orders weakened. Must not depend on the code that
//! it models, which is CUDA C++ on one side. There is one ring, of one entry or two, and a CTA is one thread
//! except in [`THREADS`].
//!
//! A poll that does not find what it waits for ends its thread, instead of repeating: a later poll sees no
//! more than one that runs later, and loom runs it later in another interleaving. So the model proves what
//! has been ordered when a wait ends, and not that every wait ends. docs/gpu.md says what else it leaves out:
//! scopes, caches and PCIe.

use super::gpu_model::{Plain, explore, mutants};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

use Ordering::{AcqRel, Acquire, Relaxed, Release};

/// Bits of a share word that count tiles, and as many that count workers.
const TILE_BITS: u64 = 8;
/// How often a CTA polls.
const ROUNDS: u64 = 4;
/// Elements of `Memory::data`.
const ELEMENTS: usize = 6;
/// What an aborting host stores: calls up to this number end.
const ALL_CALLS: u64 = u64::MAX;

/// The order of each access, and the steps that a mutant leaves out.
#[derive(Clone, Copy, Debug)]
struct Orders {
    host_publishes_head: Ordering,
    fetcher_reads_head: Ordering,
    fetcher_publishes_head: Ordering,
    cta_reads_head: Ordering,
    fetcher_reads_arrived: Ordering,
    cta_counts_tile: Ordering,
    /// Before the completion word is stored.
    fence_before_done: Option<Ordering>,
    host_reads_done: Ordering,
    fetcher_reports_start: Ordering,
    host_reads_started: Ordering,
    host_finishes: Ordering,
    host_aborts: Ordering,
    fetcher_reads_finished: Ordering,
    fetcher_reads_aborted: Ordering,
    fetcher_sets_over: Ordering,
    cta_reads_over: Ordering,
    cta_arrives: Ordering,
    cta_leaves: Ordering,
    last_cta_reports_end: Ordering,
    host_reads_ended: Ordering,
    thread_enters_barrier: Ordering,
    thread_leaves_barrier: Ordering,
    /// The count of finished tiles is zeroed before the entry is published.
    count_is_zeroed: bool,
    /// A worker reads where it begins before it arrives.
    position_is_read_first: bool,
    /// A worker compares the index in a share word with that of the entry.
    index_is_compared: bool,
    /// The host overwrites an entry only when the descriptor in it is complete.
    host_waits_before_reuse: bool,
    /// The last CTA to leave resets `arrived` and `left`.
    last_cta_resets: bool,
    /// A fetcher that sees an abort reads again whether the call had finished before.
    finished_is_read_again: bool,
}

impl Orders {
    /// The orders of kernels/engine.h.
    const PROTOCOL: Self = Self {
        host_publishes_head: Release,
        fetcher_reads_head: Acquire,
        fetcher_publishes_head: Release,
        cta_reads_head: Acquire,
        fetcher_reads_arrived: Acquire,
        cta_counts_tile: AcqRel,
        fence_before_done: Some(AcqRel),
        host_reads_done: Acquire,
        fetcher_reports_start: Release,
        host_reads_started: Acquire,
        host_finishes: Release,
        host_aborts: Release,
        fetcher_reads_finished: Acquire,
        fetcher_reads_aborted: Acquire,
        fetcher_sets_over: Relaxed,
        cta_reads_over: Relaxed,
        cta_arrives: AcqRel,
        cta_leaves: AcqRel,
        last_cta_reports_end: Release,
        host_reads_ended: Acquire,
        thread_enters_barrier: Release,
        thread_leaves_barrier: Acquire,
        count_is_zeroed: true,
        position_is_read_first: true,
        index_is_compared: true,
        host_waits_before_reuse: true,
        last_cta_resets: true,
        finished_is_read_again: true,
    };
}

/// One job: tile `t` adds 1 to the element `from + t` and writes the sum to the element `into + t`.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    tiles: u64,
    from: u64,
    into: u64,
}

/// An entry of the host's ring: no word of it is atomic.
#[derive(Debug, Default)]
struct HostEntry {
    tiles: Plain,
    from: Plain,
    into: Plain,
}

/// An entry of the GPU's ring, which only CTAs with a share read.
#[derive(Debug, Default)]
struct GpuEntry {
    from: Plain,
    into: Plain,
}

/// `HostControl`, `GpuState` with one ring each, and the vectors.
#[derive(Debug)]
struct Memory {
    orders: Orders,
    /// Entries of the ring, 1 or 2.
    entries: u64,
    /// CTAs of a kernel.
    ctas: u64,

    head: AtomicU64,
    finished: AtomicU64,
    aborted: AtomicU64,
    started: AtomicU64,
    ended: AtomicU64,
    done: [AtomicU64; 2],
    ring: [HostEntry; 2],

    line_head: AtomicU64,
    over: AtomicU64,
    shares: [AtomicU64; 2],
    arrived: AtomicU64,
    left: AtomicU64,
    finished_tiles: [AtomicU64; 2],
    gpu_ring: [GpuEntry; 2],

    data: [Plain; ELEMENTS],
    input: Plain,
    staged_input: Plain,
    staged_output: Plain,
    output: Plain,
    /// Read by every CTA while it runs, written by the host when it takes the memory back.
    mapping: Plain,
    /// By thread of the CTA of [`THREADS`], the barriers that it has reached.
    barriers: [AtomicU64; 2],
}

impl Memory {
    fn new(orders: Orders, entries: u64, ctas: u64) -> Self {
        let data: [Plain; ELEMENTS] = Default::default();
        Self {
            orders,
            entries,
            ctas,
            head: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            started: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            done: Default::default(),
            ring: Default::default(),
            line_head: AtomicU64::new(0),
            over: AtomicU64::new(0),
            shares: Default::default(),
            arrived: AtomicU64::new(0),
            left: AtomicU64::new(0),
            finished_tiles: Default::default(),
            gpu_ring: Default::default(),
            data,
            input: Plain::default(),
            staged_input: Plain::default(),
            staged_output: Plain::default(),
            output: Plain::default(),
            mapping: Plain::default(),
            barriers: Default::default(),
        }
    }

    fn entry(&self, index: u64) -> usize {
        (index % self.entries) as usize
    }
}

/// The host: `submit`, `poll` and the worker.
impl Memory {
    fn submit(&self, index: u64, job: Descriptor) {
        let entry = &self.ring[self.entry(index)];
        entry.tiles.set(job.tiles);
        entry.from.set(job.from);
        entry.into.set(job.into);
        self.head.store(index + 1, self.orders.host_publishes_head);
    }

    fn wait(word: &AtomicU64, at_least: u64, order: Ordering) -> Option<()> {
        thread::yield_now();
        (word.load(order) >= at_least).then_some(())
    }

    fn wait_done(&self, index: u64) -> Option<()> {
        Self::wait(&self.done[self.entry(index)], index + 1, self.orders.host_reads_done)
    }

    fn wait_started(&self, call: u64) -> Option<()> {
        Self::wait(&self.started, call, self.orders.host_reads_started)
    }

    fn finish(&self, call: u64) {
        self.finished.store(call, self.orders.host_finishes);
    }

    fn wait_ended(&self, call: u64) -> Option<()> {
        Self::wait(&self.ended, call, self.orders.host_reads_ended)?;
        self.mapping.set(1);
        Some(())
    }
}

/// The tiles of a descriptor on which a CTA works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    index: u64,
    first: u64,
    count: u64,
    all: u64,
}

/// How a call has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Aborted,
}

/// The kernel.
impl Memory {
    /// The share of a worker in the descriptor at an index.
    fn share_of(&self, index: u64, worker: u64) -> Option<Share> {
        let word = self.shares[self.entry(index)].load(Relaxed);
        let part = |nth: u64| word >> (nth * TILE_BITS) & ((1 << TILE_BITS) - 1);
        let (all, workers) = (part(0), part(1));
        if (self.orders.index_is_compared && word >> (2 * TILE_BITS) != index) || worker >= workers {
            return None;
        }
        let parts = all.min(workers);
        let part = (worker + index) % workers;
        let (first, end) = (all * part / parts, all * (part + 1) / parts);
        (part < parts).then_some(Share { index, first, count: end - first, all })
    }

    fn work(&self, share: Share) {
        let entry = &self.gpu_ring[self.entry(share.index)];
        for tile in share.first..share.first + share.count {
            let (from, into) = (entry.from.get() + tile, entry.into.get() + tile);
            self.data[into as usize].set(self.data[from as usize].get() + 1);
        }
        self.complete(share);
    }

    /// Counts finished tiles. The last ones of a descriptor store its completion word.
    fn complete(&self, share: Share) {
        let entry = self.entry(share.index);
        let before = self.finished_tiles[entry].fetch_add(share.count, self.orders.cta_counts_tile);
        if before + share.count == share.all {
            if let Some(order) = self.orders.fence_before_done {
                fence(order);
            }
            self.done[entry].store(share.index + 1, Relaxed);
        }
    }

    /// One CTA from its arrival to its end.
    fn run_cta(&self, call: u64) -> Option<()> {
        self.mapping.get();
        let mut position = self.line_head.load(Relaxed);
        let ticket = self.arrived.fetch_add(1, self.orders.cta_arrives);
        if !self.orders.position_is_read_first {
            position = self.line_head.load(Relaxed);
        }
        if ticket == 0 {
            self.run_fetcher(call)?;
        } else {
            self.run_worker(call, ticket - 1, position)?;
        }
        self.mapping.get();
        if self.left.fetch_add(1, self.orders.cta_leaves) + 1 == self.ctas {
            if self.orders.last_cta_resets {
                self.arrived.store(0, Relaxed);
                self.left.store(0, Relaxed);
            }
            self.ended.store(call, self.orders.last_cta_reports_end);
        }
        Some(())
    }

    /// How the call has ended, if it has. The kernel loads both words at once, so neither load is behind the
    /// other.
    fn end(&self, call: u64) -> Option<End> {
        let has_finished = || self.finished.load(self.orders.fetcher_reads_finished) >= call;
        let finished = has_finished();
        if self.aborted.load(self.orders.fetcher_reads_aborted) >= call {
            let complete = finished || (self.orders.finished_is_read_again && has_finished());
            return Some(if complete { End::Finished } else { End::Aborted });
        }
        finished.then_some(End::Finished)
    }

    fn run_fetcher(&self, call: u64) -> Option<()> {
        let mut end = self.end(call);
        if end.is_none() {
            self.staged_input.set(self.input.get());
            self.started.store(call, self.orders.fetcher_reports_start);
        }
        let mut fetched = self.line_head.load(Relaxed);
        let mut rounds = 0..ROUNDS;
        while end.is_none() {
            rounds.next()?;
            thread::yield_now();
            let workers = self.arrived.load(self.orders.fetcher_reads_arrived) - 1;
            let head = self.head.load(self.orders.fetcher_reads_head);
            if head > fetched && workers == 0 {
                let all = self.fetch(fetched, fetched + 1, 0);
                self.work(Share { index: fetched, first: 0, count: all, all });
                fetched += 1;
            } else if head > fetched {
                self.fetch(fetched, head, workers);
                fetched = head;
            }
            end = self.end(call);
        }
        self.over.store(call, self.orders.fetcher_sets_over);
        if end == Some(End::Finished) {
            self.output.set(self.staged_output.get());
        }
        Some(())
    }

    /// Brings descriptors to the GPU. Returns the number of tiles of the last one.
    fn fetch(&self, fetched: u64, head: u64, workers: u64) -> u64 {
        let mut tiles = 0;
        for index in fetched..head {
            let slot = self.entry(index);
            if self.orders.count_is_zeroed {
                self.finished_tiles[slot].store(0, Relaxed);
            }
            let (from, into) = (&self.ring[slot], &self.gpu_ring[slot]);
            into.from.set(from.from.get());
            into.into.set(from.into.get());
            tiles = from.tiles.get();
            self.shares[slot].store(index << (2 * TILE_BITS) | workers << TILE_BITS | tiles, Relaxed);
        }
        self.line_head.store(head, self.orders.fetcher_publishes_head);
        tiles
    }

    fn run_worker(&self, call: u64, worker: u64, begin: u64) -> Option<()> {
        let mut position = begin;
        for _ in 0..ROUNDS {
            thread::yield_now();
            if self.over.load(self.orders.cta_reads_over) >= call {
                return Some(());
            }
            let head = self.line_head.load(self.orders.cta_reads_head);
            // A call has one descriptor, except where there is one call.
            let before = begin.checked_sub(1).filter(|index| *index >= call - 1);
            let missed = before.and_then(|index| self.share_of(index, worker));
            assert_eq!(missed, None, "a worker began behind a descriptor in which it has a share");
            while position < head {
                if let Some(share) = self.share_of(position, worker) {
                    self.work(share);
                }
                position += 1;
            }
        }
        None
    }

    /// The kernels of calls 1 to `calls`, one after another as in a stream.
    fn run_kernels(memory: &Arc<Self>, calls: u64) -> Option<()> {
        for call in 1..=calls {
            let others: Vec<_> = (1..memory.ctas)
                .map(|_| {
                    let other = Arc::clone(memory);
                    thread::spawn(move || other.run_cta(call))
                })
                .collect();
            let mut all = memory.run_cta(call);
            for other in others {
                all = other.join().unwrap().and(all);
            }
            all?;
        }
        Some(())
    }
}

/// The only CTA of [`THREADS`], with two threads.
impl Memory {
    fn barrier(&self, thread: usize, number: u64) -> Option<()> {
        self.barriers[thread].store(number, self.orders.thread_enters_barrier);
        Self::wait(&self.barriers[1 - thread], number, self.orders.thread_leaves_barrier)
    }

    /// Thread 0 polls and reports.
    fn run_first_thread(&self) -> Option<()> {
        Self::wait(&self.head, 1, self.orders.fetcher_reads_head)?;
        self.barrier(0, 1)?;
        self.barrier(0, 2)?;
        fence(AcqRel);
        self.done[0].store(1, Relaxed);
        Some(())
    }

    /// Thread 1 reads the entry and does the work.
    fn run_second_thread(&self) -> Option<()> {
        self.barrier(1, 1)?;
        let (from, into) = (self.ring[0].from.get(), self.ring[0].into.get());
        self.data[into as usize].set(self.data[from as usize].get() + 1);
        self.barrier(1, 2)
    }

    fn run_threads(memory: &Arc<Self>) -> Option<()> {
        let second = Arc::clone(memory);
        let second = thread::spawn(move || second.run_second_thread());
        let first = memory.run_first_thread();
        second.join().unwrap().and(first)
    }
}

/// What runs.
#[derive(Clone, Copy, Debug)]
struct Scenario {
    /// Entries of the ring.
    entries: u64,
    /// CTAs of a kernel.
    ctas: u64,
    /// loom explores the interleavings with at most this number of preemptions; polls switch threads without
    /// one.
    preemptions: usize,
    /// The host, until a poll fails.
    host: fn(&Memory) -> Option<()>,
    /// The stream, until a poll fails.
    stream: fn(&Arc<Memory>) -> Option<()>,
}

/// A descriptor of two tiles, which two workers may share.
const TWO_TILES: Scenario = Scenario {
    entries: 1,
    ctas: 3,
    preemptions: 1,
    host: |memory| {
        memory.data[0].set(10);
        memory.data[1].set(20);
        memory.submit(0, Descriptor { tiles: 2, from: 0, into: 2 });
        memory.wait_done(0)?;
        assert_eq!((memory.data[2].get(), memory.data[3].get()), (11, 21), "wrong sums");
        // The operands are the host's again.
        memory.data[0].set(0);
        memory.data[1].set(0);
        memory.finish(1);
        memory.wait_ended(1)
    },
    stream: |memory| Memory::run_kernels(memory, 1),
};

/// Two descriptors in one entry: the second one reads what the first one wrote.
const REUSED_ENTRY: Scenario = Scenario {
    entries: 1,
    ctas: 2,
    preemptions: 2,
    host: |memory| {
        memory.data[0].set(10);
        memory.submit(0, Descriptor { tiles: 1, from: 0, into: 1 });
        if memory.orders.host_waits_before_reuse {
            memory.wait_done(0)?;
        }
        memory.submit(1, Descriptor { tiles: 2, from: 1, into: 3 });
        memory.wait_done(1)?;
        assert_eq!((memory.data[3].get(), memory.data[4].get()), (12, 1), "wrong sums");
        memory.finish(1);
        Some(())
    },
    stream: |memory| Memory::run_kernels(memory, 1),
};

/// Two calls of one descriptor each.
const TWO_CALLS: Scenario = Scenario {
    entries: 2,
    ctas: 2,
    preemptions: 1,
    host: |memory| {
        memory.data[0].set(10);
        for call in 1..=2 {
            memory.wait_started(call)?;
            memory.submit(call - 1, Descriptor { tiles: 1, from: call - 1, into: call });
            memory.wait_done(call - 1)?;
            assert_eq!(memory.data[call as usize].get(), 10 + call, "wrong sums");
            memory.finish(call);
        }
        Some(())
    },
    stream: |memory| Memory::run_kernels(memory, 2),
};

/// The kernel copies a small message into staging memory, and the result out of it.
const SMALL_MESSAGE: Scenario = Scenario {
    entries: 1,
    ctas: 2,
    preemptions: 3,
    host: |memory| {
        memory.wait_started(1)?;
        memory.staged_output.set(memory.staged_input.get() + 1);
        memory.finish(1);
        Some(())
    },
    stream: |memory| {
        memory.input.set(30);
        Memory::run_kernels(memory, 1)?;
        assert_eq!(memory.output.get(), 31, "wrong output");
        Some(())
    },
};

/// The host aborts the call while a descriptor waits, and takes all memory back when the kernel has ended.
const ABORT: Scenario = Scenario {
    entries: 1,
    ctas: 2,
    preemptions: 3,
    host: |memory| {
        memory.submit(0, Descriptor { tiles: 1, from: 0, into: 1 });
        memory.aborted.store(ALL_CALLS, memory.orders.host_aborts);
        memory.wait_ended(1)?;
        memory.ring[0].tiles.set(0);
        memory.data[0].set(0);
        memory.data[1].set(0);
        Some(())
    },
    stream: |memory| Memory::run_kernels(memory, 1),
};

/// The host aborts later calls, of which there are none yet, right after a call has finished. The fetcher
/// polls once: a thread that has yielded would see what is newest in loom.
const FINISH_THEN_ABORT: Scenario = Scenario {
    entries: 1,
    ctas: 2,
    preemptions: 3,
    host: |memory| {
        memory.staged_output.set(31);
        memory.finish(1);
        memory.aborted.store(ALL_CALLS, memory.orders.host_aborts);
        Some(())
    },
    stream: |memory| {
        assert_eq!(memory.end(1)?, End::Finished, "the finished call counts as aborted");
        assert_eq!(memory.staged_output.get(), 31, "wrong output");
        Some(())
    },
};

/// A CTA whose first thread polls and reports, while the second one works: what `bar.sync` and `__syncwarp`
/// are for.
const THREADS: Scenario = Scenario {
    entries: 1,
    ctas: 2,
    preemptions: 3,
    host: |memory| {
        memory.data[0].set(10);
        memory.submit(0, Descriptor { tiles: 1, from: 0, into: 1 });
        memory.wait_done(0)?;
        assert_eq!(memory.data[1].get(), 11, "wrong sum");
        memory.submit(1, Descriptor { tiles: 1, from: 1, into: 0 });
        Some(())
    },
    stream: Memory::run_threads,
};

/// Runs a scenario with changed orders under every interleaving. Panics if one is wrong, or if none runs to
/// its end.
fn check(scenario: Scenario, change: fn(&mut Orders)) {
    let mut orders = Orders::PROTOCOL;
    change(&mut orders);
    let Scenario { entries, ctas, preemptions, host, stream } = scenario;
    let memory = move || Memory::new(orders, entries, ctas);
    explore(preemptions, memory, move |memory| host(memory), stream, |_| Some(()));
}

#[test]
fn an_entry_is_reused() {
    check(REUSED_ENTRY, |_| ());
}

#[test]
fn kernels_follow_one_another() {
    check(TWO_CALLS, |_| ());
}

#[test]
fn small_messages_are_staged() {
    check(SMALL_MESSAGE, |_| ());
}

#[test]
fn memory_is_free_after_an_aborted_kernel_has_ended() {
    check(ABORT, |_| ());
}

#[test]
fn a_finished_call_keeps_its_output_when_later_calls_are_aborted() {
    check(FINISH_THEN_ABORT, |_| ());
}

#[test]
fn threads_of_a_cta_are_ordered_by_its_barrier() {
    check(THREADS, |_| ());
}

/// Two workers share a descriptor, also with either order weakened: each allows all that the protocol's
/// orders allow.
#[test]
fn one_of_the_count_and_the_fence_need_acquire() {
    check(TWO_TILES, |orders| orders.cta_counts_tile = Release);
    check(TWO_TILES, |orders| orders.fence_before_done = Some(Release));
}

mutants! {
    head_is_published_without_release: TWO_TILES, host_publishes_head = Relaxed, "Causality violation";
    head_is_fetched_without_acquire: TWO_TILES, fetcher_reads_head = Relaxed, "Causality violation";
    copied_head_is_published_without_release: TWO_TILES, fetcher_publishes_head = Relaxed, "Causality violation";
    copied_head_is_read_without_acquire: TWO_TILES, cta_reads_head = Relaxed, "Causality violation";
    tiles_are_counted_without_release: TWO_TILES, cta_counts_tile = Acquire, "Causality violation";
    tiles_are_counted_without_order: TWO_TILES, cta_counts_tile = Relaxed, "Causality violation";
    completion_has_no_fence: TWO_TILES, fence_before_done = None, "Causality violation";
    completion_has_an_acquire_fence: TWO_TILES, fence_before_done = Some(Acquire), "Causality violation";
    completion_is_read_without_acquire: TWO_TILES, host_reads_done = Relaxed, "Causality violation";
    completion_is_read_without_acquire_before_reuse: REUSED_ENTRY, host_reads_done = Relaxed, "Causality violation";
    entries_are_reused_early: REUSED_ENTRY, host_waits_before_reuse = false, "Causality violation";
    count_is_not_zeroed: REUSED_ENTRY, count_is_zeroed = false, "no interleaving runs to its end";
    workers_begin_after_they_arrive: REUSED_ENTRY, position_is_read_first = false, "a worker began behind";
    index_is_not_compared: REUSED_ENTRY, index_is_compared = false, "Causality violation";
    start_is_reported_without_release: SMALL_MESSAGE, fetcher_reports_start = Relaxed, "Causality violation";
    start_is_read_without_acquire: SMALL_MESSAGE, host_reads_started = Relaxed, "Causality violation";
    end_of_call_is_published_without_release: SMALL_MESSAGE, host_finishes = Relaxed, "Causality violation";
    end_of_call_is_read_without_acquire: SMALL_MESSAGE, fetcher_reads_finished = Relaxed, "Causality violation";
    end_of_call_is_read_once: FINISH_THEN_ABORT, finished_is_read_again = false, "counts as aborted";
    abort_is_published_without_release: FINISH_THEN_ABORT, host_aborts = Relaxed, "counts as aborted";
    abort_is_read_without_acquire: FINISH_THEN_ABORT, fetcher_reads_aborted = Relaxed, "counts as aborted";
    ctas_leave_without_release: ABORT, cta_leaves = Acquire, "Causality violation";
    ctas_leave_without_acquire: ABORT, cta_leaves = Release, "Causality violation";
    end_of_kernel_is_reported_without_release: ABORT, last_cta_reports_end = Relaxed, "Causality violation";
    end_of_kernel_is_read_without_acquire: ABORT, host_reads_ended = Relaxed, "Causality violation";
    ctas_are_not_reset: TWO_CALLS, last_cta_resets = false, "no interleaving runs to its end";
    barrier_is_entered_without_release: THREADS, thread_enters_barrier = Relaxed, "Causality violation";
    barrier_is_left_without_acquire: THREADS, thread_leaves_barrier = Relaxed, "Causality violation";
}
