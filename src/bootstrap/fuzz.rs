//! Fuzz targets: what strangers, ranks and coordinators send on control connections.

use super::call_state::{CallState, example_call};
use super::control_state::Shared;
use super::control_thread::ControlThread;
use super::coordinator_worlds::{Worlds, WorldsAction};
use super::frame_decoder::{FrameDecoder, Preamble};
use super::framed_stream::FramedStream;
use super::handshake::{Admission, AdmissionStep, Gate, code_of_rank};
use super::join_attempt::AnsweredRank;
use super::launcher::{identity, is_alone, local_rank};
use super::process::Process;
use super::protocol::{
    FRAME_LIMIT, Hello, HelloHeader, HelloParams, OPENING_LIMIT, Opening, PROOF_LIMIT, Purpose,
    ToCoordinator, ToRank, VERSION, decode, encode, encode_value,
};
use super::rendezvous::{JoinOutcome, JoinedPeer, Rendezvous};
use super::secret::{JobSecret, SecretSource};
use super::unique_id::UniqueId;
use super::world_status::{RankActivity, RankReport, WorldStatus};
use crate::config::{Config, SecretText};
use crate::error::{Error, ErrorKind};
use crate::fault::Fault;
use flexring_testkit::fuzzing::{FuzzTarget, InputReader, block};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const JOB: u128 = 7;
const SETTINGS: [(&str, &str); 1] = [("FLEXRING_SUBCHUNK", "512K")];

fn header(rank: usize, world: usize) -> HelloHeader {
    let purpose = Purpose::Join;
    HelloHeader { version: VERSION.into(), rank, world, process: Process::example(rank), purpose }
}

fn params() -> HelloParams {
    HelloParams {
        settings: SETTINGS.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        join_timeout: Duration::from_secs(60),
        exchange_timeout: Duration::from_secs(60),
        heartbeat: Duration::from_millis(500),
        successor: vec!["127.0.0.1:1".parse().expect("an address")],
        failure: None,
    }
}

fn secret() -> JobSecret {
    let config = Config { secret: Some(SecretText::new("0123456789abcdef")), ..Config::default() };
    SecretSource::of_settings(&config, JOB).expect("valid").secret().expect("there")
}

fn gate() -> Gate {
    Gate { job: JOB, secret: secret(), location: "here:1".to_owned() }
}

/// One message of each kind that a rank sends.
fn rank_messages() -> Vec<ToCoordinator> {
    let in_call = CallState::InCall(example_call(17));
    vec![
        ToCoordinator::Heartbeat(CallState::Idle { finished: 3 }),
        ToCoordinator::Heartbeat(in_call),
        ToCoordinator::Gather { number: 1, label: "peer info".into(), part: vec![1, 2, 3] },
        ToCoordinator::ToPeers(vec![(0, vec![1, 2]), (2, Vec::new())]),
        ToCoordinator::ToPeers(vec![(9, vec![3])]),
        ToCoordinator::Report { error: Error::peer_lost("gone"), suspect: Some(1), state: in_call },
        ToCoordinator::Report { error: Error::timeout("late"), suspect: None, state: in_call },
        ToCoordinator::Abort { reason: "enough".into() },
        ToCoordinator::Exit { cause: "raised an exception".into() },
        ToCoordinator::Goodbye(CallState::Idle { finished: 2 }),
        ToCoordinator::GaveUp { silent: Duration::from_secs(10) },
        ToCoordinator::Moved,
        ToCoordinator::Alive,
        open_message(&[0, 1, 2]),
        open_message(&[2, 0]),
        ToCoordinator::Goodbye(in_call).in_world(WORLD).expect("short"),
        ToCoordinator::Abort { reason: "enough".into() }.in_world(WORLD).expect("short"),
    ]
}

/// A subworld.
const WORLD: u128 = 5;

fn open_message(members: &[usize]) -> ToCoordinator {
    ToCoordinator::Open { world: WORLD, members: members.to_vec(), timeout: Duration::from_secs(60) }
}

/// One message of each kind that a coordinator sends.
fn coordinator_messages() -> Vec<ToRank> {
    let rows = vec![
        RankReport::new(0, "h", 100, RankActivity::Idle).with_state(&CallState::InCall(example_call(17))),
        RankReport::new(1, "", 0, RankActivity::Absent),
    ];
    vec![
        ToRank::Refused(Error::rendezvous("another job")),
        ToRank::Challenge([1; 16]),
        ToRank::HelloAck([2; 32]),
        ToRank::RootCause(Error::peer_lost("rank 1 died")),
        ToRank::Welcome { host: "rank 0".into(), ranks: vec![0] },
        ToRank::Gathered { number: 1, parts: vec![vec![1], vec![], vec![2, 3]] },
        ToRank::HeartbeatAck,
        ToRank::RequestState,
        ToRank::AwaitExit { process: Process::example(1), ends: true },
        ToRank::Closing,
        ToRank::Attempt(9),
        ToRank::Moved(vec![
            "127.0.0.1:1".parse().expect("an address"),
            "[::1]:2".parse().expect("an address"),
        ]),
        ToRank::TryAgain("later".into()),
        ToRank::Left { rank: 1, finished: 2 },
        ToRank::Status(
            WorldStatus::new(rows.clone(), Some(Error::timeout("late")))
                .with_further([WorldStatus::new(rows, None)].into_iter()),
        ),
        ToRank::LeaveAck,
        ToRank::FromPeer { from: 2, message: vec![1, 2] },
        ToRank::Closing.in_world(WORLD).expect("short"),
        ToRank::RootCause(Error::peer_lost("rank 1 died")).in_world(WORLD).expect("short"),
    ]
}

/// What is decoded is encoded and decoded again as the same.
fn survives<'a, T: serde::Serialize + serde::Deserialize<'a> + std::fmt::Debug>(frame: &'a [u8]) {
    let Some(value) = decode::<T>(frame) else { return };
    let again = encode_value(&value).expect("what was decoded can be encoded");
    assert!(again.len() <= frame.len(), "{value:?} grows from {} to {} bytes", frame.len(), again.len());
    let _ = format!("{value:?}");
}

#[test]
fn frames_of_control_connections() {
    let preamble = Preamble::encode();
    let stream = |flags: u8, parts: &[&[u8]]| [&[flags, 7], parts.concat().as_slice()].concat();
    let mut seeds = vec![stream(1, &[&preamble]), stream(0, &[&[0; 4]])];
    let opening =
        Opening { job: JOB, has_secret: true, is_encrypted: false, nonce: [5; 16], header: header(1, 2) };
    seeds
        .push(stream(1, &[&preamble, &encode(&opening).expect("short"), &encode(&params()).expect("short")]));
    for message in rank_messages() {
        seeds.push(stream(0, &[&encode(&message).expect("short")]));
    }
    for message in coordinator_messages() {
        seeds.push(stream(0, &[&encode(&message).expect("short")]));
    }
    // A frame of 4 KiB makes a decoder reserve no more than serde's limit for lists, 1 MiB, at each depth.
    let target = FuzzTarget { name: "control_frames", longest: 4096, memory: 4 << 20 };
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let flags = reader.byte();
        let step = usize::from(reader.byte()) + 1;
        let limit = [FRAME_LIMIT, PROOF_LIMIT, OPENING_LIMIT][usize::from(flags >> 1) % 3];
        let mut decoder = FrameDecoder::new(flags & 1 == 1);
        let mut unreadable = None;
        for bytes in reader.rest().chunks(step) {
            decoder.append(bytes);
            loop {
                match decoder.next(limit) {
                    Ok(Some(frame)) => {
                        assert!(frame.len() <= limit && unreadable.is_none());
                        survives::<Opening>(&frame);
                        survives::<HelloParams>(&frame);
                        survives::<ToCoordinator>(&frame);
                        survives::<ToRank>(&frame);
                        if let Some(ToRank::Status(status)) = decode(&frame) {
                            let _ = status.table(4);
                        }
                    }
                    Ok(None) => break,
                    Err(cause) => {
                        let _ = cause.describe();
                        assert!(unreadable.is_none_or(|first| first == cause), "an error is final");
                        unreadable = Some(cause);
                        break;
                    }
                }
            }
        }
    });
}

#[test]
fn handshakes_of_strangers_and_ranks() {
    let (gate, secret) = (gate(), secret());
    let opening = |rank, world| {
        let header = header(rank, world);
        encode_value(&Opening { job: JOB, has_secret: true, is_encrypted: false, nonce: [5; 16], header })
            .expect("short")
    };
    let params = encode_value(&params()).expect("short");
    let seeds = [0u8, 1].map(|proved| [&[proved], block(&opening(1, 2)).as_slice(), &params].concat());
    let target = FuzzTarget { name: "handshake", longest: 4096, memory: 4 << 20 };
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let (knows_secret, opening, rest) = (reader.byte() & 1 == 1, reader.block(), reader.rest());
        let step = Admission::AwaitOpening.on_frame(&gate, opening.to_vec(), Some(&[]));
        let AdmissionStep::Continue(admission, ToRank::Challenge(nonce)) = step else {
            let is_final = matches!(
                step,
                AdmissionStep::Refused(..) | AdmissionStep::WhoListens { .. } | AdmissionStep::Malformed
            );
            assert!(is_final, "{step:?}");
            return;
        };
        if !knows_secret {
            let step = admission.on_frame(&gate, rest.to_vec(), Some(&[]));
            assert!(matches!(step, AdmissionStep::Refused(..) | AdmissionStep::Malformed), "{step:?}");
            return;
        }
        // A member whose parameters are wrong.
        let code = code_of_rank(&secret, &[opening, &nonce, &[]], rest);
        match admission.on_frame(&gate, [&code, rest].concat(), Some(&[])) {
            AdmissionStep::Admitted(hello, ToRank::HelloAck(_)) => {
                let mut rendezvous = Rendezvous::new("here:1".to_owned(), Process::example(0));
                rendezvous.join(hello, Instant::now());
            }
            AdmissionStep::Malformed => {}
            step => panic!("{step:?}"),
        }
    });
}

/// Checks what a coordinator sends to its ranks: they can read it. Ranks whose connections it closes are
/// gone.
fn check_actions(worlds: &mut Worlds, now: Instant) {
    for action in worlds.actions() {
        match action {
            WorldsAction::Broadcast(message) | WorldsAction::Send(_, message) => {
                let frame = encode(&message).expect("a frame that is not too long");
                assert!(decode::<ToRank>(&frame[4..]).is_some(), "{message:?}");
                if let ToRank::InWorld { message, .. } = &message {
                    let inner = decode::<ToRank>(message);
                    assert!(inner.is_some_and(|inner| !matches!(inner, ToRank::InWorld { .. })));
                }
            }
            WorldsAction::Close(rank) => worlds.on_disconnect(rank, "closed", now),
        }
    }
    assert!(worlds.actions().is_empty(), "closing a connection changes nothing");
    let _ = worlds.status(now).to_string();
    assert!(
        worlds.deadline().is_none_or(|at| at >= now || now.duration_since(at) < Duration::from_secs(1 << 20))
    );
}

#[test]
fn members_of_a_world_that_send_anything() {
    let mut seeds = Vec::new();
    let joins = |world: u8| (0..world).flat_map(|rank| [0, rank]).collect::<Vec<u8>>();
    for message in rank_messages() {
        let message = block(&encode_value(&message).expect("short"));
        // World of 3; the ranks join; then messages, time, and a disconnect.
        seeds.push(
            [&[3], joins(3).as_slice(), &[2, 1], &message, &[2, 0], &message, &[3, 200, 4, 1, 3, 9]].concat(),
        );
        // The same after all ranks have opened a subworld.
        let open = block(&encode_value(&open_message(&[0, 1, 2])).expect("short"));
        let opens = (0..3u8).flat_map(|rank| [&[2, rank], open.as_slice()].concat()).collect::<Vec<u8>>();
        seeds.push([&[3], joins(3).as_slice(), &opens, &[2, 1], &message, &[3, 200, 4, 1, 3, 9]].concat());
    }
    let hello = [
        block(&encode_value(&header(1, 2)).expect("short")),
        block(&encode_value(&params()).expect("short")),
    ];
    seeds.push([&[2, 0, 0, 1], hello.concat().as_slice(), &[3, 255]].concat());
    // One member reports for others with lists of ranks, so time-outs grow to tables.
    let target = FuzzTarget { name: "coordinator", longest: 4096, memory: 8 << 20 };
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let world = 1 + reader.below(5);
        let mut now = Instant::now();
        let mut rendezvous = Some(Rendezvous::new("here:1".to_owned(), Process::example(0)));
        let mut worlds: Option<Worlds> = None;
        while !reader.is_empty() {
            match reader.byte() % 6 {
                kind @ (0 | 1) => {
                    let hello = if kind == 0 {
                        Hello { header: header(reader.below(world), world), params: Some(params()) }
                    } else {
                        let (header, params) = (decode(reader.block()), HelloParams::decode(reader.block()));
                        let Some(header) = header else { continue };
                        Hello { header, params }
                    };
                    let outcome = rendezvous.as_mut().map(|rendezvous| rendezvous.join(hello, now));
                    if outcome == Some(JoinOutcome::Complete) {
                        let joined = rendezvous.take().expect("ranks join it");
                        let _ = joined.successor();
                        let peers: Vec<JoinedPeer> = joined.into_peers();
                        worlds = Some(Worlds::new(peers, Process::example(0), now));
                    }
                }
                2 => {
                    let rank = reader.below(world + 1);
                    let frame = reader.block();
                    if let Some(worlds) = &mut worlds
                        && !worlds.on_frame(rank, frame, now)
                    {
                        worlds.on_disconnect(rank, "carried an invalid frame", now);
                    }
                }
                3 => now += Duration::from_millis(1) * (1 << (reader.byte() % 24)),
                4 => {
                    let rank = reader.below(world + 1);
                    if let Some(rendezvous) = &mut rendezvous {
                        rendezvous.on_disconnect(rank, "closed");
                    }
                    if let Some(worlds) = &mut worlds {
                        worlds.on_disconnect(rank, "closed", now);
                    }
                }
                _ => {
                    let pause = Duration::from_millis(reader.byte().into());
                    if let Some(worlds) = &mut worlds {
                        worlds.on_pause(pause, now);
                    }
                }
            }
            if let Some(rendezvous) = &mut rendezvous {
                rendezvous.on_tick(now);
                assert!(rendezvous.joined().count() <= rendezvous.world().unwrap_or(0));
            }
            if let Some(worlds) = &mut worlds {
                worlds.on_tick(now);
                check_actions(worlds, now);
            }
        }
    });
}

#[test]
fn coordinators_that_answer_anything() {
    let frames = |messages: &[ToRank]| -> Vec<u8> {
        messages.iter().flat_map(|message| encode(message).expect("short").to_vec()).collect()
    };
    let mut seeds: Vec<Vec<u8>> = Vec::new();
    for message in coordinator_messages() {
        seeds.push([vec![0], frames(&[ToRank::Challenge([1; 16]), message.clone()])].concat());
        seeds.push([vec![1], frames(std::slice::from_ref(&message))].concat());
        seeds.push([vec![2], frames(&[message])].concat());
    }
    let target = FuzzTarget { name: "rank_answers", longest: 4096, memory: 4 << 20 };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let socket = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let stream = || FramedStream::new(socket.try_clone().expect("a socket"), false).expect("a socket");
    let rank = AnsweredRank::new(header(1, 2), params());
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let stage = reader.byte() % 3;
        let mut decoder = FrameDecoder::new(false);
        decoder.append(reader.rest());
        let frames = std::iter::from_fn(|| decoder.next(FRAME_LIMIT).ok().flatten());
        if stage < 2 {
            rank.receive(stream(), stage == 1, frames);
            return;
        }
        // After the rank has joined.
        let fault = Arc::new(Fault::new());
        let shared = Arc::new(Shared::new(1, Arc::clone(&fault)).expect("an event descriptor"));
        let mut thread = ControlThread::new(shared, stream(), "rank 0".into(), Duration::from_secs(1));
        for message in frames.map_while(|frame| decode(&frame)) {
            let is_root_cause = matches!(message, ToRank::RootCause(_));
            let _ = thread.on_message(message);
            assert!(!is_root_cause || fault.check().is_err());
        }
    });
}

#[test]
fn unique_ids_from_anywhere() {
    let address = ["127.0.0.1:4321", "[fd00::2]:65535"].map(|text| text.parse().expect("an address"));
    let id = UniqueId::new(77, &address);
    let seeds = [id.as_bytes().to_vec(), id.to_hex().into_bytes(), b" ab \n".to_vec()];
    let target = FuzzTarget { name: "unique_id", longest: 300, memory: 1 << 16 };
    target.run(&seeds, |input| {
        let mut forged = input.to_vec();
        if let Some((content, checksum)) = forged.split_last_chunk_mut::<8>() {
            // An attacker can compute the checksum.
            *checksum = twox_hash::XxHash3_64::oneshot(content).to_le_bytes();
        }
        for bytes in [input, &forged] {
            let parsed = UniqueId::from_bytes(bytes);
            let text = UniqueId::from_hex(&String::from_utf8_lossy(bytes));
            for id in [parsed, text].into_iter().flatten() {
                assert!((1..=4).contains(&id.addresses().len()));
                assert_eq!(UniqueId::from_hex(&id.to_hex()), Ok(id));
                let _ = (id.job(), format!("{id:?}"));
            }
        }
    });
}

/// Variables of launchers, in addition to the settings.
const LAUNCHERS: [&str; 31] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_ID",
    "PMI_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
    "HYDRA_JOBID",
    "PALS_APID",
    "PALS_LOCAL_RANKID",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_ID",
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_STEP_NODELIST",
    "SLURM_NNODES",
    "SLURM_LOCALID",
];

#[test]
fn environments_of_any_text() {
    let id = UniqueId::new(7, &["127.0.0.1:4321".parse().expect("an address")]).to_hex();
    let seeds = [
        "RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=h\nMASTER_PORT=29500\nLOCAL_RANK=0\nLOCAL_WORLD_SIZE=2",
        "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nPMIX_NAMESPACE=x\nFLEXRING_MASTER_ADDR=h",
        "PMI_RANK=0\nPMI_SIZE=2\nFLEXRING_MASTER_ADDR=[::1]\nHYDRA_JOBID=7",
        "SLURM_PROCID=1\nSLURM_STEP_NUM_TASKS=4\nSLURM_STEP_NODELIST=a[01-3],b\nSLURM_STEP_ID=1\nSLURM_JOB_ID=3\nSLURM_NNODES=2",
        "FLEXRING_SUBCHUNK=1M\nFLEXRING_ALGO=ring\nFLEXRING_IB_HCA=^mlx5_0:1\nFLEXRING_BLUECONNECT=2x3\nFLEXRING_SECRET=0123456789abcdef",
        "FLEXRING_SPIN_US=99999999999\nFLEXRING_TIMEOUT_MS=18446744073709551615\nFLEXRING_HEARTBEAT_MS=0\nFLEXRING_SLOTS=4096",
        &format!("FLEXRING_UNIQUE_ID={id}\nFLEXRING_RANK=0\nFLEXRING_WORLD_SIZE=2"),
    ]
    .map(|text| text.as_bytes().to_vec());
    let target = FuzzTarget { name: "environment", longest: 1024, memory: 1 << 20 };
    target.run(&seeds, |input| {
        let text = String::from_utf8_lossy(input);
        let pairs: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('=')).collect();
        let is_known = |name: &str| {
            let is_file = name == "FLEXRING_SECRET_FILE";
            !is_file
                && (Config::NAMES.contains(&name)
                    || LAUNCHERS.contains(&name)
                    || name == "FLEXRING_UNIQUE_ID")
        };
        let lookup = |name: &str| {
            let found = pairs.iter().find(|(key, _)| *key == name && is_known(name));
            found.map(|(_, value)| (*value).to_owned())
        };
        let config = match Config::read(lookup) {
            Ok(config) => config,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidSetting, "{error}");
                return;
            }
        };
        for row in config.table(lookup) {
            assert!(row.name != "FLEXRING_SECRET" || !row.value.contains("0123456789"), "a secret is shown");
        }
        let _ = (config.shared(), config.spin());
        if let Ok(identity) = identity(&config, lookup) {
            assert!(identity.rank < identity.world, "{identity:?}");
            let world = identity.world.min(1 << 16);
            assert!(config.slots_for(1, world).checked_mul(config.subchunk.0).is_some());
        }
        let _ =
            (is_alone(&config, lookup), local_rank(lookup), SecretSource::of_settings(&config, JOB).is_ok());
    });
}
