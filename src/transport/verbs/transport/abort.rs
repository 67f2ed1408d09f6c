//! Aborting all links of a rank: afterwards no device writes to memory of the caller.
//!
//! Owns how long that is waited for. Must not know why a call failed: the failure is reported before.

use super::Verbs;
use crate::transport::verbs::link_batch::RailDevice;
use crate::transport::verbs::objects::Destruction;
use crate::transport::verbs::peer::{Peer, peer_index_of};
use std::time::{Duration, Instant};

/// How long an aborting rank sleeps between polls.
const FLUSH_PAUSE: Duration = Duration::from_micros(100);

/// How long an aborting rank waits before it logs what for.
const QUIET: Duration = Duration::from_secs(1);

/// A wait that is logged once if it takes long.
struct LoggedWait {
    began: Instant,
    is_logged: bool,
}

impl LoggedWait {
    /// Whether the wait must be logged now.
    fn is_log_due(&mut self, now: Instant) -> bool {
        now.duration_since(self.began) >= QUIET && !std::mem::replace(&mut self.is_logged, true)
    }
}

impl Verbs {
    /// Once a queue pair is in the error state, its device executes no more writes of the peer, and soon has
    /// flushed all requests. Destroying it can take much longer: a driver may wait for packets that cannot be
    /// sent. So a separate thread destroys the queue pairs; it owns everything that must outlive them. Queue
    /// pairs that are being destroyed are waited for without a limit, as their devices refused the error
    /// state or did not flush them: until then, the peer may write over them to memory of the caller, which
    /// gets it back when this returns.
    pub(super) fn abort_links(&mut self) {
        self.aborted = true;
        self.on_demand.abort(if self.sequence > 0 { &self.peers } else { &[] });
        let reason = super::aborted();
        let mut peers = std::mem::take(&mut self.peers);
        peers.iter_mut().for_each(|peer| peer.abort(&reason));
        let mut wait = LoggedWait { began: Instant::now(), is_logged: false };
        while !peers.iter().all(|peer| peer.is_aborted(wait.began.elapsed())) {
            for queue in self.devices.iter().flat_map(|device| &device.queues) {
                let polled = queue.poll(|completion| match peers.get_mut(peer_index_of(completion.id)) {
                    Some(peer) => peer.handle_completion(&completion).or(Ok(())),
                    None => Ok(()),
                });
                if polled.is_err() {
                    break;
                }
            }
            if wait.is_log_due(Instant::now()) {
                log::warn!("verbs: {}", describe_wait(&peers, &self.devices));
            }
            std::thread::sleep(FLUSH_PAUSE);
        }
        Destruction::begin(peers);
    }
}

/// What an aborting rank waits for.
fn describe_wait(peers: &[Peer], devices: &[RailDevice]) -> String {
    let waits = peers.iter().flat_map(|peer| peer.rails_being_destroyed().map(|rail| (peer.rank(), rail)));
    let name = |(rank, rail): (_, usize)| format!("{} to rank {rank}", devices[rail].context.name());
    let ends: Vec<String> = waits.map(name).collect();
    format!(
        "the failed call has waited {} s for queue pairs to be destroyed ({}); it returns when they are, as their devices may write to \
         its memory until then; if that never happens, end the process",
        QUIET.as_secs(),
        ends.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::verbs::objects::Shim;
    use crate::transport::verbs::transport::on_demand::tests::{finish, world};

    #[test]
    fn a_wait_is_logged_once_after_a_second() {
        let began = Instant::now();
        let mut wait = LoggedWait { began, is_logged: false };
        let due = [0, 999, 1000, 1001, 60_000]
            .map(|milliseconds| wait.is_log_due(began + Duration::from_millis(milliseconds)));
        assert_eq!(due, [false, false, true, false, false]);
    }

    #[test]
    fn a_wait_names_the_devices_and_the_peers() {
        let (mut ranks, _) =
            world(3, 2, |me| vec![(me + 1) % 3, (me + 2) % 3], &Shim::none()).expect("inert");
        let verbs = &mut ranks[0];
        let _unfinished = [verbs.peers[0].destroy_slowly(1), verbs.peers[1].destroy_slowly(0)];
        let message = describe_wait(&verbs.peers, &verbs.devices);
        assert!(message.contains("(inert1 to rank 1, inert0 to rank 2)"), "{message}");
        finish(ranks);
    }
}
