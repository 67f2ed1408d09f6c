//! Mailboxes: the path of small messages within a node. Every rank writes its whole vector to its own mailbox and
//! reads every other rank's, without hand-off or acknowledgement.
//!
//! A mailbox has two slots, which alternate from call to call. A rank that fills a slot for its n-th small call has read
//! every rank's slot of call n-1, and a rank fills that one only after it has read all slots of call n-2. So all ranks have
//! read the slot that is overwritten. Must not know what the bytes mean.

use super::arena_ref::{ArenaOwner, ArenaRef};
use super::control_page::ControlPage;
use super::layout::{ArenaLayout, MAILBOX_HEADER};
use super::neighbours::Neighbours;
use crate::call::{Call, CallWords};
use crate::error::{Error, Result};
use crate::memory::{Arena, Piece};
use crate::transport::Rank;
use crate::wake::WakeFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What precedes the bytes in a slot.
#[derive(Debug)]
#[repr(C, align(64))]
struct Header {
    /// Sequence number of the small call that the slot holds, from 1.
    number: AtomicU64,
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
    wake: Arc<WakeFd>,
}

/// The mailboxes of a node, as one of its ranks sees them.
pub struct Mailbox {
    mine: MailboxSlots,
    local_rank: usize,
    /// By index on the node; `None` for this rank.
    others: Vec<Option<PeerMailbox>>,
    ranks: Vec<Rank>,
    number: u64,
}

impl Mailbox {
    /// Connects the mailbox in `arena`, laid out by `layout`, with those of the neighbours.
    ///
    /// # Errors
    /// `Internal` if the layout does not fit; `System` if a neighbour's arena cannot be mapped.
    pub fn new(arena: &Arc<Arena>, layout: ArenaLayout, neighbours: &Neighbours, me: Rank) -> Result<Self> {
        let owner: ArenaOwner = Arc::clone(arena) as _;
        let mine = MailboxSlots::new(layout, |offset, len| Ok(arena.piece(offset, len)), &owner)?;
        let mut others: Vec<Option<PeerMailbox>> = (0..=neighbours.others.len()).map(|_| None).collect();
        let mut ranks = vec![me; others.len()];
        for other in &neighbours.others {
            let owner: ArenaOwner = Arc::clone(&other.arena) as _;
            ranks[other.local_rank] = other.rank;
            others[other.local_rank] = Some(PeerMailbox {
                slots: MailboxSlots::new(layout, |offset, len| other.arena.piece(offset, len), &owner)?,
                control: ArenaRef::new(other.arena.piece(0, size_of::<ControlPage>())?, owner)?,
                wake: Arc::clone(&other.wake),
            });
        }
        Ok(Self { mine, local_rank: neighbours.local_rank, others, ranks, number: 0 })
    }

    /// The number of ranks on the node.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// The rank with this local rank.
    #[must_use]
    pub fn rank_at(&self, local_rank: usize) -> Rank {
        self.ranks[local_rank]
    }

    /// Begins a small call and returns this rank's own slot, to be filled before [`post`](Self::post).
    pub fn begin(&mut self) -> Piece {
        self.number += 1;
        self.mine.bytes[self.slot()]
    }

    /// Publishes the slot to every neighbour, with this rank's call.
    pub fn post(&self, call: &Call) {
        let header = &self.mine.headers[self.slot()];
        for (word, value) in header.call.iter().zip(call.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
        header.number.store(self.number, Ordering::Release);
        for other in self.others.iter().flatten() {
            if other.control.need_wakeup.is_set() {
                other.wake.notify();
            }
        }
    }

    /// The call and the bytes that the rank with this local rank has posted for this call; `None` if it has not yet. The
    /// call is `None` if its words are invalid.
    #[must_use]
    pub fn peek(&self, local_rank: usize) -> Option<(Option<Call>, Piece)> {
        let slots =
            if local_rank == self.local_rank { &self.mine } else { &self.others[local_rank].as_ref()?.slots };
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
