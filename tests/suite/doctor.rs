//! `flexring doctor` as a command. The machine may have RDMA or not; text and JSON must agree.

use crate::command::run;
use serde_json::Value;

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
fn a_rank_of_a_job_is_identified() {
    let (code, out, _) =
        run("doctor", &[("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]);
    assert_eq!(code, Some(0), "{out}");
    assert_eq!(out.lines().nth(1), Some("rank 3 of 8, set by torchrun"), "{out}");
    let (code, out, _) = run("doctor", &[("RANK", "9"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a")]);
    assert_eq!(code, Some(1), "{out}");
    assert!(out.contains("\nerror      RANK=\"9\""), "{out}");
}
