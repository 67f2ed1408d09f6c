//! Tuning profiles: what `flexring tune` has measured on a cluster, and what `auto` makes of it.
//!
//! Owns the profile and the way from it to plans: measured links go into the topology, measured choices into
//! the plans of a communicator. All of it is a pure function of the profile, so ranks that have the same
//! profile choose alike. Must not know how anything is measured, nor where files are.
//!
//! | module | owns |
//! |---|---|
//! | `cluster` | the identity of a cluster, its fingerprint, and the difference between two |
//! | `profile` | the profile |
//! | `profile_file` | its format in TOML |
//! | `links` | latencies of links from those of paths; the measured topology |
//! | `tuned_plans` | the settings and plans of a communicator |

mod cluster;
#[cfg(test)]
mod fuzz;
mod links;
mod profile;
mod profile_file;
mod tuned_plans;

pub use cluster::{ClusterIdentity, ClusterNode};
pub use links::{link_latencies, switches_below_root};
pub use profile::{
    LONGEST_CHOICE, LONGEST_FILE, LinkClass, MAX_LATENCY, MAX_RATE, MOST_CHOICES, MeasuredChoice,
    MeasuredNode, MeasuredUplink, TuningProfile, WITHIN_NODES,
};
pub use profile_file::{parse, write};
pub use tuned_plans::TunedPlan;
