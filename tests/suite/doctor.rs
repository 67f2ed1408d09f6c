//! `flexring doctor`, run as its users run it. The machine may have RDMA or not; what is told must agree with itself.

use crate::command::run;
use serde_json::Value;

#[test]
fn this_machine_is_told_in_words() {
    let (code, out, err) = run("doctor", &[]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    assert!(out.starts_with(concat!("flexring ", env!("CARGO_PKG_VERSION"), " on ")), "{out}");
    for word in ["build", "processor", "memory", "sockets", "RDMA", "GPU", "settings", "shm", "tcp", "verbs"]
    {
        assert!(out.lines().any(|line| line.split_whitespace().next() == Some(word)), "{word} in\n{out}");
    }
    assert!(out.contains("\nsettings   none is set\n"), "{out}");
    if !std::path::Path::new("/sys/class/infiniband").exists() {
        assert!(out.contains("\nRDMA       no device; "), "{out}");
        assert!(out.contains("\nnote       there is no RDMA device: TCP connects nodes\n"), "{out}");
        assert!(out.contains("fix: load the driver of one: modprobe mlx5_ib;"), "{out}");
        assert!(out.contains("rdma link add rxe0 type rxe netdev eth0\n"), "{out}");
    }
}

#[test]
fn json_has_the_same_facts() {
    let (code, out, _) = run("doctor --json", &[("FLEXRING_ALGO", "ring")]);
    assert_eq!(code, Some(0), "{out}");
    let report: Value = serde_json::from_str(&out).expect("JSON");
    let (_, words, _) = run("doctor", &[("FLEXRING_ALGO", "ring")]);
    let devices = report["rdma"]["devices"].as_array().expect("devices").len();
    assert_eq!(devices == 0, words.contains("\nRDMA       no device; "));
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["settings"]["set"][0], serde_json::json!(["FLEXRING_ALGO", "ring"]));
    assert!(words.contains("\nsettings   FLEXRING_ALGO=ring\n"), "{words}");
    assert_eq!(report["rank"], Value::Null);
    for transport in report["transports"].as_array().expect("transports") {
        let usable = if transport["usable"] == true { "yes" } else { "no" };
        let [name, why] = ["name", "why"].map(|field| transport[field].as_str().expect("text"));
        assert!(words.contains(&format!("\n{name:11}{usable:3}  {why}\n")), "{name} in\n{words}");
    }
    let chosen = report["sockets"]["chosen"].as_str().expect("an address");
    assert!(words.lines().any(|line| line.contains(chosen) && line.contains("used: ")), "{words}");
    for finding in report["findings"].as_array().expect("findings") {
        assert!(words.contains(finding["message"].as_str().expect("text")), "{finding} in\n{words}");
    }
}

#[test]
fn a_transport_that_cannot_be_used_is_an_exit_code() {
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
fn settings_that_are_wrong_are_all_told() {
    let settings = [
        ("FLEXRING_ALGO", "rign"),
        ("FLEXRING_SLOTS", "1"),
        ("FLEXRING_RNAK", "0"),
        ("FLEXRING_LOG", "info"),
    ];
    let (code, out, err) = run("doctor", &settings);
    assert_eq!((code, &*err), (Some(1), ""), "{out}");
    for words in [
        "\nerror      FLEXRING_ALGO=\"rign\" cannot be used: expected auto, ring,",
        "\nerror      FLEXRING_SLOTS=\"1\" cannot be used: expected a whole number from 2 to 65536\n",
        "\nproblem    FLEXRING_RNAK is no setting of flexring\n           fix: if FLEXRING_RANK is meant, rename it",
        "\nsettings   FLEXRING_LOG=info\n",
    ] {
        assert!(out.contains(words), "{words:?} in\n{out}");
    }
}

#[test]
fn a_rank_says_which_it_is() {
    let (code, out, _) =
        run("doctor", &[("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]);
    assert_eq!(code, Some(0), "{out}");
    assert_eq!(out.lines().nth(1), Some("as rank 3 of 8, says torchrun"), "{out}");
    let (code, out, _) = run("doctor", &[("RANK", "9"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a")]);
    assert_eq!(code, Some(1), "{out}");
    assert!(out.contains("\nerror      RANK=\"9\""), "{out}");
}
