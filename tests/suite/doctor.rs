//! `flexring doctor` as a command. The machine may have RDMA or not; text and JSON must agree.

use crate::command::run;
use crate::programs::{present, program, succeed};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[test]
fn the_text_has_all_sections() {
    let (code, out, err) = run("doctor", &[]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    assert!(out.starts_with(concat!("flexring ", env!("CARGO_PKG_VERSION"), " on ")), "{out}");
    for heading in
        ["build", "processor", "memory", "sockets", "RDMA", "GPU", "settings", "shm", "tcp", "verbs"]
    {
        assert!(
            out.lines().any(|line| line.split_whitespace().next() == Some(heading)),
            "{heading} in\n{out}"
        );
    }
    assert!(out.contains("\nsettings   none is set\n"), "{out}");
    if !std::path::Path::new("/sys/class/infiniband").exists() {
        assert!(out.contains("\nRDMA       no device; "), "{out}");
        assert!(out.contains("\nnote       there is no RDMA device: TCP connects nodes\n"), "{out}");
        assert!(out.contains("fix: load a driver: modprobe mlx5_ib;"), "{out}");
        assert!(out.contains("rdma link add rxe0 type rxe netdev eth0\n"), "{out}");
    }
}

#[test]
fn json_and_text_agree() {
    let (code, out, _) = run("doctor --json", &[("FLEXRING_ALGO", "ring")]);
    assert_eq!(code, Some(0), "{out}");
    let report: Value = serde_json::from_str(&out).expect("JSON");
    let (_, text, _) = run("doctor", &[("FLEXRING_ALGO", "ring")]);
    let devices = report["rdma"]["devices"].as_array().expect("devices").len();
    assert_eq!(devices == 0, text.contains("\nRDMA       no device; "));
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["settings"]["set"][0], serde_json::json!(["FLEXRING_ALGO", "ring"]));
    assert!(text.contains("\nsettings   FLEXRING_ALGO=ring\n"), "{text}");
    assert_eq!(report["rank"], Value::Null);
    for transport in report["transports"].as_array().expect("transports") {
        let usable = if transport["usable"] == true { "yes" } else { "no" };
        let [name, why] = ["name", "why"].map(|field| transport[field].as_str().expect("text"));
        assert!(text.contains(&format!("\n{name:11}{usable:3}  {why}\n")), "{name} in\n{text}");
    }
    let chosen = report["sockets"]["chosen"].as_str().expect("an address");
    assert!(text.lines().any(|line| line.contains(chosen) && line.contains("used: ")), "{text}");
    for finding in report["findings"].as_array().expect("findings") {
        assert!(text.contains(finding["message"].as_str().expect("text")), "{finding} in\n{text}");
    }
}

#[test]
fn an_unusable_transport_changes_the_exit_code() {
    let settings = [("FLEXRING_TRANSPORT", "verbs"), ("FLEXRING_IB_HCA", "=none")];
    let (code, out, _) = run("doctor", &settings);
    assert_eq!(code, Some(1), "{out}");
    assert!(out.contains("\nerror      FLEXRING_TRANSPORT=verbs needs verbs, but "), "{out}");
    assert!(out.ends_with("flexring cannot run here with these settings\n"), "{out}");
    assert_eq!(run("doctor --json", &settings).0, Some(1));
    let (code, out, _) = run("doctor", &[("FLEXRING_SOCKET_IFNAME", "=none")]);
    assert_eq!(code, Some(1), "{out}");
    assert!(out.contains("FLEXRING_SOCKET_IFNAME=\"=none\" leaves no interface that is up"), "{out}");
    assert_eq!(
        run("doctor", &[("FLEXRING_SOCKET_IFNAME", "=none"), ("FLEXRING_TRANSPORT", "shm")]).0,
        Some(0)
    );
}

#[test]
fn all_invalid_settings_are_reported() {
    let settings = [
        ("FLEXRING_ALGO", "rign"),
        ("FLEXRING_SLOTS", "1"),
        ("FLEXRING_RNAK", "0"),
        ("FLEXRING_LOG", "info"),
    ];
    let (code, out, err) = run("doctor", &settings);
    assert_eq!((code, &*err), (Some(1), ""), "{out}");
    for text in [
        "\nerror      FLEXRING_ALGO=\"rign\" cannot be used: expected auto, ring,",
        "\nerror      FLEXRING_SLOTS=\"1\" cannot be used: expected a whole number from 2 to 65536\n",
        "\nproblem    FLEXRING_RNAK is not a setting of flexring\n           fix: if FLEXRING_RANK is meant, rename it",
        "\nsettings   FLEXRING_LOG=info\n",
    ] {
        assert!(out.contains(text), "{text:?} in\n{out}");
    }
}

#[test]
fn what_settings_name_must_be_usable() {
    for (name, value, message) in [
        ("FLEXRING_SECRET", "short", "FLEXRING_SECRET has 5 bytes: a secret needs at least 16"),
        ("FLEXRING_SECRET_FILE", "/nowhere", "FLEXRING_SECRET_FILE=\"/nowhere\" cannot be read"),
        ("FLEXRING_TOPOLOGY", "2+", "\"2+\", at character 3"),
        ("FLEXRING_PLAN_FILE", "/nowhere", "the plan /nowhere cannot be read"),
        ("FLEXRING_TUNING", "Cargo.toml", "Cargo.toml:"),
        ("FLEXRING_TUNING", "/nowhere", "FLEXRING_TUNING=/nowhere cannot be read"),
    ] {
        let (code, out, _) = run("doctor", &[(name, value)]);
        assert_eq!(code, Some(1), "{name}: {out}");
        assert!(out.contains("\nerror      ") && out.contains(message), "{name}: {out}");
    }
    let (code, out, _) = run("doctor", &[("FLEXRING_ALGO", "rign")]);
    assert!(code == Some(1) && out.contains("\nsettings   none can be used\n"), "{out}");
}

#[test]
fn a_rank_of_a_job_is_identified() {
    let (code, out, _) =
        run("doctor", &[("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]);
    assert_eq!(code, Some(0), "{out}");
    assert_eq!(out.lines().nth(1), Some("rank 3 of 8, set by torchrun"), "{out}");
    let (code, out, _) = run("doctor", &[("RANK", "9"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a")]);
    assert_eq!(code, Some(1), "{out}");
    assert!(out.contains("\nerror      RANK=\"9\""), "{out}");
}

/// A libibverbs whose functions have these versions, as a program sees it that opens it.
fn imitation(folder: &Path, versions: &[(&str, &[&str])]) -> PathBuf {
    let [source, script, library] =
        ["source.c", "versions", "libibverbs.so.1.9.9"].map(|name| folder.join(name));
    let functions = versions.iter().flat_map(|(_, functions)| *functions);
    let text: String = functions.map(|function| format!("void {function}(void) {{}}\n")).collect();
    std::fs::write(&source, text).expect("a file");
    let text: String = versions
        .iter()
        .map(|(version, functions)| format!("{version} {{ global: {}; }};\n", functions.join("; ")))
        .collect();
    std::fs::write(&script, text).expect("a file");
    let script = format!("-Wl,--version-script={}", script.display());
    let mut compiler = program("cc");
    compiler.args(["-shared", "-fPIC"]).arg(source).arg(script).arg("-o").arg(&library);
    succeed(&mut compiler, Duration::from_secs(60));
    library
}

/// The functions of rdma-core before version 25, by version.
const OLD: [(&str, &[&str]); 2] = [
    ("IBVERBS_1.0", &["ibv_create_comp_channel", "ibv_destroy_comp_channel"]),
    (
        "IBVERBS_1.1",
        &[
            "ibv_get_device_list",
            "ibv_free_device_list",
            "ibv_fork_init",
            "ibv_get_device_name",
            "ibv_open_device",
            "ibv_close_device",
            "ibv_get_async_event",
            "ibv_ack_async_event",
            "ibv_query_device",
            "ibv_query_port",
            "ibv_alloc_pd",
            "ibv_dealloc_pd",
            "ibv_reg_mr",
            "ibv_dereg_mr",
            "ibv_create_cq",
            "ibv_destroy_cq",
            "ibv_get_cq_event",
            "ibv_ack_cq_events",
            "ibv_create_qp",
            "ibv_modify_qp",
            "ibv_destroy_qp",
        ],
    ),
];

#[cfg_attr(not(feature = "verbs"), ignore = "this build has no RDMA")]
#[test]
fn an_old_libibverbs_is_used_without_the_functions_that_it_lacks() {
    if !present("cc", "C compiler") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let library = imitation(folder.path(), &OLD);
    let path = library.to_str().expect("a path in UTF-8");
    let (_, out, _) = run("doctor", &[("FLEXRING_IBVERBS", path)]);
    let file = library.canonicalize().expect("it exists");
    let line = format!(
        "\n           libibverbs 1.9.9: {}, without ibv_reg_mr_iova2@IBVERBS_1.8, ibv_reg_dmabuf_mr@IBVERBS_1.12, \
         ibv_is_fork_initialized@IBVERBS_1.13\n",
        file.display()
    );
    assert!(out.contains(&line), "{line:?} in\n{out}");
}

#[cfg_attr(not(feature = "verbs"), ignore = "this build has no RDMA")]
#[test]
fn a_libibverbs_without_a_needed_function_or_version_is_refused() {
    if !present("cc", "C compiler") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let all: Vec<&str> = OLD.iter().flat_map(|(_, functions)| *functions).copied().collect();
    // The old ABI, in which these functions have other arguments.
    let library = imitation(folder.path(), &[("IBVERBS_1.0", &all)]);
    let path = library.to_str().expect("a path in UTF-8");
    let refused = format!(
        "{path} is no libibverbs that flexring can use: it has no ibv_get_device_list@IBVERBS_1.1 and 19 more functions; install \
         rdma-core's libibverbs"
    );
    let (code, out, _) = run("doctor", &[("FLEXRING_IBVERBS", path)]);
    assert_eq!(code, Some(0), "without RDMA devices it is not needed: {out}");
    assert!(out.contains(&refused), "{refused:?} in\n{out}");
    let (_, out, _) = run("doctor", &[("FLEXRING_IBVERBS", "libnone.so.1")]);
    assert!(out.contains("\n           libnone.so.1 cannot be opened: libnone.so.1: cannot open"), "{out}");
}

/// The ports of each rank in the report on a machine of `tests/machines`.
fn ranks_of(machine: &str, settings: &[(&str, &str)]) -> Vec<String> {
    let machine = crate::programs::root().join("tests/machines").join(machine);
    let path = machine.to_str().expect("a path in UTF-8");
    let (code, out, err) = run(&format!("doctor --machine {path}"), settings);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    let ranks = out.lines().skip_while(|line| !line.starts_with("ranks "));
    ranks.map(|line| line[11..].split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn each_gpu_of_a_dgx_h100_has_the_port_below_its_switches() {
    let expected = [
        "rank of GPU 0000:1b:00.0 mlx5_0:1 (PXB)",
        "rank of GPU 0000:43:00.0 mlx5_3:1 (PXB)",
        "rank of GPU 0000:52:00.0 mlx5_4:1 (PXB)",
        "rank of GPU 0000:61:00.0 mlx5_5:1 (PXB)",
        "rank of GPU 0000:9d:00.0 mlx5_6:1 (PXB)",
        "rank of GPU 0000:c3:00.0 mlx5_9:1 (PXB)",
        "rank of GPU 0000:d1:00.0 mlx5_10:1 (PXB)",
        "rank of GPU 0000:df:00.0 mlx5_11:1 (PXB)",
    ];
    assert_eq!(ranks_of("dgx-h100", &[]), expected, "and none has a storage port");
    let level = [("FLEXRING_GDR_LEVEL", "pix")];
    let far = "rank of GPU 0000:1b:00.0 mlx5_0:1 (PXB, farther than FLEXRING_GDR_LEVEL=PIX)";
    assert_eq!(ranks_of("dgx-h100", &level)[0], far);
}

#[test]
fn management_ports_beside_a_gpu_are_not_used() {
    let expected = [
        "rank of GPU 0000:19:00.0 mlx5_0:1 (PIX)",
        "rank of GPU 0000:3b:00.0 mlx5_3:1 (PIX)",
        "rank of GPU 0000:4c:00.0 mlx5_4:1 (PIX)",
        "rank of GPU 0000:5d:00.0 mlx5_5:1 (PIX)",
        "rank of GPU 0000:9b:00.0 mlx5_6:1 (PIX)",
        "rank of GPU 0000:bb:00.0 mlx5_9:1 (PIX)",
        "rank of GPU 0000:cb:00.0 mlx5_10:1 (PIX)",
        "rank of GPU 0000:db:00.0 mlx5_11:1 (PIX)",
    ];
    assert_eq!(ranks_of("hgx-h100", &[]), expected);
}

#[test]
fn gpus_share_the_only_port_of_their_node() {
    let gpus = ["1a", "1c", "1d", "1e"];
    let far =
        |gpu| format!("rank of GPU 0000:{gpu}:00.0 mlx5_0:1 (NODE, farther than FLEXRING_GDR_LEVEL=PXB)");
    assert_eq!(ranks_of("iris-gpu", &[]), gpus.map(far));
    let direct = |gpu| format!("rank of GPU 0000:{gpu}:00.0 mlx5_0:1 (NODE)");
    assert_eq!(ranks_of("iris-gpu", &[("FLEXRING_GDR_LEVEL", "PHB")]), gpus.map(direct));
}

#[test]
fn ranks_without_gpus_use_the_ports_of_their_numa_node() {
    let expected = [
        "the only rank mlx5_0:1 (NODE), mlx5_1:1 (NODE)",
        "rank on NUMA node 0 mlx5_0:1 (NODE)",
        "rank on NUMA node 1 mlx5_1:1 (NODE)",
    ];
    assert_eq!(ranks_of("cpu-two-nics", &[]), expected);
}

#[test]
fn a_container_uses_the_virtual_function_that_it_may_open() {
    let expected = [
        "the only rank mlx5_3:1 (NODE)",
        "rank on NUMA node 0 mlx5_3:1 (NODE)",
        "rank on NUMA node 1 mlx5_3:1 (SYS)",
    ];
    assert_eq!(ranks_of("sriov-container", &[]), expected);
}

#[test]
fn the_tree_of_a_machine_has_gpus_and_ports_below_their_switches() {
    let machine = crate::programs::root().join("tests/machines/iris-gpu");
    let (_, out, _) = run(&format!("doctor --machine {}", machine.display()), &[]);
    let tree = "
topology   NUMA node 0
             root complex 0000:17
               bridge 0000:18:00.0
                 0000:1a:00.0  GPU
                 0000:1c:00.0  GPU
                 0000:1d:00.0  GPU
                 0000:1e:00.0  GPU
             root complex 0000:5d
               bridge 0000:5d:00.0
                 0000:5e:00.0  mlx5_0, 100 Gbit/s
                 0000:5e:00.1  mlx5_1, 100 Gbit/s
";
    assert!(out.contains(tree), "{tree}in\n{out}");
    let (code, _, err) = run("doctor --machine /nowhere", &[]);
    assert_eq!(code, Some(2));
    assert!(err.contains("cannot read the machine /nowhere: No such file"), "{err}");
    let (code, out, _) = run("doctor", &[("FLEXRING_GDR_LEVEL", "whatever")]);
    assert_eq!(code, Some(1));
    let refusal = "FLEXRING_GDR_LEVEL=\"whatever\" cannot be used: expected LOC, PIX, PXB, PHB or SYS";
    assert!(out.contains(refusal), "{out}");
}
