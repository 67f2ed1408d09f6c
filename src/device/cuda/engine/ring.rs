//! One ring of descriptors, as the host sees it.
//!
//! Owns which entries are in use, the order in which completed descriptors are reported, and descriptors that
//! wait for free entries. Must not know GPUs, nor what a descriptor's memory is.

use super::layout::{Descriptor, ENTRIES, ENTRY_WORDS, Entry, FIRST_OPERANDS, HostControl, MORE_OPERANDS};
use std::collections::VecDeque;
use std::sync::atomic::Ordering;

/// The largest number of operands of a descriptor: those of a whole ring.
pub(super) const MOST_OPERANDS: usize = FIRST_OPERANDS + (ENTRIES - 1) * MORE_OPERANDS;

/// A descriptor with all its operands, and what its job needs to be reported.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// The job, without its operands.
    pub descriptor: Descriptor,
    /// The addresses of the operands, at most [`MOST_OPERANDS`].
    pub operands: Vec<u64>,
    /// The job's ticket.
    pub ticket: u64,
    /// Bounce slots to free when the job is complete.
    pub slots: Vec<usize>,
}

impl Work {
    /// Entries of a ring that it takes.
    fn entries(&self) -> usize {
        1 + self.operands.len().saturating_sub(FIRST_OPERANDS).div_ceil(MORE_OPERANDS)
    }
}

/// A published descriptor.
#[derive(Debug)]
struct Published {
    index: u64,
    work: Work,
}

/// The host's side of one ring.
#[derive(Debug)]
pub(super) struct Ring {
    number: usize,
    /// The running index one past the last published entry.
    head: u64,
    /// The running index of the oldest entry in use.
    oldest: u64,
    published: VecDeque<Published>,
    /// Descriptors that wait for free entries.
    waiting: VecDeque<Work>,
    /// Completed work, whose memory is used again.
    spare: Vec<Work>,
}

impl Ring {
    /// The ring with this number in control memory. Continues where an earlier user of the memory has
    /// stopped; all that it published is complete.
    pub(super) fn new(control: &HostControl, number: usize) -> Self {
        let head = control.host.head[number].load(Ordering::Relaxed);
        Self {
            number,
            head,
            oldest: head,
            published: VecDeque::with_capacity(ENTRIES),
            waiting: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// Work without operands and slots, to be filled and submitted.
    pub(super) fn work(&mut self) -> Work {
        let mut work = self.spare.pop().unwrap_or_default();
        work.operands.clear();
        work.slots.clear();
        work
    }

    /// Whether no descriptor is published or waits.
    pub(super) fn is_empty(&self) -> bool {
        self.published.is_empty() && self.waiting.is_empty()
    }

    /// Publishes `work`, or has it wait until there is room.
    pub(super) fn submit(&mut self, control: &HostControl, work: Work) {
        debug_assert!((1..=MOST_OPERANDS).contains(&work.operands.len()), "{} operands", work.operands.len());
        self.waiting.push_back(work);
        self.publish(control);
    }

    /// Reports the descriptors that have completed, in the order in which they were submitted, and publishes
    /// waiting ones.
    pub(super) fn poll(&mut self, control: &HostControl, report: &mut dyn FnMut(&Work)) {
        while let Some(first) = self.published.front() {
            let done = &control.done.0[self.number][place(first.index)];
            // Acquire: what the kernel wrote is visible once the word is.
            if done.load(Ordering::Acquire) != first.index + 1 {
                break;
            }
            let Published { work, .. } = self.published.pop_front().expect("it was just looked at");
            self.oldest += work.entries() as u64;
            report(&work);
            self.spare.push(work);
        }
        self.publish(control);
    }

    /// Forgets all descriptors, because no kernel will complete them any more.
    pub(super) fn clear(&mut self) {
        self.published.clear();
        self.waiting.clear();
    }

    fn publish(&mut self, control: &HostControl) {
        let before = self.head;
        while let Some(work) = self.waiting.front() {
            let entries = work.entries() as u64;
            if self.head + entries - self.oldest > ENTRIES as u64 {
                break;
            }
            let work = self.waiting.pop_front().expect("it was just looked at");
            self.write(&control.ring[self.number], &work);
            self.published.push_back(Published { index: self.head, work });
            self.head += entries;
        }
        if self.head != before {
            // Release: the fetcher that sees the new head also sees the entries before it.
            control.host.head[self.number].store(self.head, Ordering::Release);
        }
    }

    fn write(&self, ring: &[Entry; ENTRIES], work: &Work) {
        let (first, more) = work.operands.split_at(work.operands.len().min(FIRST_OPERANDS));
        let mut descriptor = work.descriptor;
        descriptor.operands = work.operands.len() as u32;
        descriptor.at[..first.len()].copy_from_slice(first);
        store(&ring[place(self.head)], &descriptor.words());
        for (operands, index) in more.chunks(MORE_OPERANDS).zip(self.head + 1..) {
            let mut words = [0; ENTRY_WORDS];
            words[..operands.len()].copy_from_slice(operands);
            store(&ring[place(index)], &words);
        }
    }
}

/// The entry with a running index.
fn place(index: u64) -> usize {
    (index % ENTRIES as u64) as usize
}

/// The store of `head` publishes these words, so they need no order among themselves.
fn store(entry: &Entry, words: &[u64; ENTRY_WORDS]) {
    for (place, word) in entry.0.iter().zip(words) {
        place.store(*word, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(ticket: u64, operands: usize) -> Work {
        let operands = (0..operands as u64).map(|nth| 1000 * ticket + nth).collect();
        let descriptor = Descriptor { into: ticket, ..Descriptor::default() };
        Work { descriptor, operands, ticket, slots: Vec::new() }
    }

    fn complete(control: &HostControl, ring: usize, index: u64) {
        control.done.0[ring][place(index)].store(index + 1, Ordering::Release);
    }

    fn poll(ring: &mut Ring, control: &HostControl) -> Vec<u64> {
        let mut tickets = Vec::new();
        ring.poll(control, &mut |work| tickets.push(work.ticket));
        tickets
    }

    fn head(control: &HostControl, ring: usize) -> u64 {
        control.host.head[ring].load(Ordering::Acquire)
    }

    fn word(control: &HostControl, ring: usize, index: u64, word: usize) -> u64 {
        control.ring[ring][place(index)].0[word].load(Ordering::Relaxed)
    }

    #[test]
    fn descriptors_are_reported_in_the_order_of_submission() {
        let control = HostControl::zeroed();
        let mut ring = Ring::new(&control, 1);
        for ticket in 0..3 {
            ring.submit(&control, work(ticket, 1));
        }
        assert_eq!(head(&control, 1), 3);
        complete(&control, 1, 1);
        complete(&control, 1, 2);
        assert!(poll(&mut ring, &control).is_empty());
        complete(&control, 1, 0);
        assert_eq!(poll(&mut ring, &control), [0, 1, 2]);
        assert!(ring.is_empty());
    }

    #[test]
    fn operands_beyond_the_first_entry_follow_in_further_ones() {
        let control = HostControl::zeroed();
        let mut ring = Ring::new(&control, 2);
        for (operands, entries) in [(1, 1), (10, 1), (11, 2), (26, 2), (27, 3), (60, 5)] {
            let index = head(&control, 2);
            ring.submit(&control, work(7, operands));
            assert_eq!(head(&control, 2), index + entries, "{operands} operands");
            assert_eq!(word(&control, 2, index, 0), 7);
            assert_eq!(word(&control, 2, index, 3), operands as u64);
            for nth in 0..operands {
                let at = match nth.checked_sub(FIRST_OPERANDS) {
                    None => word(&control, 2, index, 6 + nth),
                    Some(nth) => {
                        word(&control, 2, index + 1 + (nth / MORE_OPERANDS) as u64, nth % MORE_OPERANDS)
                    }
                };
                assert_eq!(at, 7000 + nth as u64, "operand {nth} of {operands}");
            }
            complete(&control, 2, index);
            assert_eq!(poll(&mut ring, &control), [7]);
        }
    }

    #[test]
    fn a_full_ring_has_descriptors_wait_in_order() {
        let control = HostControl::zeroed();
        let mut ring = Ring::new(&control, 0);
        for ticket in 0..ENTRIES as u64 + 10 {
            ring.submit(&control, work(ticket, 1));
        }
        assert_eq!(head(&control, 0), ENTRIES as u64);
        // Of three entries, and then a short one, which must not pass it.
        ring.submit(&control, work(900, 27));
        ring.submit(&control, work(901, 1));
        for index in 0..12 {
            complete(&control, 0, index);
        }
        assert_eq!(poll(&mut ring, &control), Vec::from_iter(0..12));
        // Ten took the free entries; the two that are left are too few for three.
        assert_eq!(head(&control, 0), ENTRIES as u64 + 10);
        complete(&control, 0, 12);
        complete(&control, 0, 13);
        assert_eq!(poll(&mut ring, &control), [12, 13]);
        assert_eq!(head(&control, 0), ENTRIES as u64 + 14);

        let rest = (14..ENTRIES as u64 + 10).chain([ENTRIES as u64 + 10, ENTRIES as u64 + 13]);
        rest.for_each(|index| complete(&control, 0, index));
        let tickets = Vec::from_iter((14..ENTRIES as u64 + 10).chain([900, 901]));
        assert_eq!(poll(&mut ring, &control), tickets);
        assert!(ring.is_empty());
    }

    #[test]
    fn a_descriptor_may_take_the_whole_ring() {
        let control = HostControl::zeroed();
        let mut ring = Ring::new(&control, 0);
        ring.submit(&control, work(1, 1));
        ring.submit(&control, work(2, MOST_OPERANDS));
        assert_eq!(head(&control, 0), 1);
        complete(&control, 0, 0);
        assert_eq!(poll(&mut ring, &control), [1]);
        assert_eq!(head(&control, 0), 1 + ENTRIES as u64);
    }

    #[test]
    fn a_ring_continues_where_its_control_memory_was_left() {
        let control = HostControl::zeroed();
        let mut first = Ring::new(&control, 0);
        for ticket in 0..5 {
            first.submit(&control, work(ticket, 1));
            complete(&control, 0, ticket);
        }
        assert_eq!(poll(&mut first, &control).len(), 5);
        let mut second = Ring::new(&control, 0);
        second.submit(&control, work(9, 1));
        assert!(poll(&mut second, &control).is_empty());
        complete(&control, 0, 5);
        assert_eq!(poll(&mut second, &control), [9]);
    }

    #[test]
    fn cleared_descriptors_are_not_reported() {
        let control = HostControl::zeroed();
        let mut ring = Ring::new(&control, 0);
        for ticket in 0..300 {
            ring.submit(&control, work(ticket, 1));
        }
        ring.clear();
        (0..256).for_each(|index| complete(&control, 0, index));
        assert!(ring.is_empty() && poll(&mut ring, &control).is_empty());
    }
}
