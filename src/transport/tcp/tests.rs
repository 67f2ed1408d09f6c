//! What the contract of transports means on TCP.

use super::*;

use crate::error::ErrorKind;
use crate::transport::Event;
use crate::transport::fixtures::{Random, call, piece};
use rustix::event::{PollFd, PollFlags};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

pub(super) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Runs a test that must not hang.
pub(super) fn watched(test: impl FnOnce() + Send + 'static) {
    let (done, waiting) = mpsc::channel();
    let running = thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    if waiting.recv_timeout(Duration::from_secs(20)) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("the test hangs");
    }
    if let Err(panic) = running.join() {
        std::panic::resume_unwind(panic);
    }
}

pub(super) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(15)
}

/// The links of `ranks` ranks among each other, by rank.
fn linked_at(address: IpAddr, ranks: usize, sockets: usize) -> Vec<Tcp> {
    let listeners: Vec<Listener> =
        (0..ranks).map(|_| Listener::bind(&[address]).expect("loopback can be listened at")).collect();
    let endpoints: Vec<SocketAddr> = listeners.iter().map(|listener| listener.endpoints()[0]).collect();
    let connecting: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(me, listener)| {
            let peers: Vec<_> =
                endpoints.iter().copied().enumerate().filter(|(peer, _)| *peer != me).collect();
            thread::spawn(move || {
                let fault = Fault::new().expect("an event descriptor");
                Tcp::connect(listener, me, &peers, 99, sockets, soon(), &fault).expect("all ranks are here")
            })
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("connected")).collect()
}

fn pair(sockets: usize) -> (Tcp, Tcp) {
    let mut pair = linked_at(LOOPBACK, 2, sockets).into_iter();
    (pair.next().expect("rank 0"), pair.next().expect("rank 1"))
}

/// Polls until there is something to tell, sleeping on the bell in between.
fn wait(tcp: &mut Tcp, events: &mut Events) -> Result<()> {
    while events.is_empty() {
        if !tcp.poll(events)? && tcp.set_need_wakeup() {
            let bell = tcp.wake_fd();
            rustix::event::poll(&mut [PollFd::from_borrowed_fd(bell, PollFlags::IN)], None)
                .expect("can sleep");
            tcp.clear_need_wakeup();
        }
    }
    Ok(())
}

fn next(tcp: &mut Tcp) -> Result<Event> {
    let mut events = Events::new();
    wait(tcp, &mut events)?;
    assert_eq!(events.len(), 1, "one thing happens at a time: {events:?}");
    Ok(events[0])
}

fn expect_called(tcp: &mut Tcp, sequence: u64) {
    match next(tcp).expect("a call") {
        Event::PeerEntered { call: theirs, .. } => assert_eq!(theirs, call(sequence)),
        other => panic!("{other:?} instead of a call"),
    }
}

/// Polls for a while and wants nothing to happen.
fn expect_silence(tcp: &mut Tcp) {
    let mut events = Events::new();
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        tcp.poll(&mut events).expect("nothing is wrong");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(events.is_empty(), "{events:?}");
}

/// The messages from one rank to another in one call: 1 byte to 2 MiB each, small ones as often as large ones.
fn messages(from: Rank, to: Rank, sequence: u64, seed: u64) -> Vec<Vec<u8>> {
    let mut random = Random(seed ^ (from as u64) << 8 ^ (to as u64) << 16 ^ sequence << 24);
    let many = random.below(40);
    (0..many)
        .map(|_| {
            let scale = random.below(22);
            let len = 1 + random.below(1 << scale);
            random.bytes(len)
        })
        .collect()
}

/// What one rank does in one call with one peer.
struct Exchange {
    sends: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
    landings: Vec<Vec<u8>>,
    posted: usize,
    sent: usize,
    awaited: usize,
    landed: usize,
    called: bool,
}

impl Exchange {
    fn is_over(&self) -> bool {
        self.called && self.sent == self.sends.len() && self.landed == self.expected.len()
    }
}

/// Exchanges the messages of one call with all other ranks, as fast as the windows allow.
fn exchange(tcp: &mut Tcp, me: Rank, ranks: usize, sequence: u64, seed: u64) {
    tcp.begin(sequence);
    let mut exchanges: Vec<Exchange> = (0..ranks)
        .map(|peer| {
            let expected = messages(peer, me, sequence, seed);
            Exchange {
                sends: messages(me, peer, sequence, seed),
                landings: expected.iter().map(|message| vec![0; message.len()]).collect(),
                expected,
                posted: 0,
                sent: 0,
                awaited: 0,
                landed: 0,
                called: false,
            }
        })
        .collect();
    let mut events = Events::new();
    for peer in (0..ranks).filter(|peer| *peer != me) {
        tcp.announce(peer, &call(sequence)).expect("alive");
    }
    loop {
        for (peer, exchange) in exchanges.iter_mut().enumerate().filter(|(peer, _)| *peer != me) {
            while exchange.posted < exchange.sends.len() && exchange.posted - exchange.sent < tcp.window() {
                tcp.send(peer, piece(&mut exchange.sends[exchange.posted])).expect("alive");
                exchange.posted += 1;
            }
            while exchange.awaited < exchange.landings.len()
                && exchange.awaited - exchange.landed < tcp.window()
            {
                tcp.post_recv(peer, piece(&mut exchange.landings[exchange.awaited])).expect("alive");
                exchange.awaited += 1;
            }
        }
        if (0..ranks).all(|peer| peer == me || exchanges[peer].is_over()) {
            return;
        }
        wait(tcp, &mut events).expect("alive");
        for event in events.drain(..) {
            match event {
                Event::PeerEntered { peer, call: theirs } => {
                    assert_eq!(theirs, call(sequence));
                    assert!(!std::mem::replace(&mut exchanges[peer].called, true), "called twice");
                }
                Event::SendComplete { peer } => exchanges[peer].sent += 1,
                Event::RecvComplete { peer } => {
                    let exchange = &mut exchanges[peer];
                    assert!(exchange.called, "a message came before the call");
                    let at = exchange.landed;
                    assert!(
                        exchange.landings[at] == exchange.expected[at],
                        "message {at} of {peer} is not what it sent"
                    );
                    exchange.landed += 1;
                }
                Event::RecvReady { .. } => panic!("nothing is delivered in place"),
            }
        }
    }
}

fn all_exchange(address: IpAddr, ranks: usize, sockets: usize) {
    let running: Vec<_> = linked_at(address, ranks, sockets)
        .into_iter()
        .enumerate()
        .map(|(me, mut tcp)| {
            thread::spawn(move || {
                for sequence in 1..=6 {
                    exchange(&mut tcp, me, ranks, sequence, sockets as u64);
                }
                // Links are closed when all are done, as a communicator does it.
                tcp
            })
        })
        .collect();
    let _links: Vec<Tcp> = running.into_iter().map(|rank| rank.join().expect("exchanged")).collect();
}

#[test]
fn two_ranks_exchange_messages_of_all_sizes_over_one_to_four_sockets() {
    watched(|| (1..=4).for_each(|sockets| all_exchange(LOOPBACK, 2, sockets)));
}

#[test]
fn four_ranks_exchange_messages_of_all_sizes_over_one_and_three_sockets() {
    watched(|| [1, 3].into_iter().for_each(|sockets| all_exchange(LOOPBACK, 4, sockets)));
}

#[test]
#[allow(clippy::print_stderr, reason = "a skipped test says so")]
fn ipv6_carries_the_same() {
    let loopback = IpAddr::from(std::net::Ipv6Addr::LOCALHOST);
    if Listener::bind(&[loopback]).is_err() {
        eprintln!("skipped: this machine has no IPv6");
        return;
    }
    watched(move || all_exchange(loopback, 2, 2));
}

#[test]
fn a_peer_that_is_ahead_is_not_heard_beyond_this_call() {
    watched(|| {
        let (mut behind, mut ahead) = pair(2);
        let mut sent = [[1; 100], [2; 100], [3; 100]];
        for sequence in 1..=2 {
            ahead.begin(sequence);
            ahead.announce(0, &call(sequence)).expect("alive");
            for message in &mut sent {
                ahead.send(0, piece(message)).expect("alive");
            }
            for _ in 0..3 {
                let mut events = Events::new();
                ahead.poll(&mut events).expect("alive");
            }
        }
        for sequence in 1..=2 {
            behind.begin(sequence);
            expect_called(&mut behind, sequence);
            let mut landings = [[0; 100]; 3];
            for landing in &mut landings {
                behind.post_recv(1, piece(landing)).expect("alive");
            }
            let mut events = Events::new();
            while events.len() < 3 {
                behind.poll(&mut events).expect("alive");
            }
            assert!(events.iter().all(|event| matches!(event, Event::RecvComplete { peer: 1 })));
            assert_eq!(landings, sent);
            expect_silence(&mut behind);
        }
    });
}

#[test]
fn a_peer_may_leave_calls_out_and_is_heard_in_the_one_it_makes() {
    watched(|| {
        let (mut here, mut there) = pair(1);
        there.begin(3);
        there.announce(0, &call(3)).expect("alive");
        for sequence in 1..=2 {
            here.begin(sequence);
            expect_silence(&mut here);
        }
        here.begin(3);
        expect_called(&mut here, 3);
    });
}

#[test]
fn a_call_with_another_sequence_is_reported_for_the_executor_to_compare() {
    watched(|| {
        // One that this rank has left behind.
        let (mut here, mut there) = pair(1);
        there.begin(1);
        there.announce(0, &call(1)).expect("alive");
        here.begin(5);
        expect_called(&mut here, 1);
        let error = here.announce(1, &call(5)).expect_err("they disagree");
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("is in call 1, this rank in call 5"), "{error}");

        // One that is ahead while this rank needs something of the call before.
        let (mut here, mut there) = pair(1);
        there.begin(2);
        there.announce(0, &call(2)).expect("alive");
        here.begin(1);
        expect_silence(&mut here);
        let mut landing = [0; 8];
        here.post_recv(1, piece(&mut landing)).expect("alive");
        expect_called(&mut here, 2);
    });
}

#[test]
fn a_message_of_another_length_is_a_disagreement() {
    watched(|| {
        for (sent, expected) in [(100, 101), (101, 100), (1 << 20, 1), (1, 1 << 20)] {
            let (mut here, mut there) = pair(1);
            let (mut message, mut landing) = (vec![7; sent], vec![0; expected]);
            there.begin(1);
            there.announce(0, &call(1)).expect("alive");
            there.send(0, piece(&mut message)).expect("alive");
            here.begin(1);
            expect_called(&mut here, 1);
            here.post_recv(1, piece(&mut landing)).expect("alive");
            let error = next(&mut here).expect_err("the lengths differ");
            assert_eq!(error.kind(), ErrorKind::Disagreement);
            let words = format!(
                "sent message 0 of call 1 with {sent} bytes where message 0 of call 1 with {expected} bytes was expected"
            );
            assert!(error.message().starts_with("rank 1 (127.0.0.1:"), "{error}");
            assert!(error.message().contains(&words), "{error}");
            assert_eq!(here.send(1, Piece::EMPTY).expect_err("broken"), error);
        }
    });
}

#[test]
fn a_message_too_many_is_a_disagreement_in_the_next_call() {
    watched(|| {
        let (mut here, mut there) = pair(1);
        let mut message = [7; 10];
        there.begin(1);
        there.announce(0, &call(1)).expect("alive");
        there.send(0, piece(&mut message)).expect("alive");
        here.begin(1);
        expect_called(&mut here, 1);
        here.begin(2);
        // It is told as soon as it is certain, which takes more bytes than one short message has.
        there.poll(&mut Events::new()).expect("alive");
        there.begin(2);
        there.announce(0, &call(2)).expect("alive");
        let error = next(&mut here).expect_err("a call was expected");
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("where its next call was expected"), "{error}");
    });
}

#[test]
fn more_messages_than_the_window_holds_are_refused() {
    watched(|| {
        let (mut here, _there) = pair(2);
        // More than the kernel takes, so that none is sent.
        let mut message = vec![0; 32 << 20];
        let mut landing = [0; 8];
        here.begin(1);
        assert_eq!(here.window(), 32);
        for _ in 0..here.window() {
            here.send(1, piece(&mut message)).expect("within the window");
            here.post_recv(1, piece(&mut landing)).expect("within the window");
        }
        for error in [here.send(1, piece(&mut message)), here.post_recv(1, piece(&mut landing))] {
            assert_eq!(error.expect_err("beyond the window").kind(), ErrorKind::Internal);
        }
        assert_eq!(here.send(7, piece(&mut message)).expect_err("a stranger").kind(), ErrorKind::Internal);
    });
}

fn assert_lost(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.message().starts_with("rank 1 (127.0.0.1:"), "{error}");
}

#[test]
fn a_peer_that_closes_when_nothing_is_needed_is_an_error_only_when_it_is() {
    watched(|| {
        for needs in 0..3 {
            let (mut here, there) = pair(2);
            here.begin(1);
            drop(there);
            expect_silence(&mut here);
            let mut bytes = [0; 8];
            let error = match needs {
                0 => here.announce(1, &call(1)),
                1 => here.send(1, piece(&mut bytes)),
                _ => here.post_recv(1, piece(&mut bytes)),
            };
            let error = error.expect_err("the peer has left");
            assert_lost(&error);
            assert!(error.message().contains("closed its connection"), "{error}");
        }
    });
}

#[test]
fn a_peer_that_left_after_the_last_call_is_noticed_when_the_next_begins() {
    watched(|| {
        let (mut here, there) = pair(1);
        drop(there);
        here.begin(1);
        assert_lost(&here.announce(1, &call(1)).expect_err("the peer has left"));
    });
}

#[test]
fn a_peer_that_closes_before_its_message_is_lost() {
    watched(|| {
        for sockets in 1..=2 {
            let (mut here, mut there) = pair(sockets);
            let mut landings = [[0; 8]; 2];
            there.begin(1);
            there.announce(0, &call(1)).expect("alive");
            here.begin(1);
            expect_called(&mut here, 1);
            for landing in &mut landings {
                here.post_recv(1, piece(landing)).expect("alive");
            }
            there.abort();
            assert_lost(&next(&mut here).expect_err("the message will not come"));
        }
    });
}

#[test]
fn a_peer_that_closes_in_the_middle_of_a_message_is_lost() {
    watched(|| {
        let (mut here, mut there) = pair(1);
        let mut message = vec![1; 32 << 20];
        let mut landing = vec![0; 32 << 20];
        there.begin(1);
        there.announce(0, &call(1)).expect("alive");
        there.send(0, piece(&mut message)).expect("alive");
        here.begin(1);
        expect_called(&mut here, 1);
        here.post_recv(1, piece(&mut landing)).expect("alive");
        there.abort();
        let error = next(&mut here).expect_err("the rest will not come");
        assert_lost(&error);
        assert!(error.message().contains("in the middle of a message"), "{error}");
    });
}

#[test]
fn a_peer_that_closes_before_it_took_everything_is_lost() {
    watched(|| {
        let (mut here, there) = pair(1);
        let mut message = vec![1; 32 << 20];
        here.begin(1);
        here.announce(1, &call(1)).expect("alive");
        here.send(1, piece(&mut message)).expect("alive");
        drop(there);
        assert_lost(&next(&mut here).expect_err("nobody takes the rest"));
    });
}

#[test]
fn what_a_peer_sent_before_it_closed_still_lands() {
    watched(|| {
        let (mut here, mut there) = pair(2);
        let mut messages = [[5; 3000], [6; 3000], [7; 3000]];
        there.begin(1);
        there.announce(0, &call(1)).expect("alive");
        for message in &mut messages {
            there.send(0, piece(message)).expect("alive");
        }
        drop(there);
        here.begin(1);
        expect_called(&mut here, 1);
        for message in messages {
            let mut landing = [0; 3000];
            here.post_recv(1, piece(&mut landing)).expect("there is more");
            assert!(matches!(next(&mut here), Ok(Event::RecvComplete { peer: 1 })));
            assert_eq!(landing, message);
        }
        let mut landing = [0; 1];
        here.post_recv(1, piece(&mut landing)).expect("not known yet");
        assert_lost(&next(&mut here).expect_err("nothing more comes"));
    });
}

#[test]
fn links_that_were_given_up_say_so() {
    watched(|| {
        let (mut here, _there) = pair(1);
        let mut message = vec![1; 32 << 20];
        here.begin(1);
        here.send(1, piece(&mut message)).expect("alive");
        here.abort();
        drop(message);
        assert_eq!(here.poll(&mut Events::new()).expect_err("given up").kind(), ErrorKind::PeerLost);
        let error = here.announce(1, &call(1)).expect_err("given up");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert!(error.message().contains("given up"), "{error}");
        here.begin(2);
        here.abort();
    });
}
