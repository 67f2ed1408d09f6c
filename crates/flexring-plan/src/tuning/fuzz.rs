//! Fuzz target: tuning profiles from files.

use super::{parse, write};
use crate::topology::Topology;
use flexring_core::config::Config;
use flexring_core::error::ErrorKind;
use flexring_testkit::fuzzing::FuzzTarget;

#[test]
fn tuning_profiles_from_files() {
    let example = include_str!("../../../../tests/data/tuning.toml");
    let seeds = [example.as_bytes().to_vec(), example.replace("slots = 128", "slots = nan").into_bytes()];
    let target = FuzzTarget { name: "tuning_profile", longest: 4096, memory: 64 << 20 };
    target.run(&seeds, |input| {
        let text = String::from_utf8_lossy(input);
        let profile = match parse("f", &text) {
            Ok(profile) => profile,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidSetting, "{error}");
                return;
            }
        };
        assert_eq!(parse("f", &write(&profile)).expect("what was written can be read"), profile);
        assert_eq!(profile.cluster.difference(&profile.cluster), None);
        let _ = profile.cluster.topology();
        let config = Config::default();
        let tuned = profile.configure(&config);
        assert!((4 << 10..=64 << 20).contains(&tuned.subchunk.0) && (2..=65536).contains(&tuned.slots));
        if profile.cluster.world() <= 12 {
            let mut names = vec![""; profile.cluster.world()];
            let ranks = profile
                .cluster
                .nodes
                .iter()
                .flat_map(|node| node.ranks.iter().map(|rank| (*rank, &*node.host)));
            ranks.for_each(|(rank, host)| names[rank] = host);
            // Nodes with equal names are one here, so the tree may have fewer of them than the profile.
            let topology = profile.topology(&Topology::from_names(&names));
            let _ = profile.plans(&config, &topology);
        }
    });
}
