//! One rank of a tuning run: it joins the world and measures; rank 0 also writes and prints.
//!
//! Owns the order of measurements, which is the same on all ranks.

use super::options::TuneOptions;
use super::profile_output::ProfileOutput;
use super::session::TuningSession;
use super::{choices, devices, links};
use crate::local_ranks::die_with_parent;
use flexring::Identity;
use flexring::Result;
use flexring_core::config::{Algorithm, Config, Lowering};
use flexring_plan::tuning::{MeasuredNode, TuningProfile};

/// Measures as the rank that the environment names.
///
/// # Errors
/// Any error of joining or of a call; `System` on all ranks if rank 0 cannot write the profile.
pub fn run(options: &TuneOptions) -> Result<()> {
    if let Some(parent) = options.rank_of {
        die_with_parent(parent)?;
    }
    let config = Config::from_env()?;
    let identity = Identity::from_env(&config)?;
    // Settings that name a plan are left out: those are what is measured.
    let config = Config {
        algo: Algorithm::Auto,
        lowering: Lowering::Auto,
        plan_file: None,
        dimensions: None,
        tuning: None,
        ..config
    };
    let mut session = TuningSession::new(options, config, &identity, |comm| {
        devices::STEPS + links::steps(comm.topology()) + choices::steps(options.sizes().len())
    })?;
    // A path that cannot be written fails before anything is measured.
    let output = ProfileOutput::new(&session.comm, &options.output)?;
    let rates = devices::measure(&mut session)?;
    let links = links::measure(&mut session)?;
    let rates = rates.copy.into_iter().zip(rates.reduce);
    let nodes = links.uplinks.into_iter().zip(rates);
    let mut profile = TuningProfile {
        date: jiff::Timestamp::from_second(jiff::Timestamp::now().as_second())
            .unwrap_or_default()
            .to_string(),
        cluster: session.comm.cluster().clone(),
        nodes: nodes.map(|(uplink, (copy, reduce))| MeasuredNode { uplink, copy, reduce }).collect(),
        switches: links.switches,
        classes: links.classes,
        slots: session.config.slots,
        sockets_per_link: session.config.sockets_per_link,
        choices: Vec::new(),
    };
    let measured = choices::measure(&mut session, &profile, &options.sizes())?;
    profile.choices = choices::choices(&measured.fastest);
    profile.slots = measured.slots;
    profile.sockets_per_link = measured.sockets_per_link;
    output.close(&profile, &measured.fastest, &session)
}
