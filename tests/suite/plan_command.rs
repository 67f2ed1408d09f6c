//! `flexring plan` as a process.

use crate::command::run;
use crate::programs::root;
use serde_json::{Value, json};

/// The output of the command with valid flags.
fn printed(flags: &str) -> String {
    let (code, out, err) = run(&format!("plan {flags}"), &[]);
    assert_eq!((code, &*err), (Some(0), ""), "{flags}: {out}");
    out
}

/// The exit code and the error output of the command with invalid flags.
fn refused(flags: &str) -> (Option<i32>, String) {
    let (code, out, err) = run(&format!("plan {flags}"), &[]);
    assert_eq!(out, "", "{flags}");
    (code, err)
}

#[test]
fn the_plan_for_2_and_3_ranks_is_figure_2_of_the_paper() {
    let plan: Value =
        serde_json::from_str(&printed("--topology 2+3 --algo flexreduce --count 12 --json")).expect("JSON");
    // Ranks 0 and 1 are D and E in the paper, ranks 2 to 4 are F to H.
    let rows = |level: usize| -> Vec<Value> {
        let groups = plan["levels"][level]["groups"].as_array().expect("groups");
        let row = |group: &Value| {
            let mut ranks: Vec<u64> =
                group["participants"].as_array().expect("ranks").iter().filter_map(Value::as_u64).collect();
            ranks.sort_unstable();
            json!([group["span"]["start"], group["span"]["end"], ranks, group["root"]])
        };
        groups.iter().map(row).collect()
    };
    assert_eq!(
        rows(0),
        [
            json!([0, 6, [0, 1], 0]),
            json!([6, 12, [0, 1], 1]),
            json!([0, 4, [2, 3, 4], 2]),
            json!([4, 8, [2, 3, 4], 3]),
            json!([8, 12, [2, 3, 4], 4]),
        ]
    );
    assert_eq!(
        rows(1),
        [
            json!([0, 2, [0, 2], 2]),
            json!([2, 4, [0, 2], 0]),
            json!([4, 5, [0, 3], 0]),
            json!([5, 6, [0, 3], 3]),
            json!([6, 7, [1, 3], 3]),
            json!([7, 8, [1, 3], 1]),
            json!([8, 10, [1, 4], 1]),
            json!([10, 12, [1, 4], 4]),
        ]
    );
    let fractions: Value = serde_json::from_str(&printed("--topology 2+3 --json")).expect("JSON");
    assert_eq!(fractions["levels"][1]["groups"][2]["span"], json!({"start": "1/3", "end": "5/12"}));
    assert_eq!(fractions["name"], "flexreduce", "auto chooses it where nodes are uneven");
}

#[test]
fn the_table_has_spans_participants_and_roots() {
    let table = printed("--topology 2+3 --algo flexreduce --count 12");
    for line in [
        "flexreduce on 2+3: 5 ranks on 2 nodes\n",
        "\nlevel 0: each node divides the vector among its ranks\n",
        "\n  [1/3, 2/3)  4..8      4 2 3         3\n",
        "\nlevel 1: the nodes divide what they hold\n",
        "\n  [5/12, 7/12)  5..7      3\n",
        "13 calls by 5 ranks at 2 levels: 1.3 for each rank and level on average\n",
    ] {
        assert!(table.contains(line), "{line:?} in\n{table}");
    }
    assert!(!printed("--topology 2+3").contains(".."), "without a count there are no elements");
    assert!(printed("--topology 1").contains("0 calls by 1 rank at 1 level"));
}

#[test]
fn settings_apply_where_flags_are_missing() {
    let variables = [("FLEXRING_TOPOLOGY", "2+2"), ("FLEXRING_ALGO", "ring")];
    let (code, out, _) = run("plan", &variables);
    assert_eq!(code, Some(0));
    assert!(out.starts_with("ring on 2+2: 4 ranks on 2 nodes\nFLEXRING_ALGO=ring was given\n"), "{out}");
    let (_, out, _) = run("plan --algo tree --topology 3", &variables);
    assert!(out.starts_with("tree on 3: 3 ranks on 1 node\n--algo tree was given\n"), "{out}");
}

#[test]
fn inputs_of_algorithms_are_flags() {
    assert!(printed("--topology 8 --dims 4x2").starts_with("hierarchical on 8: "));
    let servers = printed("--topology 2+3 --algo parameter-server --servers 0,3");
    assert!(servers.contains("\n  [1/2, 1)  4 0-3         3\n"), "{servers}");
    let topology = printed("--topology examples/topology.toml");
    assert!(topology.contains(" on topology.toml: 11 ranks on 4 nodes\n"), "{topology}");
}

#[test]
fn invalid_flags_exit_with_an_error() {
    for (flags, words) in [
        ("", "give --topology, such as --topology 2+3"),
        ("--topology 2+x", "\"2+x\", at character 3: expected a number of ranks"),
        (
            "--topology two+three",
            "the topology two+three is not a short form such as 2+3, and cannot be read",
        ),
        ("--topology nowhere.toml", "nowhere.toml"),
        ("--topology 2+3 --algo rign", "parameter-server or forest"),
        ("--topology 2+3 --algo blueconnect", "node 0 has 2 ranks and node 1 has 3 ranks"),
        ("--topology 2+3 --dims 2x2", "dimensions 2x2 have 4 points, but there are 5 ranks"),
        ("--topology 2+3 --algo parameter-server --servers 7", "server 7 is not a rank"),
        ("--topology 2+3 --write never --svg never", "--write and --svg name the same file, never"),
        ("--topology 2+3 --count 0", "expected a number of elements"),
        ("--plan-file nowhere.json", "the plan nowhere.json cannot be read"),
        ("--topology 300 --svg never.svg", "300 ranks are too many for a drawing"),
    ] {
        let (code, err) = refused(flags);
        assert_eq!(code, Some(2), "{flags}: {err}");
        assert!(err.contains(words), "{flags}: {err}");
    }
    let (code, err) = refused("--topology 2+3 --svg /nowhere/plan.svg");
    assert_eq!(code, Some(1));
    assert!(err.contains("cannot write /nowhere/plan.svg: "), "{err}");
}

#[test]
fn a_written_plan_can_be_read_and_verified() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("plan.json");
    let name = path.to_str().expect("a name in Unicode");
    assert_eq!(printed(&format!("--topology 2+3 --algo flexreduce --write {name}")), "");
    assert_eq!(
        std::fs::read_to_string(&path).expect("it was written"),
        printed("--topology 2+3 --algo flexreduce --json")
    );
    for flags in ["", "--topology 2+3", "--topology 5"] {
        let proof = printed(&format!("--plan-file {name} --verify {flags}"));
        assert!(
            proof.starts_with("the flexreduce plan on ") && proof.contains(" holds, for vectors"),
            "{proof}"
        );
        assert!(proof.contains("each of the 5 contributions exactly once"), "{proof}");
    }
    let table = printed(&format!("--plan-file {name}"));
    assert!(
        table.starts_with("flexreduce on 1+1+1+1+1: ") && table.contains("plan.json was given\n"),
        "{table}"
    );
    let (code, err) = refused(&format!("--plan-file {name} --topology 2+2"));
    assert_eq!(code, Some(2));
    assert!(err.contains("plan.json: the plan is for 5 ranks, but the topology 2+2 has 4"), "{err}");
}

#[test]
fn a_plan_with_ranks_that_contribute_nothing_is_proved_and_simulated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("servers.json");
    let group = |start: &str, end: &str, root: usize| json!({"span": {"start": start, "end": end}, "participants": [0, 1], "root": root});
    let groups = [group("0", "1/2", 2), group("1/2", "1", 3)];
    let plan = json!({"name": "byteps", "world": 4, "helpers": [2, 3], "levels": [{"groups": groups}]});
    std::fs::write(&path, plan.to_string()).expect("a file");
    let flags = format!("--plan-file {} --topology 1@1G+1@1G+1@1G+1@1G", path.display());
    let proof = printed(&format!("{flags} --verify"));
    assert!(proof.contains("in all-reduces:"), "{proof}");
    assert!(
        proof.contains("each of the 2 contributions exactly once; 2 helpers contribute nothing"),
        "{proof}"
    );
    assert!(printed(&format!("{flags} --explain")).contains("not compared with one of 2 helpers"));
    let (code, out, err) = run(&format!("simulate --size 64M --json {flags}"), &[]);
    assert_eq!(code, Some(0), "{err}");
    // Each worker sends its vector once, and gets the sum once.
    let results: Value = serde_json::from_str(&out).expect("JSON");
    let seconds = results["results"][0]["picoseconds"].as_f64().expect("a time") * 1e-12;
    let vector = f64::from(64 << 20) / 125e6;
    assert!((vector..1.05 * vector).contains(&seconds), "{seconds} s, {vector} s for a vector");
    assert_eq!(results["results"][0]["bound_seconds"], 0.0);
}

#[test]
fn the_error_of_an_incorrect_plan_names_the_rank() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("broken.json");
    let mut plan: Value =
        serde_json::from_str(&printed("--topology 2+3 --algo flexreduce --json")).expect("JSON");
    // Rank 4 is missing in its node's second part.
    plan["levels"][0]["groups"][3]["participants"] = json!([2, 3]);
    std::fs::write(&path, plan.to_string()).expect("a file");
    for command in ["plan --verify", "plan", "plan --explain", "simulate --size 1M"] {
        let (code, out, err) = run(&format!("{command} --plan-file {} --topology 2+3", path.display()), &[]);
        assert_eq!((code, &*out), (Some(1), ""), "{command}: {err}");
        assert!(err.contains("broken.json: the flexreduce plan does not hold: "), "{command}: {err}");
        assert!(err.contains("the contribution of rank 4 to [1/3, 5/12) is missing"), "{command}: {err}");
    }
    plan["levels"][0]["groups"][3]["participants"] = json!([2, 3, 9]);
    std::fs::write(&path, plan.to_string()).expect("a file");
    let (code, err) = refused(&format!("--plan-file {} --verify", path.display()));
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("broken.json: level 0, group 3: rank 9 is not in a world of 5"), "{err}");
}

#[test]
fn a_million_ranks_are_planned_and_the_table_is_short() {
    let table = printed("--topology 1000000");
    assert!(table.starts_with("ring on 1000000: 1000000 ranks on 1 node\n"), "{}", &table[..1000]);
    for line in [
        "level 0: all ranks divide the vector among them\n",
        "  [0, 1/1000000)                   1-1000 and 999000 more               0\n",
        "\n  ... 999700 groups ...\n",
        "\n  ... 999700 shards ...\n",
        "  [999999/1000000, 1)              999999\n",
        "1000000 calls by 1000000 ranks at 1 level: 1 for each rank and level on average\n",
    ] {
        assert!(table.contains(line), "{line:?} in\n{table}");
    }
    assert!(table.lines().count() < 700, "{} lines", table.lines().count());
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("hosts.conf");
    std::fs::write(&path, "SwitchName=a Nodes=n[00000-49999]\nSwitchName=b Nodes=n[50000-99998]\n")
        .expect("a file");
    let table = printed(&format!("--topology {}", path.display()));
    assert!(table.starts_with("weighted on hosts.conf: 99999 ranks on 99999 nodes\n"), "{}", &table[..1000]);
    assert!(
        table.lines().count() < 1000 && table.contains("groups ...\n"),
        "{} lines",
        table.lines().count()
    );

    let text = printed("--topology 1000000 --explain");
    for part in ["counted for at most 1024 ranks\n", "no schedule takes less than 2.68 ms: "] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    for (flags, words) in [
        ("--verify", "1000000 ranks are too many for a proof: expected at most 4096"),
        ("--json", "1000000000000 participants, too many for JSON"),
        ("--write never.json", "1000000000000 participants, too many for JSON"),
    ] {
        let (code, err) = refused(&format!("--topology 1000000 {flags}"));
        assert_eq!(code, Some(2), "{flags}: {err}");
        assert!(err.contains(words), "{flags}: {err}");
    }
}

#[test]
fn a_topology_without_an_end_is_refused() {
    let (code, err) = refused("--topology /dev/zero");
    assert_eq!(code, Some(2));
    assert!(
        err.contains("the topology /dev/zero") && err.contains("it is a device and no regular file"),
        "{err}"
    );
}

#[test]
fn links_that_form_no_tree_are_planned_explained_and_simulated() {
    let text = printed("--topology examples/torus.toml --explain --count 16M");
    for words in [
        "forest on ",
        "trees divide the vector, and the busiest link takes the least time of any schedule\n",
        "  c - a        10G ",
        // 6 groups send 10 vectors over 9 links of 10 Gbit/s in each direction.
        "no schedule takes less than 29.83 ms: the links between 6 ranks carry 10 vectors with 180Gbit/s together\n",
    ] {
        assert!(text.contains(words), "{words} is not in {text}");
    }
    let proof = printed("--topology examples/torus.toml --verify");
    assert!(proof.starts_with("the forest plan on "), "{proof}");
    let (_, text, _) = run("simulate --topology examples/torus.toml --size 16M", &[]);
    assert!(text.contains("forest") && text.contains("  a - b        10G "), "{text}");
}

#[test]
fn every_algorithm_is_verified() {
    for algorithm in
        ["ring", "rabenseifner", "flexreduce", "weighted", "tree", "star", "local-master", "parameter-server"]
    {
        let proof = printed(&format!("--topology (2@1G+3@5G)+4 --algo {algorithm} --verify"));
        assert!(proof.starts_with(&format!("the {algorithm} plan on ")), "{proof}");
    }
}

#[test]
fn an_explanation_contains_the_reason_and_the_loads_of_links() {
    let text = printed("--topology 2+3 --explain --count 16M");
    for line in [
        "the topology is not symmetric: node 0 has 2 ranks and node 1 has 3 ranks",
        "16777216 floats (64M)",
        "  node 0        10G   1.000   1.000    53.69 ms    85.90 ms\n",
        "in a ring it is that of node 0: 85.90 ms, 1.60 times as long\n",
    ] {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
    let text = printed("--topology 1@1G+1@1G+1@500M --explain");
    assert!(text.contains("  node 2       500M   1.000   1.000"), "{text}");
    assert!(
        text.contains(
            "vectors of at most 4K use a direct exchange between all ranks instead (FLEXRING_DIRECT)"
        ),
        "{text}"
    );
    let (_, text, _) = run("plan --topology 4 --explain", &[("FLEXRING_TRANSPORT", "tcp")]);
    let line = "vectors of at most 64K use a star instead (FLEXRING_DIRECT)\n";
    assert!(text.contains(line), "{line:?} in\n{text}");
    assert!(!text.contains("mailboxes"), "{text}");
    for (ranks, limits) in [(1, None), (2, Some("16K")), (4, Some("32K (16K if every rank has a core)"))] {
        let text = printed(&format!("--topology {ranks} --explain"));
        let line = limits.map(|limits| {
            format!(
                "vectors of at most {limits} use the shared-memory mailboxes instead (FLEXRING_MAILBOX)\n"
            )
        });
        assert!(line.map_or(!text.contains("mailboxes"), |line| text.contains(&line)), "{text}");
    }
    let text = printed("--topology 1@2G+1@2G+1@2G+1@1500M --explain --count 1M");
    for line in [
        "all schedules for 4M by predicted time (simulated)\n",
        "\nweighted is ",
        " faster than ",
        ", because its busiest link, that of node ",
        "no schedule takes less than 26.84 ms: the 4 links of switch send 6 vectors together\n",
    ] {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
    let text = printed("--topology 3x4x2 --explain --count 64K");
    assert!(text.contains(" use hierarchical without level 1 instead (by calculation)\n"), "{text}");
    assert!(text.contains("hierarchical, blueconnect "), "{text}");
    for line in [
        "  FlexReduce (Eq. 6)\n",
        "  BlueConnect (Eq. 3)\n",
        "  hierarchical ring, T(n) with s = 1 (Ueno and Yokota)\n",
    ] {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
    let text = printed("--topology 1x20 --explain --count 64K");
    assert!(text.contains("use flexreduce in groups of 8 instead (by calculation)\n"), "{text}");
    assert!(text.contains("\n  flexreduce in groups of 8 "), "{text}");
    assert!(printed("--topology 4 --explain").contains("  rank 0       400G   1.500   1.500"));
    assert!(printed("--topology 1 --explain").contains("nothing is sent\n"));
}

#[test]
fn drawings_are_well_formed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("plan.svg");
    for flags in [
        "--topology 2+3 --algo flexreduce",
        "--topology 3+3+4 --count 100",
        "--topology (2+3)+(4@1G+1) --algo weighted",
        "--topology 8 --algo rabenseifner",
        "--topology 7 --algo tree",
        "--topology 64 --algo ring",
        "--topology 1",
    ] {
        assert_eq!(printed(&format!("{flags} --svg {}", path.display())), "");
        let text = std::fs::read_to_string(&path).expect("it was drawn");
        let drawing = roxmltree::Document::parse(&text).expect(flags);
        assert_eq!(drawing.root_element().tag_name().name(), "svg");
        let sized = |node: roxmltree::Node<'_, '_>| {
            ["x", "y", "width", "height"]
                .iter()
                .filter_map(|name| node.attribute(*name))
                .all(|value| value.parse::<f64>().is_ok_and(f64::is_finite))
        };
        assert!(drawing.descendants().all(sized), "{flags}");
    }
}

#[test]
fn the_drawing_in_the_readme_is_current() {
    let committed = root().join("docs/flexreduce-2+3.svg");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("new.svg");
    printed(&format!("--topology 2+3 --algo flexreduce --svg {}", path.display()));
    let new = std::fs::read_to_string(&path).expect("it was drawn");
    if std::env::var_os("FLEXRING_BLESS").is_some() {
        std::fs::write(&committed, &new).expect("the drawing can be written");
    }
    let old = std::fs::read_to_string(&committed).unwrap_or_default();
    assert!(
        old == new,
        "docs/flexreduce-2+3.svg is out of date; FLEXRING_BLESS=1 cargo test --test suite plan_command rewrites it"
    );
}
