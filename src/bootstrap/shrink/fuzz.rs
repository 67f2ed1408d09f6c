//! Fuzz targets: what strangers and ranks send to a rank that shrinks.

use super::agreement::{Agreement, AgreementAction};
use super::frame::{ShrinkFrame, frame_limit};
use super::message::{CallsMade, NewWorld, ShrinkMessage, ShrinkNotice, Stance};
use super::session::{Session, SessionParams};
use super::unidentified::{Routing, UnidentifiedConnections};
use crate::bootstrap::protocol::{decode, encode, encode_value};
use crate::error::Error;
use crate::rank::Rank;
use crate::secret::SecretKey;
use flexring_testkit::fuzzing::{FuzzTarget, InputReader, block};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// One message of each kind.
fn messages() -> Vec<ShrinkMessage> {
    let stances = [
        Stance::NotCalled,
        Stance::Called { exclude: vec![], waiting_for: vec![1], finished: 0 },
        Stance::Called { exclude: vec![2], waiting_for: vec![], finished: 3 },
        Stance::Joining,
        Stance::LeftOut,
    ];
    let states = stances.map(|stance| ShrinkMessage::State { generation: 0, stance });
    let id = vec![9; 128];
    let world = NewWorld { members: vec![0, 1], generations: vec![0, 0], id: id.clone() };
    let error = Error::peer_lost("gone");
    let others = [
        ShrinkMessage::NewWorld(world),
        ShrinkMessage::Cancelled { id, error: error.clone() },
        ShrinkMessage::Failed(error),
        ShrinkMessage::Excluded { until: 3 },
    ];
    states.into_iter().chain(others).collect()
}

/// A rank of a world, and the time.
struct ShrinkingRank {
    agreement: Agreement,
    me: Rank,
    world: usize,
    ids: u8,
}

impl ShrinkingRank {
    /// Carries out what the agreement asks for, as far as it concerns the agreement.
    fn carry_out(&mut self) {
        for action in self.agreement.actions() {
            match action {
                AgreementAction::Connect(rank) => assert!(rank < self.world && rank != self.me),
                AgreementAction::Send(rank, message) => {
                    assert!(rank < self.world && rank != self.me, "a message to rank {rank}");
                    encode_value(&message).expect("a message that can be encoded");
                }
                AgreementAction::Notify(rank, notice) => {
                    assert!(rank < self.world && rank != self.me, "a notice to rank {rank}");
                    encode_value(&notice).expect("a notice that can be encoded");
                }
                AgreementAction::Decide(members) => {
                    assert!(members.iter().all(|rank| *rank < self.world), "{members:?}");
                    self.ids += 1;
                    self.agreement.decided(members, Ok(vec![self.ids; 128]));
                }
                AgreementAction::Finish(Ok(world)) => {
                    assert!(world.members.contains(&self.me), "{world:?} without rank {}", self.me);
                    assert!(world.members.iter().all(|rank| *rank < self.world), "{world:?}");
                }
                AgreementAction::Cancel(_) | AgreementAction::Finish(Err(_)) => {}
            }
        }
    }
}

#[test]
fn members_that_shrink_and_send_anything() {
    let mut seeds = Vec::new();
    for message in messages() {
        let message = block(&encode_value(&message).expect("short"));
        for me in [0u8, 1] {
            // A world of 3; call; the peer connects and sends; time passes; the world is joined.
            let begin = [3, me, 0, 0, 2, 1 - me, 1, 1 - me];
            let end = [6, 40, 1, 1 - me];
            seeds.push([&begin[..], &message, &end[..], &message, &[7, 0, 0, 1, 1 - me], &message].concat());
        }
    }
    let notice = ShrinkNotice { generation: 0, members: vec![0, 2] };
    seeds.push([&[3, 1, 0, 0, 5], block(&encode_value(&notice).expect("short")).as_slice()].concat());
    let target = FuzzTarget { name: "shrink_agreement", longest: 2048, memory: 8 << 20 };
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let world = 2 + reader.below(4);
        let me = reader.below(world);
        let start = Instant::now();
        let mut now = start;
        let agreement = Agreement::new(me, world, Duration::from_secs(1), now);
        let mut rank = ShrinkingRank { agreement, me, world, ids: 0 };
        while !reader.is_empty() {
            let (kind, peer) = (reader.byte() % 9, (me + 1 + reader.below(world - 1)) % world);
            match kind {
                0 => {
                    let exclude = if peer % 2 == 0 { vec![peer] } else { vec![] };
                    if !rank.agreement.is_active() {
                        let calls = CallsMade { finished: u64::from(peer as u8), has_failed: world == 3 };
                        rank.agreement.call(exclude, calls, now, now + Duration::from_secs(10));
                    }
                }
                1 => {
                    if let Some(message) = decode::<ShrinkMessage>(reader.block()) {
                        rank.agreement.on_message(peer, message, now);
                    }
                }
                2 => rank.agreement.on_connected(peer),
                3 => rank.agreement.on_refused(peer, now),
                4 => rank.agreement.on_lost(peer, now),
                5 => {
                    if let Some(notice) = decode::<ShrinkNotice>(reader.block()) {
                        rank.agreement.on_notice(notice);
                    }
                }
                6 => now += Duration::from_millis(reader.byte().into()),
                7 => rank.agreement.joined(),
                _ => {
                    rank.agreement.on_unreachable(peer, now);
                    rank.agreement.call_again(now);
                }
            }
            rank.agreement.on_tick(now);
            rank.carry_out();
            let _ = (rank.agreement.state(), rank.agreement.deadline(now));
        }
        rank.agreement.gave_up();
        rank.carry_out();
    });
}

#[test]
fn strangers_at_a_rank_that_shrinks() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut wire = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let mut near = listener.accept().expect("a connection").0;
    let params = |me| SessionParams {
        key: SecretKey::from_parts("test", &[b"job"]),
        me,
        world: 2,
        is_encrypted: false,
    };
    let mut recorded = vec![vec![1]];
    for answer in [ShrinkFrame::Accepted { nonce: [1; 16] }, ShrinkFrame::Gone { nonce: [1; 16] }] {
        recorded[0].extend_from_slice(&encode(&answer).expect("short"));
    }
    let mut session =
        Session::connect(near.try_clone().expect("a socket"), &params(1), 0).expect("a session");
    session.send_notice(&ShrinkNotice { generation: 0, members: vec![1] }).expect("queued");
    session.flush().expect("a connection");
    let mut bytes = vec![0; 4096];
    let length = wire.read(&mut bytes).expect("frames");
    recorded.push([&[0], &bytes[..length]].concat());
    let mut bytes = vec![0; 64 << 10];
    let target = FuzzTarget { name: "shrink_session", longest: 4096, memory: 4 << 20 };
    let (wire, near) = (std::cell::RefCell::new(wire), std::cell::RefCell::new(&mut near));
    let bytes = std::cell::RefCell::new(&mut bytes);
    target.run(&recorded, |input| {
        let mut reader = InputReader::new(input);
        let is_initiator = reader.byte() & 1 == 1;
        let socket = near.borrow().try_clone().expect("a socket");
        wire.borrow_mut().write_all(reader.rest()).expect("sent");
        let session = if is_initiator {
            Some(Session::connect(socket, &params(0), 1).expect("a session"))
        } else {
            accept(socket, &params(0))
        };
        if let Some(mut session) = session {
            session.send(ShrinkMessage::State { generation: 0, stance: Stance::NotCalled }).expect("queued");
            loop {
                let received = session.receive();
                assert!(received.messages.is_empty(), "a forged message");
                assert!(!received.is_gone, "a forged answer");
                if received.end.is_some() || received.notices.is_empty() {
                    break;
                }
            }
            assert!(!session.is_authenticated());
        }
        // What the session left in the socket.
        while near.borrow_mut().read(&mut bytes.borrow_mut()).is_ok_and(|read| read > 0) {}
    });
}

/// What a rank makes of the bytes that have arrived: a session, if they begin with an opening.
fn accept(socket: TcpStream, params: &SessionParams) -> Option<Session> {
    let mut unidentified = UnidentifiedConnections::default();
    unidentified.add(socket, Instant::now()).expect("a connection");
    unidentified.receive(&[true], frame_limit(params.world));
    let (_, connection) = unidentified.route(Instant::now(), |_| Routing::To(0)).pop()?;
    Session::accept(connection, params).ok()
}
