//! Communicators come and go, and leave nothing behind: no descriptor, no thread, nothing of a device.

use crate::harness::{Setup, World, spawn, test_name, with_watchdog};
use crate::programs::succeed;
use flexring::ReduceOp;
use std::process::Command;
use std::time::{Duration, Instant};

/// What this process holds.
#[derive(Debug, PartialEq)]
struct Held {
    descriptors: usize,
    threads: usize,
    /// What the kernel says of RDMA devices, if there are any.
    devices: String,
}

fn held() -> Held {
    let entries = |folder: &str| std::fs::read_dir(folder).map(Iterator::count).unwrap_or(0);
    let devices = Command::new("rdma").arg("resource").output();
    Held {
        descriptors: entries("/proc/self/fd"),
        threads: entries("/proc/self/task"),
        devices: devices
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default(),
    }
}

#[test]
fn many_communicators_leave_nothing_behind() {
    // Descriptors and threads of other tests must not count, so the test runs in a process of its own.
    const ALONE: &str = "TEST_RUNS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = test_name(module_path!(), "many_communicators_leave_nothing_behind");
        let mut alone = Command::new(std::env::current_exe().expect("this binary"));
        alone.args([&name, "--exact", "--nocapture"]).env(ALONE, "1");
        let text = succeed(&mut alone, Duration::from_secs(240));
        assert!(text.contains("1 passed"), "{text}");
        return;
    }
    let worlds = World::enabled();
    // Two ranks each; worlds by turns, and fewer where a processor is emulated.
    let lives = if worlds[0].is_verbs() { 60 } else { 500 };
    with_watchdog(Duration::from_secs(200), || {
        let one = |number: usize| {
            spawn(&Setup::new(World::any(number), 2), |comm| {
                let mut vector = comm.alloc::<u32>(2000).expect("pool memory");
                vector.fill(comm.rank() as u32);
                comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
                assert!(vector.iter().all(|element| *element == 1));
            });
        };
        // What is opened once is opened now.
        (0..worlds.len()).for_each(one);
        let before = held();
        (0..lives).for_each(one);
        // Threads that were told to end may need a moment.
        let patience = Instant::now() + Duration::from_secs(10);
        while held() != before && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(held(), before);
    });
}
