//! A process that forks while devices use its memory.

use super::*;
use crate::memory::Arena;

const LIMIT: Duration = Duration::from_secs(450);

/// Lengths of an eager message and of others, for one call.
const LENS: [usize; 4] = [100, 9000, 20_000, 5000];

/// Each rank forks when it takes every so many messages: at another place in each call, which takes `2 *
/// LENS.len()`.
const MESSAGES_PER_FORK: usize = 3;

/// A pool that forks the process when a message is taken from it, again and again. Each child lives for a
/// while, so that this process writes to pages that it shares with the child.
struct ForkingPool {
    pool: MessagePool,
    /// Forks that remain, and messages until the next one.
    forks: usize,
    messages: usize,
    children: VecDeque<libc::pid_t>,
}

impl ForkingPool {
    fn new(forks: usize) -> Self {
        let children = VecDeque::new();
        Self { pool: MessagePool::new(4 * LENS.len()), forks, messages: 0, children }
    }

    fn fork(&mut self) {
        // SAFETY: the child only sleeps and ends; neither allocates or locks.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "cannot fork: {}", std::io::Error::last_os_error());
        if child == 0 {
            // SAFETY: as above; no exit handlers of the parent run.
            unsafe {
                libc::usleep(10_000);
                libc::_exit(0);
            }
        }
        self.children.push_back(child);
        if self.children.len() > 3 {
            self.reap();
        }
    }

    fn reap(&mut self) {
        let Some(child) = self.children.pop_front() else { return };
        let mut status = 0;
        // SAFETY: `status` may be written.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "a child ended with status {status:#x}");
    }
}

impl MessageMemory for ForkingPool {
    fn take(&mut self, len: usize) -> Piece {
        if self.forks > 0 && self.messages == 0 {
            self.fork();
            self.forks -= 1;
            self.messages = MESSAGES_PER_FORK;
        }
        self.messages = self.messages.saturating_sub(1);
        self.pool.take(len)
    }

    fn release(&mut self, piece: Piece) {
        self.pool.release(piece);
    }
}

impl Drop for ForkingPool {
    fn drop(&mut self) {
        while !self.children.is_empty() && !thread::panicking() {
            self.reap();
        }
    }
}

/// Exchanges messages until each of two ranks has forked the process half of `forks` times, and checks what
/// arrives.
fn fork_under_load(rails: &[Rail], forks: usize) {
    let act = |rank: &mut ConnectedRank| {
        let mut memory = ForkingPool::new(forks / 2);
        // Registered once for all calls, as a training job registers its vectors.
        rank.registrar.register(memory.pool.whole)?;
        let calls = (forks / 2 * MESSAGES_PER_FORK).div_ceil(2 * LENS.len()) as u64 + 1;
        let outcome = (1..=calls).try_for_each(|sequence| rank.exchange(sequence, &LENS, &mut memory));
        if outcome.is_err() {
            rank.verbs.abort();
        }
        outcome.as_ref().expect("no failure");
        assert_eq!(memory.forks, 0, "forks are left");
        rank.registrar.deregister(memory.pool.whole)?;
        outcome
    };
    for outcome in LinkSetup::over(rails, rails.len()).run(act).expect("all devices work") {
        outcome.expect("no failure");
    }
}

#[test]
fn a_few_forks_under_load_change_no_message() {
    on_rails(LIMIT, |rails| fork_under_load(rails, 20));
}

#[test]
fn a_thousand_forks_under_load_change_no_message() {
    on_rails(LIMIT, |rails| fork_under_load(rails, 1000));
}

#[test]
fn forked_children_have_no_memory_that_devices_use_for_this_library() {
    on_rails(LIMIT, |rails| {
        for registration in [Registration::Auto, Registration::Stage] {
            let shim = Shim::none().recording_registrations();
            let setup = LinkSetup { registration, shim: shim.clone(), ..LinkSetup::over(rails, rails.len()) };
            let arena = Arena::new(8 * SUBCHUNK).expect("memory");
            let act = |rank: &mut ConnectedRank| {
                // Slots of a pool, as a communicator lays it out.
                let half = arena.piece(rank.me * 4 * SUBCHUNK, 4 * SUBCHUNK).expect("within the arena");
                rank.registrar.register(half)?;
                let mut pool = MessagePool::of(half, vec![0; half.len()]);
                rank.exchange(1, &[SUBCHUNK, 10], &mut pool)?;
                rank.registrar.deregister(half)
            };
            for outcome in setup.run(act).expect("all devices work") {
                outcome.expect("no failure");
            }
            let found = shim.registrations();
            // Each rail registers both sides of the control buffers and the pool.
            assert!(found.len() >= 3 * rails.len(), "{found:?}");
            for registered in found {
                assert!(registered.is_unforked, "{registered:?}");
            }
        }
    });
}

#[test]
fn links_work_where_the_kernel_does_not_copy_pinned_pages() {
    // libibverbs can be initialized for forks only before a process registers memory, as other tests do.
    const ALONE: &str = "TEST_RUNS_ALONE";
    const NAME: &str =
        "transport::verbs::tests::forks::links_work_where_the_kernel_does_not_copy_pinned_pages";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().expect("this binary"));
        let output = alone.args([NAME, "--exact"]).env(ALONE, "1").output().expect("a process");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    on_rails(LIMIT, |rails| {
        let shim = Shim::none().on_old_kernel();
        let setup = LinkSetup { shim, ..LinkSetup::over(rails, 1) };
        let act = |rank: &mut ConnectedRank| rank.exchange(1, &LENS, &mut HeapMemory::default());
        for outcome in setup.run(act).expect("all devices work") {
            outcome.expect("no failure");
        }
    });
}
