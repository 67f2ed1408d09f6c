//! Which process listens at a port that rank 0 needs.
//!
//! Owns the question to it.

use super::connect::Joiner;
use super::coordinator_target::CoordinatorTarget;
use super::protocol::{HelloHeader, HelloParams, Purpose};
use super::secret::SecretSource;
use crate::config::Config;
use crate::fault::Fault;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// How long the process may take to accept the connection. It is on this node.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);
/// The longest answer that is shown. It comes from a process that has proved nothing.
const LONGEST: usize = 200;

/// A process that listens at a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListeningProcess {
    /// Describes it, as a sentence.
    pub(super) text: String,
    /// Whether it is a coordinator of the job that asks.
    pub(super) is_of_this_job: bool,
}

/// The process that listens at one of `addresses`, if it is a coordinator. Takes about two seconds for
/// each that does not answer.
pub(super) fn listening_process(
    addresses: &[SocketAddr],
    source: &SecretSource,
    config: &Config,
    fault: &Fault,
) -> Option<ListeningProcess> {
    let header = HelloHeader::of_no_rank(Purpose::WhoListens);
    let params = HelloParams::of_no_rank(CONNECT_TIMEOUT, config.heartbeat);
    let ask = |address: &SocketAddr| {
        let addresses = [*address];
        let target = CoordinatorTarget::Local(&addresses);
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let joiner = Joiner { target: &target, source, header: &header, params: &params, deadline, fault };
        joiner.listening_process()
    };
    let (answer, is_of_this_job) = addresses.iter().find_map(ask)?;
    let text = answer.chars().filter(|letter| !letter.is_control()).take(LONGEST).collect();
    Some(ListeningProcess { text, is_of_this_job })
}
