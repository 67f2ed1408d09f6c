//! Fuzz targets: topology files and plan files.

use super::lowering::{ExchangePattern, Plan};
use super::planner::{self, Details};
use super::verifier::VerifiedPlan;
use super::{plan_file, topology_file};
use flexring_core::config::{Algorithm, Config};
use flexring_core::error::ErrorKind;
use flexring_testkit::fuzzing::{FuzzTarget, InputReader};

/// Whether a number of ranks is so large that one input takes seconds: about a million is the limit.
fn describes_very_many(text: &str) -> bool {
    let digits = text.split(|letter: char| !letter.is_ascii_digit());
    digits.map(|run| run.trim_start_matches('0').len()).any(|len| (5..=7).contains(&len))
}

#[test]
fn topologies_from_files() {
    let toml = include_str!("../../../examples/topology.toml");
    let graph = include_str!("../../../examples/torus.toml");
    let slurm = "SwitchName=s0 Nodes=a[0-3,07],b\nSwitchName=s1 Nodes=c[1-2]\nSwitchName=t Switches=s[0-1] LinkSpeed=10\n";
    let tree = "[[switch]]\nname = \"s\"\nbandwidth = \"10G\"\nlatency = \"5us\"\n[[node]]\nname = \"a\"\nswitch = \"s\"\nranks = [0, 1]\n[[node]]\nname = \"b\"\nranks = [{rank = 2, bandwidth = \"1G\"}]\n";
    let texts = [
        (0, "(1@500M+1@1G)@10G+4"),
        (0, "2+3"),
        (1, toml),
        (1, graph),
        (1, slurm),
        (2, slurm),
        (2, tree),
        (1, tree),
    ];
    let seeds = texts.map(|(form, text)| [&[form], text.as_bytes()].concat());
    // Ten thousand ranks in four bytes.
    let target = FuzzTarget { name: "topology", longest: 4096, memory: 256 << 20 };
    target.run(&seeds, |input| {
        let mut reader = InputReader::new(input);
        let form = reader.byte() % 3;
        let text = String::from_utf8_lossy(reader.rest());
        if describes_very_many(&text) {
            return;
        }
        let hosts = ["a0", "b", "c1", "a0"].map(str::to_owned);
        let parsed = match form {
            0 => topology_file::parse_short(&text),
            1 => Some(topology_file::parse("f", &text, None)),
            _ => Some(topology_file::parse("f", &text, Some(&hosts))),
        };
        let Some(parsed) = parsed else { return };
        let topology = match parsed {
            Ok(topology) => topology,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidSetting, "{error}");
                return;
            }
        };
        let world = topology.world();
        let mut ranks = topology.ranks_in_tree_order();
        ranks.sort_unstable();
        assert!(ranks.into_iter().eq(0..world), "each rank once");
        let _ = (topology.levels(), topology.dimensions());
        if world > 6 {
            return;
        }
        let details = Details::of(&Config::default());
        for algorithm in
            [Algorithm::Auto, Algorithm::Ring, Algorithm::Flexreduce, Algorithm::Weighted, Algorithm::Forest]
        {
            if let Ok(schedule) = planner::plan(algorithm, &topology, &details) {
                let plan = Plan::new(schedule, |_| ExchangePattern::Direct);
                VerifiedPlan::new(plan).expect("a planner's plan is correct");
            }
        }
    });
}

#[test]
fn plans_from_files() {
    let topology = topology_file::parse_short("2+3").expect("a short form").expect("valid");
    let details = Details::of(&Config::default());
    let mut seeds: Vec<Vec<u8>> = Vec::new();
    for algorithm in [Algorithm::Ring, Algorithm::Flexreduce] {
        let schedule = planner::plan(algorithm, &topology, &details).expect("a plan");
        for count in [None, Some(120)] {
            let text = plan_file::write(&schedule, count);
            let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            seeds.push(value.to_string().into_bytes());
        }
    }
    seeds.push(br#"{"name":"x","world":1000000,"levels":[{"groups":[]},{"groups":[]}]}"#.to_vec());
    seeds.push(br#"{"name":"x","world":2,"levels":[{"groups":[{"span":{"start":"0","end":"1/2"},"participants":[0,1],"root":0}]}]}"#.to_vec());
    let target =
        FuzzTarget { name: "plan_file", longest: 4096, memory: plan_file::LONGEST_TABLES + (64 << 20) };
    target.run(&seeds, |input| {
        let text = String::from_utf8_lossy(input);
        let schedule = match plan_file::parse("f", &text) {
            Ok(schedule) => schedule,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidSetting, "{error}");
                return;
            }
        };
        if schedule.world() > 12 {
            return;
        }
        let written = plan_file::write(&schedule, None);
        let again = plan_file::parse("f", &written).expect("what was written can be read");
        assert_eq!(again.digest(), schedule.digest());
        for pattern in [ExchangePattern::Direct, ExchangePattern::Chain] {
            // An error names the property that fails.
            let _ = VerifiedPlan::new(Plan::new(schedule.clone(), |_| pattern));
        }
    });
}
