//! The handle to a coordinator, the thread at which all control connections of one world end.
//!
//! Owns the coordinator's lifetime and the creation of unique ids. Must not know the protocol, which is
//! `server`'s.
//!
//! The thread ends when all ranks have left or have moved to rank 0's coordinator, or with its process.
//! Dropping the handle cancels a rendezvous that is incomplete; once the world is complete, the thread serves
//! it even without a handle.

use super::coordinator_ports::CoordinatorControl;
use super::handshake::Gate;
use super::interfaces;
use super::listen;
use super::node_secret::NodeSecretListener;
use super::pending_ids;
use super::secret::SecretSource;
use super::server::Server;
use super::unique_id::UniqueId;
use crate::config::{Config, LONGEST_TIME};
use crate::descriptor_limit;
use crate::error::{Error, Result};
use crate::secret::random_bytes;
use crate::transport::free_port::listen_at_free_port;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Instant;

/// An id that no rank uses expires after this many times `FLEXRING_CONNECT_TIMEOUT_MS`.
const UNUSED_LIFETIME: u32 = 10;

/// Creates an id by which the ranks of one world rendezvous, as the example of [`UniqueId`] shows. This
/// process must live until all ranks have joined; then rank 0 serves the world. An id that no rank uses
/// expires after ten times `FLEXRING_CONNECT_TIMEOUT_MS`.
///
/// # Errors
/// `InvalidSetting` if no interface qualifies; `System` if a socket, thread or random number is unavailable.
pub fn create_unique_id(config: &Config) -> Result<UniqueId> {
    let (mut coordinator, id) = Coordinator::create(config)?;
    coordinator.abandon_on_drop = false;
    Ok(id)
}

/// A handle to a coordinator. Dropping it cancels an incomplete rendezvous and does not wait.
#[derive(Debug)]
pub struct Coordinator {
    control: Arc<CoordinatorControl>,
    abandon_on_drop: bool,
    addresses: Vec<SocketAddr>,
}

impl Coordinator {
    /// Listens on free ports of the chosen interfaces and the loopback, and creates the id that contains
    /// these addresses. The coordinator starts with the first connection.
    ///
    /// # Errors
    /// As [`create_unique_id`].
    pub fn create(config: &Config) -> Result<(Self, UniqueId)> {
        descriptor_limit::raise();
        let listeners = listen_on_free_ports(config)?;
        let token = u128::from_le_bytes(random_bytes()?);
        let coordinator = Self::new(&listeners)?;
        let id = UniqueId::new(token, &coordinator.addresses);
        let source = SecretSource::of_id(config, id.job(), token)?;
        let gate = gate(&source, location_of(&coordinator.addresses))?;
        let control = Arc::clone(&coordinator.control);
        let expires = Instant::now() + UNUSED_LIFETIME * config.connect_timeout.min(LONGEST_TIME);
        let start = move |listeners| {
            let server = Server::new(control, listeners, None, gate).expiring_at(expires);
            if let Err(error) = server.spawn() {
                log::error!("the rendezvous of a unique id cannot begin: {error}");
            }
        };
        pending_ids::keep(id.job(), Arc::clone(&coordinator.control), listeners, expires, Box::new(start))?;
        Ok((coordinator, id))
    }

    /// Starts a coordinator on free ports that can take over the world of `source`.
    pub(super) fn successor(source: &SecretSource, config: &Config) -> Result<Self> {
        let listeners = listen_on_free_ports(config)?;
        let location = location_of(&listen::addresses_of(&listeners)?);
        Self::start(source, listeners, None, location)
    }

    /// Serves the job of `source` at `listeners`, and hands its secret out at `node_secret`. Messages name
    /// the rendezvous by `location`.
    pub(super) fn start(
        source: &SecretSource,
        listeners: Vec<TcpListener>,
        node_secret: Option<NodeSecretListener>,
        location: String,
    ) -> Result<Self> {
        let coordinator = Self::new(&listeners)?;
        let gate = gate(source, location)?;
        Server::new(Arc::clone(&coordinator.control), listeners, node_secret, gate).spawn()?;
        Ok(coordinator)
    }

    /// A handle to a coordinator that will serve `listeners`.
    fn new(listeners: &[TcpListener]) -> Result<Self> {
        let addresses = listen::addresses_of(listeners)?;
        for listener in listeners {
            listener
                .set_nonblocking(true)
                .map_err(|cause| Error::io("cannot prepare the control port", cause))?;
        }
        Ok(Self { control: CoordinatorControl::new()?, abandon_on_drop: true, addresses })
    }

    /// What the coordinator's thread shares with the rest of the process.
    pub(super) fn control(&self) -> &Arc<CoordinatorControl> {
        &self.control
    }

    /// The addresses at which processes of this node reach the coordinator.
    pub(super) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        if self.abandon_on_drop {
            self.control.abandon();
        }
    }
}

/// Admits the ranks of the job of `source`.
fn gate(source: &SecretSource, location: String) -> Result<Gate> {
    Ok(Gate { job: source.job(), secret: source.secret().map_err(Error::internal)?, location })
}

/// How messages name a rendezvous at free ports.
fn location_of(addresses: &[SocketAddr]) -> String {
    addresses.first().map_or_else(|| "an unknown address".to_owned(), ToString::to_string)
}

/// Listens on the chosen interfaces and the loopback, on ports of the settings' range, or on ports that the
/// system chooses.
fn listen_on_free_ports(config: &Config) -> Result<Vec<TcpListener>> {
    let mut ips = interfaces::choose_addresses(config, None)?;
    // It is not known which of them the ranks reach.
    ips.truncate(UniqueId::MAX_ADDRESSES - 1);
    let loopback = match ips.first() {
        Some(IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        _ => IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    if !ips.contains(&loopback) {
        // The loopback comes last: on other nodes it leads to unrelated processes.
        ips.push(loopback);
    }
    let listen = |ip| {
        listen_at_free_port(ip, config.port_range, listen::listen_at)
            .map_err(|cause| Error::io(format!("cannot listen on {ip}"), cause))
    };
    ips.into_iter().map(listen).collect()
}
