//! The coordinator: where all control connections of one world end, seen from outside.
//!
//! Owns the handle on it and the making of unique ids. Must not know what its thread does.
//!
//! The thread lives until all ranks have left, or as long as its process. It can be given up before its world
//! has come; after that it serves on even if nobody holds it any more.

use super::connect;
use super::interfaces;
use super::rendezvous::Rendezvous;
use super::server::Server;
use super::unique_id::UniqueId;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::wake::WakeFd;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Makes an id that the ranks of one world meet by, and serves that world from this process in the background.
/// The process must live until all ranks have left, or be one of them.
///
/// # Errors
/// `InvalidSetting` if no interface qualifies; `System` if no socket, thread or random number can be had.
pub fn create_unique_id(config: &Config) -> Result<UniqueId> {
    let (mut coordinator, id) = Coordinator::create(config)?;
    coordinator.abandon_on_drop = false;
    Ok(id)
}

/// A handle on a coordinator. Dropping it gives a world up that has not come together yet, and does not wait.
#[derive(Debug)]
pub struct Coordinator {
    wake: Arc<WakeFd>,
    abandoned: Arc<AtomicBool>,
    abandon_on_drop: bool,
    addresses: Vec<SocketAddr>,
}

impl Coordinator {
    /// Makes a coordinator at any free port of the chosen interface and of the loopback, and the id that leads there.
    ///
    /// # Errors
    /// As [`create_unique_id`].
    pub fn create(config: &Config) -> Result<(Self, UniqueId)> {
        let chosen = interfaces::choose(config.socket_ifname.as_deref(), config.socket_family)?;
        let loopback = match chosen {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        };
        let mut listeners = Vec::new();
        // The loopback comes second: elsewhere it leads to somebody else's door.
        for ip in [Some(chosen), (chosen != loopback).then_some(loopback)].into_iter().flatten() {
            let listener = connect::listen_at(SocketAddr::new(ip, 0))
                .map_err(|cause| Error::io(format!("cannot listen on {ip}"), cause))?;
            listeners.push(listener);
        }
        let mut token = [0; 16];
        getrandom::fill(&mut token)
            .map_err(|cause| Error::system(format!("cannot get random bytes: {cause}")))?;
        let token = u128::from_le_bytes(token);
        let addresses = connect::addresses_of(&listeners)?;
        let location = addresses.first().map_or_else(|| "nowhere".to_owned(), ToString::to_string);
        let id = UniqueId::new(token, &addresses);
        Ok((Self::start(token, listeners, location)?, id))
    }

    /// Serves the job of `token` at `listeners`, which messages call `place`.
    pub(super) fn start(token: u128, listeners: Vec<TcpListener>, location: String) -> Result<Self> {
        let addresses = connect::addresses_of(&listeners)?;
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
            Rendezvous::new(token, location),
        );
        std::thread::Builder::new()
            .name("flexring-coord".to_owned())
            .spawn(move || server.run())
            .map_err(|cause| Error::io("cannot start the coordinator's thread", cause))?;
        Ok(coordinator)
    }

    /// Where it can be reached from this node.
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
