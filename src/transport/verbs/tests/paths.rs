//! From the files of a machine to the attributes with which queue pairs are connected.

use crate::config::Config;
use crate::error::Error;
use crate::transport::verbs::inventory::fake::{FakeMachine, FakePort, GIDS_OF_ETH0, INFINIBAND};
use crate::transport::verbs::inventory::{Affinity, Inventory};
use crate::transport::verbs::objects::{
    CompletionQueue, Context, Depth, Endpoint, ModifiedQp, PortAttributes, ProtectionDomain, QueuePair, Shim,
    Verb,
};
use crate::transport::verbs::options::VerbsOptions;
use crate::transport::verbs::port_selection::{Rail, pair_rails, select};

/// GIDs of a port in a subnet behind routers: the first is local, the second has a FLID.
macro_rules! routed {
    ($flid:literal, $subnet:literal) => {
        &[
            (0, concat!("fec0:0000:0000:", $subnet, ":9803:9b03:0067:ce60"), "IB/RoCE v1", ""),
            (1, concat!("fec0:0000:", $flid, ":", $subnet, ":9803:9b03:0067:ce60"), "IB/RoCE v1", ""),
        ]
    };
}

/// The only rail of a machine with this port.
fn rail(port: FakePort<'_>, config: &Config) -> Rail {
    let describe = |machine: &FakeMachine| {
        machine.hca("mlx5_0", "pci0000:3a/0000:3b:00.0", 0, &[port]);
    };
    rail_of(describe, config)
}

fn rail_of(describe: impl FnOnce(&FakeMachine), config: &Config) -> Rail {
    let machine = FakeMachine::new();
    describe(&machine);
    let inventory = Inventory::read(machine.root(), Vec::new());
    select(&inventory, config, &Affinity::default()).expect("a port").rails.swap_remove(0)
}

/// The attributes given to `ibv_modify_qp` when a rail is connected to another.
fn connect(
    mine: &Rail,
    theirs: &Rail,
    config: &Config,
    needs_global: bool,
) -> Result<[ModifiedQp; 2], Error> {
    let shim = Shim::none().recording_attributes();
    let pd = ProtectionDomain::new(&Context::inert(&mine.device, shim.clone()))?;
    let queue = CompletionQueue::new(pd.context(), 1)?;
    let depth = Depth { sends: 1, receives: 1, inline: 0 };
    let qp = QueuePair::new(&pd, &queue, depth, (mine.port, mine.pkey_index), 1, 5)?;
    let port = PortAttributes { active: true, lid: mine.lid, mtu: 5, needs_global };
    let path = VerbsOptions::new(config).path_attributes((mine, &port), theirs, 5);
    qp.connect(0, Endpoint { qpn: 9, psn: 7 }, &path)?;
    let of = |verb| shim.attributes(verb).expect("the state was entered");
    Ok([of(Verb::ModifyQpToInit), of(Verb::ModifyQpToRtr)])
}

#[test]
fn ports_of_one_subnet_are_addressed_by_lid() {
    let config = Config::default();
    let mine = rail(INFINIBAND, &config);
    let theirs = rail(FakePort { lid: "0x2a", ..INFINIBAND }, &config);
    let [init, rtr] = connect(&mine, &theirs, &config, false).expect("inert");
    assert_eq!((init.port, init.pkey_index), (1, 0));
    assert_eq!((rtr.dlid, rtr.is_global, rtr.service_level), (0x2a, false, 0));
    let [_, rtr] = connect(&mine, &theirs, &config, true).expect("inert");
    assert_eq!((rtr.dlid, rtr.is_global, rtr.gid_index), (0x2a, true, 0), "the port requires global headers");
}

#[test]
fn ports_of_other_subnets_are_addressed_by_flid_with_a_global_header() {
    let config = Config::default();
    let of = |gids, lid| rail(FakePort { gids, lid, ..INFINIBAND }, &config);
    let mine = of(routed!("00a1", "0001"), "0x1f");
    let near = of(routed!("00a9", "0001"), "0x2a");
    let far = of(routed!("00b2", "0002"), "0x1f");
    let without = of(&routed!("00b2", "0002")[..1], "0x1f");
    assert_eq!((mine.gid_index, mine.flid, &*mine.network), (1, 0xa1, "fec0000000000001"));
    assert_eq!((without.gid_index, without.flid), (0, 0));
    for (theirs, pairs, dlid, is_global) in
        [(&near, 1, 0x2a, false), (&far, 1, 0xb2, true), (&without, 0, 0x1f, true)]
    {
        assert_eq!(pair_rails(std::slice::from_ref(&mine), std::slice::from_ref(theirs)).len(), pairs);
        let [_, rtr] = connect(&mine, theirs, &config, false).expect("inert");
        assert_eq!((rtr.dlid, rtr.is_global, rtr.gid_index), (dlid, is_global, 1), "{}", theirs.network);
    }
    let elsewhere = Config { ib_flid_gid_index: 3, ..Config::default() };
    assert_eq!(rail(FakePort { gids: routed!("00a1", "0001"), ..INFINIBAND }, &elsewhere).flid, 0);
}

#[test]
fn partition_key_service_level_and_traffic_class_are_those_of_the_settings() {
    let config = Config { ib_pkey: 2, ib_sl: 5, ib_tc: 104, ..Config::default() };
    let rail = rail_of(
        |machine| {
            machine.hca("mlx5_0", "pci0000:3a/0000:3b:00.0", 0, &[INFINIBAND]);
            machine.file("sys/class/infiniband/mlx5_0/ports/1/pkeys/2", "0x8012");
        },
        &config,
    );
    assert_eq!((rail.pkey_index, rail.partition), (2, 0x8012));
    let [init, rtr] = connect(&rail, &rail, &config, true).expect("inert");
    assert_eq!((init.pkey_index, rtr.service_level, rtr.traffic_class), (2, 5, 104));
}

#[test]
fn interfaces_of_other_namespaces_are_not_addresses_of_this_one() {
    let of_others = [
        (3, "0000:0000:0000:0000:0000:ffff:0a09:0009", "RoCE v2", "net7"),
        (4, "0000:0000:0000:0000:0000:ffff:0a09:000a", "RoCE v2", "net8"),
    ];
    let mine = GIDS_OF_ETH0[1];
    let gids = [of_others[0], of_others[1], mine];
    let config = Config::default();
    let index = |gids: &[(usize, &str, &str, &str)], has_eth0: bool| {
        let describe = |machine: &FakeMachine| {
            let port = FakePort { gids, ..crate::transport::verbs::inventory::fake::ETHERNET };
            machine.hca("mlx5_2", "pci0000:3a/0000:3b:00.2", 0, &[port]);
            if has_eth0 {
                machine.netdev("eth0", 9000);
            }
        };
        rail_of(describe, &config).gid_index
    };
    assert_eq!(index(&gids, true), 1, "the virtual function's own interface has a link-local address only");
    assert_eq!(index(&gids, false), 3, "the kernel does not say which interfaces are of this namespace");
    assert_eq!(index(&gids[..2], true), 3, "the port has no interface of this namespace");
}
