//! Messages from one rank to another over their control connections.

use super::super::PeerMessages;
use super::super::protocol::PEER_MESSAGE_LIMIT;
use super::subworlds::open;
use super::*;
use rustix::event::{PollFd, PollFlags, poll};
use std::os::fd::AsFd;

/// The next message, as soon as the descriptor announces it.
fn next(messages: &PeerMessages) -> (Rank, Vec<u8>) {
    loop {
        if let Some(message) = messages.receive() {
            return message;
        }
        poll(&mut [PollFd::from_borrowed_fd(messages.as_fd(), PollFlags::IN)], None).expect("can poll");
    }
}

#[test]
fn each_pair_of_ranks_gets_its_messages_in_order() {
    watched(|| {
        let first = join_ranks(0..3, 3, &address_of(free_port()), &config());
        let further = open(&first, 5, &[0, 2]);
        for ranks in [&first, &further] {
            let last = ranks.len() - 1;
            let ends: Vec<PeerMessages> =
                ranks.iter().map(|rank| rank.control.peer_messages().expect("a descriptor")).collect();
            let sent: Vec<(Rank, Vec<u8>)> = (0..10).map(|number| (last, vec![number])).collect();
            ends[0].send(&sent).expect("connected");
            ends[last].send(&[(0, b"back".to_vec())]).expect("connected");
            for number in 0..10 {
                assert_eq!(next(&ends[last]), (0, vec![number]));
            }
            assert_eq!(next(&ends[0]), (last, b"back".to_vec()));
            assert_eq!(ends[0].receive(), None);
        }
    });
}

#[test]
fn messages_are_kept_until_there_is_a_reader() {
    watched(|| {
        let ranks = join_ranks(0..2, 2, &address_of(free_port()), &config());
        ranks[0].control.peer_messages().expect("a descriptor").send(&[(1, vec![7])]).expect("connected");
        thread::scope(|scope| {
            for rank in &ranks {
                scope.spawn(move || rank.control.all_gather("order", b"").expect("an exchange"));
            }
        });
        let reader = ranks[1].control.peer_messages().expect("a descriptor");
        assert_eq!(next(&reader), (0, vec![7]));
    });
}

#[test]
fn messages_that_are_too_long_are_refused_on_the_rank_that_sends_them() {
    watched(|| {
        let ranks = join_ranks(0..1, 1, &address_of(free_port()), &config());
        let messages = ranks[0].control.peer_messages().expect("a descriptor");
        let error = messages.send(&[(0, vec![0; PEER_MESSAGE_LIMIT + 1])]).expect_err("too long");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    });
}
