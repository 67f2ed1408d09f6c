//! What each rail of a rank has carried.
//!
//! Owns the counts, from the creation of the communicator on.

use super::inventory::retransmissions;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a rail has carried since the communicator was created. A rail is a port of an RDMA device.
///
/// A message is an RDMA write of the library, so the short ones count that announce calls and grant
/// permission to write. What is written again because a connection broke counts again.
///
/// ```no_run
/// # fn main() -> flexring::Result<()> {
/// let comm = flexring::Communicator::from_env()?;
/// for rail in comm.rail_statistics() {
///     println!("{}:{} has sent {} bytes", rail.device, rail.port, rail.bytes_sent);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct RailStatistics {
    /// The name of the device, such as `mlx5_0`.
    #[serde(deserialize_with = "crate::peer_text::one_line")]
    pub device: String,
    /// The number of the port, from 1.
    pub port: u8,
    /// Bytes that this rank has given to the device to send, without headers.
    pub bytes_sent: u64,
    /// Bytes that peers have written to this rank's memory.
    pub bytes_received: u64,
    /// Messages that this rank has given to the device to send.
    pub messages_sent: u64,
    /// Messages that have arrived.
    pub messages_received: u64,
    /// How often the port has sent something again, for any program; `None` if its driver does not count
    /// that.
    pub retransmissions: Option<u64>,
    /// How often a connection over this rail was made again after it had broken.
    pub reconnections: u64,
}

/// Counts what a rail carries. The thread that runs a call counts, and any thread may read.
#[derive(Debug)]
pub(crate) struct RailCounters {
    device: String,
    port: u8,
    bytes_sent: AtomicU64,
    bytes_received: AtomicU64,
    messages_sent: AtomicU64,
    messages_received: AtomicU64,
    reconnections: AtomicU64,
    /// What the port had sent again before.
    retransmissions_before: u64,
}

impl RailCounters {
    /// Counters of a port of this machine, at zero.
    pub(super) fn new(device: &str, port: u8) -> Self {
        Self {
            device: device.to_owned(),
            port,
            bytes_sent: AtomicU64::new(0),
            bytes_received: AtomicU64::new(0),
            messages_sent: AtomicU64::new(0),
            messages_received: AtomicU64::new(0),
            reconnections: AtomicU64::new(0),
            retransmissions_before: retransmissions(Path::new("/"), device, port).unwrap_or(0),
        }
    }

    /// Messages were given to the device.
    pub(super) fn sent(&self, messages: u64, bytes: u64) {
        self.messages_sent.fetch_add(messages, Ordering::Relaxed);
        self.bytes_sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A message has arrived.
    pub(super) fn received(&self, bytes: u64) {
        self.messages_received.fetch_add(1, Ordering::Relaxed);
        self.bytes_received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Messages that have arrived so far.
    pub(super) fn arrivals(&self) -> u64 {
        self.messages_received.load(Ordering::Relaxed)
    }

    /// A connection over this rail was made again.
    pub(super) fn reconnected(&self) {
        self.reconnections.fetch_add(1, Ordering::Relaxed);
    }

    /// The counts so far.
    pub(crate) fn statistics(&self) -> RailStatistics {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let retransmissions = retransmissions(Path::new("/"), &self.device, self.port);
        RailStatistics {
            device: self.device.clone(),
            port: self.port,
            bytes_sent: count(&self.bytes_sent),
            bytes_received: count(&self.bytes_received),
            messages_sent: count(&self.messages_sent),
            messages_received: count(&self.messages_received),
            // A driver that was loaded again counts from zero.
            retransmissions: retransmissions.map(|now| now.saturating_sub(self.retransmissions_before)),
            reconnections: count(&self.reconnections),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_of_one_rail_from_zero() {
        let counters = RailCounters::new("no such device", 2);
        counters.sent(3, 4096);
        counters.sent(1, 0);
        counters.received(100);
        counters.reconnected();
        let expected = RailStatistics {
            device: "no such device".to_owned(),
            port: 2,
            bytes_sent: 4096,
            bytes_received: 100,
            messages_sent: 4,
            messages_received: 1,
            retransmissions: None,
            reconnections: 1,
        };
        assert_eq!(counters.statistics(), expected);
    }
}
