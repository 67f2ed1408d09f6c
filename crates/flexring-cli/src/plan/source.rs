//! The flags that say which plan is meant, for all subcommands that take one.
//!
//! Owns their names and their mapping to settings.

use crate::settings;
use clap::Args;

/// The topology and the algorithm, or a file with the plan.
#[derive(Args, Clone, Debug)]
pub struct PlanSource {
    /// Where the ranks are: a short form such as 2+3 or 1@1G+1@500M, or a file; as FLEXRING_TOPOLOGY
    #[arg(long, value_name = "TOPOLOGY")]
    pub topology: Option<String>,

    /// Take links, rates, settings and plans from this profile of `flexring tune`, as FLEXRING_TUNING;
    /// without --topology the cluster, too
    #[arg(long, value_name = "FILE")]
    pub tuning: Option<String>,

    /// Which planner makes the schedule, as FLEXRING_ALGO
    #[arg(long, value_name = "NAME", value_parser = |text: &str| settings::checked("FLEXRING_ALGO", text))]
    pub algo: Option<String>,

    /// Dimensions of the hierarchical ring, such as 4x2, as FLEXRING_DIMENSIONS
    #[arg(long, value_name = "DIMS", value_parser = |text: &str| settings::checked("FLEXRING_DIMENSIONS", text))]
    pub dims: Option<String>,

    /// Ranks that are parameter servers, such as 0,3, as FLEXRING_SERVERS
    #[arg(long, value_name = "RANKS", value_parser = |text: &str| settings::checked("FLEXRING_SERVERS", text))]
    pub servers: Option<String>,

    /// How groups become transfers, as FLEXRING_LOWERING
    #[arg(long, value_name = "NAME", value_parser = |text: &str| settings::checked("FLEXRING_LOWERING", text))]
    pub lowering: Option<String>,

    /// Read the plan from this file instead of planning, as FLEXRING_PLAN_FILE
    #[arg(long, value_name = "FILE", conflicts_with_all = ["algo", "dims", "servers"])]
    pub plan_file: Option<String>,
}

impl PlanSource {
    /// The settings that flags replace, by the names of their variables.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let all = [
            ("FLEXRING_TOPOLOGY", &self.topology),
            ("FLEXRING_TUNING", &self.tuning),
            ("FLEXRING_ALGO", &self.algo),
            ("FLEXRING_DIMENSIONS", &self.dims),
            ("FLEXRING_SERVERS", &self.servers),
            ("FLEXRING_LOWERING", &self.lowering),
            ("FLEXRING_PLAN_FILE", &self.plan_file),
        ];
        all.into_iter().filter_map(|(name, value)| value.clone().map(|value| (name, value))).collect()
    }

    /// Whether a flag requests planning, so that a plan file in the settings is ignored.
    pub fn plans(&self) -> bool {
        self.algo.is_some() || self.dims.is_some() || self.servers.is_some()
    }
}
