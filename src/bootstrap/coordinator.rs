//! The handle to a coordinator, the thread at which all control connections of one world end.
//!
//! Owns the coordinator's lifetime and the creation of unique ids. Must not know the protocol, which is
//! `server`'s.
//!
//! The thread ends when all ranks have left, or with its process. Dropping the handle cancels a rendezvous
//! that is incomplete; once the world is complete, the thread serves it even without a handle.

use super::handshake::Gate;
use super::interfaces;
use super::listen;
use super::node_secret::NodeSecretListener;
use super::secret::SecretSource;
use super::server::Server;
use super::unique_id::UniqueId;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::process;
use crate::secret::random_bytes;
use crate::wake::WakeFd;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Creates an id by which the ranks of one world rendezvous, and serves that world from a thread of this
/// process. The process must live until all ranks have left, or be one of the ranks.
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
    wake: Arc<WakeFd>,
    abandoned: Arc<AtomicBool>,
    abandon_on_drop: bool,
    addresses: Vec<SocketAddr>,
}

impl Coordinator {
    /// Starts a coordinator on free ports of the chosen interface and the loopback, and creates the id that
    /// contains these addresses.
    ///
    /// # Errors
    /// As [`create_unique_id`].
    pub fn create(config: &Config) -> Result<(Self, UniqueId)> {
        let chosen = interfaces::choose_address(config.socket_ifname.as_deref(), config.socket_family)?;
        let loopback = match chosen {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        let mut listeners = Vec::new();
        // The loopback comes second: on other nodes it leads to unrelated processes.
        for ip in [Some(chosen), (chosen != loopback).then_some(loopback)].into_iter().flatten() {
            let listener = listen::listen_at(SocketAddr::new(ip, 0))
                .map_err(|cause| Error::io(format!("cannot listen on {ip}"), cause))?;
            listeners.push(listener);
        }
        let token = u128::from_le_bytes(random_bytes()?);
        let addresses = listen::addresses_of(&listeners)?;
        let location = addresses.first().map_or_else(|| "an unknown address".to_owned(), ToString::to_string);
        let id = UniqueId::new(token, &addresses);
        let source = SecretSource::of_id(config, id.job(), token)?;
        Ok((Self::start(&source, listeners, None, location)?, id))
    }

    /// Serves the job of `source` at `listeners`, and hands its secret out at `node_secret`. Messages name the rendezvous by
    /// `location`.
    pub(super) fn start(
        source: &SecretSource,
        listeners: Vec<TcpListener>,
        node_secret: Option<NodeSecretListener>,
        location: String,
    ) -> Result<Self> {
        let secret = source.secret().map_err(Error::internal)?;
        let gate = Gate { job: source.job(), secret, location };
        let addresses = listen::addresses_of(&listeners)?;
        for listener in &listeners {
            listener
                .set_nonblocking(true)
                .map_err(|cause| Error::io("cannot prepare the control port", cause))?;
        }
        let wake = Arc::new(WakeFd::new()?);
        let coordinator = Self { wake, abandoned: Arc::default(), abandon_on_drop: true, addresses };
        let server = Server::new(
            coordinator.wake.clone(),
            coordinator.abandoned.clone(),
            listeners,
            node_secret,
            gate,
        );
        let builder = std::thread::Builder::new().name("flexring-coord".to_owned());
        process::spawn(builder, move || server.run())
            .map_err(|cause| Error::io("cannot start the coordinator's thread", cause))?;
        Ok(coordinator)
    }

    /// The addresses at which processes of this node reach the coordinator.
    pub(super) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        if self.abandon_on_drop {
            self.abandoned.store(true, Ordering::Release);
            self.wake.notify();
        }
    }
}
