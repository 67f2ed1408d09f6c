//! The network interfaces, and the address that TCP uses.
//!
//! Owns the facts about sockets. The library chooses the address.

use flexring::internal::bootstrap::{self, Interface};
use flexring_core::config::Config;
use serde::Serialize;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::Duration;

/// The interfaces of this machine, and the address that TCP uses.
#[derive(Clone, Debug, Serialize)]
pub struct SocketReport {
    pub interfaces: Vec<InterfaceReport>,
    /// The address that other ranks connect to, if there is one.
    pub chosen: Option<IpAddr>,
    /// Why this address was chosen, or why there is none.
    pub why: String,
    /// Whether TCP returns to slow start after a connection was idle (`tcp_slow_start_after_idle`).
    pub slow_start_after_idle: bool,
}

/// An address of an interface.
#[derive(Clone, Debug, Serialize)]
pub struct InterfaceReport {
    pub name: String,
    pub address: IpAddr,
    pub up: bool,
}

impl SocketReport {
    /// Interfaces of this machine, and the kernel's settings below `root`.
    pub fn local(root: &Path, config: &Config) -> Self {
        let report = |interface: Interface| InterfaceReport {
            name: interface.name,
            address: interface.address,
            up: interface.up,
        };
        let interfaces: Vec<InterfaceReport> =
            bootstrap::list_interfaces().unwrap_or_default().into_iter().map(report).collect();
        let (chosen, why) = match bootstrap::choose_address(config) {
            Ok(address) => match connect(address) {
                Ok(()) => (Some(address), Self::reason(config, address)),
                Err(cause) => (None, format!("a connection at {address} fails: {cause}")),
            },
            Err(error) => (None, error.message().to_owned()),
        };
        let slow_start = std::fs::read_to_string(root.join("proc/sys/net/ipv4/tcp_slow_start_after_idle"));
        let slow_start_after_idle = slow_start.is_ok_and(|value| value.trim() == "1");
        Self { interfaces, chosen, why, slow_start_after_idle }
    }

    fn reason(config: &Config, chosen: IpAddr) -> String {
        match &config.socket_ifname {
            Some(text) => {
                let name = config.source("FLEXRING_SOCKET_IFNAME");
                format!("the first that is up and that {name}=\"{text}\" admits")
            }
            None if chosen.is_loopback() => "nothing else is up".to_owned(),
            None => "by the route to other networks; jobs prefer the one to rank 0".to_owned(),
        }
    }
}

/// Tries a TCP connection of this process to itself.
fn connect(address: IpAddr) -> std::io::Result<()> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let listener = TcpListener::bind((address, 0))?;
    TcpStream::connect_timeout(&listener.local_addr()?, PATIENCE).map(drop)
}
