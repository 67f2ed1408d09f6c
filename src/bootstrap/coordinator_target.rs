//! Where a rank looks for its coordinator.
//!
//! Owns name resolution, and how messages name the place.

use super::launcher::RendezvousPoint;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

/// How long resolved addresses are reused.
const RESOLVED_TTL: Duration = Duration::from_secs(2);

/// The addresses that a host's name resolves to, each once.
pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    // IPv6 addresses before a port are often written in brackets.
    let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in (host, port).to_socket_addrs()? {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    if addresses.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    }
    Ok(addresses)
}

/// These addresses with another port.
pub(super) fn with_port(addresses: &[SocketAddr], port: u16) -> impl Iterator<Item = SocketAddr> {
    addresses.iter().map(move |address| SocketAddr::new(address.ip(), port))
}

/// Where a rank looks for its coordinator.
#[derive(Debug)]
pub(super) enum CoordinatorTarget<'a> {
    /// The rendezvous point that its launcher or caller gave.
    Remote(&'a RendezvousPoint),
    /// In this process, at these addresses.
    Local(&'a [SocketAddr]),
    /// In rank 0's process, at these addresses.
    Successor(&'a [SocketAddr]),
}

impl CoordinatorTarget<'_> {
    fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Self::Remote(RendezvousPoint::Address { host, port, further_ports }) => {
                let first = resolve(host, *port)?;
                let further = further_ports.iter().flat_map(|port| with_port(&first, *port));
                Ok(first.iter().copied().chain(further).collect())
            }
            Self::Remote(RendezvousPoint::Id(id)) => Ok(id.addresses()),
            Self::Local(addresses) | Self::Successor(addresses) => Ok(addresses.to_vec()),
        }
    }

    /// Names the target.
    pub(super) fn name(&self) -> String {
        match self {
            Self::Remote(RendezvousPoint::Address { host, port, further_ports }) => further_ports
                .iter()
                .fold(format!("rank 0 at {host} port {port}"), |text, port| format!("{text} or {port}")),
            Self::Remote(RendezvousPoint::Id(id)) => {
                format!("the process that created the unique id, at {:?}", id.addresses())
            }
            Self::Successor(addresses) => format!("rank 0, which takes the world over, at {addresses:?}"),
            Self::Local(addresses) => format!("this process's own coordinator at {addresses:?}"),
        }
    }

    /// Says what to check if the target does not admit this rank. `is_unreachable` if no process answers
    /// there.
    pub(super) fn advice(&self, is_unreachable: bool) -> String {
        let advice = match self {
            Self::Remote(RendezvousPoint::Address { .. }) => {
                "check that rank 0 runs, and that FLEXRING_MASTER_ADDR and FLEXRING_MASTER_PORT (or the launcher's address) name it \
                 on every rank"
            }
            Self::Remote(RendezvousPoint::Id(_)) => {
                "check that it still runs, and that the id is fresh (each serves one world, and expires if no rank uses it)"
            }
            Self::Successor(_) => "check that it still runs",
            Self::Local(_) => return "check that the loopback interface is up".to_owned(),
        };
        if !is_unreachable {
            return advice.to_owned();
        }
        let listens = match self {
            Self::Remote(RendezvousPoint::Address { .. }) => {
                "; rank 0 listens on one interface only, see FLEXRING_SOCKET_IFNAME"
            }
            _ => "",
        };
        format!("{advice}, and that no firewall blocks the port{listens}")
    }
}

/// Caches resolved addresses, so that a thousand ranks that retry do not overload a name server.
#[derive(Default)]
pub(super) struct ResolverCache {
    known: Vec<SocketAddr>,
    since: Option<Instant>,
}

impl ResolverCache {
    pub(super) fn addresses(&mut self, target: &CoordinatorTarget<'_>) -> io::Result<&[SocketAddr]> {
        if self.since.is_none_or(|since| since.elapsed() >= RESOLVED_TTL) {
            self.known = target.addresses()?;
            self.since = Some(Instant::now());
        }
        Ok(&self.known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn firewalls_are_named_only_where_nothing_answers() {
        let rendezvous = RendezvousPoint::at("here".to_owned(), 1);
        let successor = ["192.0.2.1:1".parse().expect("an address")];
        for target in [CoordinatorTarget::Remote(&rendezvous), CoordinatorTarget::Successor(&successor)] {
            assert!(target.advice(true).contains("firewall") && !target.advice(false).contains("firewall"));
        }
    }
}
