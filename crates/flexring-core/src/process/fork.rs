//! Forked children of this process.
//!
//! A forked child has a copy of the memory of its parent, but none of its threads, and it shares the parent's
//! sockets. So it must not use what the parent created, and must not keep the sockets open: a peer learns
//! that the parent has died when the last copy of a socket is closed.
//!
//! Owns the detection of such children, by a counter that `pthread_atfork` advances in each of them, and the
//! list of sockets that they close. A child that `clone` makes without the C library is not detected.

use crate::descriptor;
use crate::error::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

/// Forks between the process that loaded the library and this one.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// The process that created an object.
#[derive(Clone, Copy, Debug)]
pub struct CreatorProcess {
    generation: u32,
    pid: u32,
}

impl CreatorProcess {
    /// This process.
    pub fn current() -> Self {
        watch_forks();
        Self { generation: GENERATION.load(Ordering::Relaxed), pid: std::process::id() }
    }

    /// Whether this process is the creator, and not a forked child of it. Costs one load, so that every call
    /// can ask.
    pub fn is_current(self) -> bool {
        self.generation == GENERATION.load(Ordering::Relaxed)
    }

    /// Checks that this process created `object`, such as "this communicator".
    ///
    /// # Errors
    /// `InvalidArgument`, naming both processes, in a forked child.
    #[inline]
    pub fn check(self, object: &str) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{object} was created by process {}, and this is its forked child {}: it cannot be used after fork, create a \
             new one in the child",
            self.pid,
            std::process::id()
        )))
    }
}

impl Default for CreatorProcess {
    fn default() -> Self {
        Self::current()
    }
}

/// Registers the handler that runs in forked children, once.
fn watch_forks() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler is a function of this library, and the C library forgets it when this library
        // is unloaded.
        let status = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if status != 0 {
            let cause = std::io::Error::from_raw_os_error(status);
            log::warn!("forked children cannot be detected, and must not use communicators: {cause}");
        }
    });
}

/// Runs in every forked child, in the thread that forked, before `fork` returns. Other threads may have held
/// locks when they ceased to exist, so this does only what is allowed in a signal handler: atomic operations
/// and `dup3`.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let replacement = REPLACEMENT.load(Ordering::Acquire);
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            let descriptor = slot.swap(FREE, Ordering::Relaxed);
            if descriptor != FREE {
                // The number stays in use, so that a late close in the child cannot close a new descriptor of
                // the child. SAFETY: dup3 has no memory arguments; the descriptor is a socket of this
                // library.
                unsafe { libc::dup3(replacement, descriptor, libc::O_CLOEXEC) };
            }
        }
        match block.next() {
            Some(next) => block = next,
            None => return,
        }
    }
}

/// A slot without a descriptor.
const FREE: RawFd = -1;

/// Slots of one block.
const SLOTS: usize = 128;

/// A block of the list of descriptors. Blocks are never freed, and there are no locks, because a child reads
/// the list.
struct DescriptorBlock {
    slots: [AtomicI32; SLOTS],
    next: AtomicPtr<DescriptorBlock>,
}

static FIRST: DescriptorBlock = DescriptorBlock::new();

/// What takes the place of the sockets in a child: an eventfd without other use.
static REPLACEMENT: AtomicI32 = AtomicI32::new(FREE);

impl DescriptorBlock {
    const fn new() -> Self {
        Self { slots: [const { AtomicI32::new(FREE) }; SLOTS], next: AtomicPtr::new(null_mut()) }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: the pointer is null or comes from `Box::leak`.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }

    /// The next block, which is added if there is none.
    fn next_or_new(&self) -> &'static Self {
        self.next().unwrap_or_else(|| {
            let new: *mut Self = Box::leak(Box::new(Self::new()));
            match self.next.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: the block was leaked above.
                Ok(_) => unsafe { &*new },
                Err(other) => {
                    // SAFETY: no other thread has seen the new block; the other one was leaked by another
                    // thread.
                    unsafe {
                        drop(Box::from_raw(new));
                        &*other
                    }
                }
            }
        })
    }
}

/// Lets forked children close a socket. Must be dropped before the socket is closed: declare it in front of
/// the socket.
#[derive(Debug)]
pub struct ClosedInChild {
    slot: Option<&'static AtomicI32>,
    descriptor: RawFd,
}

impl ClosedInChild {
    /// Registers `socket`. Without a descriptor for the replacement, does nothing.
    pub fn new(socket: BorrowedFd<'_>) -> Self {
        watch_forks();
        let descriptor = socket.as_raw_fd();
        if !has_replacement() {
            return Self { slot: None, descriptor };
        }
        let mut block = &FIRST;
        loop {
            for slot in &block.slots {
                let taken = slot.compare_exchange(FREE, descriptor, Ordering::Relaxed, Ordering::Relaxed);
                if taken.is_ok() {
                    return Self { slot: Some(slot), descriptor };
                }
            }
            block = block.next_or_new();
        }
    }
}

impl Drop for ClosedInChild {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            // In a child the slot may belong to another socket meanwhile.
            let _ = slot.compare_exchange(self.descriptor, FREE, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// Makes the replacement, once. Whether there is one.
fn has_replacement() -> bool {
    static MADE: Once = Once::new();
    MADE.call_once(|| match descriptor::event() {
        Ok(replacement) => REPLACEMENT.store(replacement.into_raw_fd(), Ordering::Release),
        Err(cause) => log::warn!("forked children keep the sockets of communicators: {cause}"),
    });
    REPLACEMENT.load(Ordering::Acquire) != FREE
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_testkit::in_forked_child;
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Duration;

    #[test]
    fn a_forked_child_is_not_the_creator_and_can_create() {
        let creator = CreatorProcess::current();
        assert!(creator.is_current());
        let status = in_forked_child(|| {
            let message = creator.check("this thing").map_err(|error| error.message().to_owned());
            let named = message.is_err_and(|message| {
                message.starts_with(&format!("this thing was created by process {}", creator.pid))
                    && message.contains(&format!("forked child {}", std::process::id()))
            });
            i32::from(!named) + 2 * i32::from(!CreatorProcess::current().is_current())
        });
        assert_eq!(status, 0);
        assert!(creator.check("this thing").is_ok());
    }

    #[test]
    fn a_peer_sees_the_end_of_a_socket_that_a_child_has_inherited() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        // More sockets than a block has slots.
        let mut ends: Vec<(ClosedInChild, TcpStream, TcpStream)> = Vec::new();
        for _ in 0..SLOTS + 3 {
            let near = TcpStream::connect(address).expect("a connection");
            let (far, _) = listener.accept().expect("a connection");
            far.set_read_timeout(Some(Duration::from_secs(10))).expect("a socket option");
            ends.push((ClosedInChild::new(near.as_fd()), near, far));
        }
        let (mut hold, held) = std::io::pipe().expect("a pipe");
        // SAFETY: the child only waits and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(held);
            let _ = hold.read(&mut [0]);
            // SAFETY: ends the process at once.
            unsafe { libc::_exit(0) };
        }
        for (guard, near, mut far) in ends {
            drop((guard, near));
            let end = far.read(&mut [0]);
            let ended = matches!(&end, Ok(0))
                || matches!(&end, Err(cause) if cause.kind() == ErrorKind::ConnectionReset);
            assert!(ended, "the child holds the socket: {end:?}");
        }
        drop(held);
        // SAFETY: a null status is allowed.
        unsafe { libc::waitpid(child, null_mut(), 0) };
    }

    #[test]
    fn a_dropped_guard_leaves_the_descriptor_to_the_child() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        drop(ClosedInChild::new(listener.as_fd()));
        assert_eq!(in_forked_child(|| i32::from(listener.local_addr().is_err())), 0);
    }
}
