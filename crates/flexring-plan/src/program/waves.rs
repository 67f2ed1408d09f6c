//! The order of sub-chunks that are in flight at the same time.
//!
//! Owns the number of waves.

/// The order of sub-chunks that are in flight at the same time. There are as many waves as the longest shard
/// has sub-chunks. The wave of a sub-chunk is its position in its own grid, scaled to that number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Waves {
    /// Length of the longest shard, as a part of the vector (0 to 1). No grid is longer.
    pub longest: f64,
    /// Waves that each hop lags behind the previous one.
    pub lag: u64,
}

impl Waves {
    /// Number of waves, at least 1, in a call of `count` elements, in sub-chunks of `subchunk`.
    #[must_use]
    pub fn number(&self, count: u64, subchunk: u64) -> u64 {
        (self.longest * count as f64 / subchunk as f64).ceil().max(1.0) as u64
    }
}
