//! Links that carry more than their bandwidth after a pause, as shapers with token buckets let them.
//!
//! Owns the tokens of each such link, and whether it may exceed its bandwidth now. Must not know flows.
//!
//! A link collects tokens while it carries less than its bandwidth, at most as many as its burst, and spends
//! them while it carries more. It begins without any, as in a series of calls. Tokens that links save before
//! a call are not modelled, so calls after a pause are predicted too long.

use super::event_queue::{EventQueue, LinkId, SimulatedEvent, VirtualTime};
use super::fair_rates::FairRates;

/// What a link with tokens carries, in multiples of its bandwidth: bursts pass shapers as fast as the
/// processor or the network interface is.
const WITH_TOKENS: u64 = 16;

/// The token buckets of all links that have one.
#[derive(Debug, Default)]
pub struct TokenBuckets {
    /// In rising order of their links.
    buckets: Vec<TokenBucket>,
    /// Links whose use has changed. Keeps its memory.
    changed: Vec<LinkId>,
}

#[derive(Debug)]
struct TokenBucket {
    link: LinkId,
    /// The bandwidth, as a rate.
    bandwidth: u64,
    /// Most tokens, and those at `since`, as a rate times picoseconds.
    size: u128,
    tokens: u128,
    since: VirtualTime,
    /// The sum of the flows' rates since then.
    used: u64,
    /// Whether the link may exceed its bandwidth.
    has_tokens: bool,
    /// Distinguishes the event for the present use from older ones.
    changes: u32,
}

impl TokenBuckets {
    /// Empty buckets of links, listed in rising order with their bandwidths and their most tokens, which are
    /// a rate times picoseconds.
    pub fn new(links: impl Iterator<Item = (LinkId, u64, u128)>) -> Self {
        let bucket = |(link, bandwidth, size)| TokenBucket {
            link,
            bandwidth,
            size,
            tokens: 0,
            since: 0,
            used: 0,
            has_tokens: true,
            changes: 0,
        };
        Self { buckets: links.map(bucket).collect(), changed: Vec::new() }
    }

    /// What a link of this bandwidth carries while it has tokens.
    pub fn with_tokens(bandwidth: u64) -> u64 {
        bandwidth.saturating_mul(WITH_TOKENS)
    }

    fn of(&mut self, link: LinkId) -> &mut TokenBucket {
        let at = self.buckets.binary_search_by_key(&link, |bucket| bucket.link);
        &mut self.buckets[at.expect("the link has a bucket")]
    }

    /// The tokens of a link are spent, if its use has not changed since then.
    pub fn spent(&mut self, now: VirtualTime, link: LinkId, changes: u32, rates: &mut FairRates) {
        let bucket = self.of(link);
        if bucket.changes == changes && bucket.has_tokens {
            bucket.proceed(now, bucket.used);
            bucket.limit(rates);
        }
    }

    /// Sets the capacities of links whose use has changed, and queues when they will have spent their tokens.
    /// Whether capacities have changed.
    ///
    /// A link may exceed its bandwidth again only if it limits no flow, so this changes no rate. A link that
    /// falls back to its bandwidth stays there as long as it limits a flow. So the rates settle.
    pub fn follow(&mut self, now: VirtualTime, rates: &mut FairRates, queue: &mut EventQueue) -> bool {
        let mut changed = std::mem::take(&mut self.changed);
        rates.take_changed_use(&mut changed);
        let mut is_other = false;
        for link in &changed {
            let bucket = self.of(*link);
            let used = rates.used(*link);
            if used == bucket.used && bucket.has_tokens {
                continue;
            }
            bucket.proceed(now, used);
            if bucket.has_tokens && used > bucket.bandwidth {
                if bucket.tokens == 0 {
                    bucket.limit(rates);
                    is_other = true;
                    continue;
                }
                let time = bucket.tokens.div_ceil(u128::from(used - bucket.bandwidth));
                // Otherwise it has tokens for longer than any simulation.
                if let Some(end) = u64::try_from(time).ok().and_then(|time| now.checked_add(time)) {
                    queue.add(end, SimulatedEvent::TokensSpent { link: *link, changes: bucket.changes });
                }
            } else if !bucket.has_tokens && used < bucket.bandwidth && !rates.limits_flows(*link) {
                bucket.has_tokens = true;
                rates.set_capacity(*link, Self::with_tokens(bucket.bandwidth));
                is_other = true;
            }
        }
        self.changed = changed;
        is_other
    }
}

impl TokenBucket {
    /// Collects or spends tokens until now. From now on the flows use the link at this rate.
    fn proceed(&mut self, now: VirtualTime, used: u64) {
        let time = u128::from(now - self.since);
        let collected = self.tokens + u128::from(self.bandwidth) * time;
        self.tokens = collected.saturating_sub(u128::from(self.used) * time).min(self.size);
        (self.since, self.used) = (now, used);
        self.changes = self.changes.wrapping_add(1);
    }

    /// The link may not exceed its bandwidth.
    fn limit(&mut self, rates: &mut FairRates) {
        self.has_tokens = false;
        rates.set_capacity(self.link, self.bandwidth);
    }
}
