//! Fuzz target: what tuning profiles from files make of the simulator.

use crate::simulator::SimulationParameters;
use flexring_core::config::Config;
use flexring_plan::tuning::parse;
use flexring_testkit::fuzzing::FuzzTarget;

#[test]
fn parameters_of_tuning_profiles_are_in_range() {
    let seeds = [include_bytes!("../../../tests/data/tuning.toml").to_vec()];
    let target = FuzzTarget { name: "tuning_profile", longest: 4096, memory: 64 << 20 };
    target.run(&seeds, |input| {
        if let Ok(profile) = parse("f", &String::from_utf8_lossy(input)) {
            let tuned = profile.configure(&Config::default());
            SimulationParameters::measured(&profile, &tuned).check().expect("parameters of the simulator");
        }
    });
}
