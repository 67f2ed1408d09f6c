//! Mailboxes: the path of small messages within a node. Every rank writes its whole vector to its own mailbox, and either every
//! rank reads all mailboxes, or the leader, the rank at place 0, reads them and the others read the leader's. There is no
//! hand-off and no acknowledgement.
//!
//! A mailbox has two slots, which alternate from call to call. A rank that fills a slot for its n-th small call has read
//! every rank's slot of call n-1, and a rank fills that one only after it has read all slots of call n-2. So all ranks have
//! read the slot that is overwritten. With a leader: a member that fills a slot for call n has the leader's result of call n-2,
//! which the leader posts after it has read the slot; the leader has every member's slot of call n-1, which a member posts
//! after it has read the leader's of call n-2. So members may read each other's slots of call n after the leader's post of call n,
//! too: each is overwritten after the leader's post of call n+1, for which every member has posted.
//!
//! Sleepers on the way through the leader wait for the word that they wait to change (a futex), in memory that they only
//! read: one system call wakes all, and takes the place of a notification for each. Must not know what the bytes mean.

use super::arena_ref::{ArenaOwner, ArenaRef};
use super::control_page::ControlPage;
use super::layout::{ArenaLayout, MAILBOX_HEADER};
use super::neighbours::Neighbours;
use crate::call::{Call, CallWords};
use crate::error::{Error, Result};
use crate::memory::{Arena, Piece};
use crate::transport::Rank;
use crate::wake::WakeFd;
use rustix::event::Timespec;
use rustix::thread::futex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

/// What precedes the bytes in a slot.
#[derive(Debug)]
#[repr(C, align(64))]
struct Header {
    /// Sequence number of the small call that the slot holds, from 1, modulo 2^32.
    number: AtomicU32,
    call: [AtomicU64; 5],
}

const _: () = assert!(size_of::<Header>() == MAILBOX_HEADER);

/// The two slots of one rank.
#[derive(Debug)]
struct MailboxSlots {
    headers: [ArenaRef<Header>; 2],
    bytes: [Piece; 2],
}

impl MailboxSlots {
    /// The slots in an arena, of which `piece` returns a range and which `owner` keeps mapped.
    fn new(
        layout: ArenaLayout,
        piece: impl Fn(usize, usize) -> Result<Option<Piece>>,
        owner: &ArenaOwner,
    ) -> Result<Self> {
        let header = |slot| ArenaRef::new(piece(layout.mailbox(slot), MAILBOX_HEADER)?, Arc::clone(owner));
        let bytes = |slot| {
            let bytes = piece(layout.mailbox(slot) + MAILBOX_HEADER, layout.small())?;
            bytes.ok_or_else(|| Error::internal("the mailbox exceeds the arena"))
        };
        Ok(Self { headers: [header(0)?, header(1)?], bytes: [bytes(0)?, bytes(1)?] })
    }
}

struct PeerMailbox {
    slots: MailboxSlots,
    control: ArenaRef<ControlPage>,
    wakes: Arc<[WakeFd]>,
}

/// The mailboxes of a node, as one of its ranks sees them.
pub struct Mailbox {
    mine: MailboxSlots,
    local_rank: usize,
    /// By index on the node; `None` for this rank.
    others: Vec<Option<PeerMailbox>>,
    ranks: Vec<Rank>,
    control: ArenaRef<ControlPage>,
    number: u32,
}

impl Mailbox {
    /// Connects the mailbox in this rank's region of `arena` with those of the neighbours.
    ///
    /// # Errors
    /// `Internal` if the layout does not fit; `System` if a neighbour's arena cannot be mapped.
    pub fn new(arena: &Arc<Arena>, neighbours: &Neighbours, me: Rank) -> Result<Self> {
        let owner: ArenaOwner = Arc::clone(arena) as _;
        let layout = neighbours.layout;
        let mine = MailboxSlots::new(layout, |offset, len| Ok(arena.piece(offset, len)), &owner)?;
        let control =
            ArenaRef::new(arena.piece(layout.start(), size_of::<ControlPage>()), Arc::clone(&owner))?;
        let mut others: Vec<Option<PeerMailbox>> = (0..=neighbours.others.len()).map(|_| None).collect();
        let mut ranks = vec![me; others.len()];
        for other in &neighbours.others {
            let owner: ArenaOwner = Arc::clone(&other.arena) as _;
            let page = other.arena.piece(other.layout.start(), size_of::<ControlPage>())?;
            ranks[other.local_rank] = other.rank;
            others[other.local_rank] = Some(PeerMailbox {
                slots: MailboxSlots::new(other.layout, |offset, len| other.arena.piece(offset, len), &owner)?,
                control: ArenaRef::new(page, owner)?,
                wakes: Arc::clone(&other.wakes),
            });
        }
        Ok(Self { mine, local_rank: neighbours.local_rank, others, ranks, control, number: 0 })
    }

    /// The number of ranks on the node.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// This rank's index on the node.
    #[must_use]
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// The rank with this local rank.
    #[must_use]
    pub fn rank_at(&self, local_rank: usize) -> Rank {
        self.ranks[local_rank]
    }

    /// Begins a small call and returns this rank's own slot, to be filled before [`post`](Self::post).
    pub fn begin(&mut self) -> Piece {
        self.number = self.number.wrapping_add(1);
        self.mine.bytes[self.slot()]
    }

    /// Publishes the slot with this rank's call, and wakes every neighbour that sleeps until one of its descriptors is
    /// notified.
    pub fn post(&self, call: &Call) {
        self.publish(call);
        for other in self.others.iter().flatten() {
            other.control.need_wakeup.wake(&other.wakes);
        }
    }

    /// Publishes the slot with this rank's call to the leader, and wakes it if it [awaits](Self::await_post) this rank. Called by
    /// members.
    pub fn post_to_leader(&self, call: &Call) {
        self.publish(call);
        // Pairs with the fence in `await_post`: either this rank sees that it is awaited, or the leader sees the post.
        fence(Ordering::SeqCst);
        let awaited = self.others.first().and_then(Option::as_ref).map(|leader| &leader.control.awaited);
        if awaited.is_some_and(|awaited| awaited.load(Ordering::Relaxed) as usize == self.local_rank) {
            self.wake_sleepers();
        }
    }

    /// Publishes the leader's slot with its call, and wakes all members that await it.
    pub fn post_to_members(&self, call: &Call) {
        self.publish(call);
        self.wake_sleepers();
    }

    fn publish(&self, call: &Call) {
        let header = &self.mine.headers[self.slot()];
        for (word, value) in header.call.iter().zip(call.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        header.number.store(self.number, Ordering::Release);
    }

    /// Wakes all that await this rank's post.
    fn wake_sleepers(&self) {
        // It fails only for addresses that are not mapped.
        let _ = futex::wake(&self.mine.headers[self.slot()].number, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Sleeps until the rank with this local rank has posted for this call, or `longest` is over. May return earlier. For the way
    /// through the leader: members await the leader, and the leader one member after another.
    pub fn await_post(&self, local_rank: usize, longest: Duration) {
        let Some(slots) = self.slots_of(local_rank) else { return };
        let word = &slots.headers[self.slot()].number;
        // Only the leader's word is read; a member's has no effect.
        self.control.awaited.store(local_rank as u32, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let posted = word.load(Ordering::Relaxed);
        if posted != self.number {
            let longest =
                Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
            // Returns at once if the word has changed meanwhile. The caller checks again, whatever ended the sleep.
            let _ = futex::wait(word, futex::Flags::empty(), posted, Some(&longest));
        }
        self.control.awaited.store(0, Ordering::Relaxed);
    }

    fn slots_of(&self, local_rank: usize) -> Option<&MailboxSlots> {
        if local_rank == self.local_rank {
            return Some(&self.mine);
        }
        self.others[local_rank].as_ref().map(|other| &other.slots)
    }

    /// The call and the bytes that the rank with this local rank has posted for this call; `None` if it has not yet. The
    /// call is `None` if its words are invalid.
    #[must_use]
    pub fn peek(&self, local_rank: usize) -> Option<(Option<Call>, Piece)> {
        let slots = self.slots_of(local_rank)?;
        let header = &slots.headers[self.slot()];
        if header.number.load(Ordering::Acquire) != self.number {
            return None;
        }
        let words: CallWords = std::array::from_fn(|word| header.call[word].load(Ordering::Relaxed));
        Some((Call::from_words(words), slots.bytes[self.slot()]))
    }

    /// The index of the slot that this call uses.
    fn slot(&self) -> usize {
        (self.number % 2) as usize
    }
}
