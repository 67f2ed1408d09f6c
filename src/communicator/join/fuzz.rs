//! Fuzz target: what a member publishes before links are made.

use super::cpu_set::CpuSet;
use super::endpoints;
use super::peer_info::{PeerInfo, RailOffer};
use crate::transport::verbs::inventory::{GidKind, LinkLayer, PciDistance};
use crate::transport::verbs::port_selection::{Offer, Rail, describe_mismatch, pair_rails, rails_of_world};
use flexring_testkit::fuzzing::{FuzzTarget, InputReader, block};

fn rail(device: &str, network: &str) -> Rail {
    Rail {
        device: device.to_owned(),
        port: 1,
        layer: LinkLayer::Ethernet,
        gid_index: 3,
        gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 1],
        gid_kind: GidKind::RoceV2,
        lid: 0,
        pkey_index: 0,
        partition: 0,
        flid: 0,
        network: network.to_owned(),
        rate_mbps: 100_000,
        numa: None,
        position: 0,
        distance: PciDistance::Node,
        is_software: false,
        is_reserve: false,
    }
}

fn info(rails: Vec<Rail>) -> Vec<u8> {
    let info = PeerInfo {
        memories: vec![([3; 16], 1)],
        connections: vec![([4; 16], 2)],
        node: "n".to_owned(),
        host: "h".to_owned(),
        topology_name: "h".to_owned(),
        descriptors: None,
        shared_room: Some(1 << 26),
        endpoints: endpoints::described(&["127.0.0.1:1".parse().expect("an address")], None),
        shrink_endpoints: vec![],
        nonce: [1; 16],
        process: 7,
        has_gpu: false,
        may_have_gpus: false,
        cores: CpuSet::of_this_process(),
        rails: RailOffer {
            ports: Offer { rails, most: 4, is_near_gpu: false },
            why_not: None,
            is_idle: false,
            missing: None,
        },
    };
    postcard::to_stdvec(&info).expect("short")
}

#[test]
fn peer_info_of_a_hostile_member() {
    let many =
        (0..12).map(|number| rail("d", if number == 11 { "10.0.0.0/24" } else { "10.1.0.0/24" })).collect();
    let seeds = [vec![], vec![rail("d", "10.0.0.0/24")], many].map(|rails| block(&info(rails)));
    let mine = [rail("mine", "10.0.0.0/24"), rail("mine_2", "10.2.0.0/24")];
    // Lists of at most 4 KiB, whose decoder reserves up to 1 MiB at each depth.
    let target = FuzzTarget { name: "peer_info", longest: 4096, memory: 4 << 20 };
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let mut infos = Vec::new();
        while !reader.is_empty() {
            infos.extend(PeerInfo::decode(reader.block()));
        }
        let cores = || infos.iter().map(|info| &info.cores);
        let _ = CpuSet::ranks_per_core(cores());
        let offers: Vec<&Offer> = infos.iter().map(|info| &info.rails.ports).collect();
        let nodes: Vec<&str> = infos.iter().map(|info| &*info.node).collect();
        let used = rails_of_world(&offers, &nodes, true);
        assert!(used.iter().all(|rails| rails.len() <= 8), "more rails than a rank has");
        for info in &infos {
            let theirs = &info.rails.ports.rails;
            let (one, other) = (pair_rails(&mine, theirs), pair_rails(theirs, &mine));
            assert_eq!(one.len(), other.len());
            for (at, partner) in one {
                assert!(
                    at < mine.len() && partner < theirs.len().min(8),
                    "rail {partner} of {}",
                    theirs.len()
                );
            }
            let _ = describe_mismatch((0, &mine), (1, theirs));
        }
    });
}
