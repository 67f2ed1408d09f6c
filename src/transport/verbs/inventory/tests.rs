//! Inventories of file trees, and the distances of devices.

use super::fake::{ETHERNET, FakeMachine, FakePort, GIDS_OF_ETH0, INFINIBAND};
use super::sysfs::natural_key;
use super::*;

fn read(machine: &FakeMachine) -> Inventory {
    Inventory::read(machine.root(), Vec::new())
}

#[test]
fn a_machine_without_devices_has_an_empty_inventory() {
    assert_eq!(read(&FakeMachine::new()), Inventory::default());
    let unused = FakeMachine::new();
    unused.link("sys/class/infiniband/none", "elsewhere");
    assert_eq!(read(&unused).devices[0].ports, []);
}

#[test]
fn all_fields_of_an_infiniband_device_are_read() {
    let machine = FakeMachine::new();
    let down = FakePort { state: "1: DOWN", lid: "0xffff", rate: "2.5 Gb/sec (1X SDR)", ..INFINIBAND };
    machine.hca("mlx5_10", "pci0000:3a/0000:3a:00.0/0000:3b:00.0", 1, &[INFINIBAND, down]);
    machine.hca("mlx5_2", "pci0000:00/0000:01:00.0", -1, &[INFINIBAND]);
    let inventory = read(&machine);
    let names: Vec<&str> = inventory.devices.iter().map(|device| &*device.name).collect();
    assert_eq!(names, ["mlx5_2", "mlx5_10"], "natural order");
    assert_eq!(inventory.devices[0].pci.numa, None, "the kernel wrote -1");
    let device = &inventory.devices[1];
    assert_eq!(device.pci.path, ["pci0000:3a", "0000:3a:00.0", "0000:3b:00.0"]);
    assert_eq!((device.pci.address(), device.pci.numa), (Some("0000:3b:00.0"), Some(1)));
    assert_eq!(device.driver.as_deref(), Some("mlx5_core"));
    assert_eq!(device.firmware.as_deref(), Some("28.39.1002"));
    assert_eq!((&*device.kind, &*device.node_guid), ("CA", "9803:9b03:0067:ce60"));
    assert_eq!(
        (device.uverbs.as_deref(), device.access),
        (Some("/dev/infiniband/uverbsmlx5_10"), DeviceAccess::Granted)
    );
    let gid = Gid {
        index: 0,
        address: "fe80::9803:9b03:67:ce60".parse().expect("an address"),
        kind: GidKind::InfiniBand,
        netdev: None,
    };
    let port = RdmaPort {
        number: 1,
        state: PortState::Active,
        physical_state: "LinkUp".to_owned(),
        layer: LinkLayer::InfiniBand,
        rate_mbps: 400_000,
        lid: 31,
        sm_lid: 1,
        pkeys: vec![(0, 0xffff)],
        gids: vec![gid],
        netdev: None,
    };
    let down = RdmaPort {
        number: 2,
        state: PortState::Down,
        physical_state: "Disabled".to_owned(),
        rate_mbps: 2500,
        lid: 0xffff,
        ..port.clone()
    };
    assert_eq!(device.ports, [port, down]);
}

#[test]
fn software_devices_have_no_pci_location() {
    let machine = FakeMachine::new();
    machine.device("rxe0", &[FakePort { gids: GIDS_OF_ETH0, ..ETHERNET }]);
    machine.device("rxe1", &[ETHERNET]).file("sys/class/infiniband/rxe1/parent", "eth1");
    machine.netdev("eth0", 1500).netdev("eth1", 9000);
    machine.file("sys/class/infiniband/rxe0/ports/1/gids/256", "fe80::256");
    let inventory = read(&machine);
    assert_eq!(inventory.devices[0].pci, PciLocation::default());
    assert_eq!(
        (inventory.devices[0].driver.as_deref(), inventory.devices[0].firmware.as_deref()),
        (None, None)
    );
    let gids = &inventory.devices[0].ports[0].gids;
    assert_eq!(
        gids.iter().map(|gid| gid.index).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 5],
        "6 is empty, and 256 exceeds 8 bits"
    );
    assert_eq!(gids[3].kind, GidKind::RoceV2);
    assert_eq!(gids[3].ip().to_string(), "10.1.0.5");
    assert_eq!(gids[4].ip().to_string(), "fd00:0:0:1::5");
    assert_eq!(gids[4].kind, GidKind::RoceV1);
    assert_eq!(inventory.devices[1].ports[0].netdev.as_deref(), Some("eth1"), "named by its parent file");
    let mtus: Vec<_> = inventory.netdevs.iter().map(|netdev| (&*netdev.name, netdev.rdma_mtu())).collect();
    assert_eq!(mtus, [("eth0", Some(1024)), ("eth1", Some(4096))]);
}

#[test]
fn rdma_packets_fit_into_ethernet_frames() {
    let netdev = |mtu| Netdev { name: "eth0".to_owned(), mtu: Some(mtu), state: None };
    for (mtu, rdma) in [
        (9000, Some(4096)),
        (4192, Some(4096)),
        (4191, Some(2048)),
        (1500, Some(1024)),
        (351, None),
        (60, None),
    ] {
        assert_eq!(netdev(mtu).rdma_mtu(), rdma, "{mtu}");
    }
}

#[test]
fn a_missing_device_file_is_distinguished_from_a_missing_kernel_module() {
    let machine = FakeMachine::new();
    machine.device("rxe0", &[]).device("rxe1", &[]);
    std::fs::remove_file(machine.root().join("dev/infiniband/uverbsrxe0")).expect("the file exists");
    std::fs::remove_dir_all(machine.root().join("sys/class/infiniband_verbs/uverbsrxe1"))
        .expect("the file exists");
    let inventory = read(&machine);
    assert_eq!(
        [inventory.devices[0].access, inventory.devices[1].access],
        [DeviceAccess::Missing, DeviceAccess::Unknown]
    );
}

#[test]
fn names_are_in_natural_order() {
    let mut names = ["rxe10", "mlx5_10", "mlx5_2", "rxe", "bnxt_re0", "mlx4_11", "ibp59s0f1", "ibp59s0"];
    names.sort_by_cached_key(|name| natural_key(name));
    assert_eq!(names, ["bnxt_re0", "ibp59s0", "ibp59s0f1", "mlx4_11", "mlx5_2", "mlx5_10", "rxe", "rxe10"]);
}

#[test]
fn devices_are_near_that_share_pci_bridges_or_the_numa_node() {
    let machine = FakeMachine::new();
    machine.numa(&["10 21", "21 10"], "5-6");
    machine.hca("a", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0", 0, &[]);
    machine.hca("b", "pci0000:00/0000:00:02.0/0000:05:00.0", 0, &[]);
    machine.hca("c", "pci0000:80/0000:80:01.0/0000:81:00.0", 1, &[]);
    machine.device("rxe0", &[]);
    let inventory = read(&machine);
    let order = |affinity: &Affinity| {
        let mut devices: Vec<&RdmaDevice> = inventory.devices.iter().collect();
        devices.sort_by_key(|device| affinity.distance(&device.pci));
        devices.iter().map(|device| device.name.clone()).collect::<String>()
    };
    let without_gpu = Affinity::read(machine.root(), None);
    assert_eq!(without_gpu.nodes.iter().map(|node| node.local).collect::<Vec<_>>(), [false, true]);
    assert_eq!(
        order(&without_gpu),
        "crxe0ab",
        "node 1 is local, and a device without a location counts as local"
    );
    let gpu = "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:02.0/0000:03:00.0";
    machine.file(&format!("{gpu}/numa_node"), "0").link("sys/bus/pci/devices/0000:03:00.0", gpu);
    let gpu = Affinity::read(machine.root(), Some("0000:03:00.0"));
    assert_eq!(gpu.gpu.as_ref().and_then(PciLocation::address), Some("0000:03:00.0"));
    assert_eq!(order(&gpu), "abrxe0c", "a is behind the same switch, c at the other socket");
    let unknown = Affinity::read(machine.root(), Some("0000:99:00.0"));
    assert_eq!(order(&unknown), "crxe0ab", "a GPU without a location is ignored");
    let pci = |index: usize| gpu.distance(&inventory.devices[index].pci).pci;
    assert_eq!(
        [0, 1, 2, 3].map(pci),
        [PciDistance::Pix, PciDistance::Phb, PciDistance::Sys, PciDistance::Node]
    );
    let coherent = Affinity { is_coherent: true, ..gpu.clone() };
    let pci = |index: usize| coherent.distance(&inventory.devices[index].pci).pci;
    assert_eq!([0, 1, 2].map(pci), [PciDistance::Pix, PciDistance::Pxb, PciDistance::Sys]);
    let nowhere = Distance { pci: PciDistance::Node, numa: 10 };
    assert_eq!(Affinity::default().distance(&inventory.devices[2].pci), nowhere);
}

#[test]
fn the_inventory_of_this_machine_has_a_loopback_address() {
    let inventory = Inventory::local();
    assert!(inventory.addresses.iter().any(|address| address.ip.is_loopback()));
    assert_eq!(Affinity::local(None).gpu, None);
}
