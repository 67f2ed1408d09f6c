//! Mailboxes: the path of small messages within a node. Every rank writes its whole vector to its own
//! mailbox, and either every rank reads all mailboxes, or the leader, the rank at place 0, reads them and the
//! others read the leader's. There is no hand-off and no acknowledgement. A message of up to 16 bytes lies
//! behind the header of its mailbox, in the same cache line, and a longer one in the lines after it. Each
//! rank looks where its own call says, so a message is used only after the calls were compared.
//!
//! A mailbox has two slots, which alternate from call to call. A rank that fills a slot for its n-th small
//! call has read every rank's slot of call n-1, and a rank fills that one only after it has read all slots of
//! call n-2. So all ranks have read the slot that is overwritten. With a leader: a member that fills a slot
//! for call n has the leader's result of call n-2, which the leader posts after it has read the slot; the
//! leader has every member's slot of call n-1, which a member posts after it has read the leader's of call
//! n-2. So members may read each other's slots of call n after the leader's post of call n, too: each is
//! overwritten after the leader's post of call n+1, for which every member has posted.
//!
//! Sleepers on the way through the leader wait for the word that they wait to change (a futex), in memory
//! that they only read: one system call wakes all, and takes the place of a notification for each.

use super::arena_ref::{ArenaOwner, ArenaRef};
use super::control_page::ControlPage;
use super::layout::{ArenaLayout, MAILBOX_LINE};
use super::neighbours::Neighbours;
use crate::call::CallWords;
use crate::error::{Error, Result};
use crate::memory::{Arena, Piece};
use crate::transport::Rank;
use crate::wake::WakeFd;
use rustix::event::Timespec;
use rustix::thread::futex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

/// What a slot starts with, at the start of a cache line.
#[derive(Debug)]
#[repr(C)]
struct Header {
    /// Sequence number of the small call that the slot holds, from 1, modulo 2^32.
    number: AtomicU32,
    call: [AtomicU64; 5],
}

/// Length in bytes of the longest message that lies inline, in the cache line of its header. Then one
/// transfer between cores brings both: with 2 ranks, 8 B take 0.34 us instead of 0.37 (AMD EPYC). If longer
/// ones began there, too, and not in a line of their own, 4 KiB would take 10 % longer.
const INLINE_BYTES: usize = 16;

const _: () = assert!(size_of::<Header>() + INLINE_BYTES == MAILBOX_LINE);

/// The two slots of one rank.
#[derive(Debug)]
struct MailboxSlots {
    headers: [ArenaRef<Header>; 2],
    /// For messages of at most [`INLINE_BYTES`].
    inline: [Piece; 2],
    /// For longer ones.
    separate: [Piece; 2],
}

impl MailboxSlots {
    /// The slots in an arena, of which `piece` returns a range and which `owner` keeps mapped.
    fn new(
        layout: ArenaLayout,
        piece: impl Fn(usize, usize) -> Result<Option<Piece>>,
        owner: &ArenaOwner,
    ) -> Result<Self> {
        let header =
            |slot| ArenaRef::new(piece(layout.mailbox(slot), size_of::<Header>())?, Arc::clone(owner));
        let bytes = |slot, offset, len| {
            let bytes = piece(layout.mailbox(slot) + offset, len)?;
            bytes.ok_or_else(|| Error::internal("the mailbox exceeds the arena"))
        };
        let inline = |slot| bytes(slot, size_of::<Header>(), INLINE_BYTES);
        let separate = |slot| bytes(slot, MAILBOX_LINE, layout.small());
        Ok(Self {
            headers: [header(0)?, header(1)?],
            inline: [inline(0)?, inline(1)?],
            separate: [separate(0)?, separate(1)?],
        })
    }

    /// Where a message of this length lies in a slot.
    fn message(&self, slot: usize, len: usize) -> Piece {
        let place = if len <= INLINE_BYTES { self.inline[slot] } else { self.separate[slot] };
        place.narrow(0, len)
    }
}

struct PeerMailbox {
    slots: MailboxSlots,
    control: ArenaRef<ControlPage>,
    wakes: Arc<[WakeFd]>,
}

/// What a rank has posted for this call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// It has not posted yet.
    Nothing,
    /// A call that equals this rank's, with an equal factor.
    SameCall,
    /// A call that differs from it, packed.
    OtherCall(CallWords),
}

/// The mailboxes of a node, as one of its ranks sees them.
pub struct Mailbox {
    mine: MailboxSlots,
    local_rank: usize,
    /// By index on the node; `None` for this rank.
    others: Vec<Option<PeerMailbox>>,
    ranks: Vec<Rank>,
    control: ArenaRef<ControlPage>,
    /// Sequence number of the running small call, modulo 2^32.
    number: u32,
    /// The running call.
    call: CallWords,
    /// Bytes of each of its messages.
    len: usize,
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
        let (local_rank, call) = (neighbours.local_rank, CallWords::default());
        Ok(Self { mine, local_rank, others, ranks, control, number: 0, call, len: 0 })
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

    /// Begins a small call with messages of `len` bytes. This rank's own [`message`](Self::message) is to be
    /// written before it is posted.
    pub fn begin(&mut self, call: CallWords, len: usize) {
        self.number = self.number.wrapping_add(1);
        (self.call, self.len) = (call, len);
    }

    /// The place of the message of the rank with this local rank. Those of others may be read once they have
    /// posted the same call.
    #[must_use]
    pub fn message(&self, local_rank: usize) -> Piece {
        self.slots_of(local_rank).message(self.slot(), self.len)
    }

    /// Publishes the slot. Neighbours that sleep until one of their descriptors is notified see it after
    /// [`wake_neighbours`](Self::wake_neighbours).
    pub fn post(&self) {
        let header = &self.mine.headers[self.slot()];
        for (word, value) in header.call.iter().zip(self.call) {
            word.store(value, Ordering::Relaxed);
        }
        header.number.store(self.number, Ordering::Release);
    }

    /// Wakes every neighbour that sleeps until one of its descriptors is notified, after
    /// [`post`](Self::post). The fence in here waits until the post has reached the cache; what can be done
    /// meanwhile comes before it.
    pub fn wake_neighbours(&self) {
        for other in self.others.iter().flatten() {
            other.control.need_wakeup.wake(&other.wakes);
        }
    }

    /// Publishes the slot to the leader, and wakes it if it [awaits](Self::await_post) this rank. Called by
    /// members.
    pub fn post_to_leader(&self) {
        self.post();
        // Pairs with the fence in `await_post`: either this rank sees that it is awaited, or the leader sees
        // the post.
        fence(Ordering::SeqCst);
        let awaited = self.others.first().and_then(Option::as_ref).map(|leader| &leader.control.awaited);
        if awaited.is_some_and(|awaited| awaited.load(Ordering::Relaxed) as usize == self.local_rank) {
            self.wake_sleepers();
        }
    }

    /// Publishes the leader's slot, and wakes all members that await it.
    pub fn post_to_members(&self) {
        self.post();
        self.wake_sleepers();
    }

    /// Wakes all that await this rank's post.
    fn wake_sleepers(&self) {
        // It fails only for addresses that are not mapped.
        let _ = futex::wake(&self.mine.headers[self.slot()].number, futex::Flags::empty(), i32::MAX as u32);
    }

    /// Sleeps until the rank with this local rank has posted for this call, or `longest` is over. May return
    /// earlier. For the way through the leader: members await the leader, and the leader one member after
    /// another.
    pub fn await_post(&self, local_rank: usize, longest: Duration) {
        let word = &self.slots_of(local_rank).headers[self.slot()].number;
        // Only the leader's word is read; a member's has no effect.
        self.control.awaited.store(local_rank as u32, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let posted = word.load(Ordering::Relaxed);
        if posted != self.number {
            let longest =
                Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
            // Returns at once if the word has changed meanwhile. The caller checks again, whatever ended the
            // sleep.
            let _ = futex::wait(word, futex::Flags::empty(), posted, Some(&longest));
        }
        self.control.awaited.store(0, Ordering::Relaxed);
    }

    fn slots_of(&self, local_rank: usize) -> &MailboxSlots {
        self.others[local_rank].as_ref().map_or(&self.mine, |other| &other.slots)
    }

    /// What the rank with this local rank has posted for this call.
    #[must_use]
    pub fn peek(&self, local_rank: usize) -> Posted {
        let header = &self.slots_of(local_rank).headers[self.slot()];
        if header.number.load(Ordering::Acquire) != self.number {
            return Posted::Nothing;
        }
        let words = header.call.each_ref().map(|word| word.load(Ordering::Relaxed));
        // All words at once: most calls are the same.
        let differences = words.iter().zip(self.call).fold(0, |all, (theirs, own)| all | (theirs ^ own));
        if differences == 0 { Posted::SameCall } else { Posted::OtherCall(words) }
    }

    /// Begins to load the cache line that the next post writes: all have read what it holds, and the post
    /// need not wait until other cores have given it up.
    pub fn prefetch_next(&self) {
        prefetch_to_write(&*self.mine.headers[1 - self.slot()]);
    }

    /// The index of the slot that this call uses, 0 or 1.
    #[must_use]
    pub fn slot(&self) -> usize {
        (self.number % 2) as usize
    }
}

/// Has this core fetch the cache line of `target` to write it, without waiting. In assembly, because
/// `_mm_prefetch` fetches lines to read them unless the build is for processors that have this instruction.
fn prefetch_to_write<T>(target: &T) {
    let address = std::ptr::from_ref(target);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing that the program can see, and 64-bit processors without this one do
    // nothing (the manuals of AMD and Intel list no exception for it).
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch changes nothing that the program can see.
    unsafe {
        std::arch::asm!("prfm pstl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
}
