//! What is chosen on machines of all kinds, what is said of the rest, and who is paired with whom.

use super::*;
use crate::config::Family;
use crate::transport::verbs::inventory::InterfaceAddress;
use crate::transport::verbs::inventory::fake::{ETHERNET, FakeMachine, FakePort, GIDS_OF_ETH0, INFINIBAND};
use proptest::prelude::*;

const ROCE: FakePort<'_> = FakePort { gids: GIDS_OF_ETH0, ..ETHERNET };
const DOWN: &str = "1: DOWN";

/// The inventory of a machine whose `eth0` has the addresses of [`GIDS_OF_ETH0`].
fn surveyed(machine: &FakeMachine) -> Inventory {
    let address = |ip: &str, prefix| InterfaceAddress {
        netdev: "eth0".to_owned(),
        ip: ip.parse().expect("an address"),
        prefix,
    };
    let addresses = vec![address("10.1.0.5", 23), address("fd00:0:0:1::5", 64), address("127.0.0.1", 8)];
    Inventory::read(machine.root(), addresses)
}

fn chosen(machine: &FakeMachine, config: &Config) -> Result<PortSelection> {
    select(&surveyed(machine), config, &Affinity::read(machine.root(), None))
}

fn names(selection: &PortSelection) -> Vec<String> {
    selection.rails.iter().map(|rail| format!("{}:{}", rail.device, rail.port)).collect()
}

fn words(selection: &PortSelection, port: &str) -> String {
    let decision =
        selection.decisions.iter().find(|decision| format!("{}:{}", decision.device, decision.port) == port);
    match &decision.expect("a decision for every port").port_use {
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
        network: "fe80000000000000".to_owned(),
        rate_mbps: 400_000,
        numa: Some(1),
    };
    assert_eq!(selection.rails.first(), Some(&rail));
    assert_eq!(selection.rails.len(), 1);
    assert_eq!(words(&selection, "mlx5_0:1"), "rail 0");
    assert_eq!(words(&selection, "mlx5_0:2"), "is down, its wire Disabled (see to its cable, and ibstat)");
    let bytes = postcard::to_stdvec(&rail).expect("it can be sent");
    assert_eq!(postcard::from_bytes::<Rail>(&bytes).expect("it can be received"), rail);
}

#[test]
fn roce_is_addressed_by_version_then_family_then_index() {
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
        (
            2,
            Family::Auto,
            Some(0),
            0,
            "fe80::/64",
            "FLEXRING_IB_GID_INDEX=0 says so; it is RoCE v1, link-local",
        ),
    ] {
        let (index, on, because) = case(version, family, index);
        assert_eq!((index, &*on), (expected, network));
        assert!(because.starts_with(why), "{because}");
    }
}

#[test]
fn what_is_there_is_taken_if_what_is_wanted_is_not() {
    let machine = FakeMachine::new();
    machine
        .device("a", &[FakePort { gids: &GIDS_OF_ETH0[..1], ..ETHERNET }])
        .device("b", &[FakePort { gids: &GIDS_OF_ETH0[..2], ..ETHERNET }]);
    let elsewhere = (9, "::ffff:10.9.9.9", "RoCE v2", "eth9");
    machine.device("c", &[FakePort { gids: &[elsewhere, GIDS_OF_ETH0[5]], ..ETHERNET }]);
    machine.device("d", &[FakePort { gids: &[elsewhere, GIDS_OF_ETH0[1]], ..ETHERNET }]);
    let selection = chosen(&machine, &Config::default()).expect("GIDs");
    let indexes: Vec<u8> = selection.rails.iter().map(|rail| rail.gid_index).collect();
    assert_eq!(indexes, [0, 1, 5, 9], "c's 9 is of another namespace, but d has nothing better");
    assert_eq!(selection.rails[3].network, "10.9.9.0/24", "as most are");
    let why = &selection.decisions[0].gid.as_ref().expect("it was chosen").why;
    assert!(why.ends_with("of eth0, as there is no RoCE v2"), "{why}");
}

#[test]
fn near_rails_come_first_and_no_more_than_asked_for() {
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
    let left = "is not needed: FLEXRING_IB_RAILS=2 others are as near or nearer";
    assert_eq!(words(&two, "mlx5_10:1"), left);
}

#[test]
fn slow_ports_are_left_unless_they_are_named() {
    let machine = FakeMachine::new();
    let slow = FakePort { rate: "25 Gb/sec (1X EDR)", ..ROCE };
    machine.device("mlx5_0", &[INFINIBAND]).device("mlx5_bond_0", &[slow]);
    let usual = chosen(&machine, &Config::default()).expect("a rail");
    assert_eq!(names(&usual), ["mlx5_0:1"]);
    let left = "has 25 Gbit/s, less than half of what mlx5_0:1 has (FLEXRING_IB_HCA can name it)";
    assert_eq!(words(&usual, "mlx5_bond_0:1"), left);
    assert_eq!(names(&chosen(&machine, &hca("mlx5")).expect("rails")), ["mlx5_0:1", "mlx5_bond_0:1"]);
    assert_eq!(names(&chosen(&machine, &hca("^rxe")).expect("a rail")), ["mlx5_0:1"]);
    assert_eq!(names(&chosen(&machine, &hca("=mlx5_bond_0")).expect("a rail")), ["mlx5_bond_0:1"]);
}

#[test]
fn no_rail_is_an_error_that_names_cause_and_mend() {
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
    std::fs::remove_file(closed.root().join("dev/infiniband/uverbsrxe0")).expect("it was there");
    let foreign = FakeMachine::new();
    foreign.device("siw0", &[ROCE]).file("sys/class/infiniband/siw0/node_type", "4: RNIC");
    foreign.device("efa_0", &[FakePort { layer: "Unspecified", ..ROCE }]);
    let many = FakeMachine::new();
    many.device("mlx5_0", &[const { FakePort { state: DOWN, ..INFINIBAND } }; 6]);
    let usual = Config::default();
    let (system, setting) = (ErrorKind::System, ErrorKind::InvalidSetting);
    for (machine, config, kind, words) in [
        (&nothing, &usual, system, "there is no RDMA device: load the driver of one (modprobe mlx5_ib)"),
        (&portless, &usual, system, "no RDMA device has a port"),
        (
            &down,
            &usual,
            system,
            "rxe0:1 is down (ip link set eth0 up, and see to its cable); fix that, or use FLEXRING",
        ),
        (
            &unmanaged,
            &usual,
            system,
            "a:1 is initializing, as no subnet manager has been there (start one: opensm",
        ),
        (&unmanaged, &usual, system, "b:1 has no LID, as no subnet manager has been there"),
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
            "no /dev/infiniband/uverbsrxe0 here (in a container: docker run --device=/dev/infiniband)",
        ),
        (&foreign, &usual, system, "siw0:1 speaks iWARP"),
        (&foreign, &usual, system, "efa_0:1 speaks neither InfiniBand nor RoCE"),
        (
            &many,
            &usual,
            system,
            "mlx5_0:4 is down, its wire Disabled (see to its cable, and ibstat); and 2 more, which",
        ),
        (
            &works,
            &hca("mlx5"),
            setting,
            "FLEXRING_IB_HCA=\"mlx5\" leaves no RDMA port; there are: rxe0:1, rxe1:1",
        ),
        (&works, &hca("^"), setting, "FLEXRING_IB_HCA=\"^\" cannot be used"),
        (
            &works,
            &with(|c| c.ib_gid_index = Some(7)),
            setting,
            "has no GID 7, which FLEXRING_IB_GID_INDEX asks for; there are: 0, 1, 2, 3, 4, 5",
        ),
        (
            &works,
            &with(|c| c.ib_pkey = 1),
            setting,
            "has no partition key 1, which FLEXRING_IB_PKEY asks for; there are: 0",
        ),
    ] {
        let error = chosen(machine, config).expect_err(words);
        assert!(error.message().contains(words), "{error}");
        assert_eq!(error.kind(), kind, "{error}");
    }
    let ipv6 = FakeMachine::new();
    ipv6.device("rxe0", &[FakePort { gids: &GIDS_OF_ETH0[..2], ..ETHERNET }]);
    let error = chosen(&ipv6, &with(|c| c.ib_family = Family::Ipv4)).expect_err("no IPv4");
    assert_eq!(error.kind(), setting);
    assert!(error.message().contains("rxe0:1 has no GID that FLEXRING_IB_FAMILY=ipv4 allows"), "{error}");
    assert_eq!(decide(&surveyed(&nothing), &usual, &Affinity::default()), Ok(PortSelection::default()));
}

#[test]
fn a_port_that_is_down_has_its_gid_told_all_the_same() {
    let machine = FakeMachine::new();
    machine.device("rxe0", &[FakePort { state: DOWN, ..ROCE }]);
    let selection =
        decide(&surveyed(&machine), &Config::default(), &Affinity::default()).expect("a decision");
    assert_eq!(selection.decisions[0].gid.as_ref().map(|gid| gid.index), Some(3));
}

/// `i1` is on InfiniBand subnet 1, `4a` and `6a` on Ethernet with an address in network a, `1a` the same by RoCE v1.
fn rails(text: &str) -> Vec<Rail> {
    let rail = |word: &str| {
        let (first, network) = word.split_at(1);
        let ip: IpAddr =
            if first == "6" { "fd00::1" } else { "::ffff:10.0.0.1" }.parse().expect("an address");
        let IpAddr::V6(ip) = ip else { unreachable!("it was written so") };
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
            network: network.to_owned(),
            rate_mbps: 1,
            numa: None,
        }
    };
    text.split_whitespace().map(rail).collect()
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
        ("4a 6a 1a", "1b 6b 4b", vec![(0, 2), (1, 1), (2, 0)]),
        ("4a", "6a", vec![]),
        ("4a", "", vec![]),
    ] {
        assert_eq!(pair_rails(&rails(mine), &rails(theirs)), pairs, "{mine} with {theirs}");
    }
}

#[test]
fn ranks_that_cannot_meet_are_told_why() {
    for (mine, theirs, words) in [
        (
            "4a",
            "i1",
            "rank 0's rails are Ethernet (RoCE v2, IPv4), and rank 5's rails are InfiniBand (subnet 1): name ports of \
             one kind in FLEXRING_IB_HCA, or use FLEXRING_TRANSPORT=tcp",
        ),
        (
            "4a 4b",
            "6a",
            "rank 0's rails are Ethernet (RoCE v2, IPv4), and rank 5's rails are Ethernet (RoCE v2, IPv6): set",
        ),
        (
            "4a",
            "1a",
            "(RoCE v1, IPv4): set FLEXRING_IB_ROCE_VERSION and FLEXRING_IB_FAMILY to what both have",
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
        let told = describe_mismatch((0, &mine), (5, &theirs));
        assert!(told.contains(words), "{told}");
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
