//! `flexring status`: what the coordinator answers in each phase.

use super::super::call_state::example_call;
use super::super::job_address::JobAddress;
use super::super::{RankActivity, WorldStatus, world_status};
use super::*;
use crate::config::{SecretText, Switch};

fn job(rendezvous: &RendezvousPoint) -> JobAddress {
    JobAddress { address: rendezvous.clone(), id: None, token: JOB, one_node: false }
}

pub(super) fn ask(rendezvous: &RendezvousPoint) -> Result<WorldStatus> {
    world_status(&job(rendezvous), &short_timeout())
}

#[test]
fn a_running_world_can_be_asked_again_and_again() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let members = join_ranks(0..3, 3, &rendezvous, &config());
        members[0].control.enter_call(&example_call(1)).expect("no rank has left");
        let until = Instant::now() + Duration::from_secs(10);
        let status = loop {
            let status = ask(&rendezvous).expect("an answer");
            if status.ranks[0].activity == RankActivity::InCall {
                break status;
            }
            assert!(Instant::now() < until, "{status}");
            thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(status.ranks.len(), 3);
        assert_eq!(status.ranks[0].call.as_deref(), Some("all_reduce #1 (1024 x float, sum)"));
        assert_eq!(status.ranks[0].waits_for, [1, 2]);
        assert_eq!(status.ranks[2].pid, std::process::id());
        assert!(members.iter().all(|member| member.fault.check().is_ok()), "the world does not notice");
    });
}

#[test]
fn an_incomplete_rendezvous_says_which_ranks_are_absent() {
    watched(|| {
        let rendezvous = address_of(free_port());
        thread::scope(|scope| {
            let others = scope.spawn(|| join_ranks(0..2, 3, &rendezvous, &config()));
            let until = Instant::now() + Duration::from_secs(10);
            while !ask(&rendezvous).is_ok_and(|status| {
                status.ranks.iter().filter(|row| row.activity == RankActivity::Joining).count() == 2
                    && status.ranks[0].waits_for == [2]
            }) {
                assert!(Instant::now() < until);
            }
            let last = join_ranks(2..3, 3, &rendezvous, &config());
            assert_eq!(others.join().expect("joined").len() + last.len(), 3);
        });
    });
}

#[test]
fn the_status_needs_the_secret_of_the_job() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let config = Config { secret: Some(SecretText::new("the secret of this job")), ..config() };
        let members = join_ranks(0..2, 2, &rendezvous, &config);
        let stranger = |text| Config { secret: Some(SecretText::new(text)), ..short_timeout() };
        world_status(&job(&rendezvous), &stranger("the secret of this job")).expect("the status");
        let error = ask(&rendezvous).expect_err("no secret");
        assert!(error.message().contains("FLEXRING_SECRET"), "{error}");
        let error =
            world_status(&job(&rendezvous), &stranger("the secret of another job")).expect_err("refused");
        assert!(error.message().contains("does not know the secret"), "{error}");
        let other_job = JobAddress { token: JOB + 1, ..job(&rendezvous) };
        let error = world_status(&other_job, &config).expect_err("refused");
        assert!(error.message().contains("another job"), "{error}");
        assert!(members.iter().all(|member| member.fault.check().is_ok()), "refusals do not fail the world");
    });
}

#[test]
fn a_rank_that_finds_a_complete_world_waits_for_the_next() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let _members = join_ranks(0..2, 2, &rendezvous, &config());
        let error = join(1, 2, &rendezvous, &short_timeout()).map(drop).expect_err("no second world");
        assert!(error.message().contains("rank 0 does not create another one"), "{error}");
        assert_eq!(join_ranks(0..2, 2, &rendezvous, &config()).len(), 2);
    });
}

#[test]
fn a_refused_request_for_the_status_is_not_called_a_rank() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let secret = |text| Some(SecretText::new(text));
        let config = Config { secret: secret("the secret of this job"), ..config() };
        let _members = join_ranks(0..2, 2, &rendezvous, &config);
        let asking = |config: Config| Config { connect_timeout: Duration::from_millis(1500), ..config };
        let (no_secret, other) = (None, secret("the secret of another job"));
        for (config, expected) in [
            (Config { tls: Switch(true), ..config.clone() }, "has FLEXRING_TLS=1 and the coordinator"),
            (Config { secret: no_secret, ..config.clone() }, "has no job secret"),
            (Config { secret: other, ..config.clone() }, "does not know the secret of the job"),
        ] {
            let error = world_status(&job(&rendezvous), &asking(config)).expect_err("refused");
            let sender = format!("the request for the status (pid {} on host ", std::process::id());
            assert!(error.message().contains(&sender) && error.message().contains(expected), "{error}");
            assert!(!error.message().contains("rank 0 (pid"), "{error}");
        }
    });
}
