//! The command over adapters that are in memory, which do what real ones do and Soft-RoCE never does.

#[allow(dead_code, reason = "the library's tests use more of it")]
#[path = "../../../src/transport/verbs/inventory/fake.rs"]
mod fake;
mod lab;

use crate::programs::simulated_cuda;
use fake::{ETHERNET, FakeMachine, FakePort, INFINIBAND};
use lab::{Node, at_once, job};

/// A short job that checks its sums.
const SHORT: &str = "perf -b 8 -e 4M -f 64 -w 1 -n 3";

/// A node with this many InfiniBand adapters, each at a PCI switch of its own.
fn infiniband(adapters: usize) -> FakeMachine {
    of_networks(adapters, |_| 0)
}

/// A node with this many InfiniBand adapters, each in the subnet of this number.
fn of_networks(adapters: usize, network: impl Fn(usize) -> usize) -> FakeMachine {
    let machine = FakeMachine::new();
    for number in 0..adapters {
        let slot = format!("pci0000:{number}0/0000:{number}0:00.0/0000:{number}1:00.0");
        let gid = format!("fe80:0000:0000:{:04x}:9803:9b03:0067:ce60", network(number));
        let port = FakePort { gids: &[(0, &gid, "IB/RoCE v1", "")], ..INFINIBAND };
        machine.hca(&format!("mlx5_{number}"), &slot, 0, &[port]);
    }
    machine
}

/// Two nodes whose adapters differ from good ones in this way, and whose ranks must use them.
fn pair(adapters: usize, ranks: usize, quirks: &str) -> [Node; 2] {
    [0, 1].map(|_| Node::new(infiniband(adapters), ranks).quirks(quirks).set("FLEXRING_TRANSPORT", "verbs"))
}

/// Whether a line contains all of these words.
fn has_line(text: &str, words: &[&str]) -> bool {
    text.lines().any(|line| words.iter().all(|word| line.contains(word)))
}

#[test]
fn good_adapters_carry_the_right_sums_without_a_word() {
    for (adapters, ranks) in [(1, 1), (3, 2)] {
        let Some(job) = job(&pair(adapters, ranks, ""), SHORT) else { return };
        let text = job.sums_are_right();
        assert!(!text.contains("WARN") && !text.contains("verbs:"), "{text}");
    }
}

/// Counter-example: all ranks used the first four adapters, and the others were idle.
#[test]
fn every_adapter_is_used_by_one_rank_where_each_has_a_subnet() {
    const ADAPTERS: usize = 8;
    // Ranks of one position have rails in common; a broadcast needs links between others.
    for arguments in [SHORT, "perf --collective broadcast --root 1 -b 64K -e 64K -w 1 -n 2"] {
        let node = |_| {
            let of_each = (0..ADAPTERS).map(|number| format!("mlx5_{number}:network={number}"));
            Node::new(of_networks(ADAPTERS, |number| number), 2)
                .quirks(&of_each.collect::<Vec<_>>().join(" "))
                .set("FLEXRING_TRANSPORT", "verbs")
                .set("FLEXRING_LOG", "debug")
        };
        let Some(job) = job(&[0, 1].map(node), arguments) else { return };
        let text = job.sums_are_right();
        for (node, adapter) in (0..2).flat_map(|node| (0..ADAPTERS).map(move |adapter| (node, adapter))) {
            let uses = |line: &&str| {
                let of = |rank| line.contains(&format!("verbs: rank {rank} uses mlx5_{adapter}:1, "));
                (of(2 * node) || of(2 * node + 1)) && !line.contains("reserve")
            };
            assert_eq!(text.lines().filter(uses).count(), 1, "mlx5_{adapter} of node {node}: {text}");
        }
    }
}

#[test]
fn packets_of_half_the_length_are_used_where_a_switch_passes_no_longer_ones() {
    // Adapters report a loss after half a minute, which no rank waits for.
    at_once(&["mtu=2048", "mtu=2048 delay=40000"], |quirks| {
        let Some(job) = job(&pair(1, 1, quirks), SHORT) else { return };
        let text = job.sums_are_right();
        let words = ["WARN", "packets of 4096 bytes get lost", "MTU", "mlx5_0", "half the length"];
        assert!(has_line(&text, &words), "{text}");
        assert_eq!(text.matches("WARN").count(), 1, "rank 0 alone says so: {text}");
    });
}

#[test]
fn a_rail_that_loses_long_packets_is_left_out_or_named() {
    let Some(with_another) = job(&pair(2, 1, "mlx5_1:lose=4096"), SHORT) else { return };
    let text = with_another.sums_are_right();
    assert!(has_line(&text, &["WARN", "does not use mlx5_1:1", "MTU"]), "{text}");
    let alone = job(&pair(1, 1, "lose=4096"), SHORT).expect("not skipped");
    let text = alone.text();
    assert!(alone.0.iter().all(|rank| !rank.status.success()), "{text}");
    for rank in &alone.0 {
        assert!(has_line(&rank.text, &["packets of 2048 bytes get lost", "MTU", "mlx5_0"]), "{text}");
    }
}

/// Counter-example: links that calls make were tested by their first messages, and the error named no MTU.
#[test]
fn links_that_calls_make_are_tested_with_long_packets() {
    // Each rank of a node uses one adapter, and plans link those of one number.
    let arguments = "perf --collective broadcast --root 1 -b 64K -e 64K -w 1 -n 2";
    let node = |quirks| move |_| Node::new(infiniband(2), 2).quirks(quirks);
    // Adapters report a loss after half a minute, which no rank waits for.
    let cases = ["spine_mtu=2048", "spine_mtu=1024", "spine_mtu=2048 delay=40000", "spine_mtu=512", ""];
    at_once(&cases, |quirks| {
        let nodes = [0, 1].map(node(quirks));
        let is_late = quirks.contains("delay");
        let patience = |node: Node| if is_late { node.set("FLEXRING_IB_RECONNECT_MS", "4000") } else { node };
        let Some(job) = job(&nodes.map(patience), arguments) else { return };
        match *quirks {
            "" => assert!(!job.sums_are_right().contains("WARN"), "{}", job.text()),
            "spine_mtu=512" => {
                let text = job.text();
                assert!(job.0.iter().all(|rank| !rank.status.success()), "{text}");
                let words = ["cannot be reached", "packets of ", "bytes get lost", "MTU", "mlx5_"];
                assert!(has_line(&text, &words), "{text}");
            }
            _ => {
                let text = job.sums_are_right();
                let words =
                    ["WARN", "packets of 4096 bytes get lost", "MTU", "mlx5_", "packets of half the length"];
                assert!(has_line(&text, &words) && has_line(&text, &["works again"]), "{quirks}: {text}");
            }
        }
    });
}

/// Counter-example: such a rail broke and worked again 33 times in 100 s.
#[test]
fn a_rail_that_loses_messages_again_and_again_is_given_up() {
    let Some(job) = job(&pair(2, 1, "mlx5_1:lose=30000"), "perf -b 1M -e 1M -w 2 -n 40") else { return };
    let text = job.sums_are_right();
    assert!(
        has_line(&text, &["WARN", "broke again before it had carried 1 MiB", "is not used any more"]),
        "{text}"
    );
    assert!(text.matches("works again").count() <= 4, "{text}");
}

/// Counter-example: a rail that long packets no longer pass was tried again and again without a word.
#[test]
fn a_rail_that_loses_long_packets_later_carries_shorter_ones_or_is_given_up() {
    // Long enough for three failures, with pauses before each try.
    for (mtu, outcome) in [(2048, "works again"), (512, "is not used any more")] {
        let quirks = format!("mlx5_1:mtu={mtu} mlx5_1:after=2000000");
        let arguments = "perf -b 256K -e 256K -w 2 -n 400";
        let Some(job) = job(&pair(2, 1, &quirks), arguments) else { return };
        let text = job.sums_are_right();
        let words =
            ["WARN", "cannot be used", "packets of 4096 bytes get lost", "mlx5_1 port 1", "fix: set the"];
        assert!(has_line(&text, &words), "{text}");
        for rank in &job.0 {
            assert!(rank.text.matches("cannot be used").count() <= 1, "{text}");
        }
        assert!(has_line(&text, &["WARN", outcome]), "{text}");
    }
}

#[test]
fn queue_pairs_that_are_not_flushed_or_refuse_requests_cost_no_sum() {
    for quirks in ["mlx5_1:lose=30000 no_flush", "mlx5_1:lose=30000 einval"] {
        let begun = std::time::Instant::now();
        let Some(job) = job(&pair(2, 1, quirks), "perf -b 1M -e 1M -w 1 -n 20") else { return };
        job.sums_are_right();
        // A device that does not flush costs a second for each of three failures.
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{quirks}");
    }
}

#[test]
fn a_device_that_fails_costs_its_rail_only() {
    // A device may fail and flush nothing.
    for quirks in ["mlx5_0:fails_after=3000000", "mlx5_0:fails_after=3000000 mlx5_0:no_flush"] {
        let Some(job) = job(&pair(2, 1, quirks), "perf -b 1M -e 1M -w 2 -n 10") else { return };
        let text = job.sums_are_right();
        assert!(has_line(&text, &["WARN", "mlx5_0: the device failed"]), "{quirks}: {text}");
    }
}

#[test]
fn a_cable_that_is_cut_costs_its_rail_only() {
    let Some(job) = job(&pair(2, 1, "mlx5_1:cut_after=3000000"), "perf -b 1M -e 1M -w 2 -n 10") else {
        return;
    };
    let text = job.sums_are_right();
    assert!(has_line(&text, &["WARN", "port 1 of mlx5_1 went down"]), "{text}");
}

/// Counter-example: the new queue pairs were connected by the number that the address had had.
#[test]
fn a_port_that_comes_back_with_its_address_at_another_place_is_used_again() {
    let gid = |number: usize, at: usize| format!("0000:0000:0000:0000:0000:ffff:0a0{number}:000{}", at + 1);
    let nodes = [0, 1].map(|at| {
        let machine = FakeMachine::new();
        for number in 0..2 {
            let gids = [(3, &*gid(number, at), "RoCE v2", "eth9")];
            let slot = format!("pci0000:{number}0/0000:{number}0:00.0");
            machine.hca(&format!("mlx5_{number}"), &slot, 0, &[FakePort { gids: &gids, ..ETHERNET }]);
        }
        Node::new(machine, 1).set("FLEXRING_TRANSPORT", "verbs").set("FLEXRING_LOG", "info")
    });
    let [first, second] = nodes;
    let nodes = [first.quirks("mlx5_1:cut_after=3000000 mlx5_1:back_after=300"), second];
    let Some(job) = job(&nodes, "perf -b 128K -e 128K -w 2 -n 800") else { return };
    let text = job.sums_are_right();
    assert!(has_line(&text, &["WARN", "port 1 of mlx5_1 went down"]), "{text}");
    assert!(has_line(&text, &["works again; 8 of 8 do"]), "{text}");
}

/// Counter-example: what was sent again counted as progress, so the time limit was not reached.
#[test]
fn calls_end_in_time_while_adapters_send_again_what_is_lost() {
    let nodes = pair(1, 1, "lose=30000 delay=1500").map(|node| node.set("FLEXRING_TIMEOUT_MS", "2500"));
    let Some(job) = job(&nodes, "perf -b 1M -e 1M -w 1 -n 3") else { return };
    for rank in &job.0 {
        assert!(!rank.status.success(), "{}", job.text());
        assert!(has_line(&rank.text, &["error", "timed out", "no progress for 2.5s"]), "{}", job.text());
        assert!(has_line(&rank.text, &["WARN", "no acknowledgement came", "mlx5_0"]), "{}", job.text());
    }
}

#[test]
fn keys_with_relaxed_ordering_and_short_inline_data_are_enough() {
    let Some(relaxed) = job(&pair(1, 1, "relaxed_only"), SHORT) else { return };
    assert!(!relaxed.sums_are_right().contains("RELAXED"));
    let strict = pair(1, 2, "relaxed_only").map(|node| node.set("FLEXRING_IB_RELAXED_ORDERING", "0"));
    let text = job(&strict, SHORT).expect("not skipped").sums_are_right();
    assert!(has_line(&text, &["WARN", "FLEXRING_IB_RELAXED_ORDERING=0 has no effect on mlx5_0"]), "{text}");
    assert_eq!(text.matches("has no effect").count(), 1, "{text}");
    let inline = job(&pair(1, 1, "max_inline=100 min_inline=90"), SHORT).expect("not skipped");
    inline.sums_are_right();
}

/// As some drivers report received writes: `byte_len` is 0.
#[test]
fn writes_whose_length_the_driver_leaves_out_arrive_in_full() {
    for arguments in [SHORT, "perf --collective all_to_all -b 8 -e 4M -f 64 -w 1 -n 3"] {
        let Some(job) = job(&pair(2, 2, "no_length"), arguments) else { return };
        let text = job.sums_are_right();
        assert!(!text.contains("WARN"), "{text}");
    }
    let lossy = job(&pair(2, 1, "no_length mlx5_1:lose=30000"), "perf -b 1M -e 1M -w 1 -n 20");
    lossy.expect("not skipped").sums_are_right();
}

#[test]
fn errors_name_the_cause() {
    let cases = [
        ("max_cqe=300", ["ibv_create_cq", "mlx5_0", "315 entries", "256 queues of 300", "FLEXRING_IB_HCA"]),
        ("max_qp=0", ["ibv_create_qp", "mlx5_0", "allows 0 of 512", "Cannot allocate memory", "memlock"]),
        (
            "max_qp_wr=100",
            ["ibv_create_qp", "mlx5_0", "of 127 and 188 requests", "of 100", "FLEXRING_IB_HCA"],
        ),
        ("no_rc", ["ibv_create_qp", "mlx5_0", "not supported", "no reliable connections", "FLEXRING_IB_HCA"]),
        ("lose=30000 status=4", ["local protection error", "mlx5_0", "(ACS)", "IOMMU", "iommu=pt"]),
    ];
    at_once(&cases, |(quirks, words)| {
        let Some(job) = job(&pair(1, 1, quirks), "perf -b 1M -e 1M -w 1 -n 3") else { return };
        let text = job.text();
        assert!(job.0.iter().all(|rank| !rank.status.success()), "{text}");
        for rank in &job.0 {
            assert!(has_line(&rank.text, words), "{quirks}: {text}");
        }
    });
}

#[test]
fn links_that_calls_make_fit_the_devices_completion_queues() {
    // Plans link each rank with one of the other node. An exchange with all makes three more links.
    let node = |_| Node::new(infiniband(1), 4).quirks("max_cqe=400");
    let Some(job) = job(&[0, 1].map(node), "perf --collective all_to_all -b 8M -e 8M -w 1 -n 2") else {
        return;
    };
    job.sums_are_right();
}

#[test]
fn adapters_that_are_there_and_not_used_are_named_once_with_the_fix() {
    // An error names four ports at most.
    let cases: [&[(&str, &[&str])]; 2] = [
        &[
            ("no file", &["there is no /dev/infiniband/uverbsmlx5_0", "docker run --device=/dev/infiniband"]),
            ("efa", &["Elastic Fabric Adapter", "aws-ofi-nccl"]),
            ("no subnet manager", &["no subnet manager", "opensm"]),
            ("iwarp", &["iWARP"]),
        ],
        &[("erdma", &["eRDMA"]), ("no address", &["mlx5_1:1 has no GID", "ip address add"])],
    ];
    for case in cases {
        let node = |_| {
            let machine = infiniband(case.len());
            for (number, (what, _)) in case.iter().enumerate() {
                let device = format!("sys/class/infiniband/mlx5_{number}");
                let by = |driver: &str| {
                    let link = format!("{device}/device/driver");
                    std::fs::remove_file(machine.root().join(&link)).expect("removed");
                    machine.link(&link, &format!("sys/bus/pci/drivers/{driver}"));
                    machine.file(&format!("{device}/ports/1/link_layer"), "Unspecified");
                };
                match *what {
                    "no file" => {
                        let file = format!("dev/infiniband/uverbsmlx5_{number}");
                        std::fs::remove_file(machine.root().join(file)).expect("removed");
                    }
                    "no subnet manager" => {
                        machine.file(&format!("{device}/ports/1/state"), "2: INIT");
                    }
                    "iwarp" => {
                        machine.file(&format!("{device}/node_type"), "4: RNIC");
                    }
                    "no address" => {
                        machine.file(&format!("{device}/ports/1/link_layer"), "Ethernet");
                        std::fs::remove_dir_all(machine.root().join(&device).join("ports/1/gids"))
                            .expect("removed");
                    }
                    driver => by(driver),
                }
            }
            Node::new(machine, 1)
        };
        let Some(job) = job(&[0, 1].map(node), SHORT) else { return };
        let text = job.sums_are_right();
        for (number, (what, words)) in case.iter().enumerate() {
            let port = format!("mlx5_{number}:1");
            let all: Vec<&str> = [&["WARN", "use tcp", &*port], *words].concat();
            assert!(has_line(&text, &all), "{what}: {text}");
        }
        assert_eq!(text.matches("use tcp").count(), 1, "{text}");
    }
}

#[test]
fn a_port_that_other_nodes_can_use_is_named() {
    let down = |of_node: [bool; 2]| {
        let node = |at: usize| {
            let machine = infiniband(2);
            if of_node[at] {
                machine.file("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN");
            }
            Node::new(machine, 1).set("FLEXRING_TRANSPORT", "verbs")
        };
        Some(job(&[0, 1].map(node), SHORT)?.sums_are_right())
    };
    let Some(text) = down([false, true]) else { return };
    let words =
        ["WARN", "fewer ports than another node, 1 instead of 2", "mlx5_1:1 is down", "check its cable"];
    assert!(has_line(&text, &words), "{text}");
    assert_eq!(text.matches("fewer ports").count(), 1, "{text}");
    // As a port that is not needed.
    let text = down([true, true]).expect("not skipped");
    assert!(!text.contains("WARN"), "{text}");
}

/// As the kernel does, which looks up the route and the neighbour when a queue pair is connected.
#[test]
fn rails_that_no_route_connects_are_left_out_or_named() {
    let node = |first: usize| {
        move |at: usize| {
            let machine = FakeMachine::new();
            let mut quirks = "no_route".to_owned();
            for number in first..2 {
                // Of the second adapters, each has a network of its own.
                let network = number * (at + 1);
                let gid = format!("0000:0000:0000:0000:0000:ffff:0a0{network}:000{}", at + 1);
                let port = FakePort { gids: &[(3, &gid, "RoCE v2", "eth9")], ..ETHERNET };
                let slot = format!("pci0000:{number}0/0000:{number}0:00.0");
                machine.hca(&format!("mlx5_{number}"), &slot, 0, &[port]);
                quirks += &format!(" mlx5_{number}:network={network}");
            }
            Node::new(machine, 1).quirks(&quirks).set("FLEXRING_TRANSPORT", "verbs")
        }
    };
    let words = ["ibv_modify_qp to RTR failed on mlx5_1", "could not be resolved", "is reachable"];
    let Some(with_another) = job(&[0, 1].map(node(0)), SHORT) else { return };
    let text = with_another.sums_are_right();
    assert!(has_line(&text, &[&["WARN", "does not use mlx5_1:1"], &words[..]].concat()), "{text}");
    let alone = job(&[0, 1].map(node(1)), SHORT).expect("not skipped");
    for rank in &alone.0 {
        assert!(!rank.status.success() && has_line(&rank.text, &words), "{}", alone.text());
    }
}

#[test]
fn settings_of_nccl_count_where_flexrings_are_unset_and_roce_without_a_class_is_named() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "NCCL_IB_HCA=mlx5_1\nNCCL_IB_SL=3\n").expect("written");
    let node = |settings: &[(&'static str, &str)]| {
        let machine = FakeMachine::new();
        for number in 0..2 {
            let gid = format!("0000:0000:0000:0000:0000:ffff:0a01:000{}", number + 1);
            let port = FakePort { gids: &[(3, &gid, "RoCE v2", "eth9")], ..ETHERNET };
            machine.hca(
                &format!("mlx5_{number}"),
                &format!("pci0000:{number}0/0000:{number}0:00.0"),
                0,
                &[port],
            );
        }
        let node = Node::new(machine, 1).set("FLEXRING_TRANSPORT", "verbs").set("FLEXRING_LOG", "debug");
        settings.iter().fold(node, |node, (name, value)| node.set(name, *value))
    };
    let conf = file.path().to_str().expect("a path");
    let nodes = [0, 1].map(|_| node(&[("NCCL_CONF_FILE", conf)]));
    let Some(with_file) = job(&nodes, SHORT) else { return };
    let text = with_file.sums_are_right();
    assert!(has_line(&text, &["FLEXRING_IB_HCA=mlx5_1 (NCCL_IB_HCA in ", "FLEXRING_IB_SL=3"]), "{text}");
    assert!(!text.contains("uses mlx5_0:1") && text.contains("uses mlx5_1:1"), "{text}");
    assert!(has_line(&text, &["WARN", "mlx5_1:1", "traffic class 0", "FLEXRING_IB_TC"]), "{text}");
    // What cannot be used is named as it was given.
    let bad =
        |settings: &[(&'static str, &str)]| job(&[0, 1].map(|_| node(settings)), SHORT).expect("not skipped");
    std::fs::write(file.path(), "NCCL_IB_SL=99\n").expect("written");
    let in_file = format!("NCCL_IB_SL in {conf}=\"99\" cannot be used");
    for (settings, words) in [
        (&[("NCCL_IB_HCA", "mlx9")][..], "NCCL_IB_HCA=\"mlx9\" admits no RDMA port"),
        (&[("NCCL_IB_HCA", "mlx5_0:x")], "NCCL_IB_HCA=\"mlx5_0:x\" cannot be used"),
        (&[("NCCL_IB_GID_INDEX", "7")], "which NCCL_IB_GID_INDEX requires"),
        (&[("NCCL_IB_TC", "lossless")], "NCCL_IB_TC=\"lossless\" cannot be used"),
        (&[("NCCL_CONF_FILE", conf)], &in_file),
    ] {
        let text = bad(settings).text();
        assert!(
            text.contains(words) && !text.contains(&words.replace("NCCL", "FLEXRING")),
            "{words}: {text}"
        );
    }
    let with_class = job(&[0, 1].map(|_| node(&[("NCCL_IB_TC", "106")])), SHORT).expect("not skipped");
    let text = with_class.sums_are_right();
    assert!(!text.contains("traffic class 0") && text.contains("uses mlx5_0:1"), "{text}");
}

#[test]
fn the_doctor_tests_the_ports_of_a_job_one_by_one() {
    let with_facts = |node: usize| {
        let machine = infiniband(2);
        let bridge = "sys/devices/pci0000:10/0000:10:00.0";
        // Access Control Services at 0x100 that redirect requests.
        let mut space = vec![0; 256];
        space.extend([0x0d, 0, 1, 0, 0, 0, 0x1d, 0]);
        std::fs::write(machine.root().join(bridge).join("config"), space).expect("written");
        let device = format!("{bridge}/0000:11:00.0");
        machine.file(&format!("{device}/current_link_speed"), "32.0 GT/s PCIe");
        machine.file(&format!("{device}/current_link_width"), "8");
        machine.file(&format!("{device}/max_link_speed"), "32.0 GT/s PCIe");
        machine.file(&format!("{device}/max_link_width"), "16");
        machine.file("sys/class/infiniband/mlx5_0/fw_ver", &format!("28.39.{node}"));
        Node::new(machine, 1)
    };
    let Some(good) = job(&[0, 1].map(with_facts), "doctor --pair") else { return };
    let text = &good.0[0].text;
    assert!(good.0.iter().all(|rank| rank.status.success()) && good.0[1].text.is_empty(), "{}", good.text());
    for words in [
        &["rail 0", "mlx5_0:1", "works", "GB/s of 50.0"][..],
        &["rail 1", "mlx5_1:1", "works"],
        &["mlx5_1:1", "32.0 GT/s PCIe x8", "could have 32.0 GT/s PCIe x16"],
        &["mlx5_1:1", "Access Control Services", "0000:10:00.0"],
        &["different firmware", "mlx5_core 28.39.0", "mlx5_core 28.39.1"],
        &["all 2 rails between 2 ranks work"],
    ] {
        assert!(has_line(text, words), "{words:?}: {text}");
    }
    assert!(has_line(text, &["ranks 0", "mlx5_0:1 (NODE), mlx5_1:1 (NODE) on each node"]), "{text}");
    // A node with fewer ports than the other.
    let unequal = ["1: DOWN", "4: ACTIVE"].map(|state| {
        let machine = infiniband(2);
        machine.file("sys/class/infiniband/mlx5_1/ports/1/state", state);
        Node::new(machine, 1)
    });
    let unequal = job(&unequal, "doctor --pair").expect("not skipped");
    assert!(unequal.0.iter().all(|rank| rank.status.code() == Some(1)), "{}", unequal.text());
    let text = &unequal.0[0].text;
    assert!(has_line(text, &["different numbers of ports", "has 1", "has 2"]), "{text}");
    assert!(has_line(text, &["does not use a port", "mlx5_1:1 is down", "check its cable"]), "{text}");
    let bad = job(&pair(2, 1, "mlx5_1:lose=4096"), "doctor --pair --json").expect("not skipped");
    assert!(bad.0.iter().all(|rank| rank.status.code() == Some(1)), "{}", bad.text());
    let text = &bad.0[0].text;
    let report: serde_json::Value =
        serde_json::from_str(&text[text.find("{\n").expect("JSON")..]).expect("JSON");
    assert!(report["tests"][0]["gbytes_per_second"].as_f64() > Some(0.0), "{report:#}");
    let failure = report["tests"][1]["failure"].as_str().expect("why it failed");
    assert!(failure.contains("MTU") && failure.contains("mlx5_1"), "{failure}");
}

#[test]
fn the_doctor_names_what_loses_packets_and_measures_gpu_memory() {
    let node = |_| {
        let machine = FakeMachine::new();
        let gids: &[_] = &[(3, "0000:0000:0000:0000:0000:ffff:0a01:0001", "RoCE v2", "eth9")];
        machine.hca("mlx5_bond_0", "pci0000:b0/0000:b1:00.0", 0, &[FakePort { gids, ..ETHERNET }]);
        for (file, text) in [
            ("sys/class/net/eth9/qos/pfc", "0,0,0,0,0,0,0,0"),
            ("sys/class/net/eth9/qos/trust", "pcp"),
            ("sys/class/net/eth9/ecn/roce_np/enable/3", "1"),
            ("sys/class/net/eth9/ecn/roce_rp/enable/3", "0"),
            ("sys/class/net/eth9/bonding/mode", "802.3ad 4"),
            ("sys/class/net/eth9/bonding/xmit_hash_policy", "layer2 0"),
            ("sys/class/infiniband/mlx5_bond_0/ports/1/gid_attrs/ndevs/3", "eth9"),
            ("sys/class/infiniband/mlx5_bond_0/ports/1/hw_counters/local_ack_timeout_err", "7"),
            ("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de"),
            ("sys/bus/pci/devices/0000:01:00.0/class", "0x030200"),
            // BAR1 of 2 MiB.
            (
                "sys/bus/pci/devices/0000:01:00.0/resource",
                "0x0000000001000000 0x0000000001ffffff 0x0000000000040200\n\
                 0x0000002000000000 0x00000020001fffff 0x000000000014220c",
            ),
        ] {
            machine.file(file, text);
        }
        // What is lost is sent with packets of half the length.
        Node::new(machine, 1).quirks("mtu=2048")
    };
    let Some(found) = job(&[0, 1].map(node), "doctor --pair") else { return };
    let text = &found.0[0].text;
    assert!(found.0.iter().all(|rank| rank.status.success()), "{}", found.text());
    for words in [
        &["mlx5_bond_0:1", "flow control (PFC) for no priority", "mlnx_qos -i eth9"][..],
        &["priority from pcp", "--trust dscp"],
        &["marks of congestion (ECN)"],
        &["is a bond (802.3ad, layer2)"],
        &["GPU 0000:01:00.0", "2 MiB (BAR1)", "slots take 4 MiB"],
        &["packets again: the network loses some"],
        &["counted", "local_ack_timeout_err (no acknowledgement came in time)"],
    ] {
        assert!(has_line(text, words), "{words:?}: {text}");
    }
    let Some(cuda) = simulated_cuda() else { return };
    let on_gpu = |_| {
        let node = Node::new(infiniband(1), 1).set("FLEXRING_GDR_LEVEL", "SYS");
        node.set("LD_LIBRARY_PATH", cuda.to_str().expect("a path"))
    };
    let measured = job(&[0, 1].map(on_gpu), "doctor --pair").expect("not skipped");
    assert!(has_line(&measured.0[0].text, &["rail 0", "works", "GPU memory"]), "{}", measured.text());
}

/// Counter-example: ports were matched by position, so both rails of such nodes failed.
#[test]
fn the_doctor_tests_ports_that_reach_each_other() {
    let node = |networks: [usize; 2]| {
        let of_each = [0, 1].map(|number| format!("mlx5_{number}:network={}", networks[number]));
        let machine = of_networks(2, |number| networks[number]);
        for number in 0..2 {
            // A GPU beside the adapter.
            let gpu = format!("sys/devices/pci0000:{number}0/0000:{number}0:00.0/0000:{number}2:00.0");
            machine.link(&format!("sys/bus/pci/devices/0000:{number}2:00.0"), &gpu);
            machine.file(&format!("{gpu}/vendor"), "0x10de");
            machine.file(&format!("{gpu}/class"), "0x030200");
        }
        Node::new(machine, 1).quirks(&of_each.join(" "))
    };
    let divided = ["mlx5_0:1", "mlx5_1:1"].map(|port| format!("{port} (PIX) on each node"));
    let has_division = |text: &str| {
        (0..).zip(&divided).all(|(number, ports)| has_line(text, &[&format!("ranks {number}"), ports]))
    };
    let Some(crossed) = job(&[node([0, 1]), node([1, 0])], "doctor --pair") else { return };
    let text = &crossed.0[0].text;
    assert!(crossed.0.iter().all(|rank| rank.status.success()), "{}", crossed.text());
    for words in [["mlx5_0:1 - ", " mlx5_1:1", "works"], ["mlx5_1:1 - ", " mlx5_0:1", "works"]] {
        assert!(has_line(text, &words), "{words:?}: {text}");
    }
    assert!(has_division(text), "{text}");
    for number in [0, 1] {
        assert!(has_line(text, &[&format!("ports of ranks {number} do not reach each other")]), "{text}");
    }
    let apart = job(&[node([0, 1]), node([0, 2])], "doctor --pair").expect("not skipped");
    let text = &apart.0[0].text;
    assert!(has_division(text) && !text.contains("ports of ranks 0"), "{text}");
    assert!(has_line(text, &["ports of ranks 1 do not reach each other"]), "{text}");
    assert!(apart.0.iter().all(|rank| rank.status.code() == Some(1)), "{}", apart.text());
    assert!(has_line(text, &["rail 0", "mlx5_0:1", "works"]), "{text}");
    for rank in [0, 1] {
        let words = ["mlx5_1:1", "reaches no port", &format!("rank {rank}'s rails"), "one subnet"];
        assert!(has_line(text, &words), "{words:?}: {text}");
    }
}

#[test]
fn a_gpu_without_a_near_adapter_is_named_unless_nccls_file_says_where_both_are() {
    let Some(cuda) = simulated_cuda() else { return };
    let file = tempfile::NamedTempFile::new().expect("a file");
    let topology = r#"<system version="1"><cpu numaid="0"><pci busid="ffff:ff:01.0">
        <pci busid="0000:01:00.0"/><pci busid="0000:b1:00.0"/></pci></cpu></system>"#;
    std::fs::write(file.path(), topology).expect("written");
    let node = |_| {
        let machine = FakeMachine::new();
        machine.hca("mlx5_0", "pci0000:b0/0000:b1:00.0", 0, &[INFINIBAND]);
        machine.link("sys/bus/pci/devices/0000:01:00.0", "sys/devices/pci0000:00/0000:01:00.0");
        Node::new(machine, 1)
            .set("FLEXRING_TRANSPORT", "verbs")
            .set("FLEXRING_GPU", "0")
            .set("LD_LIBRARY_PATH", cuda.to_str().expect("a path"))
    };
    let hidden = [0, 1].map(|at| node(at).set("NCCL_TOPO_FILE", "/nonexistent"));
    let Some(hidden) = job(&hidden, SHORT) else { return };
    let text = hidden.sums_are_right();
    let words = [
        "WARN",
        "GPU memory of ranks 0 and 1 is copied",
        "mlx5_0 is NODE from the GPU of rank 0",
        "FLEXRING_GDR_LEVEL=PXB",
        "NCCL_TOPO_FILE=/nonexistent is not used",
    ];
    assert!(has_line(&text, &words), "{text}");
    let file = file.path().to_str().expect("a path");
    let shown = job(&[0, 1].map(|at| node(at).set("NCCL_TOPO_FILE", file)), SHORT).expect("not skipped");
    let text = shown.sums_are_right();
    assert!(!text.contains("is copied through host memory"), "{text}");
}

/// Counter-example: calls on GPUs failed where bridges refuse what adapters access there.
#[test]
fn gpu_memory_that_adapters_cannot_access_is_copied_through_host_memory() {
    let Some(cuda) = simulated_cuda() else { return };
    let node = |quirks: &'static str, way: &'static str| {
        let cuda = cuda.to_str().expect("a path");
        move |_| {
            let node = Node::new(infiniband(1), 1).quirks(quirks).set("FLEXRING_TRANSPORT", "verbs");
            let node = node.set("FLEXRING_GDR_LEVEL", "SYS").set("FLEXRING_GPU_DIRECT", way);
            node.set("FLEXRING_GPU", "0").set("LD_LIBRARY_PATH", cuda)
        }
    };
    let arguments = "perf --device cuda -b 64K -e 64K -w 1 -n 1";
    let Some(good) = job(&[0, 1].map(node("", "auto")), arguments) else { return };
    let text = good.sums_are_right();
    assert!(!text.contains("is copied through host memory"), "{text}");
    let refused = job(&[0, 1].map(node("no_gpu", "auto")), arguments).expect("not skipped");
    let text = refused.sums_are_right();
    let words = ["WARN", "is copied through host memory", "mlx5_0: cannot write to it", "(ACS)", "IOMMU"];
    assert!(has_line(&text, &words), "{text}");
    let required = job(&[0, 1].map(node("no_gpu", "peer")), arguments).expect("not skipped");
    let text = required.sums_are_right();
    assert!(
        has_line(&text, &["WARN", "are not registered", "mlx5_0: cannot write to it", "(ACS)"]),
        "{text}"
    );
}

/// A node whose rank has a simulated GPU.
fn with_gpu(adapters: usize, quirks: &str, cuda: &std::path::Path) -> Node {
    let node = Node::new(infiniband(adapters), 1).quirks(quirks).set("FLEXRING_TRANSPORT", "verbs");
    let node = node.set("FLEXRING_GDR_LEVEL", "SYS");
    node.set("FLEXRING_GPU", "0").set("LD_LIBRARY_PATH", cuda.to_str().expect("a path"))
}

#[test]
fn gpu_memory_is_registered_as_dma_bufs_and_for_data_direct_as_adapters_need_it() {
    let Some(cuda) = simulated_cuda() else { return };
    let run = |quirks: &str, settings: &[(&'static str, &str)]| {
        let node = |_| {
            let node = with_gpu(1, quirks, &cuda).set("SIMCUDA_DMABUF", "1");
            settings.iter().fold(node, |node, (name, value)| node.set(name, *value))
        };
        job(&[0, 1].map(node), "perf --device cuda -b 64K -e 64K -w 1 -n 1")
    };
    let coherent = [("SIMCUDA_COHERENT", "1")];
    let Some(plain) = run("", &[("FLEXRING_GPU_DIRECT", "dmabuf")]) else { return };
    assert!(!plain.sums_are_right().contains("WARN"), "{}", plain.text());
    // As ConnectX-8 and GB300: memory is out of reach, but by Data Direct over PCI Express.
    let direct = run("data_direct", &coherent).expect("not skipped");
    assert!(!direct.sums_are_right().contains("WARN"), "{}", direct.text());
    let refused = run("data_direct=2", &coherent).expect("not skipped").sums_are_right();
    assert!(has_line(&refused, &["WARN", "mlx5_0 does not use Data Direct for GPU 0"]), "{refused}");
    let by_address = run("no_dmabuf", &[]).expect("not skipped").sums_are_right();
    let words = ["WARN", "by DMA-BUF", "the driver of mlx5_0 does not import DMA-BUFs", "mlx5_ib"];
    assert!(has_line(&by_address, &words) && !by_address.contains("is copied"), "{by_address}");
}

/// As on PCI Express: a completion, or another adapter, overtakes what an adapter has written to a GPU, and a
/// read by the same adapter does not.
#[test]
fn data_on_gpus_has_arrived_before_it_is_added_or_sent_on() {
    let Some(cuda) = simulated_cuda() else { return };
    // Among three nodes ranks send on what came over either adapter.
    for (nodes, adapters) in [(2, 1), (3, 2)] {
        let node = |_| with_gpu(adapters, "posted=2000", &cuda);
        let nodes: Vec<Node> = (0..nodes).map(node).collect();
        let Some(job) = job(&nodes, "perf --device cuda -b 1M -e 1M -w 1 -n 2") else { return };
        job.sums_are_right();
    }
}

#[test]
fn bonds_of_ports_and_roce_carry_several_queue_pairs() {
    let gids: &[_] = &[(3, "0000:0000:0000:0000:0000:ffff:0a01:0001", "RoCE v2", "eth9")];
    let roce = FakePort { gids, ..ETHERNET };
    let cases = [("mlx5_bond_0", INFINIBAND, "1 of 2 remain"), ("mlx5_0", roce, "3 of 4 remain")];
    at_once(&cases, |(device, port, remain)| {
        let node = |_| {
            let machine = FakeMachine::new();
            machine.hca(device, "pci0000:b0/0000:b1:00.0", 0, &[*port]);
            Node::new(machine, 1).set("FLEXRING_TRANSPORT", "verbs")
        };
        let Some(good) = job(&[0, 1].map(node), SHORT) else { return };
        good.sums_are_right();
        let lossy = [0, 1].map(|at| node(at).quirks("lose=30000"));
        let text = job(&lossy, "perf -b 1M -e 1M -w 1 -n 3").expect("not skipped").text();
        assert!(has_line(&text, &[device, remain]), "{text}");
    });
}
