//! Every verb and every completion fails once: the outcome is a correct exchange or an error that names the
//! fault.

use super::*;
use crate::transport::verbs::objects::Verb;
use flexring_testkit::effort::cases;
use rustix::io::Errno;

/// Time limit of one exchange with a fault: longer than any deadline within it. The handshake has one of 20
/// s.
const LIMIT: Duration = Duration::from_secs(60);
/// Time limit of one test.
const TEST_LIMIT: Duration = Duration::from_secs(240);

/// `IBV_WC_RETRY_EXC_ERR`: the peer did not acknowledge a request.
const RETRY_EXCEEDED: u32 = 12;
/// Local length and access errors, remote invalid request and access errors.
const WRONG_REQUESTS: [u32; 4] = [1, 8, 9, 10];

/// Lengths of eager messages and others, for two calls.
const LENS: [usize; 6] = [10, 5000, 300, SUBCHUNK, 20_000, 1];

/// Exchanges messages while this fault occurs on rank 0. Returns the first error of any rank.
fn exchange(rails: &[Rail], shim: &Shim) -> Result<()> {
    exchange_with(rails, shim, AdaptiveRouting::Auto)
}

/// [`exchange`], with this value of `FLEXRING_IB_ADAPTIVE_ROUTING`.
fn exchange_with(rails: &[Rail], shim: &Shim, adaptive_routing: AdaptiveRouting) -> Result<()> {
    let setup = LinkSetup { shim: shim.clone(), adaptive_routing, ..LinkSetup::over(rails, rails.len()) };
    with_timeout(LIMIT, move || {
        let act = |rank: &mut ConnectedRank| {
            // The pool outlives the links on every path.
            let mut pool = MessagePool::new(4 * LENS.len());
            let outcome = (1..3).try_for_each(|sequence| rank.exchange(sequence, &LENS, &mut pool));
            if outcome.is_err() {
                rank.verbs.abort();
            }
            outcome
        };
        // The first rank that fails raises its error at all others.
        setup.run(act)?.into_iter().collect()
    })
}

/// Fails unless the outcome is an error that names this verb and one of these devices.
fn assert_names(outcome: Result<()>, verb: Verb, rails: &[Rail], k: u64) {
    let error = outcome.expect_err("a failed verb is an error");
    let named = rails
        .iter()
        .any(|rail| error.message().contains(&format!("{} failed on {}", verb.name(), rail.device)));
    assert!(named, "call {k} of {verb:?}: {error}");
}

/// Makes each call of a verb fail, one exchange after the other, up to the last call; from call `dense` on
/// with growing gaps. `check` gets the number of the call and the outcome. Returns how many calls failed.
fn with_each_failing(
    rails: &[Rail],
    verb: Verb,
    errno: Errno,
    dense: u64,
    check: impl Fn(u64, Result<()>),
) -> u64 {
    let (mut k, mut tried) = (0, 0);
    loop {
        let shim = Shim::failing(verb, k, errno.raw_os_error());
        let outcome = exchange(rails, &shim);
        if !shim.triggered() {
            outcome.expect("no fault occurred");
            return tried;
        }
        check(k, outcome);
        tried += 1;
        k += 1 + k.saturating_sub(dense) / 2;
    }
}

#[test]
fn a_verb_that_fails_during_setup_is_named_with_its_device() {
    use Verb::{
        AllocPd, CreateCompChannel, CreateCq, CreateQp, GetDeviceList, ModifyQpToInit, ModifyQpToRtr,
        ModifyQpToRts, OpenDevice, QueryPort,
    };
    on_rails(TEST_LIMIT, |rails| {
        for (verb, errno) in [
            (GetDeviceList, Errno::NOSYS),
            (OpenDevice, Errno::ACCESS),
            (QueryPort, Errno::INVAL),
            (AllocPd, Errno::NOMEM),
            (CreateCompChannel, Errno::MFILE),
            (CreateCq, Errno::NOMEM),
            (CreateQp, Errno::NOMEM),
            (ModifyQpToInit, Errno::INVAL),
            (ModifyQpToRtr, Errno::TIMEDOUT),
            (ModifyQpToRts, Errno::INVAL),
        ] {
            let tried =
                with_each_failing(rails, verb, errno, 9, |k, outcome| assert_names(outcome, verb, rails, k));
            assert_eq!(tried, rails.len() as u64, "{verb:?} is called once for each rail");
        }
    });
}

#[test]
fn memory_that_cannot_be_registered_is_an_error() {
    on_rails(TEST_LIMIT, |rails| {
        let tried = with_each_failing(rails, Verb::RegMr, Errno::NOMEM, 12, |k, outcome| {
            assert_names(outcome, Verb::RegMr, rails, k);
        });
        assert!(tried > 4, "control buffers, sources and destinations were registered");
    });
}

#[test]
fn a_completion_queue_that_cannot_be_polled_is_an_error() {
    on_rails(TEST_LIMIT, |rails| {
        // The number of polls depends on timing.
        for k in (0..12).chain([20, 40, 80, 160, 320, 640, 1280]) {
            let shim = Shim::failing(Verb::PollCq, k, Errno::IO.raw_os_error());
            let outcome = exchange(rails, &shim);
            match outcome {
                // A failure after the last message does not matter.
                Ok(()) => assert!(!shim.triggered() || k > 3, "poll {k} failed without an error"),
                Err(_) => assert_names(outcome, Verb::PollCq, rails, k),
            }
        }
    });
}

#[test]
fn a_completion_queue_that_cannot_be_armed_is_polled() {
    on_rails(TEST_LIMIT, |rails| {
        for k in 0..6 {
            let shim = Shim::failing(Verb::ReqNotifyCq, k, Errno::INVAL.raw_os_error());
            exchange(rails, &shim).expect("polling needs no wake-up");
        }
    });
}

#[test]
fn requests_that_cannot_be_posted_use_another_rail_or_are_an_error() {
    on_rails(TEST_LIMIT, |rails| {
        for errno in [Errno::NOMEM, Errno::INVAL] {
            with_each_failing(&rails[..1], Verb::PostSend, errno, 30, |k, outcome| {
                // The last requests are only goodbyes; the first are the hello and the call.
                if outcome.is_err() || k < 2 {
                    assert_names(outcome, Verb::PostSend, rails, k);
                }
            });
        }
        if rails.len() > 1 {
            with_each_failing(rails, Verb::PostSend, Errno::NOMEM, 30, |k, outcome| {
                assert!(outcome.is_ok(), "request {k}: {outcome:?}");
            });
        }
    });
}

#[test]
fn receives_that_cannot_be_posted_break_their_queue_pair() {
    on_rails(TEST_LIMIT, |rails| {
        for rails in [&rails[..1], rails] {
            // The receives of a new queue pair are one chain.
            let connecting = rails.len() as u64;
            for k in 0..connecting + 40 {
                let shim = Shim::failing(Verb::PostRecv, k, Errno::NOMEM.raw_os_error());
                let outcome = exchange(rails, &shim);
                if !shim.triggered() {
                    outcome.expect("no fault occurred");
                    break;
                }
                if k < connecting || (rails.len() == 1 && outcome.is_err()) {
                    assert_names(outcome, Verb::PostRecv, rails, k);
                } else {
                    assert!(
                        outcome.is_ok() && (rails.len() > 1 || k > connecting),
                        "receive {k}: {outcome:?}"
                    );
                }
            }
        }
    });
}

#[test]
fn completions_of_every_status_break_their_queue_pair_only_unless_the_request_is_wrong() {
    on_rails(TEST_LIMIT, |rails| {
        for rails in [&rails[..1], rails] {
            for status in 1..=21 {
                let routing = if status % 2 == 0 { AdaptiveRouting::On } else { AdaptiveRouting::Off };
                // A broken connection is the most common fault.
                let step = if status == RETRY_EXCEEDED { 1 } else { 24 / cases(8).min(24) };
                for k in (u64::from(status) % step..24).step_by(step as usize) {
                    let shim = Shim::failing_completion(k, status);
                    let outcome = exchange_with(rails, &shim, routing);
                    assert!(
                        shim.triggered() || (outcome.is_ok() && k > 6),
                        "there are more than {k} completions"
                    );
                    let Err(error) = outcome else { continue };
                    let message = error.message();
                    assert!(message.contains(&format!("(status {status})")), "completion {k}: {error}");
                    // Only a lost receive, and a request that would be refused again, fail the exchange while
                    // another rail is alive.
                    let ends_the_link =
                        WRONG_REQUESTS.contains(&status) || message.contains("a receive ended with");
                    assert!(rails.len() == 1 || ends_the_link, "completion {k}: {error}");
                }
            }
        }
    });
}

#[test]
fn queue_pairs_that_cannot_be_moved_to_the_error_state_are_destroyed() {
    on_rails(TEST_LIMIT, |rails| {
        for k in 0..6 {
            let shim = Shim::failing(Verb::ModifyQpToErr, 0, Errno::INVAL.raw_os_error());
            let shim = shim.and_failing_completion(k, RETRY_EXCEEDED);
            let outcome = exchange(rails, &shim);
            if rails.len() == 1 {
                // The link is lost already.
                let error = outcome.expect_err("no other rail is alive");
                assert!(error.message().contains("(status 12)"), "{error}");
            } else if let Err(error) = outcome {
                // A completion that the device did not report in time, or a receive whose immediate data is
                // lost.
                let causes = ["was lost with a queue pair", "a receive ended with"];
                let is_expected = causes.iter().any(|cause| error.message().contains(cause));
                assert!(is_expected, "completion {k}: {error}");
            }
        }
    });
}

/// Exchanges messages while a device of rank 0 reports an event of this `ibv_event_type`. Returns the outcome
/// of the exchange in which it was reported: a rank reads events when it has slept.
fn exchange_with_event(rails: &[Rail], event_type: u32) -> Result<()> {
    for _ in 0..20 {
        let shim = Shim::none().with_event(event_type);
        let outcome = exchange(rails, &shim);
        if !shim.has_event() {
            return outcome;
        }
        outcome.expect("no event occurred");
    }
    panic!("no rank has slept during twenty exchanges");
}

#[test]
fn a_device_that_fails_or_is_removed_costs_its_rail_only() {
    /// `IBV_EVENT_DEVICE_FATAL`, which is also reported when a device is removed, and `IBV_EVENT_CQ_ERR`.
    const FATAL: [(u32, &str); 2] = [(8, "the device failed"), (0, "its completion queue overran")];
    on_rails(TEST_LIMIT, |rails| {
        for (event_type, cause) in FATAL {
            if rails.len() > 1 {
                exchange_with_event(rails, event_type).expect("another rail is alive");
            }
            // It does not matter after the last message.
            if let Err(error) = exchange_with_event(&rails[..1], event_type) {
                let message = error.message();
                assert!(message.contains(cause) || message.contains("(status "), "{error}");
            }
        }
    });
}

#[test]
fn changes_of_a_devices_addresses_are_no_failure() {
    // `IBV_EVENT_LID_CHANGE`, `IBV_EVENT_PKEY_CHANGE` and `IBV_EVENT_GID_CHANGE`: the queue pairs still reach
    // each other.
    on_rails(TEST_LIMIT, |rails| {
        for event_type in [11, 12, 18] {
            exchange_with_event(&rails[..1], event_type).expect("nothing broke");
        }
    });
}
