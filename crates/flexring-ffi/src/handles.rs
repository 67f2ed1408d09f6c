//! Handles of communicators and requests.
//!
//! A handle is a number that is used once, not an address: a handle that was freed or never existed is
//! recognised, and nothing that a caller passes is dereferenced. Looking one up takes no lock.

use flexring_core::error::{Error, Result};
use flexring_core::process::PerProcess;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Distance between handles. They look like addresses of an object, because programs test bits of pointers.
const STEP: usize = 64;

/// Slots of one block, and blocks of a table.
const SLOTS: usize = 1024;
const BLOCKS: usize = 4096;

/// The lower half of a handle is the number of its slot, from 1, times [`STEP`]. The upper half counts the
/// uses of the slot, from 1.
const HALF: u32 = usize::BITS / 2;

/// The live objects of one type, by handle. Public for `nccl/`.
pub struct HandleTable<T> {
    /// What an object is in errors, such as "communicator", and how it ends, such as "freed".
    object: &'static str,
    end: &'static str,
    /// Made when they are needed, and never freed.
    blocks: [AtomicPtr<[Slot<T>; SLOTS]>; BLOCKS],
    /// How many slots have been used.
    used: AtomicUsize,
    /// The slots that are free again.
    free: PerProcess<Mutex<Vec<usize>>>,
}

struct Slot<T> {
    /// The handle of the object; 0 without one.
    live: AtomicUsize,
    object: AtomicPtr<T>,
    /// Changed by the thread that puts an object here.
    uses: AtomicUsize,
}

impl<T: 'static> HandleTable<T> {
    /// A table without objects, which are called so, and end so.
    pub const fn new(object: &'static str, end: &'static str) -> Self {
        let blocks = [const { AtomicPtr::new(null_mut()) }; BLOCKS];
        Self { object, end, blocks, used: AtomicUsize::new(0), free: PerProcess::new() }
    }

    /// A new handle of this object.
    ///
    /// # Errors
    /// The object, and the error of the program, if there are too many.
    pub fn insert(&'static self, object: T) -> std::result::Result<*mut T, (T, Error)> {
        let reused = self.free().pop();
        let index = reused.unwrap_or_else(|| self.used.fetch_add(1, Ordering::Relaxed));
        let Some(slot) = self.slot_or_new(index) else {
            let message =
                format!("there are {} {}s already, which is the maximum", SLOTS * BLOCKS, self.object);
            return Err((object, Error::system(message)));
        };
        let uses = slot.uses.load(Ordering::Relaxed) % ((1 << HALF) - 1) + 1;
        slot.uses.store(uses, Ordering::Relaxed);
        let handle = (uses << HALF) | ((index + 1) * STEP);
        slot.object.store(Box::into_raw(Box::new(object)), Ordering::Relaxed);
        slot.live.store(handle, Ordering::Release);
        Ok(without_provenance_mut(handle))
    }

    /// The object with this handle.
    ///
    /// # Safety
    /// No thread takes the object during `'a`.
    ///
    /// # Errors
    /// `InvalidArgument` if there is none.
    #[inline]
    pub unsafe fn get<'a>(&self, handle: *const T) -> Result<&'a T> {
        match self.slot_of(handle) {
            // SAFETY: the slot has had the object since before its handle was stored, and the caller
            // guarantees that it stays.
            Some(slot) => Ok(unsafe { &*slot.object.load(Ordering::Relaxed) }),
            None => Err(self.unknown(handle)),
        }
    }

    /// Takes the object with this handle out of the table. Of several threads that try, one gets it.
    ///
    /// # Errors
    /// As for [`get`](Self::get).
    pub fn take(&'static self, handle: *const T) -> Result<Box<T>> {
        let taken = |slot: &&Slot<T>| {
            slot.live.compare_exchange(handle.addr(), 0, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let Some(slot) = self.slot_of(handle).filter(taken) else {
            return Err(self.unknown(handle));
        };
        let object = slot.object.swap(null_mut(), Ordering::Relaxed);
        self.free().push(Self::index_of(handle.addr()));
        // SAFETY: the pointer came from a box, and only this thread has taken it.
        Ok(unsafe { Box::from_raw(object) })
    }

    fn free(&'static self) -> MutexGuard<'static, Vec<usize>> {
        self.free.get().lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index of the slot of a handle, or any number for a number that is none.
    fn index_of(handle: usize) -> usize {
        ((handle & ((1 << HALF) - 1)) / STEP).wrapping_sub(1)
    }

    /// The slot with this live handle.
    #[inline]
    fn slot_of(&self, handle: *const T) -> Option<&'static Slot<T>> {
        let index = Self::index_of(handle.addr());
        let block = self.blocks.get(index / SLOTS)?.load(Ordering::Acquire);
        // SAFETY: the pointer is null or comes from `Box::into_raw`, and blocks are never freed.
        let slot = unsafe { block.as_ref() }?.get(index % SLOTS)?;
        (slot.live.load(Ordering::Acquire) == handle.addr()).then_some(slot)
    }

    /// The slot at this index, whose block is made if there is none. `None` beyond the last one.
    fn slot_or_new(&self, index: usize) -> Option<&'static Slot<T>> {
        let place = self.blocks.get(index / SLOTS)?;
        let mut block = place.load(Ordering::Acquire);
        if block.is_null() {
            let slot = || Slot {
                live: AtomicUsize::new(0),
                object: AtomicPtr::new(null_mut()),
                uses: AtomicUsize::new(0),
            };
            let new = Box::into_raw(Box::new(std::array::from_fn(|_| slot())));
            block = match place.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => new,
                Err(other) => {
                    // SAFETY: it was made above, and no other thread has seen it.
                    drop(unsafe { Box::from_raw(new) });
                    other
                }
            };
        }
        // SAFETY: the pointer comes from `Box::into_raw`, and blocks in the table are never freed.
        unsafe { block.as_ref() }?.get(index % SLOTS)
    }

    #[cold]
    fn unknown(&self, handle: *const T) -> Error {
        let Self { object, end, .. } = self;
        Error::invalid_argument(if handle.is_null() {
            format!("the {object} is NULL")
        } else {
            format!("{handle:p} is no {object}: it was {end}, or never made")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_used_once() {
        static TABLE: HandleTable<u32> = HandleTable::new("thing", "freed");
        // SAFETY: no other thread takes things.
        let get = |handle: *mut u32| unsafe { TABLE.get(handle) };
        let first = TABLE.insert(1).expect("room");
        let second = TABLE.insert(2).expect("room");
        assert_eq!((get(first).copied().ok(), get(second).copied().ok()), (Some(1), Some(2)));
        assert_eq!(*TABLE.take(first).expect("live"), 1);
        let third = TABLE.insert(3).expect("room");
        assert_eq!(third.addr() as u32, first.addr() as u32, "the slot is used again");
        for stale in [first, without_provenance_mut(1), without_provenance_mut(usize::MAX)] {
            let message = get(stale).expect_err("no such thing").message().to_owned();
            assert_eq!(message, format!("{stale:p} is no thing: it was freed, or never made"));
            assert!(TABLE.take(stale).is_err());
        }
        let message = get(null_mut()).expect_err("NULL").message().to_owned();
        assert_eq!(message, "the thing is NULL");
        assert_eq!(get(third).copied().ok(), Some(3));
    }

    #[test]
    fn one_of_several_threads_takes_an_object() {
        static TABLE: HandleTable<Vec<u8>> = HandleTable::new("thing", "freed");
        for round in 0..3 * SLOTS {
            let handle = TABLE.insert(vec![round as u8]).expect("room").expose_provenance();
            if round % SLOTS == 0 {
                let taken = std::thread::scope(|scope| {
                    let take = || TABLE.take(std::ptr::with_exposed_provenance(handle)).is_ok();
                    let threads = [scope.spawn(take), scope.spawn(take), scope.spawn(take)];
                    threads.map(|thread| usize::from(thread.join().expect("no panic"))).iter().sum::<usize>()
                });
                assert_eq!(taken, 1);
            }
        }
    }
}
