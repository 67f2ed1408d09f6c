//! Whatever goes wrong with a device, once: the outcome is a correct exchange or an error that says what it was.

use super::*;
use crate::transport::verbs::link::RECV_DEPTH;
use crate::transport::verbs::objects::Verb;
use rustix::io::Errno;

/// How long one exchange may take with something that goes wrong: longer than any deadline within it, of which saying hello
/// has one of 20 s.
const LIMIT: Duration = Duration::from_secs(60);
/// How long all of a test's may.
const TEST_LIMIT: Duration = Duration::from_secs(240);

/// What verbs call it when nobody acknowledges a request.
const RETRIED: u32 = 12;

/// Messages by the board, by grants, and once more: two calls of them.
const LENS: [usize; 6] = [10, 5000, 300, SUBCHUNK, 20_000, 1];

/// What came of an exchange in which something went wrong on rank 0: nothing, or its error.
fn exchange(rails: &[Rail], shim: &Shim) -> Result<()> {
    let setup = LinkSetup { shim: shim.clone(), ..LinkSetup::over(rails, rails.len()) };
    with_timeout(LIMIT, move || {
        let act = |rank: &mut ConnectedRank| {
            // In memory that outlives the links, whatever becomes of them.
            let mut pool = SlotPool::new(4 * LENS.len());
            let outcome = (1..3).try_for_each(|sequence| rank.exchange(sequence, &LENS, &mut pool));
            if outcome.is_err() {
                rank.verbs.abort();
            }
            outcome
        };
        // The first that fails has all others fail, in its words.
        setup.run(act)?.into_iter().collect()
    })
}

/// Fails unless an error says that this verb failed on one of these devices.
fn assert_names(outcome: Result<()>, verb: Verb, rails: &[Rail], k: u64) {
    let error = outcome.expect_err("this cannot have gone well");
    let named = rails
        .iter()
        .any(|rail| error.message().contains(&format!("{} failed on {}", verb.name(), rail.device)));
    assert!(named, "call {k} of {verb:?}: {error}");
}

/// Lets each call of a verb fail, one exchange after the other, up to the last one that is made; of the calls from
/// `dense` on ever fewer. What came of each.
fn with_each_failing(
    rails: &[Rail],
    verb: Verb,
    errno: Errno,
    dense: u64,
    judge: impl Fn(u64, Result<()>),
) -> u64 {
    let (mut k, mut tried) = (0, 0);
    loop {
        let shim = Shim::failing(verb, k, errno.raw_os_error());
        let outcome = exchange(rails, &shim);
        if !shim.triggered() {
            outcome.expect("nothing went wrong");
            return tried;
        }
        judge(k, outcome);
        tried += 1;
        k += 1 + k.saturating_sub(dense) / 2;
    }
}

#[test]
fn a_verb_that_fails_while_links_are_made_is_named_with_its_device() {
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
        assert!(tried > 4, "boards, sources and landings were registered");
    });
}

#[test]
fn a_completion_queue_that_cannot_be_polled_is_an_error() {
    on_rails(TEST_LIMIT, |rails| {
        // How often it is polled depends on the time that things take.
        for k in (0..12).chain([20, 40, 80, 160, 320, 640, 1280]) {
            let shim = Shim::failing(Verb::PollCq, k, Errno::IO.raw_os_error());
            let outcome = exchange(rails, &shim);
            match outcome {
                // Whoever has all it wants does not mind.
                Ok(()) => assert!(!shim.triggered() || k > 3, "poll {k} failed, and nobody minds"),
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
            exchange(rails, &shim).expect("nobody need sleep");
        }
    });
}

#[test]
fn requests_that_cannot_be_posted_go_over_another_rail_or_are_an_error() {
    on_rails(TEST_LIMIT, |rails| {
        for errno in [Errno::NOMEM, Errno::INVAL] {
            with_each_failing(&rails[..1], Verb::PostSend, errno, 30, |k, outcome| {
                // The last ones only say goodbye; the first say hello and tell the call.
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
fn receives_that_cannot_be_posted_end_their_queue_pair() {
    on_rails(TEST_LIMIT, |rails| {
        for rails in [&rails[..1], rails] {
            let connecting = (RECV_DEPTH * rails.len()) as u64;
            for k in [0, 1, connecting - 1].into_iter().chain(connecting..connecting + 40) {
                let shim = Shim::failing(Verb::PostRecv, k, Errno::NOMEM.raw_os_error());
                let outcome = exchange(rails, &shim);
                if !shim.triggered() {
                    outcome.expect("nothing went wrong");
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
fn completions_of_every_status_break_their_queue_pair_only() {
    on_rails(TEST_LIMIT, |rails| {
        for rails in [&rails[..1], rails] {
            for status in 1..=21 {
                // A connection that breaks is what happens most.
                for k in (status as u64 % 3..24).step_by(if status == RETRIED { 1 } else { 3 }) {
                    let shim = Shim::failing_completion(k, status);
                    let outcome = exchange(rails, &shim);
                    assert!(
                        shim.triggered() || (outcome.is_ok() && k > 6),
                        "there are more than {k} completions"
                    );
                    let Err(error) = outcome else { continue };
                    let words = error.message();
                    assert!(words.contains(&format!("(status {status})")), "completion {k}: {error}");
                    // Whoever drops what came has no other way.
                    assert!(
                        rails.len() == 1 || words.contains("a receive ended with"),
                        "completion {k}: {error}"
                    );
                }
            }
        }
    });
}

#[test]
fn queue_pairs_that_break_and_cannot_be_broken_off_are_an_error() {
    on_rails(TEST_LIMIT, |rails| {
        for k in 0..6 {
            let shim = Shim::failing(Verb::ModifyQpToErr, 0, Errno::INVAL.raw_os_error());
            let shim = shim.and_failing_completion(k, RETRIED);
            let outcome = exchange(rails, &shim);
            if rails.len() == 1 {
                // Nothing would be saved by breaking it off.
                let error = outcome.expect_err("there is no other way");
                assert!(error.message().contains("(status 12)"), "{error}");
            } else if outcome.is_err() || k < 4 {
                assert_names(outcome, Verb::ModifyQpToErr, rails, k);
            }
        }
    });
}
