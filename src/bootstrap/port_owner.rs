//! Which process listens at a port that rank 0 needs.
//!
//! Owns the question to it. Must not know why rank 0 cannot listen.

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

/// Describes the process that listens at one of `addresses`, as a sentence, if it is a coordinator. Takes about two seconds for
/// each that does not answer.
pub(super) fn port_owner(
    addresses: &[SocketAddr],
    source: &SecretSource,
    config: &Config,
    fault: &Fault,
) -> Option<String> {
    let header = HelloHeader::of_no_rank(Purpose::WhoListens);
    let params = HelloParams::of_no_rank(CONNECT_TIMEOUT, config.heartbeat);
    let ask = |address: &SocketAddr| {
        let addresses = [*address];
        let target = CoordinatorTarget::Local(&addresses);
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let joiner = Joiner { target: &target, source, header: &header, params: &params, deadline, fault };
        joiner.listening_process()
    };
    let answer = addresses.iter().find_map(ask)?;
    Some(answer.chars().filter(|letter| !letter.is_control()).take(LONGEST).collect())
}
