//! A plan with the lengths that use it.
//!
//! Owns its name in output. Must not know how it was chosen.

use super::candidates::with_variant;
use super::lowering::Plan;
use super::selection::ShortPlan;
use std::sync::Arc;

/// The plan of vectors up to a length.
#[derive(Clone, Debug)]
pub struct SizedPlan {
    /// For short vectors, whose time depends on the number of messages; `None` if it depends on bandwidth, or
    /// for a choice of a tuning profile.
    pub short: Option<ShortPlan>,
    /// What the plan has instead of the tree of the topology, as words; empty if it was not chosen by
    /// calculation.
    pub variant: String,
    /// Longest vector in bytes.
    pub longest: usize,
    /// Longest sub-chunk in bytes.
    pub subchunk: usize,
    /// The plan.
    pub plan: Arc<Plan>,
}

impl SizedPlan {
    /// Whether every rank can reduce a vector itself by this plan.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.short == Some(ShortPlan::Direct)
    }

    /// The schedule and the variant.
    #[must_use]
    pub fn name(&self) -> String {
        with_variant(self.plan.schedule().name(), &self.variant)
    }
}
