//! A queue pair of a peer, or what is left of it, and the attempts to connect another in its place.
//!
//! Owns the times of attempts.

use crate::error::Error;
use crate::transport::verbs::objects::{
    Connected, Destruction, Endpoint, Fresh, PathAttributes, QueuePair, QueuePairSpec,
};
use std::time::{Duration, Instant};

/// How long after a queue pair is flushed the first attempt is made to connect another in its place. The time
/// doubles with each further attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest time between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A queue pair, or what is left of it.
pub(super) struct PeerQp {
    /// `None` once it is destroyed.
    pub connected: Option<QueuePair<Connected>>,
    /// When it was first found broken and not flushed.
    pub unflushed_since: Option<Instant>,
    pub destruction: Option<Destruction>,
    /// Whether its destruction was over at an earlier look, so that its last completions were polled since.
    pub destroyed: bool,
    /// Why its trial was lost.
    pub lost_trial: Option<Error>,
    pub reconnection: Reconnection,
}

impl PeerQp {
    pub(super) fn new(connected: QueuePair<Connected>, path: PathAttributes) -> Self {
        let spec = connected.spec();
        Self { connected: Some(connected), destroyed: false, ..Self::lost(spec, path) }
    }

    /// Destroys a queue pair that was never connected, because its device has failed.
    pub(super) fn unconnected(fresh: QueuePair<Fresh>, path: PathAttributes) -> Self {
        let spec = fresh.spec();
        // No peer writes over it.
        fresh.destroy_in_background();
        Self::lost(spec, path)
    }

    /// What is left of a queue pair that was never connected.
    pub(super) fn lost(spec: QueuePairSpec, path: PathAttributes) -> Self {
        let reconnection = Reconnection { spec, path, attempts: 0, due: None, fresh: None, offered: None };
        Self {
            connected: None,
            unflushed_since: None,
            destruction: None,
            destroyed: true,
            lost_trial: None,
            reconnection,
        }
    }

    /// Destroys the queue pair, unless it is destroyed.
    pub(super) fn destroy(&mut self) {
        if let Some(connected) = self.connected.take() {
            self.destruction = Some(connected.destroy_in_background());
        }
    }

    /// Whether the device executes no more writes of the peer. False while the queue pair is being destroyed,
    /// because it may not be in the error state.
    pub(super) fn is_stopped(&self) -> bool {
        self.destruction.as_ref().is_none_or(Destruction::is_over)
    }

    /// The calls since the last call of this. Only for a queue pair without a device.
    #[cfg(test)]
    pub(super) fn recorded_calls(&mut self) -> crate::transport::verbs::objects::RecordedCalls {
        self.connected.as_mut().map(QueuePair::recorded_calls).unwrap_or_default()
    }
}

/// The attempts to connect a queue pair again.
pub(super) struct Reconnection {
    pub spec: QueuePairSpec,
    pub path: PathAttributes,
    /// Attempts since it was reliable.
    pub attempts: u32,
    /// When the next attempt is due, if that is known.
    pub due: Option<Instant>,
    /// This end of the next generation, which was offered to the peer.
    pub fresh: Option<QueuePair<Fresh>>,
    /// The peer's end of the next generation.
    pub offered: Option<Endpoint>,
}

impl Reconnection {
    /// Whether an attempt is due, of which the first is due some time after this is called first.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.attempts.min(16)).min(LONGEST_PAUSE);
        now >= *self.due.get_or_insert(now + pause)
    }
}
