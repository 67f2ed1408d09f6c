//! `flexring simulate` as a process.

use crate::command::run;
use flexring_core::trace::TraceFile;
use flexring_core::trace::merge::totals;
use serde_json::Value;
use std::path::Path;

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
    let csv = printed("--topology 1x20 --size 1K,32K,1M,8M --csv");
    for line in [
        "\"tree\",20,1024,",
        "\"flexreduce\",20,32768,",
        "\"flexreduce\",20,1048576,",
        "\"ring\",20,8388608,",
    ] {
        assert!(csv.contains(line), "{csv}");
    }
}

#[test]
fn a_profile_gives_the_cluster_its_links_and_the_plans_of_auto() {
    let flags = "--tuning tests/data/tuning.toml";
    let csv = printed(&format!("{flags} --size 2K,16K,1M --csv"));
    for line in ["\"tuning.toml\",\"flexreduce\",4,2048,", ",\"ring\",4,16384,", ",\"weighted\",4,1048576,"] {
        assert!(csv.contains(line), "{line} in\n{csv}");
    }
    let json: Value = serde_json::from_str(&printed(&format!("{flags} --size 1M --json"))).expect("JSON");
    assert_eq!(json["parameters"]["memory_bandwidth"], 7_000_000_000_u64);
    assert_eq!(json["parameters"]["slots"], 128);
    assert_eq!(json["results"][0]["subchunk"], 256 << 10);
    // An algorithm that is named is planned for the measured links, of which that of node c has 58.5 MB/s.
    let csv = printed(&format!("{flags} --algo ring --size 64M --csv"));
    let fields: Vec<&str> = csv.lines().last().unwrap_or_default().split(',').collect();
    let seconds: f64 = fields[4].parse().expect("a number");
    let at_least = 1.5 * f64::from(64 << 20) / 58.5e6;
    assert!(fields[7] == "\"c\"" && (at_least..1.1 * at_least).contains(&seconds), "{csv}");
    let (code, _, err) = run(&format!("simulate {flags} --topology 2+3"), &[]);
    let difference =
        "tuning.toml is not the profile of this topology: it is for 4 ranks, but the topology has 5";
    assert!(code != Some(0) && err.contains(difference), "{err}");
}

/// The texts of a drawing that the command writes.
fn drawn(path: &Path, flags: &str) -> Vec<String> {
    printed(&format!("{flags} --svg {}", path.display()));
    let text = std::fs::read_to_string(path).expect("the drawing is written");
    let drawing = roxmltree::Document::parse(&text).expect("XML");
    assert_eq!(drawing.root_element().tag_name().name(), "svg");
    drawing.descendants().filter_map(|element| element.text().map(str::to_owned)).collect()
}

#[test]
fn a_run_is_drawn_with_its_ranks_and_links() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("run.svg");
    let texts = drawn(&path, "--topology 2@1G+3@10G --size 4M");
    for text in
        ["rank 4, node 1", "node 0, 1Gbit/s", "additions and copies", "30 ms", ", bound ", "; best other: "]
    {
        assert!(texts.iter().any(|found| found.contains(text)), "{text:?} in {texts:?}");
    }
    let first = std::fs::read(&path).expect("the drawing is written");
    drawn(&path, "--topology 2@1G+3@10G --size 4M");
    assert_eq!(first, std::fs::read(&path).expect("the drawing is written"));
    // Links of one node are its memory.
    assert!(!drawn(&path, "--topology 3 --size 1M").iter().any(|text| text.contains("bit/s")));
}

#[test]
fn several_sizes_are_drawn_as_times_by_size() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("sizes.svg");
    let texts = drawn(&path, "--topology 1x20 --size 1K,32K,1M,4M --no-path");
    for text in ["1K", "4M", "tree", "flexreduce", "ring", "bytes of the vector", "the best other schedule"] {
        assert!(texts.iter().any(|found| found == text), "{text:?} in {texts:?}");
    }
}

#[test]
fn a_simulated_timeline_has_the_form_of_a_real_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("trace.json");
    let flags = format!("--topology 2+1 --size 1M --json --trace {}", path.display());
    let json: Value = serde_json::from_str(&printed(&flags)).expect("JSON");
    let result = &json["results"][0];
    let trace = TraceFile::load(&path).expect("a timeline");
    let hosts: Vec<&str> = trace.other_data.ranks.iter().map(|rank| rank.origin.host.as_str()).collect();
    assert_eq!(hosts, ["node 0 (simulated)", "node 0 (simulated)", "node 1 (simulated)"]);
    let named = |name: &str| trace.trace_events.iter().filter(|event| event.name == name).collect::<Vec<_>>();
    let messages = result["messages"].as_u64().expect("a number") as usize;
    assert_eq!((named("send").len(), named("receive").len()), (messages, messages));
    // Each has a begin and an end.
    assert_eq!(named("message").len(), 2 * messages);
    assert!(!named("reduce").is_empty() && !named("copy").is_empty() && !named("wait").is_empty());
    let calls = named("all_reduce");
    let longest = calls.iter().filter_map(|call| call.dur).fold(0.0, f64::max);
    let seconds = result["picoseconds"].as_u64().expect("a number") as f64 / 1e12;
    assert!((longest / 1e6 - seconds).abs() < 1e-8, "{longest} us, not {seconds} s");
    for (rank, totals) in totals(&trace).iter().enumerate() {
        let busy = totals.waiting + totals.copying + totals.reducing;
        assert!(totals.calls == 1 && busy <= totals.in_calls + 1.0, "rank {rank}: {totals:?}");
        assert!(totals.sent_bytes > 0, "rank {rank}: {totals:?}");
    }
    let again = folder.path().join("again.json");
    printed(&flags.replace("trace.json", "again.json"));
    assert_eq!(std::fs::read(&path).expect("a file"), std::fs::read(&again).expect("a file"));
}

#[test]
fn what_cannot_be_simulated_is_refused_with_cause_and_fix() {
    for (flags, code, words) in [
        ("--size 1M", 2, "give --topology"),
        ("--topology 2+3 --size 0", 2, "expected a number of bytes from 4"),
        ("--topology 2+3 --size 2", 2, "in multiples of 4"),
        ("--topology 2+3 --size 1152921504606846976", 2, "expected a number of bytes from 4"),
        ("--topology 2+3 --memory-bandwidth NaN", 2, "expected bytes per second"),
        ("--topology 2+3 --window 0", 2, "the window is 0: use 1 to 1048576"),
        ("--topology 2+3 --algo blueconnect", 2, "not symmetric"),
        ("--topology 2+3 --size 1000G", 2, "more than the limit of 4G (--max-memory): do not record"),
        (
            "--topology 1x16384 --algo ring",
            2,
            "this simulation is too large: 16384 ranks send 536838144 messages, which take about 3 to 18 minutes of processor \
             time, more than the limit of 67108864 (--max-messages)",
        ),
        ("--topology 2+3 --size 1M --max-memory 1K", 2, "more than the limit of 1K (--max-memory)"),
        (
            "--topology 65 --svg never.svg",
            2,
            "65 ranks are too many for a drawing of one run: expected at most 64",
        ),
        ("--topology 2 --svg /nowhere/x.svg", 1, "cannot create /nowhere/x.svg, whose folder must exist"),
        ("--topology 2 --trace /nowhere/x.json", 1, "cannot create /nowhere/x.json, whose folder must exist"),
        ("--topology 2 --svg never.svg --no-path", 2, "omit --no-path or --svg"),
        ("--topology 2 --svg never --trace never", 2, "--svg and --trace name the same file, never"),
        ("--topology 2 --size 1M,2M --trace never.json", 2, "give --trace with a single --size"),
        ("--topology never.toml", 2, "cannot be read as a file"),
    ] {
        let (found, out, err) = run(&format!("simulate {flags}"), &[]);
        assert_eq!((found, &*out), (Some(code), ""), "{flags}: {err}");
        assert!(err.contains(words), "{flags}: {err}");
    }
}
