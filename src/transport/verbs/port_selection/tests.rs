//! Selections on machines of all kinds, the reasons for rejections, and pairs of rails.

use super::*;
use crate::config::Family;
use crate::transport::verbs::inventory::fake::{ETHERNET, FakeMachine, FakePort, GIDS_OF_ETH0, INFINIBAND};
use crate::transport::verbs::inventory::{GidKind, InterfaceAddress, LinkLayer, PciDistance};
use proptest::prelude::*;
use std::net::IpAddr;

const ROCE: FakePort<'_> = FakePort { gids: GIDS_OF_ETH0, ..ETHERNET };
const DOWN: &str = "1: DOWN";

/// The inventory of a machine whose `eth0` has the addresses of [`GIDS_OF_ETH0`].
fn inventory(machine: &FakeMachine) -> Inventory {
    let address = |ip: &str, prefix| InterfaceAddress {
        netdev: "eth0".to_owned(),
        ip: ip.parse().expect("an address"),
        prefix,
    };
    let addresses = vec![address("10.1.0.5", 23), address("fd00:0:0:1::5", 64), address("127.0.0.1", 8)];
    Inventory::read(machine.root(), addresses)
}

fn chosen(machine: &FakeMachine, config: &Config) -> Result<PortSelection> {
    select(&inventory(machine), config, &Affinity::read(machine.root(), None))
}

fn names(selection: &PortSelection) -> Vec<String> {
    selection.rails.iter().map(|rail| format!("{}:{}", rail.device, rail.port)).collect()
}

fn outcome(selection: &PortSelection, port: &str) -> String {
    let decision =
        selection.decisions.iter().find(|decision| format!("{}:{}", decision.device, decision.port) == port);
    match &decision.expect("a decision for every port").outcome {
        PortUse::Rail(rail) => format!("rail {rail}"),
        PortUse::Rejected(reason) => reason.to_string(),
    }
}

fn with(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config::default();
    change(&mut config);
    config
}

fn hca(text: &str) -> Config {
    with(|config| config.ib_hca = Some(text.to_owned()))
}

#[test]
fn an_adapter_with_a_port_down_is_one_rail() {
    let machine = FakeMachine::new();
    machine.hca(
        "mlx5_0",
        "pci0000:3a/0000:3b:00.0",
        1,
        &[INFINIBAND, FakePort { state: DOWN, ..INFINIBAND }],
    );
    let selection = chosen(&machine, &Config::default()).expect("a port is up");
    let rail = Rail {
        device: "mlx5_0".to_owned(),
        port: 1,
        layer: LinkLayer::InfiniBand,
        gid_index: 0,
        gid: [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x98, 3, 0x9b, 3, 0, 0x67, 0xce, 0x60],
        gid_kind: GidKind::InfiniBand,
        lid: 31,
        pkey_index: 0,
        partition: 0xffff,
        flid: 0,
        network: "fe80000000000000".to_owned(),
        rate_mbps: 400_000,
        numa: Some(1),
        position: 0,
        distance: PciDistance::Node,
        is_software: false,
        is_reserve: false,
    };
    assert_eq!(selection.rails.first(), Some(&rail));
    assert_eq!(selection.rails.len(), 1);
    assert_eq!(outcome(&selection, "mlx5_0:1"), "rail 0");
    assert_eq!(
        outcome(&selection, "mlx5_0:2"),
        "is down, its physical state is Disabled (check its cable, and ibstat)"
    );
    let bytes = postcard::to_stdvec(&rail).expect("the rail is serialized");
    assert_eq!(postcard::from_bytes::<Rail>(&bytes).expect("the rail is deserialized"), rail);
}

#[test]
fn roce_gids_are_preferred_by_version_then_family_then_index() {
    let machine = FakeMachine::new();
    machine.device("rxe0", &[ROCE]);
    let case = |version, family, index| {
        let config = with(|config| {
            config.ib_roce_version = version;
            config.ib_family = family;
            config.ib_gid_index = index;
        });
        let selection = chosen(&machine, &config).expect("a GID");
        let why = selection.decisions[0].gid.clone().expect("it was chosen").why;
        (selection.rails[0].gid_index, selection.rails[0].network.clone(), why)
    };
    for (version, family, index, expected, network, why) in [
        (2, Family::Auto, None, 3, "10.1.0.0/23", "RoCE v2, IPv4 10.1.0.5 of eth0, the first by"),
        (1, Family::Auto, None, 2, "10.1.0.0/23", "RoCE v1, IPv4 10.1.0.5 of eth0, the first by"),
        (2, Family::Ipv6, None, 5, "fd00:0:0:1::/64", "RoCE v2, IPv6 fd00:0:0:1::5 of eth0"),
        (1, Family::Ipv6, None, 4, "fd00:0:0:1::/64", "RoCE v1, IPv6"),
        (2, Family::Auto, Some(0), 0, "fe80::/64", "set by FLEXRING_IB_GID_INDEX=0: RoCE v1, link-local"),
    ] {
        let (index, on, because) = case(version, family, index);
        assert_eq!((index, &*on), (expected, network));
        assert!(because.starts_with(why), "{because}");
    }
}

#[test]
fn another_gid_is_chosen_if_there_is_no_preferred_one() {
    let machine = FakeMachine::new();
    machine
        .device("a", &[FakePort { gids: &GIDS_OF_ETH0[..1], ..ETHERNET }])
        .device("b", &[FakePort { gids: &GIDS_OF_ETH0[..2], ..ETHERNET }]);
    let elsewhere = (9, "::ffff:10.9.9.9", "RoCE v2", "eth9");
    machine.device("c", &[FakePort { gids: &[elsewhere, GIDS_OF_ETH0[5]], ..ETHERNET }]);
    machine.device("d", &[FakePort { gids: &[elsewhere, GIDS_OF_ETH0[1]], ..ETHERNET }]);
    let selection = chosen(&machine, &Config::default()).expect("GIDs");
    let indexes: Vec<u8> = selection.rails.iter().map(|rail| rail.gid_index).collect();
    assert_eq!(
        indexes,
        [0, 1, 5, 9],
        "GID 9 belongs to another namespace, but d has only a link-local one besides"
    );
    assert_eq!(selection.rails[3].network, "10.9.9.0/24", "the most common prefix length");
    let why = &selection.decisions[0].gid.as_ref().expect("it was chosen").why;
    assert!(why.ends_with("of eth0, as there is no RoCE v2"), "{why}");
}

#[test]
fn the_nearest_rails_are_selected_up_to_the_limit() {
    let machine = FakeMachine::new();
    machine.numa(&["10 21", "21 10"], "4-7");
    for (number, numa) in [(0, 0), (1, 0), (2, 1), (10, 1), (3, -1)] {
        let slot = format!("pci0000:{numa}0/0000:0{number}:00.0");
        machine.hca(&format!("mlx5_{number}"), &slot.replace("-1", "f"), numa, &[INFINIBAND]);
    }
    let all = chosen(&machine, &with(|config| config.ib_rails = 8)).expect("rails");
    assert_eq!(names(&all), ["mlx5_2:1", "mlx5_3:1", "mlx5_10:1", "mlx5_0:1", "mlx5_1:1"]);
    let two = chosen(&machine, &with(|config| config.ib_rails = 2)).expect("rails");
    assert_eq!(names(&two), ["mlx5_2:1", "mlx5_3:1"]);
    let left = "is not needed: FLEXRING_IB_RAILS=2 other ports are as near or nearer";
    assert_eq!(outcome(&two, "mlx5_10:1"), left);
}

#[test]
fn slow_ports_are_rejected_unless_they_are_named() {
    let machine = FakeMachine::new();
    let slow = FakePort { rate: "25 Gb/sec (1X EDR)", ..ROCE };
    machine.device("mlx5_0", &[INFINIBAND]).device("mlx5_bond_0", &[slow]);
    let usual = chosen(&machine, &Config::default()).expect("a rail");
    assert_eq!(names(&usual), ["mlx5_0:1"]);
    let left = "has 25 Gbit/s, less than half of what mlx5_0:1 has (name it in FLEXRING_IB_HCA to use it)";
    assert_eq!(outcome(&usual, "mlx5_bond_0:1"), left);
    assert_eq!(names(&chosen(&machine, &hca("mlx5")).expect("rails")), ["mlx5_0:1", "mlx5_bond_0:1"]);
    assert_eq!(names(&chosen(&machine, &hca("^rxe")).expect("a rail")), ["mlx5_0:1"]);
    assert_eq!(names(&chosen(&machine, &hca("=mlx5_bond_0")).expect("a rail")), ["mlx5_bond_0:1"]);
}

#[test]
fn the_error_without_rails_names_cause_and_fix() {
    let nothing = FakeMachine::new();
    let portless = FakeMachine::new();
    portless.device("mlx5_0", &[]);
    let down = FakeMachine::new();
    down.device("rxe0", &[FakePort { state: DOWN, ..ROCE }]);
    let unmanaged = FakeMachine::new();
    unmanaged
        .device("a", &[FakePort { state: "2: INIT", ..INFINIBAND }])
        .device("b", &[FakePort { lid: "0x0", ..INFINIBAND }]);
    let bare = FakeMachine::new();
    bare.device("rxe0", &[ETHERNET]).file("sys/class/infiniband/rxe0/parent", "eth7");
    let works = FakeMachine::new();
    works.device("rxe0", &[ROCE]).device("rxe1", &[ROCE]);
    let closed = FakeMachine::new();
    closed.device("rxe0", &[ROCE]);
    std::fs::remove_file(closed.root().join("dev/infiniband/uverbsrxe0")).expect("the file exists");
    let foreign = FakeMachine::new();
    foreign.device("siw0", &[ROCE]).file("sys/class/infiniband/siw0/node_type", "4: RNIC");
    foreign.device("efa_0", &[FakePort { layer: "Unspecified", ..ROCE }]);
    let many = FakeMachine::new();
    many.device("mlx5_0", &[const { FakePort { state: DOWN, ..INFINIBAND } }; 6]);
    let usual = Config::default();
    let (system, setting) = (ErrorKind::System, ErrorKind::InvalidSetting);
    for (machine, config, kind, expected) in [
        (&nothing, &usual, system, "there is no RDMA device: load a driver (modprobe mlx5_ib)"),
        (&portless, &usual, system, "no RDMA device has a port"),
        (
            &down,
            &usual,
            system,
            "rxe0:1 is down (ip link set eth0 up, and check its cable); fix this, or set FLEXRING",
        ),
        (
            &unmanaged,
            &usual,
            system,
            "a:1 is initializing, as no subnet manager has configured it (start one: opensm",
        ),
        (&unmanaged, &usual, system, "b:1 has no LID, as no subnet manager has configured it"),
        (
            &bare,
            &usual,
            system,
            "rxe0:1 has no GID, as its interface has no address (ip address add <address>/<prefix> dev eth7)",
        ),
        (
            &closed,
            &usual,
            system,
            "no /dev/infiniband/uverbsrxe0 (in a container: docker run --device=/dev/infiniband)",
        ),
        (&foreign, &usual, system, "siw0:1 uses iWARP"),
        (&foreign, &usual, system, "efa_0:1 supports neither InfiniBand nor RoCE"),
        (
            &many,
            &usual,
            system,
            "mlx5_0:4 is down, its physical state is Disabled (check its cable, and ibstat); and 2 more, which",
        ),
        (
            &works,
            &hca("mlx5"),
            setting,
            "FLEXRING_IB_HCA=\"mlx5\" admits no RDMA port; the ports are: rxe0:1, rxe1:1",
        ),
        (&works, &hca("^"), setting, "FLEXRING_IB_HCA=\"^\" cannot be used"),
        (
            &works,
            &with(|c| c.ib_gid_index = Some(7)),
            setting,
            "has no GID 7, which FLEXRING_IB_GID_INDEX requires; it has: 0, 1, 2, 3, 4, 5",
        ),
        (
            &works,
            &with(|c| c.ib_pkey = 1),
            setting,
            "has no partition key 1, which FLEXRING_IB_PKEY requires; it has: 0",
        ),
    ] {
        let error = chosen(machine, config).expect_err(expected);
        assert!(error.message().contains(expected), "{error}");
        assert_eq!(error.kind(), kind, "{error}");
    }
    let ipv6 = FakeMachine::new();
    ipv6.device("rxe0", &[FakePort { gids: &GIDS_OF_ETH0[..2], ..ETHERNET }]);
    let error = chosen(&ipv6, &with(|c| c.ib_family = Family::Ipv4)).expect_err("no IPv4");
    assert_eq!(error.kind(), setting);
    assert!(error.message().contains("rxe0:1 has no GID that FLEXRING_IB_FAMILY=ipv4 allows"), "{error}");
    assert_eq!(decide(&inventory(&nothing), &usual, &Affinity::default()), Ok(PortSelection::default()));
}

#[test]
fn the_gid_of_a_port_that_is_down_is_reported() {
    let machine = FakeMachine::new();
    machine.device("rxe0", &[FakePort { state: DOWN, ..ROCE }]);
    let selection =
        decide(&inventory(&machine), &Config::default(), &Affinity::default()).expect("a decision");
    assert_eq!(selection.decisions[0].gid.as_ref().map(|gid| gid.index), Some(3));
}

/// `i1` is on InfiniBand subnet 1, `4a` and `6a` on Ethernet with an IPv4 or IPv6 address in network a, `1a`
/// like `4a` but with RoCE v1.
fn rails(text: &str) -> Vec<Rail> {
    let rail = |word: &str| {
        let (first, network) = word.split_at(1);
        let ip: IpAddr =
            if first == "6" { "fd00::1" } else { "::ffff:10.0.0.1" }.parse().expect("an address");
        let IpAddr::V6(ip) = ip else { unreachable!("both addresses are IPv6") };
        let (layer, gid_kind) = match first {
            "i" => (LinkLayer::InfiniBand, GidKind::InfiniBand),
            "1" => (LinkLayer::Ethernet, GidKind::RoceV1),
            _ => (LinkLayer::Ethernet, GidKind::RoceV2),
        };
        Rail {
            device: word.to_owned(),
            port: 1,
            layer,
            gid_index: 0,
            gid: ip.octets(),
            gid_kind,
            lid: 0,
            pkey_index: 0,
            partition: 0xffff,
            flid: 0,
            network: network.to_owned(),
            rate_mbps: 1,
            numa: None,
            position: 0,
            distance: PciDistance::Node,
            is_software: false,
            is_reserve: false,
        }
    };
    text.split_whitespace().map(rail).collect()
}

#[test]
fn rails_beyond_the_most_that_a_rank_uses_are_not_paired() {
    let others = "i2 ".repeat(MAX_RAILS);
    assert_eq!(pair_rails(&rails("4a"), &rails(&format!("{others} 4a"))), [], "the ninth rail has no key");
    assert_eq!(pair_rails(&rails("4a"), &rails(&format!("{} 4a", &others[3..]))), [(0, MAX_RAILS - 1)]);
}

#[test]
fn rails_of_one_network_are_paired_first() {
    for (mine, theirs, pairs) in [
        ("4a", "4a", vec![(0, 0)]),
        ("4a 4b", "4b 4a", vec![(0, 1), (1, 0)]),
        ("4a 4b", "4c 4a", vec![(0, 1), (1, 0)]),
        ("4a 4a 4a", "4a", vec![(0, 0)]),
        ("4a", "4b 4c", vec![(0, 0)]),
        ("i1 i1", "i1 i1", vec![(0, 0), (1, 1)]),
        ("i1 i2", "i2 i3", vec![(1, 0)]),
        ("i1 4a", "4a", vec![(1, 0)]),
        ("4a 6a 1a", "1a 6b 4b", vec![(0, 2), (1, 1), (2, 0)]),
        // No router forwards RoCE version 1.
        ("4a 6a 1a", "1b 6b 4b", vec![(0, 2), (1, 1)]),
        ("4a", "6a", vec![]),
        ("4a", "", vec![]),
    ] {
        assert_eq!(pair_rails(&rails(mine), &rails(theirs)), pairs, "{mine} with {theirs}");
    }
}

/// Counter-example: behind a port that was down, each rail was connected to the next one of the other node.
#[test]
fn a_port_that_is_down_moves_no_other_to_another_rail() {
    let offered = |down: Option<usize>| {
        let machine = FakeMachine::new();
        for number in 0..4 {
            let state = if down == Some(number) { DOWN } else { INFINIBAND.state };
            let place = format!("pci0000:{number}0/0000:{number}0:00.0");
            machine.hca(&format!("mlx5_{number}"), &place, 0, &[FakePort { state, ..INFINIBAND }]);
        }
        chosen(&machine, &Config::default()).expect("ports are up").rails
    };
    assert_eq!(pair_rails(&offered(Some(1)), &offered(None)), [(0, 0), (1, 2), (2, 3)]);
}

#[test]
fn rails_of_one_position_are_paired_before_others_of_their_network() {
    let at = |positions: &[u16]| {
        let mut rails = rails(&"i1 ".repeat(positions.len()));
        rails.iter_mut().zip(positions).for_each(|(rail, position)| rail.position = *position);
        rails
    };
    assert_eq!(pair_rails(&at(&[0, 3]), &at(&[3, 0])), [(0, 1), (1, 0)], "each with its like, in any order");
    assert_eq!(pair_rails(&at(&[0, 1]), &at(&[1, 2])), [(0, 1), (1, 0)], "then those that are left");
    assert_eq!(pair_rails(&at(&[2]), &at(&[5])), [(0, 0)], "ranks with one port of different positions");
}

#[test]
fn rails_of_several_ranks_are_matched_by_network_and_each_is_in_one_group() {
    let matched = |ranks: &[&str]| match_rails(&ranks.iter().map(|text| rails(text)).collect::<Vec<_>>());
    let (one, two, three) = (Some(0), Some(1), Some(2));
    assert_eq!(matched(&["i1 i2", "i2 i1", "i1"]), [vec![one, two, one], vec![two, one, None]]);
    // Ranks join groups that earlier ones have made.
    assert_eq!(
        matched(&["i1", "i2 i3", "i3 i1"]),
        [vec![one, None, two], vec![None, one, None], vec![None, two, one]]
    );
    let many = "i1 ".repeat(MAX_RAILS + 1);
    assert_eq!(matched(&[&many, &many]).len(), MAX_RAILS + 1);
    assert_eq!(matched(&["1a i1 4b", ""]), [vec![one, None], vec![two, None], vec![three, None]]);
}

#[test]
fn rails_of_one_partition_are_paired_if_one_of_them_is_a_full_member() {
    let with = |keys: &[u16]| {
        let mut rails = rails(&"i1 ".repeat(keys.len()));
        rails.iter_mut().zip(keys).for_each(|(rail, key)| rail.partition = *key);
        rails
    };
    for (mine, theirs, pairs) in [
        (0xffff, 0xffff, 1),
        (0xffff, 0x7fff, 1),
        (0x7fff, 0x7fff, 0),
        (0x8012, 0x0012, 1),
        (0x8012, 0xffff, 0),
        (0, 0x8012, 1),
    ] {
        let (mine, theirs) = (with(&[mine]), with(&[theirs]));
        assert_eq!(pair_rails(&mine, &theirs).len(), pairs, "{mine:?} with {theirs:?}");
        assert_eq!(pair_rails(&theirs, &mine).len(), pairs, "{theirs:?} with {mine:?}");
        let unreachable = first_unreachable(&[mine.clone(), theirs.clone()], None);
        assert_eq!(unreachable, (pairs == 0).then_some((0, 1)), "{mine:?} with {theirs:?}");
    }
    assert_eq!(pair_rails(&with(&[0x8001, 0x8002]), &with(&[0x8002, 0x8001])), [(0, 1), (1, 0)]);
    let message = describe_mismatch((0, &with(&[0xffff])), (3, &with(&[0x8012])));
    let expected = "rank 0's rails are InfiniBand (subnet 1), and rank 3's rails are InfiniBand (subnet 1, partition key 0x8012): \
                    set FLEXRING_IB_PKEY on each node to the index of a partition that both have";
    assert!(message.starts_with(expected), "{message}");
}

#[test]
fn ranks_that_no_rails_connect_are_found_in_a_large_world() {
    let of = |texts: &[&str]| texts.iter().map(|text| rails(text)).collect::<Vec<_>>();
    for (texts, nodes, expected) in [
        (&["4a", "4b", "4a 6a"][..], None, None),
        (&["4a", "4b", "6a"], None, Some((0, 2))),
        (&["4a", "4a", "6a", "6a", "4a"], None, Some((0, 2))),
        (&["1a", "1a", "1a 1b"], None, None),
        (&["1a", "1a", "1b"], None, Some((0, 2))),
        (&["", ""], None, Some((0, 1))),
        (&["4a", ""], Some(&["n", "n"][..]), None),
        (&["4a", "4a", "6a", "6a"], Some(&["n", "m", "n", "m"]), Some((0, 3))),
        (&["4a 6a", "4a", "6a", "4a 6a"], Some(&["n", "m", "m", "n"]), None),
    ] {
        assert_eq!(first_unreachable(&of(texts), nodes), expected, "{texts:?} on {nodes:?}");
    }
    let mut world = vec![rails("4a 4b 4c 4d"); 4096];
    assert_eq!(first_unreachable(&world, None), None);
    world[4095] = rails("i1");
    assert_eq!(first_unreachable(&world, None), Some((0, 4095)));
}

#[test]
fn the_mismatch_of_rails_is_described() {
    for (mine, theirs, expected) in [
        (
            "4a",
            "i1",
            "rank 0's rails are Ethernet (RoCE v2, IPv4), and rank 5's rails are InfiniBand (subnet 1): name ports of \
             one kind in FLEXRING_IB_HCA, or set FLEXRING_TRANSPORT=tcp",
        ),
        (
            "4a 4b",
            "6a",
            "rank 0's rails are Ethernet (RoCE v2, IPv4), and rank 5's rails are Ethernet (RoCE v2, IPv6): set",
        ),
        (
            "4a",
            "1a",
            "(RoCE v1, IPv4, network a): set FLEXRING_IB_GID_INDEX and FLEXRING_IB_FAMILY so that both have the same kind of address",
        ),
        (
            "i1",
            "i2",
            "and rank 5's rails are InfiniBand (subnet 2): name ports of one subnet in FLEXRING_IB_HCA",
        ),
        ("i1", "", "and rank 5 has no rails: name"),
    ] {
        let (mine, theirs) = (rails(mine), rails(theirs));
        assert_eq!(pair_rails(&mine, &theirs), []);
        let message = describe_mismatch((0, &mine), (5, &theirs));
        assert!(message.contains(expected), "{message}");
    }
}

proptest! {
    #[test]
    fn pairs_are_symmetric_and_injective(mine in "([i461][abc] ){0,6}", theirs in "([i461][abc] ){0,6}") {
        let (mine, theirs) = (rails(&mine), rails(&theirs));
        let pairs = pair_rails(&mine, &theirs);
        let mut exchanged: Vec<(usize, usize)> =
            pair_rails(&theirs, &mine).into_iter().map(|(theirs, mine)| (mine, theirs)).collect();
        exchanged.sort_unstable();
        prop_assert_eq!(&pairs, &exchanged);
        let (mut ours, mut others): (Vec<usize>, Vec<usize>) = pairs.iter().copied().unzip();
        ours.dedup();
        others.sort_unstable();
        others.dedup();
        prop_assert!(ours.len() == pairs.len() && others.len() == pairs.len());
        prop_assert!(pairs.iter().all(|(one, other)| mine[*one].layer == theirs[*other].layer));
    }
}
