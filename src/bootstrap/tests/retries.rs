//! Attempts at a rendezvous after one that failed, in the same processes and at the same address.

use super::*;
use crate::config::Size;

/// Settings that no other rank has.
fn odd() -> Config {
    Config { subchunk: Size(1 << 20), ..config() }
}

/// Fails the rendezvous of a world of three before rank 2 joins.
fn fail_without_rank_2(rendezvous: &RendezvousPoint) {
    let errors = join_errors(&[(0, 3, config()), (1, 3, odd())], rendezvous);
    assert!(all_equal(&errors).message().contains("FLEXRING_SUBCHUNK"), "{}", errors[0]);
}

/// Lets all three ranks join after [`fail_without_rank_2`], `first` earlier than the others.
fn retry(rendezvous: &RendezvousPoint, first: Option<Rank>) {
    let begin = |rank: Rank| {
        if first.is_some_and(|first| first != rank) {
            thread::sleep(Duration::from_millis(300));
        }
        match join(rank, 3, rendezvous, &config()) {
            // Rank 2 has not joined before, so it still gets the error of the failed attempt, if it meets it.
            Err(error) if rank == 2 => {
                assert!(error.message().contains("FLEXRING_SUBCHUNK"), "{error}");
                join(rank, 3, rendezvous, &config())
            }
            joined => joined,
        }
        .unwrap_or_else(|error| panic!("rank {rank}, with {first:?} first: {error}"))
    };
    let members: Vec<ControlConnection> = thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || begin(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("joined")).collect()
    });
    assert_eq!(members.len(), 3);
}

#[test]
fn a_retry_meets_its_own_attempt() {
    watched(|| {
        // The rank that begins the retry, and how much earlier than the others.
        for first in [None, Some(0), Some(1), Some(2)] {
            let rendezvous = address_of(free_port());
            fail_without_rank_2(&rendezvous);
            retry(&rendezvous, first);
        }
    });
}

#[test]
fn a_retry_may_fail_again() {
    watched(|| {
        let rendezvous = address_of(free_port());
        for _ in 0..3 {
            fail_without_rank_2(&rendezvous);
        }
        retry(&rendezvous, None);
    });
}

#[test]
fn a_rank_that_retries_alone_gets_the_cause_of_the_last_attempt() {
    watched(|| {
        let rendezvous = address_of(free_port());
        fail_without_rank_2(&rendezvous);
        let error = join(1, 3, &rendezvous, &short_timeout()).map(drop).expect_err("rank 0 does not retry");
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        for text in ["rank 0 has not tried again", "FLEXRING_SUBCHUNK"] {
            assert!(error.message().contains(text), "{error}");
        }
    });
}

#[test]
fn a_rendezvous_in_progress_keeps_its_port() {
    watched(|| {
        let rendezvous = address_of(free_port());
        let timeout = Config { connect_timeout: Duration::from_secs(4), ..config() };
        thread::scope(|scope| {
            let first = scope.spawn(|| join_errors(&[(0, 2, timeout.clone())], &rendezvous));
            thread::sleep(Duration::from_millis(100));
            let error = join(0, 2, &rendezvous, &config()).map(drop).expect_err("in use");
            let process = std::process::id();
            let owner = format!("the port is in use: a flexring coordinator (pid {process} on host");
            assert!(error.message().contains(&owner), "{error}");
            assert!(error.message().contains("set FLEXRING_MASTER_PORT to a port that is free"), "{error}");
            let errors = first.join().expect("refused");
            assert!(errors[0].message().contains("did not join"), "{}", errors[0]);
            let note = "a process at 127.0.0.1 was refused: it needs this port as rank 0 of a job";
            assert!(errors[0].message().ends_with(note), "{}", errors[0]);
        });
    });
}

#[test]
fn a_port_that_another_program_uses_is_refused_with_the_fix() {
    watched(|| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let begun = Instant::now();
        let error = join(0, 2, &address_of(port), &config()).map(drop).expect_err("in use");
        assert!(error.message().contains("Address already in use"), "{error}");
        assert!(error.message().contains("set FLEXRING_MASTER_PORT to a port that is free"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(6), "it took {:?}", begun.elapsed());
    });
}
