//! Fuzz target: a neighbour that writes anything to its own memory, which this rank reads.

use super::control_page::ControlPage;
use super::layout::ArenaLayout;
use super::mailbox::{Mailbox, Posted};
use super::neighbours::{Neighbour, Neighbours};
use super::node_page::NodePage;
use super::spsc_queue::{ENTRIES, SpscQueue};
use super::{Shm, WINDOW, WakeLanes};
use crate::call::Call;
use crate::memory::{Arena, PeerArena, Piece};
use crate::transport::fixtures::call;
use crate::transport::{Event, Events, InPlaceTransport, Transport};
use crate::wake::WakeFd;
use flexring_testkit::fuzzing::{FuzzTarget, InputReader, block};
use std::sync::Arc;
use std::time::Duration;

const SMALL: usize = 256;
/// Offsets in a queue: the count of written entries, that of consumed ones, and the entries, each with
/// padding of 128 bytes.
const LINE: usize = 128;

/// Two ranks of a node: this one, and a neighbour whose memory the fuzzer writes.
struct Node {
    mine: Arc<Arena>,
    theirs: Arena,
    neighbours: Neighbours,
}

impl Node {
    fn new() -> Self {
        let layout = ArenaLayout::new(2, SMALL, 2, 4096).at(size_of::<NodePage>());
        let bytes = layout.start() + layout.bytes();
        let (mine, theirs) =
            (Arc::new(Arena::new(bytes).expect("memory")), Arena::new(bytes).expect("memory"));
        let file = theirs.read_only_file().expect("a descriptor");
        let arena = Arc::new(PeerArena::new(file, 2, bytes).expect("an arena"));
        let wakes = [WakeFd::new().expect("an event descriptor")].into();
        let other = Neighbour { rank: 1, local_rank: 1, arena, layout, wakes };
        let lanes = Arc::new(WakeLanes::new(true).expect("an event descriptor"));
        let neighbours = Neighbours { local_rank: 0, layout, lanes, others: vec![other] };
        Self { mine, theirs, neighbours }
    }

    fn layout(&self) -> ArenaLayout {
        self.neighbours.layout
    }

    /// Bytes of the neighbour's arena that this rank reads as words, from its start: the node page and the
    /// front of a region.
    fn words(&self) -> usize {
        self.layout().pool().offset()
    }

    /// Writes a word of the neighbour's memory.
    fn write(&self, offset: usize, word: u64) {
        let piece = self.theirs.piece(offset / 8 * 8, 8).expect("within the arena");
        // SAFETY: the range is aligned, and only this thread accesses it.
        unsafe { piece.as_ptr().cast::<u64>().write(word) }
    }

    /// Both arenas as they are at the start of a job.
    fn clear(&self) {
        for arena in [&*self.mine, &self.theirs] {
            let piece = arena.piece(0, self.words()).expect("within the arena");
            // SAFETY: as above.
            unsafe { piece.as_ptr().write_bytes(0, self.words()) }
        }
    }
}

/// Reads the first and the last byte, and one in between: a range outside of the mapping ends this process.
fn touch(view: Piece) {
    for at in [0, view.len() / 2, view.len().saturating_sub(1)] {
        if at < view.len() {
            // SAFETY: the range lies in the neighbour's mapped arena; if it does not, the test fails as it
            // should.
            unsafe { view.as_ptr().add(at).read_volatile() };
        }
    }
}

#[test]
fn memory_of_a_hostile_neighbour() {
    let node = Node::new();
    let entry = |words: &[u64]| {
        [&[1], block(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>()).as_slice()]
            .concat()
    };
    let mut a_call = vec![1];
    a_call.extend(call(1).to_words());
    let most = node.theirs.len() as u64;
    let seeds = [
        [&[2], entry(&a_call).as_slice(), &entry(&[2, 4096, 100]), &[3, 5, 2]].concat(),
        [&[2], entry(&a_call).as_slice(), &entry(&[2, most - 8, 8]), &entry(&[2, u64::MAX, 2]), &[3]]
            .concat(),
        [&[2, 4], entry(&[3, 0, 1]).as_slice(), &[3]].concat(),
        [&[2, 4, 4, 4, 0, 1, 0, 2], [0; 6].as_slice(), &[3, 6, 7]].concat(),
        // The neighbour posts a short message for call 1, and a long one for call 2.
        [&[6, 7, 0, 6, 1], [0; 7].as_slice(), &[7, 6, 0, 2, 2], [0; 7].as_slice(), &[7]].concat(),
    ];
    // A small job: what this rank keeps of a neighbour does not depend on what the neighbour writes.
    let target = FuzzTarget { name: "shm_neighbour", longest: 2048, memory: 1 << 20 };
    target.run(&seeds, |input| {
        node.clear();
        let mut reader = InputReader::new(input);
        let mut shm = Shm::new("shm", 2, &node.mine, &node.neighbours).expect("a layout that fits");
        let mut mailbox = Mailbox::new(&node.mine, &node.neighbours, 0).expect("a layout that fits");
        let page = |offset, len| {
            let page = node.neighbours.others[0].arena.piece(offset, len).expect("mapped").expect("within");
            page.as_ptr()
        };
        let node_page = page(0, size_of::<NodePage>()).cast::<NodePage>();
        // SAFETY: the page lies at the start of the neighbour's mapped arena and consists of atomics.
        let node_page = unsafe { node_page.as_ref().expect("not null") };
        let control = page(node.layout().start(), size_of::<ControlPage>()).cast::<ControlPage>();
        // SAFETY: as above, at the start of the neighbour's region.
        let control = unsafe { control.as_ref().expect("not null") };
        let queue = node.layout().queue(0);
        let (mut sequence, mut seen, mut written, mut unreleased, mut in_flight, mut small_calls) =
            (0, 0, 0u64, 0usize, 0usize, 0u64);
        let mut failed = false;
        while !reader.is_empty() && !failed {
            match reader.byte() % 9 {
                0 => {
                    // A word: of the queue's counters, of the control page, of a mailbox, or anywhere.
                    let place = usize::from(reader.byte());
                    let offset = match place % 4 {
                        0 => queue + place / 4 % 2 * LINE,
                        1 => place % 8 / 4 * node.layout().start() + place / 4 * 8,
                        2 => node.layout().mailbox(place / 4 % 2) + place / 8 % 8 * 8,
                        _ => queue + 2 * LINE + place / 4 * 8,
                    };
                    node.write(offset % node.words(), reader.word());
                }
                1 => {
                    // An entry, as the protocol writes it.
                    let mut words = InputReader::new(reader.block());
                    let at = queue + 2 * LINE + written as usize % ENTRIES * LINE;
                    (0..8).for_each(|word| node.write(at + 8 * word, words.word()));
                    written += 1;
                    node.write(queue, written);
                }
                2 if unreleased == 0 && in_flight == 0 => {
                    sequence += 1;
                    shm.begin(sequence);
                }
                3 => {
                    let mut events = Events::new();
                    failed = shm.poll(&mut events).is_err();
                    assert!(events.len() <= 2 * ENTRIES, "{} events", events.len());
                    for event in events {
                        match event {
                            Event::RecvReady { peer: 1, view } => {
                                unreleased += 1;
                                touch(view);
                                let _ = shm.check_reads();
                            }
                            Event::PeerEntered { peer: 1, .. } => {}
                            Event::SendComplete { peer: 1 } => in_flight -= 1,
                            event => panic!("{event:?}"),
                        }
                    }
                }
                4 if sequence > 0 && in_flight < WINDOW => {
                    let source =
                        node.mine.piece(node.layout().pool().offset(), 100).expect("within the arena");
                    shm.send(1, source).expect("from the arena");
                    in_flight += 1;
                }
                5 if unreleased > 0 => {
                    shm.release(1);
                    unreleased -= 1;
                }
                6 => {
                    small_calls += 1;
                    mailbox.begin(call(1).to_words(), if small_calls % 2 == 1 { 8 } else { SMALL });
                    touch(mailbox.message(0));
                    mailbox.post();
                    mailbox.wake_neighbours();
                    mailbox.post_to_members();
                    mailbox.prefetch_next();
                }
                7 => {
                    match mailbox.peek(1) {
                        Posted::Nothing => {}
                        Posted::SameCall => touch(mailbox.message(1)),
                        Posted::OtherCall(words) => {
                            let _ = Call::from_words(words);
                            touch(mailbox.message(1));
                        }
                    }
                    mailbox.await_post(1, Duration::ZERO);
                }
                8 => {
                    let ranges: Vec<(usize, usize)> = node_page.prefault.since(&mut seen).collect();
                    assert!(ranges.len() <= 16, "{} ranges", ranges.len());
                    // Not filled: hostile ranges may be as long as the machine's memory.
                    for (offset, len) in ranges {
                        if let Ok(Some(view)) = node.neighbours.others[0].arena.piece(offset, len) {
                            touch(view);
                        }
                    }
                    let _ = (control.gpu.read(), control.gpu.has_open(reader.byte().into()));
                    let _ = node_page.is_region_closed(reader.byte().into(), reader.word());
                }
                _ => {}
            }
            if shm.set_need_wakeup() {
                shm.clear_need_wakeup();
            }
        }
        shm.abort();
    });
    assert_eq!(size_of::<SpscQueue>(), (2 + ENTRIES) * LINE);
}
