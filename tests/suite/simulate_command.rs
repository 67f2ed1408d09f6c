//! `flexring simulate` as a process.

use crate::command::run;
use serde_json::Value;

/// The output of the command with valid flags.
fn printed(flags: &str) -> String {
    let (code, out, err) = run(&format!("simulate {flags}"), &[]);
    assert_eq!((code, &*err), (Some(0), ""), "{flags}: {out}");
    out
}

#[test]
fn a_simulation_prints_time_links_and_critical_path() {
    let text = printed("--topology 1@1G+1@1G+1@500M --size 8M");
    for part in ["1@1G+1@1G+1@500M: 3 ranks on 3 nodes", "weighted", "node 2, busy 9", "the critical path: "]
    {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    assert_eq!(text, printed("--topology 1@1G+1@1G+1@500M --size 8M"), "equal inputs give equal results");
}

#[test]
fn csv_and_json_hold_every_size() {
    let csv = printed("--topology 2+3 --algo flexreduce --size 64K,1M,4M --csv");
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 4, "{csv}");
    assert!(lines[3].starts_with("\"2+3\",\"flexreduce\",5,4194304,0."), "{csv}");
    let json: Value = serde_json::from_str(&printed("--topology 2+3 --size 64K,1M --json")).expect("JSON");
    let results = json["results"].as_array().expect("results");
    assert_eq!(results.len(), 2);
    assert_eq!(results[1]["bytes"], 1 << 20);
    let node = &results[1]["links"].as_array().expect("links")[0];
    assert_eq!((node["link"].as_str(), node["up"].as_u64()), (Some("node 0"), Some(1 << 20)));
}

#[test]
fn short_vectors_are_simulated_with_the_plan_that_they_use() {
    let csv = printed("--topology 1+1+1 --size 4K,1M --csv");
    assert!(csv.contains("\"ring\",3,4096,") && csv.contains("\"ring\",3,1048576,"), "{csv}");
    let csv = printed("--topology 1x20 --size 1K,32K,1M --csv");
    for line in ["\"tree\",20,1024,", "\"rabenseifner\",20,32768,", "\"ring\",20,1048576,"] {
        assert!(csv.contains(line), "{csv}");
    }
}

#[test]
fn what_cannot_be_simulated_is_refused_with_cause_and_fix() {
    for (flags, code, words) in [
        ("--size 1M", 2, "give --topology"),
        ("--topology 2+3 --size 0", 2, "expected a number of bytes from 1"),
        ("--topology 2+3 --size 1152921504606846976", 2, "expected a number of bytes from 1"),
        ("--topology 2+3 --memory-bandwidth NaN", 2, "expected bytes per second"),
        ("--topology 2+3 --window 0", 2, "the window is 0: use 1 to 1048576"),
        ("--topology 2+3 --algo blueconnect", 2, "not symmetric"),
        ("--topology 2+3 --size 1000G", 2, "this simulation is too large"),
        ("--topology 1x100000 --algo ring", 2, "this simulation is too large: 100000 ranks have about"),
        ("--topology never.toml", 2, "cannot be read as a file"),
    ] {
        let (found, out, err) = run(&format!("simulate {flags}"), &[]);
        assert_eq!((found, &*out), (Some(code), ""), "{flags}: {err}");
        assert!(err.contains(words), "{flags}: {err}");
    }
}
