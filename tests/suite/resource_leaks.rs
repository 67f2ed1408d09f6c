//! Dropped communicators leak no descriptor, no thread and no device resource.

use crate::harness::{Setup, World, once_unchanged, spawn, test_name, with_watchdog};
use crate::programs::succeed;
use flexring::ReduceOp;
use std::process::Command;
use std::time::{Duration, Instant};

/// Resources of this process.
#[derive(Debug, PartialEq)]
struct Resources {
    descriptors: usize,
    threads: usize,
    /// RDMA objects as `rdma resource` counts them; empty without devices.
    devices: String,
}

fn current_resources() -> Resources {
    let entries = |folder: &str| std::fs::read_dir(folder).map(Iterator::count).unwrap_or(0);
    let devices = Command::new("rdma").arg("resource").output();
    Resources {
        descriptors: entries("/proc/self/fd"),
        threads: entries("/proc/self/task"),
        devices: devices
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default(),
    }
}

#[test]
fn dropped_communicators_leak_nothing() {
    // Descriptors and threads of other tests must not count, so the test runs in its own process.
    const ALONE: &str = "TEST_RUNS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = test_name(module_path!(), "dropped_communicators_leak_nothing");
        let mut alone = Command::new(std::env::current_exe().expect("this binary"));
        alone.args([&name, "--exact", "--nocapture"]).env(ALONE, "1");
        let text = succeed(&mut alone, Duration::from_secs(240));
        assert!(text.contains("1 passed"), "{text}");
        return;
    }
    let worlds = World::enabled();
    // Two ranks each, cycling through the worlds; fewer where the device is emulated.
    let rounds = if worlds[0].is_verbs() { 60 } else { 500 };
    with_watchdog(Duration::from_secs(200), || {
        let one = |number: usize| {
            let mut setup = Setup::new(World::any(number), 2);
            setup.config.threads = 1 + number % 8 / 4;
            spawn(&setup, |comm| {
                let mut vector = comm.alloc::<u32>(2000).expect("pool memory");
                vector.fill(comm.rank() as u32);
                comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
                assert!(vector.iter().all(|element| *element == 1));
            });
        };
        // The first round opens what a process opens once.
        (0..2 * worlds.len()).for_each(one);
        // Threads that are about to end do not count.
        let before = once_unchanged(current_resources);
        (0..rounds).for_each(one);
        // Ending threads may need a moment.
        let deadline = Instant::now() + Duration::from_secs(10);
        while current_resources() != before && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(current_resources(), before);
    });
}

/// The threads of the library in this process: their names and masks of blocked signals. A thread has its
/// name only once it runs.
fn library_threads() -> Vec<(String, u64)> {
    let mut threads = Vec::new();
    for task in std::fs::read_dir("/proc/self/task").expect("the kernel lists threads").flatten() {
        // A thread may end meanwhile.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
        let blocked = u64::from_str_radix(field("SigBlk:"), 16).expect("a mask");
        threads.push((field("Name:").to_owned(), blocked));
    }
    threads.retain(|(name, _)| name.starts_with("flexring-"));
    threads
}

#[test]
fn all_threads_of_communicators_block_signals() {
    // SIGHUP, SIGINT, SIGTERM and SIGCHLD, which only threads of the program may handle.
    const HANDLED: [u32; 4] = [1, 2, 15, 17];
    for &world in World::enabled() {
        let mut setup = Setup::new(world, 2);
        setup.config.threads = 2;
        spawn(&setup, |comm| {
            comm.all_reduce(&mut [1f32; 8], ReduceOp::Sum).expect("a sum");
            let request = comm.all_reduce_async(vec![1f32; 8], ReduceOp::Sum).expect("a request");
            request.wait().expect("a sum");
            assert!(library_threads().iter().any(|(name, _)| name == "flexring-worker"));
            for (name, blocked) in library_threads() {
                assert!(HANDLED.iter().all(|signal| blocked >> (signal - 1) & 1 == 1), "{name}: {blocked:x}");
            }
        });
    }
}
