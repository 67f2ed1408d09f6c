//! Making links without devices: which messages follow from which, and when a rank may write.

use super::super::{BROKEN_INTERVAL, Transport, Verbs};
use super::*;
use crate::config::{Config, Registration};
use crate::descriptor_limit;
use crate::error::ErrorKind;
use crate::fault::Fault;
use crate::secret::SecretKey;
use crate::transport::Events;
use crate::transport::fixtures::{call, piece};
use crate::transport::verbs::connect::UnconnectedVerbs;
use crate::transport::verbs::connect_info::OutOfBand;
use crate::transport::verbs::objects::{Endpoint, PortAttributes, Shim, Verb};
use crate::transport::verbs::options::VerbsOptions;
use crate::transport::verbs::port_selection::Rail;
use crate::transport::verbs::rail_faults::SetupFailure;
use crate::transport::verbs::shared_device::SharedDevice;
use crate::transport::verbs::tests::out_of_band::MemoryMessages;
use crate::transport::verbs::wire::{CALL_BYTES, ImmData, ImmKind, MAX_RAILS, RECOVERY_BYTES};
use std::time::{Duration, Instant};

/// A rail of a device that does not exist.
fn rail(position: u16) -> Rail {
    Rail { device: format!("inert{position}"), position, ..Rail::example() }
}

/// A world whose ranks have `rails` rails each; `planned` gives the peers that a rank is linked with from the
/// beginning. The last value sends messages in the name of any rank.
pub(in super::super) fn world(
    ranks: usize,
    rails: u16,
    planned: impl Fn(Rank) -> Vec<Rank>,
    shim: &Shim,
) -> Result<(Vec<Verbs>, MemoryMessages)> {
    let (ranks, messages) = try_world(ranks, rails, planned, |_| shim.clone())?;
    Ok((ranks.into_iter().collect::<Result<_>>()?, messages))
}

/// [`world`], with a shim for each rank. The ranks connect one after the other.
fn try_world(
    ranks: usize,
    rails: u16,
    planned: impl Fn(Rank) -> Vec<Rank>,
    shim: impl Fn(Rank) -> Shim,
) -> Result<(Vec<Result<Verbs>>, MemoryMessages)> {
    let mut ends = MemoryMessages::world(ranks);
    let other = ends[0].clone();
    let rails: Vec<Vec<Rail>> = vec![(0..rails).map(rail).collect(); ranks];
    let open = |(me, end): (Rank, MemoryMessages)| {
        let contexts = rails[me].iter().map(|rail| {
            let port = PortAttributes { active: true, lid: 1, mtu: 5, needs_global: false };
            (SharedDevice::open_inert(&rail.device, &shim(me)).expect("inert"), port)
        });
        let directory = LinkDirectory {
            me,
            rails: rails.clone(),
            key: Box::new(|_| SecretKey::from_parts("test", &[])),
            out_of_band: Box::new(end),
        };
        let registration = Registration::Subchunk;
        let options = VerbsOptions { registration, ..VerbsOptions::new(&Config::default()) };
        UnconnectedVerbs::over(contexts.collect(), directory, &planned(me), options)
    };
    let prepared: Vec<_> = ends.drain(..).enumerate().map(open).collect::<Result<_>>()?;
    let infos: Vec<ConnectInfo> =
        prepared.iter().map(UnconnectedVerbs::connect_info).collect::<Result<_>>()?;
    prepared.iter().try_for_each(UnconnectedVerbs::send_links)?;
    let connect = |unconnected: UnconnectedVerbs| {
        let fault = Arc::new(Fault::new());
        let deadline = Instant::now() + Duration::from_secs(20);
        let received = unconnected.receive_links(deadline, &fault)?;
        unconnected.connect(&infos, received, &fault).map_err(SetupFailure::into_error)
    };
    Ok((prepared.into_iter().map(connect).collect(), other))
}

/// Drops the ranks without goodbyes, which no device would carry.
pub(in super::super) fn finish(ranks: Vec<Verbs>) {
    ranks.iter().for_each(|verbs| drop(verbs.fault.raise(Error::aborted("the test ends"))));
}

fn unlinked(ranks: usize) -> (Vec<Verbs>, MemoryMessages) {
    world(ranks, 2, |_| Vec::new(), &Shim::none()).expect("inert")
}

/// Begins a call with this peer.
fn enter(verbs: &mut Verbs, peer: Rank) {
    verbs.begin(1);
    verbs.announce(peer, &call(1)).expect("no failure");
}

fn poll(verbs: &mut Verbs) -> Result<()> {
    verbs.poll(&mut Events::new()).map(drop)
}

/// Whether anything was posted to the first peer's queue pairs.
fn has_written(verbs: &Verbs) -> bool {
    verbs.peers[0].link.qps.iter().any(|qp| !qp.is_idle())
}

/// The peer's device acknowledges all that was posted to a queue pair of a peer.
fn acknowledge(verbs: &mut Verbs, peer: usize, qp: usize) {
    verbs.peers[peer].link.write_completed(qp, u32::MAX / 4);
    verbs.schedule(peer);
}

#[test]
fn plans_make_links_to_their_peers_only() {
    let ring = |me: Rank| vec![(me + 1) % 5, (me + 4) % 5];
    let (ranks, _) = world(5, 2, ring, &Shim::none()).expect("inert");
    for verbs in &ranks {
        assert_eq!(verbs.peers.len(), 2);
        assert!(verbs.peers.iter().all(|peer| peer.is_ready() && peer.qp_count() == 2));
    }
    finish(ranks);
}

/// Recursive halving, and then an exchange of rank 0 with all others.
#[test]
fn a_world_of_256_ranks_has_the_links_that_calls_use() {
    const RANKS: usize = 256;
    descriptor_limit::raise();
    let halving = |me: Rank| (0..8).map(|level| me ^ (1 << level)).collect();
    let (mut ranks, _) = world(RANKS, 1, halving, &Shim::none()).expect("inert");
    let links: usize = ranks.iter().map(|verbs| verbs.peers.len()).sum();
    assert_eq!(links, RANKS * 8);
    ranks[0].begin(1);
    for peer in 1..RANKS {
        ranks[0].announce(peer, &call(1)).expect("no failure");
    }
    ranks[1..].iter_mut().for_each(|verbs| poll(verbs).expect("no failure"));
    poll(&mut ranks[0]).expect("no failure");
    ranks[1..].iter_mut().for_each(|verbs| poll(verbs).expect("no failure"));
    let expected = |me: Rank| match me {
        0 => RANKS - 1,
        // Those that halving links with rank 0.
        _ if me.is_power_of_two() => 8,
        _ => 8 + 1,
    };
    for (me, verbs) in ranks.iter().enumerate() {
        assert_eq!(verbs.peers.len(), expected(me), "rank {me}");
        assert!(verbs.peers.iter().all(Peer::is_ready) && verbs.on_demand.pending.is_empty());
    }
    finish(ranks);
}

#[test]
fn a_rank_writes_only_once_both_ends_are_connected() {
    let (mut ranks, _) = unlinked(2);
    let [one, other] = &mut ranks[..] else { unreachable!() };
    enter(one, 1);
    let mut source = [1; 100];
    one.send(1, piece(&mut source)).expect("requests wait in the link");
    poll(one).expect("no failure");
    assert!(!has_written(one) && !one.peers[0].is_ready());
    poll(other).expect("no failure");
    assert!(other.peers.len() == 1 && !other.peers[0].is_ready(), "its end is made, and connected");
    poll(one).expect("no failure");
    assert!(one.peers[0].is_ready() && has_written(one));
    poll(other).expect("no failure");
    assert!(other.peers[0].is_ready());
    assert!(one.on_demand.pending.is_empty() && other.on_demand.pending.is_empty());
    // Hellos and trials come first.
    for verbs in [one, other] {
        assert!(verbs.peers[0].link.qps.iter().all(|qp| !qp.is_proven() && !qp.is_idle()));
        poll(verbs).expect("no failure");
        assert!(verbs.on_demand.directory.me == 1 || !verbs.peers[0].link.is_announced());
        (0..2).for_each(|qp| acknowledge(verbs, 0, qp));
        poll(verbs).expect("no failure");
        assert!(verbs.peers[0].link.is_announced(), "the call is written, if there is one");
        assert_eq!(has_written(verbs), verbs.on_demand.directory.me == 0, "rank 1 is in no call");
    }
    finish(ranks);
}

/// A call in which a rank only receives would end without its announcement, which the peer waits for.
#[test]
fn what_a_peer_writes_before_the_link_is_ready_is_reported_afterwards() {
    let (mut ranks, _) = unlinked(2);
    let [one, other] = &mut ranks[..] else { unreachable!() };
    enter(one, 1);
    poll(other).expect("it connects its end");
    let imm = ImmData { kind: ImmKind::Call, epoch: 1 }.pack();
    one.peers[0].link.received(0, imm, CALL_BYTES as u32).expect("valid");
    one.schedule(0);
    let mut events = Events::new();
    one.peers[0].progress(&mut events).expect("no failure");
    assert!(events.is_empty() && !one.peers[0].is_ready());
    poll(one).expect("no failure");
    assert!(one.peers[0].is_ready(), "it may write once its trial is over");
    (0..2).for_each(|qp| acknowledge(one, 0, qp));
    // The write had no content.
    let error = poll(one).expect_err("it is reported");
    assert!(error.message().contains("rank 1 made a call"), "{error}");
    finish(ranks);
}

#[test]
fn a_link_made_after_a_rail_failed_begins_on_the_others() {
    let (mut ranks, _) = unlinked(3);
    enter(&mut ranks[0], 1);
    for me in [1, 0, 1] {
        poll(&mut ranks[me]).expect("no failure");
    }
    (0..2).for_each(|qp| acknowledge(&mut ranks[0], 0, qp));
    ranks[0].peers[0].break_qp(0, &Error::peer_lost("the cable is disconnected"));
    ranks[0].announce(2, &call(1)).expect("no failure");
    for me in [2, 0, 2] {
        poll(&mut ranks[me]).expect("no failure");
    }
    // Each end has sent a hello and a trial over both rails.
    for (me, index) in [(0, 1), (2, 0)] {
        let qps = &ranks[me].peers[index].link.qps;
        assert!(qps.iter().all(|qp| qp.is_alive() && !qp.is_proven() && !qp.is_idle()), "at rank {me}");
    }
    acknowledge(&mut ranks[0], 1, 1);
    poll(&mut ranks[0]).expect("no failure");
    let to_2 = &mut ranks[0].peers[1];
    assert!(
        to_2.link.is_announced() && !to_2.link.qps[1].is_idle(),
        "the call is written over the other rail"
    );
    to_2.link.write_completed(0, 1);
    assert!(!to_2.link.qps[0].is_proven(), "a hello says nothing of long packets");
    to_2.link.write_completed(0, 2);
    assert!(to_2.link.qps[0].is_proven(), "the trial was acknowledged");
    finish(ranks);
}

/// Counter-example: the link failed, as its trial was not over.
#[test]
fn a_link_that_a_peer_makes_during_the_handshake_has_time_for_its_trial() {
    let (mut ranks, _) = unlinked(2);
    enter(&mut ranks[0], 1);
    let (outcome, _) = ranks[1].handshake(Instant::now() + Duration::from_secs(20));
    outcome.expect("there are no planned links");
    assert!(ranks[1].peers.len() == 1 && ranks[1].peers[0].link.check().is_ok());
    finish(ranks);
}

/// Counter-example: all links without a working queue pair failed when the coordinator's process left.
#[test]
fn a_trial_goes_on_after_the_coordinators_process_has_left() {
    let (mut ranks, messages) = unlinked(2);
    enter(&mut ranks[0], 1);
    for me in [1, 0, 1] {
        poll(&mut ranks[me]).expect("no failure");
    }
    messages.close();
    let wait = |verbs: &mut Verbs| {
        std::thread::sleep(BROKEN_INTERVAL);
        poll(verbs)
    };
    (0..3).try_for_each(|_| wait(&mut ranks[0])).expect("the trial may succeed");
    assert!(ranks[0].peers[0].link.is_isolated() && !ranks[0].peers[0].link.reconnects());
    let lost = Error::peer_lost("packets get lost");
    (0..2).for_each(|qp| ranks[0].peers[0].break_qp(qp, &lost));
    let error = wait(&mut ranks[0]).expect_err("the call needs rank 1");
    assert!(error.message().contains("packets get lost"), "{error}");
    finish(ranks);
}

#[test]
fn messages_about_queue_pairs_that_no_rank_has_are_disagreements() {
    let state = vec![0; 3];
    for message in
        [RailMessage::Connected { qp: 2, generation: 1 }, RailMessage::Broken { qp: 0, generation: 0, state }]
    {
        let (mut ranks, messages) = unlinked(2);
        enter(&mut ranks[0], 1);
        for me in [1, 0] {
            poll(&mut ranks[me]).expect("no failure");
        }
        messages.deliver(1, 0, LinkMessage::Rail(message).encode().expect("encodes"));
        let error = poll(&mut ranks[0]).expect_err("no rank sends this");
        assert_eq!((error.kind(), error.suspect()), (ErrorKind::Disagreement, Some(1)), "{error}");
        finish(ranks);
    }
}

#[test]
fn a_rank_that_leaves_makes_no_link() {
    let (mut ranks, _) = unlinked(2);
    let [one, other] = &mut ranks[..] else { unreachable!() };
    other.on_demand.close();
    enter(one, 1);
    poll(other).expect("no failure");
    assert!(other.peers.is_empty());
    finish(ranks);
}

#[test]
fn ranks_that_begin_at_once_make_one_link() {
    let (mut ranks, _) = unlinked(3);
    for (me, verbs) in ranks.iter_mut().enumerate() {
        verbs.begin(1);
        for peer in (0..3).filter(|peer| *peer != me) {
            verbs.announce(peer, &call(1)).expect("no failure");
        }
    }
    for _ in 0..3 {
        ranks.iter_mut().for_each(|verbs| poll(verbs).expect("no failure"));
    }
    for verbs in &ranks {
        assert_eq!(verbs.peers.len(), 2);
        assert!(verbs.peers.iter().all(Peer::is_ready) && verbs.on_demand.pending.is_empty());
    }
    finish(ranks);
}

#[test]
fn a_peer_that_leaves_before_it_connects_is_lost() {
    let (mut ranks, messages) = unlinked(2);
    enter(&mut ranks[0], 1);
    messages.deliver(1, 0, Vec::new());
    let error = poll(&mut ranks[0]).expect_err("the call needs rank 1");
    assert_eq!((error.kind(), error.suspect()), (ErrorKind::PeerLost, Some(1)));
    assert!(error.message().contains("rank 1 closed its communicator"), "{error}");
    finish(ranks);
}

#[test]
fn the_departure_of_other_ranks_concerns_no_link() {
    let (mut ranks, messages) = unlinked(3);
    messages.deliver(2, 0, Vec::new());
    messages.deliver(7, 0, Vec::new());
    enter(&mut ranks[0], 1);
    poll(&mut ranks[0]).expect("rank 1 is there");
    finish(ranks);
}

#[test]
fn messages_that_no_rank_sends_are_disagreements() {
    let info = ConnectInfo { mtus: vec![5; 2], address: 0, keys: [0; MAX_RAILS] };
    let link = |qps| LinkConnectInfo { endpoints: vec![Endpoint { qpn: 1, psn: 1 }; qps], offset: 0 };
    let on_demand = |qps| LinkMessage::OnDemand(info.clone(), link(qps), 0);
    let encode = |message: LinkMessage| message.encode().expect("encodes");
    let none = ConnectInfo { mtus: Vec::new(), ..info.clone() };
    for (from, messages) in [
        (1, vec![vec![9, 9, 9]]),
        (1, vec![encode(LinkMessage::Ready)]),
        (1, vec![encode(LinkMessage::Planned(link(2)))]),
        (1, vec![encode(on_demand(3))]),
        (1, vec![encode(on_demand(0))]),
        (1, vec![encode(LinkMessage::OnDemand(none, link(2), 0))]),
        (1, vec![encode(on_demand(2)), encode(on_demand(2))]),
        (1, vec![encode(on_demand(2)), encode(LinkMessage::Ready), encode(LinkMessage::Ready)]),
        (0, vec![encode(on_demand(2))]),
        (9, vec![encode(on_demand(2))]),
    ] {
        let (mut ranks, end) = unlinked(2);
        messages.iter().for_each(|message| end.deliver(from, 0, message.clone()));
        let error = poll(&mut ranks[0]).expect_err("no rank sends this");
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{messages:?}: {error}");
        assert!(error.message().contains(&format!("rank {from}")), "{error}");
        finish(ranks);
    }
}

#[test]
fn further_links_share_memory_and_queues_in_growing_batches() {
    let (mut ranks, _) = unlinked(20);
    let verbs = &mut ranks[0];
    verbs.begin(1);
    for peer in 1..20 {
        verbs.announce(peer, &call(1)).expect("no failure");
    }
    // For 1, 1, 2, 4, 8 and 16 links.
    assert_eq!((verbs.peers.len(), verbs.on_demand.batches.len()), (19, 1 + 6));
    assert!(verbs.devices.iter().all(|device| device.queues.len() == 1 + 6));
    finish(ranks);
}

#[test]
fn a_device_that_refuses_a_further_link_fails_the_call_that_needs_it() {
    // Four completion queues are those of the beginning, two for each rank.
    for (verb, k) in [(Verb::CreateQp, 0), (Verb::CreateCq, 4), (Verb::ModifyQpToRtr, 0)] {
        let shim = Shim::failing(verb, k, rustix::io::Errno::NOMEM.raw_os_error());
        let (mut ranks, messages) = world(2, 2, |_| Vec::new(), &shim).expect("no link is made yet");
        let verbs = &mut ranks[0];
        verbs.begin(1);
        let info = ConnectInfo { mtus: vec![5; 2], address: 0, keys: [0; MAX_RAILS] };
        let link = LinkConnectInfo { endpoints: vec![Endpoint { qpn: 1, psn: 1 }; 2], offset: 0 };
        let message = LinkMessage::OnDemand(info, link, 0).encode().expect("encodes");
        let failed = verbs.announce(1, &call(1)).and_then(|()| {
            messages.send(&[]).expect("in memory");
            messages.deliver(1, 0, message);
            poll(verbs)
        });
        let error = failed.expect_err("the device refuses");
        assert_eq!(error.kind(), ErrorKind::System, "{verb:?}: {error}");
        finish(ranks);
    }
}

#[test]
fn a_call_ends_at_once_with_the_event_of_the_only_device() {
    let shim = Shim::none();
    let (mut ranks, _) = world(2, 1, |me| vec![1 - me], &shim).expect("inert");
    enter(&mut ranks[0], 1);
    poll(&mut ranks[0]).expect("the device works");
    // IBV_EVENT_DEVICE_FATAL. Asynchronous events are read after a sleep.
    let _shim = shim.with_event(8);
    ranks[0].clear_need_wakeup();
    let error = poll(&mut ranks[0]).expect_err("no rail comes back");
    assert_eq!(
        (error.kind(), error.suspect()),
        (ErrorKind::System, None),
        "the peer is not to blame: {error}"
    );
    assert_eq!(error.message(), "no rail to rank 1 is left: inert0: the device failed");
    finish(ranks);
}

/// Two ranks of which rank 0 has begun to make a link of `rails` rails, and rank 1 has connected its end.
fn half_linked(rails: u16) -> Vec<Verbs> {
    let (mut ranks, _) = world(2, rails, |_| Vec::new(), &Shim::none()).expect("inert");
    enter(&mut ranks[0], 1);
    poll(&mut ranks[1]).expect("it connects its end");
    ranks
}

#[test]
fn a_device_that_fails_before_the_link_is_ready_is_not_connected() {
    let mut ranks = half_linked(2);
    ranks[0].fail_rail(0, "the device failed");
    poll(&mut ranks[0]).expect("the other rail works");
    assert!(ranks[0].peers[0].is_ready());
    let link = &ranks[0].peers[0].link;
    assert!(!link.qps[0].is_alive() && link.qps[0].is_idle(), "nothing is posted on the failed device");
    acknowledge(&mut ranks[0], 0, 1);
    poll(&mut ranks[0]).expect("the other rail works");
    let link = &ranks[0].peers[0].link;
    assert!(link.qps[1].is_proven() && !link.qps[1].is_idle(), "the call, and that queue pair 0 is broken");
    // The other end hears of it over the rail that works.
    let broken = ImmData { kind: ImmKind::Recovery(0, 0), epoch: 0 }.pack();
    poll(&mut ranks[1]).expect("no failure");
    ranks[1].peers[0].link.received(1, broken, RECOVERY_BYTES as u32).expect("valid");
    ranks[1].schedule(0);
    poll(&mut ranks[1]).expect("the other rail works");
    assert!(!ranks[1].peers[0].link.qps[0].is_alive());
    finish(ranks);
}

#[test]
fn a_link_whose_devices_all_fail_before_it_is_ready_is_aborted_at_both_ends() {
    let mut ranks = half_linked(2);
    enter(&mut ranks[1], 0);
    ranks[0].fail_rail(0, "the device failed");
    ranks[0].fail_rail(1, "its completion queue overran");
    let error = poll(&mut ranks[0]).expect_err("the call needs rank 1");
    assert_eq!((error.kind(), error.suspect()), (ErrorKind::System, None));
    let expected =
        "no rail to rank 1 is left: inert0: the device failed; inert1: its completion queue overran";
    assert_eq!(error.message(), expected);
    let error = poll(&mut ranks[1]).expect_err("the call needs rank 0");
    assert_eq!((error.kind(), error.suspect()), (ErrorKind::PeerLost, Some(0)));
    assert!(error.message().contains("rank 0 has no rail left"), "{error}");
    assert!(ranks[1].on_demand.pending.is_empty());
    finish(ranks);
}

#[test]
fn a_failed_device_ends_no_call_that_does_not_need_its_links() {
    let (mut ranks, _) = world(2, 1, |me| vec![1 - me], &Shim::none()).expect("inert");
    ranks[0].begin(1);
    ranks[0].fail_rail(0, "the device failed");
    poll(&mut ranks[0]).expect("the call has not used the link yet");
    let announced = ranks[0].announce(1, &call(1));
    announced.and_then(|()| poll(&mut ranks[0])).expect_err("now it needs it");
    finish(ranks);
}
