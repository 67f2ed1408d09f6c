//! The events to come, by time.
//!
//! Owns their order, and the numbers by which they name things. Must not know what an event means.

use flexring_plan::Rank;

/// Picoseconds since the call began.
pub type VirtualTime = u64;

/// Number of a channel: one for each rank and each of its peers.
pub type ChannelId = u32;

/// Number of a link in one direction.
pub type LinkId = u32;

/// What happens at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimulatedEvent {
    /// The last bit of a channel's transfer was sent, if its flow still has this number of changes.
    FlowEnds { channel: ChannelId, changes: u32 },
    /// The last bit of a message arrived.
    Arrives { channel: ChannelId },
    /// The receiver was notified of a message that it reads in place.
    Announced { channel: ChannelId },
    /// The sender was notified that a message was read.
    Released { channel: ChannelId },
    /// A link has spent the tokens that let it exceed its bandwidth, if its use still has this number of
    /// changes.
    TokensSpent { link: LinkId, changes: u32 },
    /// A rank's addition or copy ended, as far as its thread is concerned.
    JobEnds { rank: u32 },
}

/// Events in the order of their times; those of one time in the order in which they were added.
///
/// This is a radix heap: an event is in the bucket of the highest bit in which its time differs from the
/// present one. When time proceeds to the earliest event, the events of its bucket move to lower ones. An
/// event moves at most 64 times, each time from and to consecutive memory, and events of one time are always
/// in one bucket, where they stay in order. Equal events that follow each other, such as the messages with
/// which a rank fills a window, are stored once.
#[derive(Debug)]
pub struct EventQueue {
    /// The time of the events that were removed last. No event is earlier.
    now: VirtualTime,
    /// Events of the present time, of which the first `taken` were removed.
    due: Vec<RepeatedEvent>,
    taken: usize,
    /// By the highest bit in which times differ from the present one.
    later: [Vec<(VirtualTime, RepeatedEvent)>; 64],
}

/// Equal events of one time.
#[derive(Clone, Copy, Debug)]
struct RepeatedEvent {
    event: SimulatedEvent,
    times: u32,
}

impl Default for EventQueue {
    fn default() -> Self {
        Self { now: 0, due: Vec::new(), taken: 0, later: [const { Vec::new() }; 64] }
    }
}

impl EventQueue {
    /// Adds an event, which must not be earlier than the last one that was removed.
    pub fn add(&mut self, time: VirtualTime, event: SimulatedEvent) {
        debug_assert!(time >= self.now, "an event in the past");
        let last = match (time ^ self.now).checked_ilog2() {
            None => self.due[self.taken..].last_mut(),
            Some(bit) => {
                self.later[bit as usize].last_mut().filter(|(of, _)| *of == time).map(|(_, last)| last)
            }
        };
        match last {
            Some(last) if last.event == event => last.times += 1,
            _ => self.append(time, RepeatedEvent { event, times: 1 }),
        }
    }

    fn append(&mut self, time: VirtualTime, event: RepeatedEvent) {
        match (time ^ self.now).checked_ilog2() {
            None => self.due.push(event),
            Some(bit) => self.later[bit as usize].push((time, event)),
        }
    }

    pub fn job_ends(&mut self, time: VirtualTime, rank: Rank) {
        self.add(time, SimulatedEvent::JobEnds { rank: rank as u32 });
    }

    /// Proceeds to the time of the next event.
    pub fn next_time(&mut self) -> Option<VirtualTime> {
        if self.taken == self.due.len() {
            let next = self.later.iter().position(|bucket| !bucket.is_empty())?;
            self.due.clear();
            self.taken = 0;
            let mut bucket = std::mem::take(&mut self.later[next]);
            self.now = bucket.iter().map(|(time, _)| *time).min()?;
            for (time, event) in bucket.drain(..) {
                self.append(time, event);
            }
            // Keeps its memory.
            self.later[next] = bucket;
        }
        Some(self.now)
    }

    /// The next event of the present time.
    pub fn pop(&mut self) -> Option<SimulatedEvent> {
        let next = self.due.get_mut(self.taken)?;
        next.times -= 1;
        self.taken += usize::from(next.times == 0);
        Some(next.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_one_time_are_in_the_order_of_their_addition() {
        let mut random = fastrand::Rng::with_seed(7);
        let (mut queue, mut expected) = (EventQueue::default(), std::collections::BTreeMap::new());
        let mut now = 0;
        for rank in 0..10_000 {
            for _ in 0..random.usize(..3) {
                // Many events of few times, and some that are far away.
                let time = now + if random.u8(..9) == 0 { random.u64(..1 << 40) } else { random.u64(..9) };
                for _ in 0..1 + random.usize(..3) {
                    queue.job_ends(time, rank);
                    let of_time = expected.entry(time).or_insert_with(std::collections::VecDeque::new);
                    of_time.push_back(rank as u32);
                }
            }
            let Some(mut first) = expected.first_entry() else {
                assert_eq!(queue.next_time(), None);
                continue;
            };
            now = *first.key();
            assert_eq!(queue.next_time(), Some(now));
            let next = first.get_mut().pop_front().expect("times have events");
            assert_eq!(queue.pop(), Some(SimulatedEvent::JobEnds { rank: next }));
            if first.get().is_empty() {
                first.remove();
            }
        }
    }
}
