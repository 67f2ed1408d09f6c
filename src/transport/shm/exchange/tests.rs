//! The exchange between threads that stand for the ranks of a node.

use super::channel::DescriptorChannel;
use super::message::ExchangeHello;
use super::*;
use crate::error::ErrorKind;
use crate::secret::SecretKey;
use crate::transport::shm::layout::ArenaLayout;
use crate::transport::shm::node_memory::RegionOfRank;
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;

/// What a rank got.
type Exchanged = Result<NodeMemory>;

/// Where each rank writes its number, behind the node page.
const MARK: usize = 1 << 20;

const WATCHDOG: Duration = Duration::from_secs(30);

/// Starts an exchange of `world` ranks, of which those in `absent` do not take part. `before` runs when all
/// sockets exist. Returns what each rank got, by rank.
fn exchange(
    world: usize,
    absent: &[Rank],
    timeout: Duration,
    before: impl FnOnce(&[(Rank, ExchangeAddress)]),
) -> Vec<Option<Exchanged>> {
    let sockets: Vec<_> = (0..world).map(|_| DescriptorExchange::new().expect("a socket")).collect();
    let node: Vec<_> = sockets.iter().map(DescriptorExchange::address).enumerate().collect();
    before(&node);
    let (done, results) = channel();
    for (rank, socket) in sockets.into_iter().enumerate().filter(|(rank, _)| !absent.contains(rank)) {
        let (node, done) = (node.clone(), done.clone());
        std::thread::spawn(move || {
            let own = OwnMemory::new(world).expect("memory");
            let piece = own.arena().piece(MARK, 1).expect("within");
            // SAFETY: no other thread accesses the arena before the exchange.
            unsafe { piece.as_ptr().write(rank as u8 + 1) };
            let fault = Fault::new();
            let got = socket.run(rank, &node, &own, [5; 16], Instant::now() + timeout, &fault);
            let _ = done.send((rank, got));
        });
    }
    drop(done);
    let mut all: Vec<_> = (0..world).map(|_| None).collect();
    for _ in absent.len()..world {
        let (rank, got) = results.recv_timeout(WATCHDOG).expect("every rank returns");
        all[rank] = Some(got);
    }
    all
}

/// Checks that every rank has the memory of all others, and nothing else.
fn assert_complete(all: Vec<Option<Exchanged>>) {
    let world = all.len();
    const LAYOUT: ArenaLayout = ArenaLayout::new(2, 64, 2, 4096);
    let all: Vec<_> = all.into_iter().map(|got| got.expect("a result").expect("an exchange")).collect();
    for (rank, memory) in all.iter().enumerate() {
        assert_eq!((memory.place(), memory.processes()), (rank, world));
        let mut region = memory.own().region(LAYOUT, None).expect("memory");
        let address = region.address();
        let one = |place| RegionOfRank { rank: place, place, region: address };
        let neighbours = memory.neighbours(&mut region, &(0..world).map(one).collect::<Vec<_>>());
        let neighbours = neighbours.expect("neighbours");
        let others: Vec<Rank> = neighbours.others.iter().map(|other| other.rank).collect();
        assert_eq!(others, (0..world).filter(|other| *other != rank).collect::<Vec<_>>());
        for other in &neighbours.others {
            let mark = other.arena.piece(MARK, 1).expect("a mapping").expect("within");
            // SAFETY: nothing writes to it any more.
            assert_eq!(usize::from(unsafe { mark.as_ptr().read() }), other.rank + 1);
            other.wakes.iter().for_each(WakeFd::notify);
        }
    }
    let woken = |memory: &NodeMemory| memory.own().lanes().eventfds().iter().all(|eventfd| eventfd.drain());
    assert!(world == 1 || all.iter().all(woken));
}

/// A packet of a connection to the leader, with as many descriptors as a rank has.
fn intrude(leader: &ExchangeAddress, packet: &[u8]) -> DescriptorChannel {
    let channel = DescriptorChannel::connect(&leader.name).expect("a connection");
    let forged = eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor");
    channel.send(packet, &[forged.as_fd(); 6]).expect("room");
    channel
}

#[test]
fn every_rank_gets_the_memory_of_all_others() {
    for world in [2, 3, 18] {
        assert_complete(exchange(world, &[], WATCHDOG, |_| ()));
    }
}

#[test]
fn the_name_of_a_socket_is_public_and_its_secret_is_not() {
    let socket = DescriptorExchange::new().expect("a socket");
    let address = socket.address();
    let public = std::fs::read_to_string("/proc/net/unix").expect("the list of sockets");
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert!(public.contains(&format!("flexring-{}", hex(&address.name))));
    assert!(!public.contains(&hex(&address.secret[..16])) && !public.contains(&hex(&address.secret[16..])));
}

#[test]
fn a_process_without_the_secret_cannot_take_a_ranks_place() {
    let mut open = Vec::new();
    let all = exchange(3, &[], WATCHDOG, |node| {
        let leader = &node[0].1;
        let guessed = SecretKey::from_bytes([0; 32]);
        for place in 0..3 {
            open.push(intrude(leader, &ExchangeHello { place, nonce: [0; 16] }.encode(&guessed)));
        }
        open.push(intrude(leader, b""));
        open.push(intrude(leader, &[0; 5000]));
        // A connection that sends nothing.
        open.push(DescriptorChannel::connect(&leader.name).expect("a connection"));
    });
    assert_complete(all);
}

#[test]
fn the_leaders_place_and_places_beyond_the_node_are_refused() {
    let mut open = Vec::new();
    let all = exchange(3, &[], WATCHDOG, |node| {
        for place in [0, 3, usize::MAX] {
            let hello = ExchangeHello { place, nonce: [0; 16] };
            open.push(intrude(&node[0].1, &hello.encode(&node[0].1.key())));
        }
    });
    assert_complete(all);
}

#[test]
fn the_second_claim_of_a_place_is_refused() {
    let mut open = Vec::new();
    let all = exchange(3, &[2], Duration::from_millis(300), |node| {
        let hello = ExchangeHello { place: 1, nonce: [0; 16] };
        open.push(intrude(&node[0].1, &hello.encode(&node[0].1.key())));
    });
    // The intruder has the secret and came first, so rank 1 is refused, and its own error says so.
    let errors: Vec<Error> = all.into_iter().flatten().filter_map(Result::err).collect();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].message().starts_with("rank 2 on this node did not share"), "{errors:?}");
    assert_eq!(errors[1].kind(), ErrorKind::PeerLost, "{errors:?}");
}

#[test]
fn missing_ranks_are_named_on_all_others() {
    let all = exchange(4, &[1, 3], Duration::from_millis(200), |_| ());
    for rank in [0, 2] {
        let Some(Some(Err(error))) = all.get(rank) else { panic!("rank {rank} has no error") };
        assert_eq!(error.kind(), ErrorKind::Rendezvous);
        assert!(error.message().starts_with("ranks 1 and 3 on this node did not share"), "{error}");
    }
}

#[test]
fn a_lack_of_descriptors_is_reported_as_that() {
    // The limit is that of the process, so the test runs in one of its own.
    const ALONE: &str = "TEST_RUNS_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "transport::shm::exchange::tests::a_lack_of_descriptors_is_reported_as_that";
        let mut alone = Command::new(std::env::current_exe().expect("this binary"));
        let output =
            alone.args([name, "--exact", "--nocapture"]).env(ALONE, "1").output().expect("it starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}{output:?}");
        return;
    }
    let socket = DescriptorExchange::new().expect("a socket");
    let address = socket.address();
    let node: Vec<_> = (0..3).map(|rank| (rank, address.clone())).collect();
    let own = OwnMemory::new(3).expect("memory");
    let fault = Fault::new();
    let _open: Vec<_> = (1..3)
        .map(|place| intrude(&address, &ExchangeHello { place, nonce: [0; 16] }.encode(&address.key())))
        .collect();
    // Room for this rank's own descriptors, both connections, and not all that come with them.
    let used = std::fs::read_dir("/proc/self/fd").expect("descriptors").count() as u64 - 1;
    let limit = Rlimit { current: Some(used + 1 + 2 + 6 + 3), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("a lower limit");
    let got = socket.run(0, &node, &own, [5; 16], Instant::now() + WATCHDOG, &fault);
    let error = got.err().expect("descriptors run out");
    assert_eq!(error.kind(), ErrorKind::System);
    for part in ["no descriptors left", "it needs 21 for them", "`ulimit -n`"] {
        assert!(error.message().contains(part), "{error}");
    }
}
