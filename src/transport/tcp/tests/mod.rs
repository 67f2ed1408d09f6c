//! The `Transport` and `PostedTransport` contracts over TCP on loopback.

mod damage;
mod encryption;
mod lost;

use super::*;

use crate::error::ErrorKind;
use crate::transport::Event;
use crate::transport::fixtures::{call, piece, random_bytes};
use rustix::event::{PollFd, PollFlags};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// No test reaches it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

pub(super) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Runs a test and fails if it takes more than 20 s.
pub(super) fn with_timeout(test: impl FnOnce() + Send + 'static) {
    let (done, waiting) = mpsc::channel();
    let running = thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    if waiting.recv_timeout(Duration::from_secs(20)) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("the test timed out");
    }
    if let Err(panic) = running.join() {
        std::panic::resume_unwind(panic);
    }
}

/// The key of every link of a communicator with this number.
pub(super) fn key(number: u64) -> impl Fn(Rank) -> SecretKey {
    move |_| SecretKey::from_parts("test", &[&number.to_le_bytes()])
}

/// A deadline that no test reaches.
pub(super) fn deadline() -> Instant {
    Instant::now() + CONNECT_TIMEOUT
}

/// The transports of `ranks` ranks that are all linked to each other, by rank.
fn linked_at(address: IpAddr, ranks: usize, options: LinkOptions) -> Vec<Tcp> {
    let listeners: Vec<Listener> =
        (0..ranks).map(|_| Listener::bind(&[address], None).expect("a listener on loopback")).collect();
    let endpoints: Vec<SocketAddr> = listeners.iter().map(|listener| listener.endpoints()[0]).collect();
    let connecting: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(me, listener)| {
            let peers: Vec<_> =
                endpoints.iter().map(|at| vec![*at]).enumerate().filter(|(peer, _)| *peer != me).collect();
            thread::spawn(move || {
                let fault = Fault::new();
                Tcp::connect(listener, me, &peers, &key(99), options, deadline(), &fault).expect("all links")
            })
        })
        .collect();
    connecting.into_iter().map(|rank| rank.join().expect("no panic")).collect()
}

/// A listener on loopback, and its address.
pub(super) fn listen() -> (Listener, SocketAddr) {
    let listener = Listener::bind(&[LOOPBACK], None).expect("a listener on loopback");
    let endpoint = listener.endpoints()[0];
    (listener, endpoint)
}

/// Ranks 0 and 1 while they connect: of each the listener, and the address at which it looks for the other
/// one.
fn connecting(
    [zero, one]: [(Listener, SocketAddr); 2],
    options: LinkOptions,
    until: Instant,
) -> [thread::JoinHandle<Result<Tcp>>; 2] {
    [(0, zero), (1, one)].map(|(me, (listener, other_at))| {
        let peers = [(1 - me, vec![other_at])];
        thread::spawn(move || Tcp::connect(listener, me, &peers, &key(7), options, until, &Fault::new()))
    })
}

/// Links of so many sockets that are not encrypted.
pub(super) fn plain(sockets_per_link: usize) -> LinkOptions {
    LinkOptions { sockets_per_link, is_encrypted: false, connect_timeout: CONNECT_TIMEOUT }
}

/// Links of so many sockets that are encrypted.
pub(super) fn encrypted(sockets_per_link: usize) -> LinkOptions {
    LinkOptions { is_encrypted: true, ..plain(sockets_per_link) }
}

fn pair(sockets: usize) -> (Tcp, Tcp) {
    let mut pair = linked_at(LOOPBACK, 2, plain(sockets)).into_iter();
    (pair.next().expect("rank 0"), pair.next().expect("rank 1"))
}

/// Polls until there is an event, sleeping on the wake-up descriptor in between.
fn wait(tcp: &mut Tcp, events: &mut Events) -> Result<()> {
    while events.is_empty() {
        if !tcp.poll(events)? && tcp.set_need_wakeup() {
            let wake = tcp.wake_fd().expect("a descriptor");
            rustix::event::poll(&mut [PollFd::from_borrowed_fd(wake, PollFlags::IN)], None)
                .expect("can sleep");
            tcp.clear_need_wakeup();
        }
    }
    Ok(())
}

/// The next event. Fails if there is more than one.
fn next(tcp: &mut Tcp) -> Result<Event> {
    let mut events = Events::new();
    wait(tcp, &mut events)?;
    assert_eq!(events.len(), 1, "one event at a time: {events:?}");
    Ok(events[0])
}

/// Announces call `sequence` to `peer`, and sends it.
fn enter(tcp: &mut Tcp, peer: Rank, sequence: u64) {
    tcp.announce(peer, &call(sequence)).expect("linked");
    tcp.poll(&mut Events::new()).expect("linked");
}

fn expect_entry(tcp: &mut Tcp, sequence: u64) {
    match next(tcp).expect("an event") {
        Event::PeerEntered { call: theirs, .. } => assert_eq!(theirs, call(sequence)),
        other => panic!("{other:?} instead of PeerEntered"),
    }
}

/// Polls for 100 ms and expects no event.
fn expect_no_event(tcp: &mut Tcp) {
    let mut events = Events::new();
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        tcp.poll(&mut events).expect("no error");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(events.is_empty(), "{events:?}");
}

/// The messages from one rank to another in one call: 1 byte to 2 MiB each, small ones as often as large
/// ones.
fn messages(from: Rank, to: Rank, sequence: u64, seed: u64) -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(seed ^ (from as u64) << 8 ^ (to as u64) << 16 ^ sequence << 24);
    let count = random.usize(..40);
    (0..count)
        .map(|_| {
            let scale = random.usize(..22);
            let len = 1 + random.usize(..1 << scale);
            random_bytes(&mut random, len)
        })
        .collect()
}

/// The messages of one rank with one peer in one call, and how far they are.
struct Exchange {
    sends: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
    destinations: Vec<Vec<u8>>,
    sends_posted: usize,
    sent: usize,
    recvs_posted: usize,
    received: usize,
    entered: bool,
}

impl Exchange {
    fn is_over(&self) -> bool {
        self.entered && self.sent == self.sends.len() && self.received == self.expected.len()
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
                destinations: expected.iter().map(|message| vec![0; message.len()]).collect(),
                expected,
                sends_posted: 0,
                sent: 0,
                recvs_posted: 0,
                received: 0,
                entered: false,
            }
        })
        .collect();
    let mut events = Events::new();
    for peer in (0..ranks).filter(|peer| *peer != me) {
        tcp.announce(peer, &call(sequence)).expect("linked");
    }
    loop {
        for (peer, exchange) in exchanges.iter_mut().enumerate().filter(|(peer, _)| *peer != me) {
            while exchange.sends_posted < exchange.sends.len()
                && exchange.sends_posted - exchange.sent < tcp.window()
            {
                tcp.send(peer, piece(&mut exchange.sends[exchange.sends_posted])).expect("linked");
                exchange.sends_posted += 1;
            }
            while exchange.recvs_posted < exchange.destinations.len()
                && exchange.recvs_posted - exchange.received < tcp.window()
            {
                tcp.post_recv(peer, piece(&mut exchange.destinations[exchange.recvs_posted]))
                    .expect("linked");
                exchange.recvs_posted += 1;
            }
        }
        if (0..ranks).all(|peer| peer == me || exchanges[peer].is_over()) {
            return;
        }
        wait(tcp, &mut events).expect("linked");
        for event in events.drain(..) {
            match event {
                Event::PeerEntered { peer, call: theirs } => {
                    assert_eq!(theirs, call(sequence));
                    assert!(!std::mem::replace(&mut exchanges[peer].entered, true), "entered twice");
                }
                Event::SendComplete { peer } => exchanges[peer].sent += 1,
                Event::RecvComplete { peer } => {
                    let exchange = &mut exchanges[peer];
                    assert!(exchange.entered, "a message before the peer's entry");
                    let at = exchange.received;
                    assert!(
                        exchange.destinations[at] == exchange.expected[at],
                        "message {at} of rank {peer} differs from what it sent"
                    );
                    exchange.received += 1;
                }
                Event::RecvReady { .. } => panic!("TCP does not deliver in place"),
            }
        }
    }
}

fn all_exchange(address: IpAddr, ranks: usize, options: LinkOptions) {
    let sockets = options.sockets_per_link;
    let running: Vec<_> = linked_at(address, ranks, options)
        .into_iter()
        .enumerate()
        .map(|(me, mut tcp)| {
            thread::spawn(move || {
                for sequence in 1..=6 {
                    exchange(&mut tcp, me, ranks, sequence, sockets as u64);
                }
                // Closed only when all ranks are done, as a communicator does.
                tcp
            })
        })
        .collect();
    let _links: Vec<Tcp> = running.into_iter().map(|rank| rank.join().expect("no panic")).collect();
}

#[test]
fn two_ranks_exchange_messages_of_all_sizes_over_one_to_four_sockets() {
    with_timeout(|| (1..=4).for_each(|sockets| all_exchange(LOOPBACK, 2, plain(sockets))));
}

#[test]
fn four_ranks_exchange_messages_of_all_sizes_over_one_and_three_sockets() {
    with_timeout(|| [1, 3].into_iter().for_each(|sockets| all_exchange(LOOPBACK, 4, plain(sockets))));
}

#[test]
#[allow(clippy::print_stderr, reason = "a skipped test says so")]
fn two_ranks_exchange_messages_over_ipv6() {
    let loopback = IpAddr::from(std::net::Ipv6Addr::LOCALHOST);
    if Listener::bind(&[loopback], None).is_err() {
        eprintln!("skipped: this machine has no IPv6");
        return;
    }
    with_timeout(move || all_exchange(loopback, 2, plain(2)));
}

#[test]
fn calls_of_a_peer_that_is_ahead_stay_queued_until_this_rank_begins_them() {
    with_timeout(|| {
        let (mut behind, mut ahead) = pair(2);
        let mut sent = [[1; 100], [2; 100], [3; 100]];
        for sequence in 1..=2 {
            ahead.begin(sequence);
            ahead.announce(0, &call(sequence)).expect("linked");
            for message in &mut sent {
                ahead.send(0, piece(message)).expect("linked");
            }
            for _ in 0..3 {
                let mut events = Events::new();
                ahead.poll(&mut events).expect("linked");
            }
        }
        for sequence in 1..=2 {
            behind.begin(sequence);
            expect_entry(&mut behind, sequence);
            let mut destinations = [[0; 100]; 3];
            for destination in &mut destinations {
                behind.post_recv(1, piece(destination)).expect("linked");
            }
            let mut events = Events::new();
            while events.len() < 3 {
                behind.poll(&mut events).expect("linked");
            }
            assert!(events.iter().all(|event| matches!(event, Event::RecvComplete { peer: 1 })));
            assert_eq!(destinations, sent);
            expect_no_event(&mut behind);
        }
    });
}

#[test]
fn a_peer_may_skip_calls_and_is_reported_in_the_call_that_it_makes() {
    with_timeout(|| {
        let (mut here, mut there) = pair(1);
        there.begin(3);
        enter(&mut there, 0, 3);
        for sequence in 1..=2 {
            here.begin(sequence);
            expect_no_event(&mut here);
        }
        here.begin(3);
        expect_entry(&mut here, 3);
    });
}

#[test]
fn a_call_with_another_sequence_is_reported_for_the_executor_to_compare() {
    with_timeout(|| {
        // An earlier call than this rank's.
        let (mut here, mut there) = pair(1);
        there.begin(1);
        enter(&mut there, 0, 1);
        here.begin(5);
        expect_entry(&mut here, 1);
        let error = here.announce(1, &call(5)).expect_err("different calls");
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("is in call 1, this rank in call 5"), "{error}");

        // A later call, while this rank still expects a message of its own call.
        let (mut here, mut there) = pair(1);
        there.begin(2);
        enter(&mut there, 0, 2);
        here.begin(1);
        expect_no_event(&mut here);
        let mut destination = [0; 8];
        here.post_recv(1, piece(&mut destination)).expect("linked");
        expect_entry(&mut here, 2);
    });
}

#[test]
fn a_message_of_another_length_is_a_disagreement() {
    with_timeout(|| {
        for (sent, expected) in [(100, 101), (101, 100), (1 << 20, 1), (1, 1 << 20)] {
            let (mut here, mut there) = pair(1);
            let (mut message, mut destination) = (vec![7; sent], vec![0; expected]);
            there.begin(1);
            there.announce(0, &call(1)).expect("linked");
            there.send(0, piece(&mut message)).expect("linked");
            here.begin(1);
            expect_entry(&mut here, 1);
            here.post_recv(1, piece(&mut destination)).expect("linked");
            let error = next(&mut here).expect_err("the lengths differ");
            assert_eq!(error.kind(), ErrorKind::Disagreement);
            let expected_text = format!(
                "sent message 0 of call 1 with {sent} bytes where message 0 of call 1 with {expected} bytes was expected"
            );
            assert!(error.message().starts_with("rank 1 (127.0.0.1:"), "{error}");
            assert!(error.message().contains(&expected_text), "{error}");
            assert_eq!(here.send(1, Piece::EMPTY).expect_err("broken"), error);
        }
    });
}

#[test]
fn an_extra_message_is_a_disagreement_in_the_next_call() {
    with_timeout(|| {
        let (mut here, mut there) = pair(1);
        let mut message = [7; 10];
        there.begin(1);
        there.announce(0, &call(1)).expect("linked");
        there.send(0, piece(&mut message)).expect("linked");
        here.begin(1);
        expect_entry(&mut here, 1);
        here.begin(2);
        // The header of a call is longer than one short message, so the mismatch shows only with more bytes.
        there.poll(&mut Events::new()).expect("linked");
        there.begin(2);
        enter(&mut there, 0, 2);
        let error = next(&mut here).expect_err("a call was expected");
        assert_eq!(error.kind(), ErrorKind::Disagreement);
        assert!(error.message().contains("where its next call was expected"), "{error}");
    });
}

#[test]
fn more_messages_than_the_window_holds_are_refused() {
    with_timeout(|| {
        let (mut here, _there) = pair(2);
        // More than the kernel's buffers hold, so that no send completes.
        let mut message = vec![0; 32 << 20];
        let mut destination = [0; 8];
        here.begin(1);
        assert_eq!(here.window(), 32);
        for _ in 0..here.window() {
            here.send(1, piece(&mut message)).expect("within the window");
            here.post_recv(1, piece(&mut destination)).expect("within the window");
        }
        for error in [here.send(1, piece(&mut message)), here.post_recv(1, piece(&mut destination))] {
            assert_eq!(error.expect_err("beyond the window").kind(), ErrorKind::Internal);
        }
        assert_eq!(here.send(7, piece(&mut message)).expect_err("not a peer").kind(), ErrorKind::Internal);
    });
}

#[test]
fn a_rank_that_reads_from_its_only_source_asks_epoll_before_it_sleeps() {
    with_timeout(|| {
        let (mut a, mut b) = pair(1);
        for sequence in 1..=3 {
            a.begin(sequence);
            b.begin(sequence);
            enter(&mut a, 1, sequence);
            expect_entry(&mut b, sequence);
            let mut into = [0u8; 8];
            b.post_recv(0, piece(&mut into)).expect("linked");
            let mut events = Events::new();
            assert!(!b.poll(&mut events).expect("linked"), "nothing was sent");
            assert!(!b.set_need_wakeup(), "epoll was not asked");
            assert!(!b.poll(&mut events).expect("linked") && b.set_need_wakeup(), "there is no work");
            b.clear_need_wakeup();
            a.send(1, piece(&mut [7; 8])).expect("linked");
            assert!(matches!(next(&mut b), Ok(Event::RecvComplete { peer: 0 })));
            assert_eq!(into, [7; 8]);
            assert!(matches!(next(&mut a), Ok(Event::SendComplete { peer: 1 })));
            enter(&mut b, 0, sequence);
            expect_entry(&mut a, sequence);
        }
    });
}

#[test]
fn an_announcement_goes_with_the_first_message_or_before_its_rank_sleeps() {
    with_timeout(|| {
        let (mut a, mut b) = pair(1);
        for sequence in 1..=2 {
            a.begin(sequence);
            b.begin(sequence);
            a.announce_with_message(1, &call(sequence)).expect("linked");
            assert!(!a.poll(&mut Events::new()).expect("linked"), "it waits for a message");
            if sequence == 1 {
                assert!(!a.set_need_wakeup(), "it is to be sent");
                assert!(a.poll(&mut Events::new()).expect("linked"));
                expect_entry(&mut b, sequence);
            }
            let mut into = [0u8; 8];
            b.post_recv(0, piece(&mut into)).expect("linked");
            a.send(1, piece(&mut [7; 8])).expect("linked");
            let mut events = Events::new();
            wait(&mut b, &mut events).expect("linked");
            assert!(matches!(events.pop_back(), Some(Event::RecvComplete { peer: 0 })));
            let came_along = matches!(events.pop_back(), Some(Event::PeerEntered { peer: 0, .. }));
            assert_eq!(came_along, sequence == 2, "with the message of the second call only");
            assert!(matches!(next(&mut a), Ok(Event::SendComplete { peer: 1 })));
            enter(&mut b, 0, sequence);
            expect_entry(&mut a, sequence);
        }
    });
}

#[test]
fn a_rank_that_polls_for_long_announces_its_call_and_asks_epoll() {
    with_timeout(|| {
        let (mut a, mut b) = pair(1);
        a.begin(1);
        b.begin(1);
        a.announce_with_message(1, &call(1)).expect("linked");
        let mut into = [0u8; 8];
        a.post_recv(1, piece(&mut into)).expect("linked");
        // It waits for its only source, so it asks epoll only because it has waited for long.
        while !a.poll(&mut Events::new()).expect("linked") {
            assert!(a.skipped_epoll, "it only reads");
        }
        assert!(!a.skipped_epoll);
        expect_entry(&mut b, 1);
        enter(&mut b, 0, 1);
        expect_entry(&mut a, 1);
        b.send(0, piece(&mut [7; 8])).expect("linked");
        assert!(matches!(next(&mut a), Ok(Event::RecvComplete { peer: 1 })));
        assert_eq!(into, [7; 8]);
    });
}
