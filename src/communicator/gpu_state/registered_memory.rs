//! Memory on GPUs that users have registered, which the kernels of all ranks of the node access.
//!
//! A rank names an allocation to its neighbours in shared memory; each opens it when it makes its next call,
//! and says so there. A call names an allocation only if all have it open, so a call costs no exchange
//! between hosts. Owns what is registered, named and open. Must not know calls.

use crate::cuda_driver::Address;
use crate::device::cuda::collective::{CollectiveMemory, Place};
use crate::device::cuda::naps::nap_until;
use crate::device::cuda::objects::{Gpu, address};
use crate::device::cuda::peer_memory::{Allocation, Exported, OpenedMemory};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Piece;
use crate::rank::Rank;
use crate::transport::shm::{MemoryNotices, NamedMemory, ReceivedParts, UnsentParts};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a rank that ends the use of its memory waits for neighbours to close it. They do so in their next
/// collective that kernels run. Chosen, not measured.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(100);

/// What a rank has registered, and what it has open of its neighbours.
pub(in crate::communicator) struct OfferedMemory {
    gpu: Arc<Gpu>,
    memory: Arc<CollectiveMemory>,
    rank: Rank,
    notices: MemoryNotices,
    /// Whether this rank has registered any, so that calls look for none otherwise.
    any: AtomicBool,
    state: Mutex<OfferState>,
}

#[derive(Default)]
struct OfferState {
    /// By number.
    own: HashMap<usize, Own>,
    /// By number and first address, the last end that an allocation had there.
    ends: HashMap<(usize, Address), Address>,
    /// How many allocations this rank has named.
    named: u64,
    /// By neighbour and number: what is open, as its owner counts them.
    open: HashMap<(usize, usize), (u64, OpenedMemory)>,
    /// Likewise, parts that have come and are not open.
    received: HashMap<(usize, usize), ReceivedParts>,
    /// The changes of the neighbours' notices that were followed.
    followed: u64,
    /// Why calls have gone through stages, as far as the log says it.
    noted: Vec<&'static str>,
}

/// An allocation of this rank.
struct Own {
    allocation: Allocation,
    count: u64,
    /// What was registered of it: address and length, as often as it was.
    ranges: Vec<(usize, usize)>,
    /// Whether all neighbours have it open. Kernels of this rank do not name it before.
    is_open: bool,
    /// Descriptors of its parts that some neighbours have not received yet.
    unsent: Option<UnsentParts>,
}

impl OfferedMemory {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        memory: &Arc<CollectiveMemory>,
        rank: Rank,
        mut notices: MemoryNotices,
    ) -> Self {
        if let Err(error) = notices.open_socket() {
            log::debug!("memory that is mapped in parts is not accessed directly: {}", error.message());
        }
        let (gpu, memory) = (Arc::clone(gpu), Arc::clone(memory));
        Self { gpu, memory, rank, notices, any: AtomicBool::new(false), state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, OfferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers memory, which the neighbours open in their next calls. If it cannot be exported, calls on it
    /// go through stages.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(in crate::communicator) fn add(&self, piece: Piece) -> Result<()> {
        let range = (piece.as_ptr() as usize, piece.len());
        let state = &mut *self.lock();
        self.discard_freed(state);
        if let Some(own) = state.own.values_mut().find(|own| own.allocation.contains(piece)) {
            own.ranges.push(range);
            return Ok(());
        }
        let stages = |why: &str| {
            log::debug!(
                "calls on the {} registered bytes at {:p} go through stages: {why}",
                piece.len(),
                piece.as_ptr()
            );
            Ok(())
        };
        let allocation = match Allocation::of(&self.gpu, piece) {
            Ok(allocation) if allocation.contains(piece) => allocation,
            Ok(_) => return stages("they are in several allocations"),
            Err(error) if error.kind() == ErrorKind::Unsupported => return stages(error.message()),
            Err(error) => return Err(error),
        };
        // A graph names a vector by a number and its place from the first address, so it may have captured a
        // vector beyond a shorter allocation that begins there.
        let (start, end) = (allocation.start(), allocation.end());
        let is_free = |number: &usize| {
            !state.own.contains_key(number)
                && self.notices.is_open(*number, 0)
                && state.ends.get(&(*number, start)).is_none_or(|known| *known <= end)
        };
        let Some(number) = (0..self.notices.most()).find(is_free) else {
            return stages("parts of too many allocations are registered");
        };
        if allocation.parts() > self.notices.most_parts() {
            let (parts, most) = (allocation.parts(), self.notices.most_parts());
            return stages(&format!("they have {parts} parts, of which {most} can be sent"));
        }
        let (handle, parts) = match allocation.export(&self.gpu) {
            Ok(Exported::Name(handle)) => (handle, Vec::new()),
            Ok(Exported::Parts(parts)) => ([0; 8], parts),
            Err(error) => return stages(error.message()),
        };
        state.ends.insert((number, start), end);
        state.named += 1;
        let count = state.named;
        let (bytes, part_count) = (allocation.bytes(), parts.len() as u64);
        self.notices.name(number, NamedMemory { count, bytes, parts: part_count, handle });
        let unsent = (part_count > 0).then(|| self.notices.unsent(number, count, parts));
        let own = state.own.entry(number).insert_entry(Own {
            allocation,
            count,
            ranges: vec![range],
            is_open: false,
            unsent,
        });
        self.send_parts(own.into_mut());
        self.any.store(true, Ordering::Release);
        Ok(())
    }

    /// Sends the parts of an allocation to neighbours that have not received them, as far as queues have
    /// room.
    fn send_parts(&self, own: &mut Own) {
        let Some(unsent) = &mut own.unsent else { return };
        match self.notices.send_parts(unsent) {
            Ok(false) => return,
            Ok(true) => {}
            Err(error) => log::debug!(
                "calls on {} registered bytes go through stages: {}",
                own.allocation.bytes(),
                error.message()
            ),
        }
        own.unsent = None;
    }

    /// Undoes one [`add`](Self::add) of exactly this memory. If it was the last one of its allocation, no
    /// kernel that begins later uses it, replays included; `await_kernels` waits for those that have begun,
    /// and returns `false` if they take too long.
    ///
    /// # Errors
    /// `Timeout` if they do: then it stays registered. `System` if the GPU fails.
    pub(super) fn forget(&self, piece: Piece, await_kernels: &dyn Fn() -> bool) -> Result<()> {
        let range = (piece.as_ptr() as usize, piece.len());
        let mut state = self.lock();
        let has = |(_, own): &(&usize, &mut Own)| own.ranges.contains(&range);
        let Some((&number, own)) = state.own.iter_mut().find(has) else { return Ok(()) };
        let index = own.ranges.iter().position(|known| *known == range).unwrap_or_default();
        own.ranges.swap_remove(index);
        if !own.ranges.is_empty() {
            return Ok(());
        }
        self.memory.set_memory(self.rank, number, 0)?;
        // A peer has accessed it for the last time when this rank's kernel has ended.
        if !await_kernels() {
            own.ranges.push(range);
            // The next call uses it again.
            own.is_open = false;
            return Err(Error::timeout(format!(
                "{} bytes at {:#x} stay registered, because calls on the GPU are not over: synchronize their streams first",
                range.1, range.0
            )));
        }
        state.own.remove(&number);
        self.notices.withdraw(number);
        drop(state);
        // Takes what neighbours have sent, also in programs that make no calls meanwhile.
        self.follow();
        // The neighbours may wait for this rank alike.
        self.await_closed(&[number], || self.follow());
        Ok(())
    }

    /// Waits for a moment until the neighbours have closed these allocations, and calls `meanwhile` until
    /// then.
    fn await_closed(&self, numbers: &[usize], meanwhile: impl Fn()) {
        let begun = Instant::now();
        nap_until(|| {
            if numbers.iter().all(|number| self.notices.is_open(*number, 0)) {
                return true;
            }
            if begun.elapsed() > CLOSE_TIMEOUT {
                log::debug!(
                    "a neighbour has not closed memory within {CLOSE_TIMEOUT:?}: it does so in its next call"
                );
                return true;
            }
            meanwhile();
            false
        });
    }

    /// How many allocations this rank has named.
    pub(in crate::communicator) fn named(&self) -> u64 {
        self.lock().named
    }

    /// Whether neighbours have named or withdrawn memory since [`follow`](Self::follow).
    pub(in crate::communicator) fn has_changed(&self) -> bool {
        self.notices.changes() != self.lock().followed
    }

    /// Opens the memory that neighbours have named, and closes what they have withdrawn. May wait for the
    /// GPU: see docs/gpu.md.
    pub(in crate::communicator) fn follow(&self) {
        let state = &mut *self.lock();
        let changes = self.notices.changes();
        if changes == state.followed {
            return;
        }
        // A replay may access what an owner has found to be unmapped, and withdrawn at once.
        if !state.open.is_empty() && self.memory.is_running() {
            return;
        }
        match self.notices.receive_parts() {
            Ok(received) => {
                let by_number = |parts: ReceivedParts| ((parts.neighbour, parts.number), parts);
                state.received.extend(received.into_iter().map(by_number));
                state.followed = changes;
            }
            // The next call tries again.
            Err(error) => log::debug!("memory of neighbours is not accessed directly: {}", error.message()),
        }
        for (neighbour, rank) in self.notices.neighbours().enumerate() {
            for number in 0..self.notices.most() {
                let named = self.notices.of_neighbour(neighbour, number);
                // Parts are sent after the name, so what is not named is withdrawn.
                let parts = state.received.remove(&(neighbour, number));
                let open = state.open.get(&(neighbour, number)).map(|(count, _)| *count);
                if open == named.map(|named| named.count) {
                    continue;
                }
                if let Some((_, memory)) = state.open.remove(&(neighbour, number)) {
                    self.close_one(neighbour, number, memory);
                }
                let Some(named) = named else { continue };
                let exported = match parts.filter(|parts| parts.count == named.count) {
                    _ if named.parts == 0 => Exported::Name(named.handle),
                    Some(parts) => Exported::Parts(parts.parts),
                    // They have not come yet.
                    None => continue,
                };
                let opened = OpenedMemory::new(&self.gpu, &exported).and_then(|memory| {
                    let start = memory.start();
                    state.open.insert((neighbour, number), (named.count, memory));
                    self.memory.set_memory(rank, number, start)
                });
                match opened {
                    Ok(()) => self.notices.set_open(neighbour, number, named.count),
                    Err(error) => log::debug!(
                        "calls on {} bytes that rank {rank} has registered go through stages: {}",
                        named.bytes,
                        error.message()
                    ),
                }
            }
        }
    }

    fn close_one(&self, neighbour: usize, number: usize, memory: OpenedMemory) {
        // Its owner has withdrawn it, or no kernel runs any more: no kernel accesses it.
        if memory.close(&self.gpu) {
            self.notices.set_open(neighbour, number, 0);
        }
    }

    /// Whether this rank has registered memory that others may open.
    pub(in crate::communicator) fn has_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Has kernels, those of replays too, use what all neighbours have opened since the last call. Not
    /// before: a graph may name a number that has got another allocation, which a neighbour has not opened
    /// yet.
    ///
    /// # Errors
    /// `System` if the GPU fails.
    pub(in crate::communicator) fn use_opened(&self) -> Result<()> {
        for (&number, own) in self.lock().own.iter_mut().filter(|(_, own)| !own.is_open) {
            self.send_parts(own);
            if self.notices.is_open(number, own.count) {
                self.memory.set_memory(self.rank, number, own.allocation.start())?;
                own.is_open = true;
            }
        }
        Ok(())
    }

    /// Logs, once for each reason, why a call goes through stages although this rank has registered memory.
    pub(in crate::communicator) fn note_stages(&self, why: &'static str) {
        let noted = &mut self.lock().noted;
        if !noted.contains(&why) {
            noted.push(why);
            log::debug!("rank {}: a call goes through stages: {why}", self.rank);
        }
    }

    /// Where a vector is in registered memory that all neighbours have open.
    pub(in crate::communicator) fn place_of(&self, vector: Piece) -> Option<Place> {
        let start = vector.as_ptr() as usize;
        let state = &mut *self.lock();
        let has = |(from, len): &(usize, usize)| *from <= start && start + vector.len() <= from + len;
        let (&number, own) = state.own.iter().find(|(_, own)| own.ranges.iter().any(has))?;
        if !own.allocation.has(&self.gpu, (start, vector.len())) {
            self.discard_freed(state);
            return None;
        }
        let offset = (address(vector) - own.allocation.start()) as usize;
        own.is_open.then_some(Place { number, offset })
    }

    /// Ends the use of what was freed while it was registered.
    fn discard_freed(&self, state: &mut OfferState) {
        state.own.retain(|number, own| {
            if own.ranges.iter().all(|range| own.allocation.has(&self.gpu, *range)) {
                return true;
            }
            log::warn!(
                "{} bytes at {:#x} on {:?} were freed or unmapped while they were registered: calls on them go through stages (fix: \
                 deregister memory before you free it)",
                own.allocation.bytes(),
                own.allocation.start(),
                self.gpu
            );
            if let Err(error) = self.memory.set_memory(self.rank, *number, 0) {
                log::debug!("{error}");
            }
            self.notices.withdraw(*number);
            false
        });
    }

    /// Closes the neighbours' memory, and waits a moment until they have closed this rank's. No kernel runs
    /// any more.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        for ((neighbour, number), (_, memory)) in std::mem::take(&mut state.open) {
            self.close_one(neighbour, number, memory);
        }
        // What is named from now on stays closed.
        let numbers: Vec<usize> = state.own.drain().map(|(number, _)| number).collect();
        drop(state);
        numbers.iter().for_each(|number| self.notices.withdraw(*number));
        self.await_closed(&numbers, || {});
    }
}
