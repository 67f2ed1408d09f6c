//! Memory of users that peers and devices reach: neighbours read it, RDMA devices send from it and write to
//! it.
//!
//! Owns its allocation, its announcement to neighbours and devices, and whether it can be read.

use super::checked_wait::wait_until;
use super::registered_pages::{RegisteredPages, SharedVector};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::memory::{Arena, Buffer, Piece, ReadablePages, Registrar, lend_in_place};
use crate::process::CreatorProcess;
use crate::transport::shm::NodeMemory;
use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Allocates and registers the memory that users give to calls.
pub(super) struct UserMemory {
    /// The process's memory, which other communicators may use, too.
    node: Arc<NodeMemory>,
    /// What users free by its address, as C does: offset and length in the arena, by address.
    leases: Mutex<HashMap<usize, (usize, usize)>>,
    /// Registers memory with the RDMA devices, if there are devices.
    registrar: Option<Arc<dyn Registrar>>,
    /// Kept without devices, too, so that wrong arguments of `deregister` are refused in either case.
    registered: Mutex<Registrations>,
    /// Notified when the call is over that a deregistration waits for, and when that deregistration is over.
    changed: Condvar,
    /// Whether registered memory is shared with neighbours.
    shares: bool,
    /// Registrations with shared pages, which another communicator may have shared, those included whose
    /// pages are becoming private. Calls record nothing while there are none.
    shared: AtomicUsize,
    /// Of the vectors of calls.
    readable: ReadablePages,
}

/// What users have registered, and what the running call uses.
#[derive(Default)]
struct Registrations {
    /// By address and length.
    by_range: HashMap<(usize, usize), UserRegistration>,
    /// Memory of the running call, if anything was registered when it began. Keeps its capacity, so that
    /// calls do not allocate.
    in_use: Vec<Piece>,
    /// Deregistrations that wait for the running call. No further call begins meanwhile.
    waiting: usize,
}

impl Registrations {
    /// Whether ending this registration may replace pages that the running call uses.
    fn is_in_use(&self, range: (usize, usize)) -> bool {
        let uses = |pages: &RegisteredPages| self.in_use.iter().any(|piece| pages.share(*piece));
        self.by_range.get(&range).is_some_and(|known| known.count == 1 && uses(&known.pages))
    }
}

/// Memory that the user has registered.
struct UserRegistration {
    /// Registrations that are not reverted yet, at least 1.
    count: usize,
    pages: Arc<RegisteredPages>,
    /// What is registered with the devices.
    on_devices: Piece,
}

impl UserMemory {
    /// The memory of a communicator. `shares` is whether registered memory may become part of the arena.
    pub(super) fn new(node: Arc<NodeMemory>, registrar: Option<Arc<dyn Registrar>>, shares: bool) -> Self {
        let shares = shares && node.processes() > 1;
        let (leases, registered, changed, shared) = Default::default();
        let readable = ReadablePages::new();
        Self { node, leases, registrar, registered, changed, shares, shared, readable }
    }

    fn arena(&self) -> &Arc<Arena> {
        self.node.own().arena()
    }

    /// Allocates a vector of `len` zeros.
    pub(super) fn alloc<T: Element>(&self, len: usize) -> Result<Buffer<T>> {
        let buffer = Buffer::new(Arc::clone(self.arena()), len, self.registrar.clone())?;
        self.announce(buffer.offset(), size_of_val(&buffer[..]));
        Ok(buffer)
    }

    /// Allocates zeroed bytes that the caller frees by address, at the latest when the communicator is freed.
    pub(super) fn lease(&self, bytes: usize) -> Result<NonNull<u8>> {
        let offset = self.arena().alloc(bytes)?;
        let piece = self.arena().piece(offset, bytes);
        let piece = piece.ok_or_else(|| Error::internal("an allocation exceeds its arena"))?;
        let start = NonNull::new(piece.as_ptr()).ok_or_else(|| Error::internal("an arena begins at zero"))?;
        self.leases().insert(start.as_ptr() as usize, (offset, bytes));
        self.announce(offset, bytes);
        if let Some(registrar) = &self.registrar {
            registrar.try_register(piece);
        }
        Ok(start)
    }

    /// Whether these bytes are part of the arena.
    pub(super) fn contains(&self, start: *const u8, len: usize) -> bool {
        self.arena().contains(start, len)
    }

    /// The end of a vector that is not part of the arena and that this process cannot read, if there is one.
    pub(super) fn unreadable_end(&self, start: *const u8, len: usize) -> Option<*const u8> {
        self.readable.unreadable_end(start, len)
    }

    /// Frees leased bytes; `false` if nothing is leased at this address.
    pub(super) fn end_lease(&self, start: *const u8) -> bool {
        let lease = self.leases().remove(&(start as usize));
        lease.inspect(|(offset, bytes)| self.free(*offset, *bytes)).is_some()
    }

    fn free(&self, offset: usize, bytes: usize) {
        if let (Some(registrar), Some(piece)) = (&self.registrar, self.arena().piece(offset, bytes)) {
            registrar.try_deregister(piece);
        }
        self.arena().free(offset, bytes);
    }

    fn leases(&self) -> MutexGuard<'_, HashMap<usize, (usize, usize)>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announce(&self, offset: usize, bytes: usize) {
        reach(FaultPoint::MemoryAllocated);
        self.node.announce(offset, bytes);
        reach(FaultPoint::MemoryAnnounced);
    }

    /// Lets no further communicator use this memory: a process that has it may be gone, and what it had would
    /// stay.
    pub(super) fn retire(&self) {
        self.node.retire();
    }

    /// Whether registered memory is shared with neighbours, where it can be.
    pub(super) fn shares(&self) -> bool {
        self.shares
    }

    /// Registers memory: shares it with neighbours if `may_share`, which implies [`shares`](Self::shares),
    /// and if it can be, and registers it with the devices, if there are any.
    pub(super) fn register(&self, piece: Piece, may_share: bool) -> Result<()> {
        let mut registered = self.registered();
        if let Some(registration) = registered.by_range.get_mut(&address_and_length(piece)) {
            self.register_with_devices(registration.on_devices)?;
            registration.count += 1;
            return Ok(());
        }
        let is_own = self.arena().offset_of(piece).is_some();
        let arena = Some(self.arena()).filter(|_| may_share && !is_own);
        let pages = Arc::new(RegisteredPages::new(arena, piece));
        let shared = pages.find(self.arena(), piece).map(|vector| vector.alias());
        let on_devices = shared.unwrap_or(piece);
        self.register_with_devices(on_devices)?;
        if let Some(offset) = shared.and_then(|alias| self.arena().offset_of(alias)) {
            self.announce(offset, piece.len());
        }
        if pages.are_shared() {
            self.shared.fetch_add(1, Ordering::Relaxed);
        }
        let registration = UserRegistration { count: 1, pages, on_devices };
        registered.by_range.insert(address_and_length(piece), registration);
        Ok(())
    }

    /// Memory of a GPU is not registered: devices access the slots of kernels only.
    fn registrar_of(&self, piece: Piece) -> Option<&Arc<dyn Registrar>> {
        self.registrar.as_ref().filter(|_| piece.is_host())
    }

    fn register_with_devices(&self, piece: Piece) -> Result<()> {
        if let Some(registrar) = self.registrar_of(piece) {
            registrar.register(piece)?;
        }
        reach(FaultPoint::MemoryRegistered);
        Ok(())
    }

    /// Undoes one registration of exactly this memory. If its pages become private again, waits at most
    /// `limit` until the running call does not use them: what it wrote meanwhile would be lost. Calls `check`
    /// every so often meanwhile. Later calls begin after the deregistration, so it waits for one call only.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not registered; `Timeout`, after which it is still registered.
    pub(super) fn deregister(&self, piece: Piece, limit: Duration, check: &dyn Fn()) -> Result<()> {
        reach(FaultPoint::MemoryDeregistered);
        let range = address_and_length(piece);
        // Dropped after the lock.
        let _waiting;
        let mut registered = self.registered();
        if registered.is_in_use(range) {
            registered.waiting += 1;
            _waiting = WaitingDeregistration(self);
            registered = self.wait_for_call(registered, range, limit, check)?;
        }
        let Some(registration) = registered.by_range.get_mut(&range) else {
            let message = format!(
                "{} bytes at {:p} are not registered: deregister takes the address and length that were registered",
                piece.len(),
                piece.as_ptr()
            );
            return Err(Error::invalid_argument(message));
        };
        registration.count -= 1;
        let on_devices = registration.on_devices;
        let last = if registration.count == 0 { registered.by_range.remove(&range) } else { None };
        let deregistered =
            self.registrar_of(on_devices).map_or(Ok(()), |registrar| registrar.deregister(on_devices));
        // Its pages become private after the devices have given them up, and are counted until they are, so
        // that a call that begins meanwhile waits for the lock.
        if let Some(UserRegistration { pages, .. }) = last {
            let were_shared = pages.are_shared();
            drop(pages);
            self.shared.fetch_sub(usize::from(were_shared), Ordering::Release);
        }
        deregistered
    }

    /// Waits until the running call does not use the memory of a registration.
    fn wait_for_call<'a>(
        &'a self,
        registered: MutexGuard<'a, Registrations>,
        range: (usize, usize),
        limit: Duration,
        check: &dyn Fn(),
    ) -> Result<MutexGuard<'a, Registrations>> {
        let since = Instant::now();
        let is_over = |state: &Registrations| !state.is_in_use(range) || since.elapsed() >= limit;
        let registered = wait_until(&self.registered, &self.changed, registered, is_over, Some(check));
        if registered.is_in_use(range) {
            let message = format!(
                "{} bytes at {:#x} stay registered, because a call still uses them after {limit:?}: wait for it first",
                range.1, range.0
            );
            return Err(Error::timeout(message));
        }
        Ok(registered)
    }

    /// Records what memory a call uses, until the result is dropped. `None` if no registered memory is
    /// shared. Calls begin one at a time, each after the end of the one before it, and after deregistrations
    /// that wait for that: for at most `limit`.
    ///
    /// # Errors
    /// `Timeout` if a deregistration takes longer.
    #[inline]
    pub(super) fn begin_call(
        &self,
        pieces: impl Iterator<Item = Piece>,
        limit: Duration,
    ) -> Result<Option<CallMemory<'_>>> {
        // Memory is registered and shared before calls use it, so the caller has what was counted. What is no
        // longer counted is private again.
        if self.shared.load(Ordering::Acquire) == 0 {
            return Ok(None);
        }
        let waits = |state: &mut Registrations| state.waiting > 0;
        let waited = self.changed.wait_timeout_while(self.registered(), limit, waits);
        let mut registered = waited.unwrap_or_else(PoisonError::into_inner).0;
        if registered.waiting > 0 {
            let message =
                format!("memory is still being deregistered after {limit:?}, before a call could begin");
            return Err(Error::timeout(message));
        }
        registered.in_use.extend(pieces.filter(|piece| !piece.is_empty()));
        Ok(Some(CallMemory(self)))
    }

    /// `piece` as neighbours read it, if it is registered and shared with them.
    pub(super) fn shared_vector(&self, piece: Piece) -> Option<SharedVector> {
        if !self.shares || piece.is_empty() {
            return None;
        }
        self.registered().by_range.values().find_map(|known| known.pages.find(self.arena(), piece))
    }

    fn registered(&self) -> MutexGuard<'_, Registrations> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for UserMemory {
    fn drop(&mut self) {
        // The arena may live on, for other communicators.
        for (offset, bytes) in std::mem::take(&mut *self.leases()).into_values() {
            self.free(offset, bytes);
        }
        // What is still registered becomes private again after the devices have given it up.
        for registration in std::mem::take(&mut self.registered().by_range).into_values() {
            if let Some(registrar) = &self.registrar {
                (0..registration.count).for_each(|_| registrar.try_deregister(registration.on_devices));
            }
        }
    }
}

fn address_and_length(piece: Piece) -> (usize, usize) {
    (piece.as_ptr() as usize, piece.len())
}

/// What memory a call uses. Dropped when the call is over, after what it has of shared memory.
pub(super) struct CallMemory<'a>(&'a UserMemory);

impl Drop for CallMemory<'_> {
    fn drop(&mut self) {
        let mut registered = self.0.registered();
        registered.in_use.clear();
        if registered.waiting > 0 {
            self.0.changed.notify_all();
        }
    }
}

/// A deregistration that waits for the running call. Dropped when it is over, so that the next call may
/// begin.
struct WaitingDeregistration<'a>(&'a UserMemory);

impl Drop for WaitingDeregistration<'_> {
    fn drop(&mut self) {
        self.0.registered().waiting -= 1;
        self.0.changed.notify_all();
    }
}

/// A vector that is registered with a communicator until it is dropped. See
/// [`register`](super::Communicator::register).
///
/// Forgetting it ([`std::mem::forget`]) leaks the vector, which stays registered until the communicator is
/// freed.
///
/// A forked child of this process may not have the memory: using the vector may end the child by SIGSEGV.
/// Dropping it there leaks the vector, and has no effect on the parent.
///
/// ```
/// use flexring::{Communicator, ReduceOp};
///
/// # fn main() -> flexring::Result<()> {
/// let comm = Communicator::local(1)?.remove(0);
/// let mut gradient = comm.register(vec![0.5f32; 1 << 10])?;
/// comm.all_reduce(&mut gradient, ReduceOp::Sum)?;
/// let vector: Vec<f32> = gradient.into_vec();
/// # drop(vector);
/// # Ok(())
/// # }
/// ```
pub struct Registered<'a, T: Element> {
    creator: CreatorProcess,
    vector: Vec<T>,
    /// The elements; `None` when the registration has ended.
    piece: Option<Piece>,
    user_memory: &'a UserMemory,
}

impl<'a, T: Element> Registered<'a, T> {
    /// Registers `vector`. The piece is valid as long as the registration: the guard owns the elements, does
    /// not move them, and lends them as a slice only.
    pub(super) fn new(user_memory: &'a UserMemory, mut vector: Vec<T>, may_share: bool) -> Result<Self> {
        let register = |piece| user_memory.register(piece, may_share).map(|()| piece);
        let piece = Some(lend_in_place(&mut vector, register)?);
        Ok(Self { creator: CreatorProcess::current(), vector, piece, user_memory })
    }

    /// Ends the registration, and returns the vector.
    ///
    /// In a forked child this is a copy, whose making ends the child by SIGSEGV if the child does not have
    /// the memory.
    #[must_use = "dropping the guard ends the registration, too"]
    pub fn into_vec(mut self) -> Vec<T> {
        self.end().unwrap_or_else(|leaked| leaked.to_vec())
    }

    /// Ends the registration, and returns the vector; as an error if it must not be freed, because its memory
    /// is still registered or may be missing.
    fn end(&mut self) -> std::result::Result<Vec<T>, ManuallyDrop<Vec<T>>> {
        let vector = std::mem::take(&mut self.vector);
        let Some(piece) = self.piece.take() else { return Ok(vector) };
        if !self.creator.is_current() {
            // The registration is that of the parent. The child does not have pages that neighbours share,
            // and the allocator would write there.
            return Err(ManuallyDrop::new(vector));
        }
        // Calls borrow the guard, so none uses the memory now.
        match self.user_memory.deregister(piece, Duration::ZERO, &|| ()) {
            Ok(()) => Ok(vector),
            Err(error) => {
                log::warn!("a vector is leaked, as it cannot be deregistered: {}", error.message());
                Err(ManuallyDrop::new(vector))
            }
        }
    }
}

impl<T: Element> Deref for Registered<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.vector
    }
}

impl<T: Element> DerefMut for Registered<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.vector
    }
}

impl<T: Element> Drop for Registered<'_, T> {
    fn drop(&mut self) {
        drop(self.end());
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::CallOutcome;
    use super::*;
    use crate::Communicator;
    use crate::communicator::Request;
    use crate::config::{Config, Size, Switch};
    use crate::dtype::{DType, ReduceOp};
    use crate::error::ErrorKind;
    use flexring_testkit::in_forked_child;
    use std::ops::Range;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{Sender, channel};

    const COUNT: usize = 50_000;
    /// Calls on so many elements take the path for small messages.
    const SMALL: usize = 100;

    fn two_ranks() -> [Communicator; 2] {
        let (register_shared, mailbox) = (Switch(true), Size(SMALL * size_of::<i64>()));
        let timeout = Duration::from_secs(20);
        let config = Config { register_shared, mailbox, timeout, ..Config::default() };
        let ranks = Communicator::local_with(&config, 2).expect("two ranks");
        ranks.try_into().expect("two ranks")
    }

    fn two_ranks_that_share_nothing() -> [Communicator; 2] {
        let config = Config { timeout: Duration::from_secs(20), ..Config::default() };
        let ranks = Communicator::local_with(&config, 2).expect("two ranks");
        ranks.try_into().expect("two ranks")
    }

    fn elements(whole: Piece, range: &Range<usize>) -> Piece {
        whole.narrow(range.start * size_of::<i64>(), range.len() * size_of::<i64>())
    }

    fn start(comm: &Communicator, piece: Piece) -> Arc<CallOutcome> {
        let call = comm.validator().all_reduce(piece, piece, DType::I64, ReduceOp::Sum).expect("valid");
        comm.submit(call).expect("a worker")
    }

    /// Starts a call of rank 0, and returns when it runs. It then waits for the other rank.
    fn start_and_run(comm: &Communicator, piece: Piece) -> Arc<CallOutcome> {
        let outcome = start(comm, piece);
        while comm.runner.user_memory.registered().in_use.is_empty() {
            std::thread::yield_now();
        }
        outcome
    }

    fn is_shared(comm: &Communicator, piece: Piece) -> bool {
        comm.runner.user_memory.shared_vector(piece).is_some()
    }

    #[test]
    fn deregistering_waits_for_the_call_that_uses_the_memory() {
        let [first, second] = two_ranks();
        let all = 0..COUNT;
        // What is registered and what the call uses: parts, a small one, and one that begins before the
        // registered memory, so that the call does not use the registration.
        let cases = [
            (all.clone(), all.clone()),
            (all.clone(), 7..40_000),
            (all, 20_000..20_000 + SMALL),
            (10_000..COUNT, 0..30_000),
        ];
        for (registered, called) in cases {
            let mut vector = vec![1i64; COUNT];
            lend_in_place(&mut vector, |whole| {
                let piece = elements(whole, &registered);
                first.register_piece(piece).expect("memory");
                assert!(is_shared(&first, piece));
                let outcome = start_and_run(&first, elements(whole, &called));
                std::thread::scope(|scope| {
                    let late = scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(50));
                        let mut other = vec![2i64; called.len()];
                        let is_registered = is_shared(&first, piece);
                        second.all_reduce(&mut other, ReduceOp::Sum).expect("a sum");
                        is_registered
                    });
                    first.deregister_piece(piece).expect("registered");
                    assert!(!is_shared(&first, piece));
                    assert!(late.join().expect("no panic"), "it was deregistered under the call");
                });
                outcome.wait().expect("a sum");
            });
            let expected = |at| if called.contains(&at) { 3 } else { 1 };
            assert!((0..COUNT).all(|at| vector[at] == expected(at)), "{registered:?}, {called:?}");
        }
    }

    /// Devices that, while they give memory up, look whether a call has begun.
    struct Devices {
        deregistering: Sender<()>,
        has_begun: Arc<AtomicBool>,
    }

    impl Registrar for Devices {
        fn register(&self, _: Piece) -> Result<()> {
            Ok(())
        }

        fn reaches(&self, _: Piece) -> bool {
            false
        }

        fn deregister(&self, _: Piece) -> Result<()> {
            self.deregistering.send(()).expect("a call begins");
            std::thread::sleep(Duration::from_millis(50));
            assert!(!self.has_begun.load(Ordering::SeqCst), "a call began before the pages were private");
            Ok(())
        }
    }

    /// It would write the pages while they are copied, and what it wrote would be lost.
    #[test]
    fn no_call_begins_while_pages_become_private() {
        let [first, _second] = two_ranks();
        let (deregistering, is_deregistering) = channel();
        let has_begun = Arc::new(AtomicBool::new(false));
        let devices = Devices { deregistering, has_begun: Arc::clone(&has_begun) };
        let node = Arc::clone(&first.runner.user_memory.node);
        let user_memory = UserMemory::new(node, Some(Arc::new(devices)), true);
        let mut vector = vec![1i64; COUNT];
        lend_in_place(&mut vector, |piece| {
            user_memory.register(piece, true).expect("memory");
            assert!(user_memory.shared_vector(piece).is_some());
            let user_memory = &user_memory;
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    is_deregistering.recv().expect("a deregistration");
                    let begun = user_memory.begin_call([piece].into_iter(), Duration::MAX);
                    has_begun.store(true, Ordering::SeqCst);
                    begun.expect("none waits");
                });
                user_memory.deregister(piece, Duration::MAX, &|| ()).expect("registered");
            });
        });
    }

    #[test]
    fn deregistering_waits_for_no_other_call() {
        let [first, second] = two_ranks();
        let (mut vector, mut other) = (vec![1i64; COUNT], vec![1i64; COUNT]);
        let pieces = [&mut vector, &mut other].map(|vector| lend_in_place(vector, |piece| piece));
        for round in 0..2 {
            pieces.iter().for_each(|piece| first.register_piece(*piece).expect("memory"));
            let (steps, step) = channel();
            std::thread::scope(|scope| {
                let second = &second;
                scope.spawn(move || {
                    // Rank 0 sends when the first call runs, and when it has deregistered. In round 1 the
                    // first call ends between.
                    for waits in [[2, 0], [1, 1]][round] {
                        (0..waits).for_each(|_| step.recv().expect("a step"));
                        second.all_reduce(&mut [2i64; COUNT], ReduceOp::Sum).expect("a sum");
                    }
                });
                let running = start_and_run(&first, pieces[0]);
                let queued = start(&first, pieces[1]);
                steps.send(()).expect("the other rank waits");
                // In round 0 this is not the memory of the running call, and in round 1 it is.
                first.deregister_piece(pieces[1 - round]).expect("registered");
                steps.send(()).expect("the other rank waits");
                running.wait().expect("a sum");
                queued.wait().expect("a sum");
            });
            first.deregister_piece(pieces[round]).expect("registered");
        }
        assert!([vector, other].iter().flatten().all(|element| *element == 5));
    }

    #[test]
    fn memory_that_is_used_too_long_stays_registered() {
        let [first, second] = two_ranks();
        let mut vector = vec![1i64; COUNT];
        lend_in_place(&mut vector, |piece| {
            first.register_piece(piece).expect("memory");
            first.register_piece(piece).expect("memory");
            let outcome = start_and_run(&first, piece);
            // This is not the last registration.
            first.deregister_piece(piece).expect("registered twice");
            let user_memory = &first.runner.user_memory;
            let checked = std::cell::Cell::new(false);
            let limit = Duration::from_millis(100);
            let error =
                user_memory.deregister(piece, limit, &|| checked.set(true)).expect_err("it is in use");
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.message().contains("a call still uses them after 100ms"), "{error}");
            assert!(checked.get() && is_shared(&first, piece));
            let other = second.all_reduce_async(vec![2i64; COUNT], ReduceOp::Sum).expect("a request");
            outcome.wait().expect("a sum");
            other.wait().expect("a sum");
            // Later calls begin.
            let requests: [Request<_>; 2] = [&first, &second]
                .map(|comm| comm.all_reduce_async(vec![1i64], ReduceOp::Sum).expect("a request"));
            requests.into_iter().for_each(|request| assert_eq!(request.wait().expect("a sum"), [2]));
            first.deregister_piece(piece).expect("registered");
            assert!(!is_shared(&first, piece));
        });
        assert!(vector.iter().all(|element| *element == 3));
    }

    #[test]
    fn deregistering_waits_for_a_call_on_memory_that_another_communicator_shared() {
        let [sharing, _peer] = two_ranks();
        let [first, second] = two_ranks_that_share_nothing();
        let mut vector = vec![1i64; COUNT];
        lend_in_place(&mut vector, |piece| {
            sharing.register_piece(piece).expect("memory");
            first.register_piece(piece).expect("memory");
            // The pages stay shared for the second registration.
            sharing.deregister_piece(piece).expect("registered");
            let outcome = start_and_run(&first, piece);
            std::thread::scope(|scope| {
                let late = scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(50));
                    let registered = first.runner.user_memory.registered().by_range.len();
                    second.all_reduce(&mut [2i64; COUNT], ReduceOp::Sum).expect("a sum");
                    registered
                });
                first.deregister_piece(piece).expect("registered");
                assert_eq!(late.join().expect("no panic"), 1, "it was deregistered under the call");
            });
            outcome.wait().expect("a sum");
        });
        assert!(vector.iter().all(|element| *element == 3));
    }

    #[test]
    fn a_call_begins_in_time_although_a_deregistration_does_not_end() {
        let [first, _second] = two_ranks();
        let mut vector = vec![1i64; COUNT];
        lend_in_place(&mut vector, |piece| {
            first.register_piece(piece).expect("memory");
            let user_memory = &first.runner.user_memory;
            user_memory.registered().waiting = 1;
            let begun = user_memory.begin_call([piece].into_iter(), Duration::from_millis(10));
            let error = begun.err().expect("memory is being deregistered");
            assert!(error.message().contains("is still being deregistered after 10ms"), "{error}");
            user_memory.registered().waiting = 0;
            assert!(
                user_memory.begin_call([piece].into_iter(), Duration::MAX).expect("none waits").is_some()
            );
            user_memory.deregister(piece, Duration::MAX, &|| ()).expect("registered");
            assert!(
                user_memory.begin_call([piece].into_iter(), Duration::MAX).expect("none waits").is_none()
            );
        });
    }

    #[test]
    fn a_call_on_memory_that_is_not_shared_does_not_wait() {
        let [first, second] = two_ranks_that_share_nothing();
        let mut vector = vec![1i64; COUNT];
        lend_in_place(&mut vector, |piece| {
            first.register_piece(piece).expect("memory");
            let outcome = start(&first, piece);
            first.deregister_piece(piece).expect("registered");
            assert!(first.runner.user_memory.registered().in_use.is_empty());
            second.all_reduce(&mut [2i64; COUNT], ReduceOp::Sum).expect("a sum");
            outcome.wait().expect("a sum");
        });
        assert!(vector.iter().all(|element| *element == 3));
    }

    #[test]
    fn a_forked_child_ends_a_guard_without_an_effect_on_the_parent() {
        let [first, second] = two_ranks();
        // Vectors below and above the allocator's threshold for mappings of their own.
        for count in [10_000, COUNT] {
            let mut guard = Some(first.register(vec![1i64; count]).expect("memory"));
            let piece = guard.as_ref().and_then(|guard| guard.piece).expect("registered");
            assert!(is_shared(&first, piece));
            // The child takes its copy of the guard. If it freed the vector, the allocator would use pages
            // that it does not have.
            let status = in_forked_child(|| {
                drop(guard.take());
                let total: i64 = (0..50).map(|_| vec![1i64; count].iter().sum::<i64>()).sum();
                i32::from(total != 50 * count as i64)
            });
            assert_eq!(status, 0);
            let mut registered = guard.expect("the parent has its own");
            let request = second.all_reduce_async(vec![2i64; count], ReduceOp::Sum).expect("a request");
            first.all_reduce(&mut registered, ReduceOp::Sum).expect("a sum");
            request.wait().expect("a sum");
            assert_eq!(registered.into_vec(), vec![3; count]);
        }
        // A vector that is not shared is copied.
        let mut guard = Some(first.register(vec![7i64; SMALL]).expect("memory"));
        let child = || i32::from(guard.take().is_none_or(|guard| guard.into_vec() != [7; SMALL]));
        assert_eq!(in_forked_child(child), 0);
    }
}
