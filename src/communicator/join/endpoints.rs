//! The addresses of a rank that its peers connect to.
//!
//! Owns which addresses it listens on, and in which order a peer tries them.
//!
//! The address over which a rank reaches the coordinator is known to work, and so is the coordinator's. A
//! peer tries another one first only if it is on a faster network by what the drivers of both ends say:
//! management networks are slow. Bridges of container engines have the same address on many nodes. A peer
//! that has such an address itself tries it last, and tunnels, such as those of a VPN, before these.

use crate::bootstrap::{self, ControlRoute, Interface};
use crate::config::{Config, TransportChoice};
use crate::error::Result;
use std::cmp::Reverse;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Where a rank listens for TCP links.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct LinkEndpoint {
    pub address: SocketAddr,
    /// Mbit/s of its interface, if known.
    speed: Option<u32>,
    /// Whether the rank reaches the coordinator from this address.
    is_known: bool,
}

/// The addresses that this rank listens on for TCP links: those that other nodes may reach, the best one
/// first, and loopback for its own node. `route` is that of its control connection.
pub(super) fn listen_addresses(config: &Config, route: Option<ControlRoute>) -> Result<Vec<IpAddr>> {
    let mut chosen = bootstrap::choose_addresses(config, route.map(|route| route.own))?;
    let loopback: IpAddr = match chosen.first() {
        Some(IpAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
        _ => Ipv4Addr::LOCALHOST.into(),
    };
    // An interface that the user named is used within the node, too.
    if config.socket_ifname.is_none() && !chosen.iter().any(IpAddr::is_loopback) {
        chosen.push(loopback);
    }
    Ok(chosen)
}

/// The addresses at which this rank answers ranks that shrink the communicator.
pub(super) fn shrink_addresses(config: &Config, route: Option<ControlRoute>) -> Result<Vec<IpAddr>> {
    if config.transport == TransportChoice::Shm {
        // All ranks are on this node.
        return Ok(vec![Ipv4Addr::LOCALHOST.into()]);
    }
    listen_addresses(config, route)
}

/// What peers learn about the addresses at which this rank listens.
pub(super) fn described(listening: &[SocketAddr], route: Option<ControlRoute>) -> Vec<LinkEndpoint> {
    let interfaces = bootstrap::list_interfaces().unwrap_or_default();
    let describe = |address: &SocketAddr| LinkEndpoint {
        address: *address,
        speed: interface_of(&interfaces, address.ip()).and_then(Interface::speed),
        is_known: route.is_some_and(|route| route.own == address.ip()),
    };
    listening.iter().map(describe).collect()
}

fn interface_of(interfaces: &[Interface], address: IpAddr) -> Option<&Interface> {
    interfaces.iter().find(|interface| interface.address == address)
}

/// By what a rank orders the addresses of its peers.
pub(super) struct PeerAddresses {
    /// Whether the settings name interfaces, which are then used within a node, too.
    is_named: bool,
    route: Option<ControlRoute>,
    interfaces: Vec<Interface>,
    /// From where this rank connects to hosts outside of its networks.
    defaults: [Option<IpAddr>; 2],
}

impl PeerAddresses {
    pub(super) fn new(config: &Config, route: Option<ControlRoute>) -> Self {
        let interfaces = bootstrap::list_interfaces().unwrap_or_default();
        let defaults = bootstrap::default_sources();
        Self { is_named: config.socket_ifname.is_some(), route, interfaces, defaults }
    }

    /// The addresses of a peer in the order in which this rank tries them for links.
    pub(super) fn ordered(&self, endpoints: &[LinkEndpoint], same_node: bool) -> Vec<SocketAddr> {
        let usable = self.usable(endpoints, same_node);
        if usable.iter().all(|endpoint| endpoint.address.ip().is_loopback()) {
            return usable.iter().map(|endpoint| endpoint.address).collect();
        }
        let paths = usable.into_iter().map(|endpoint| Path {
            address: endpoint.address,
            speed: endpoint.speed,
            is_known: self.is_known(endpoint),
            from: bootstrap::route_source(endpoint.address.ip())
                .and_then(|from| interface_of(&self.interfaces, from))
                .map(|from| LocalSource {
                    speed: from.speed(),
                    is_tunnel: from.is_tunnel(),
                    is_suspicious: from.address == endpoint.address.ip()
                        || (from.is_inner_bridge() && !self.defaults.contains(&Some(from.address))),
                }),
        });
        in_order(paths.collect())
    }

    /// Those at which this rank asks a peer whether it shrinks. Which one is faster does not matter, and
    /// every rank needs those of all others, so this asks the kernel for no route.
    pub(super) fn for_shrink(&self, endpoints: &[LinkEndpoint], same_node: bool) -> Vec<SocketAddr> {
        let mut usable = self.usable(endpoints, same_node);
        usable.sort_by_key(|endpoint| !self.is_known(endpoint));
        let addresses = usable.into_iter().map(|endpoint| endpoint.address).enumerate();
        let leads_there = |(index, address): &(usize, SocketAddr)| {
            *index == 0 || interface_of(&self.interfaces, address.ip()).is_none()
        };
        addresses.filter(leads_there).map(|(_, address)| address).collect()
    }

    /// Loopback within a node, and else the others, if there are any: on other nodes the loopback leads to
    /// unrelated processes.
    fn usable<'a>(&self, endpoints: &'a [LinkEndpoint], same_node: bool) -> Vec<&'a LinkEndpoint> {
        let is_inside = same_node && !self.is_named;
        let matching: Vec<&LinkEndpoint> =
            endpoints.iter().filter(|endpoint| endpoint.address.ip().is_loopback() == is_inside).collect();
        if matching.is_empty() { endpoints.iter().collect() } else { matching }
    }

    /// Whether the address of a peer is known to work.
    fn is_known(&self, endpoint: &LinkEndpoint) -> bool {
        endpoint.is_known || self.route.is_some_and(|route| route.coordinator == endpoint.address.ip())
    }
}

/// A way to a peer.
struct Path {
    address: SocketAddr,
    speed: Option<u32>,
    is_known: bool,
    /// The interface of this rank that leads there, if one does.
    from: Option<LocalSource>,
}

struct LocalSource {
    speed: Option<u32>,
    /// Whether its packets travel over another interface. What its driver says of its speed means nothing.
    is_tunnel: bool,
    /// Whether it may not lead to another machine.
    is_suspicious: bool,
}

impl Path {
    fn speed(&self) -> Option<u32> {
        let from = self.from.as_ref().filter(|from| !from.is_tunnel)?;
        Some(self.speed?.min(from.speed?))
    }

    fn is_tunnel(&self) -> bool {
        self.from.as_ref().is_some_and(|from| from.is_tunnel)
    }

    fn is_suspicious(&self) -> bool {
        self.from.as_ref().is_none_or(|from| from.is_suspicious)
    }
}

fn in_order(mut paths: Vec<Path>) -> Vec<SocketAddr> {
    let known = paths.iter().filter(|path| path.is_known).map(Path::speed).max().flatten();
    paths.sort_by_key(|path| {
        let is_faster = known.is_some_and(|known| path.speed() > Some(known));
        let place = match (path.is_known, path.is_suspicious()) {
            (false, false) if is_faster => 0,
            (true, _) => 1,
            (false, false) => 2,
            (false, true) => 3,
        };
        (place, path.is_tunnel(), Reverse(path.speed()))
    });
    paths.into_iter().map(|path| path.address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(number: u8, speeds: [u32; 2], is_known: bool, is_suspicious: bool) -> Path {
        let [speed, own] = speeds.map(|speed| (speed > 0).then_some(speed));
        let address = SocketAddr::from(([10, 0, 0, number], 1));
        Path {
            address,
            speed,
            is_known,
            from: Some(LocalSource { speed: own, is_tunnel: false, is_suspicious }),
        }
    }

    fn order(paths: Vec<Path>) -> Vec<u8> {
        let last = |address: &SocketAddr| match address.ip() {
            IpAddr::V4(address) => address.octets()[3],
            IpAddr::V6(_) => 0,
        };
        in_order(paths).iter().map(last).collect()
    }

    #[test]
    fn the_known_address_comes_before_all_but_faster_networks() {
        let (known, not_known) = (true, false);
        let usual = |number, speeds, is_known| path(number, speeds, is_known, false);
        // A network is as fast as its slower end.
        let paths = vec![
            usual(1, [10_000, 1_000], not_known),
            usual(2, [1_000, 1_000], known),
            usual(3, [100_000, 10_000], not_known),
            usual(4, [100, 100], not_known),
        ];
        assert_eq!(order(paths), [3, 2, 1, 4]);
        // If a speed is not known, the known address is the better choice.
        for speeds in [[0, 100_000], [100_000, 0], [0, 0]] {
            assert_eq!(order(vec![usual(1, speeds, not_known), usual(2, [1_000, 1_000], known)]), [2, 1]);
        }
        assert_eq!(order(vec![usual(1, [100_000; 2], not_known), usual(2, [0, 0], known)]), [2, 1]);
        // Without a known address, as behind address translation.
        assert_eq!(order(vec![usual(1, [0, 0], not_known), usual(2, [1_000; 2], not_known)]), [2, 1]);
    }

    #[test]
    fn bridges_and_addresses_of_this_machine_come_last() {
        let paths = vec![
            path(1, [10_000; 2], false, true),
            path(2, [1_000; 2], true, false),
            path(3, [100; 2], false, false),
        ];
        assert_eq!(order(paths), [2, 3, 1]);
        // Two containers of one machine: all their addresses are those of the machine.
        assert_eq!(order(vec![path(1, [0; 2], false, true), path(2, [0; 2], true, true)]), [2, 1]);
        let no_route = Path { from: None, ..path(1, [100_000; 2], false, false) };
        assert_eq!(order(vec![no_route, path(2, [1_000; 2], false, false)]), [2, 1]);
    }

    #[test]
    fn tunnels_come_after_the_networks_that_they_use() {
        let tunnel = |number, speeds| {
            let mut path = path(number, speeds, false, false);
            path.from.as_mut().expect("a source").is_tunnel = true;
            path
        };
        // Drivers of tunnels say 10 Mbit/s, those of bridges mostly nothing.
        let paths = vec![tunnel(1, [10; 2]), path(2, [0; 2], false, false), path(3, [0; 2], false, true)];
        assert_eq!(order(paths), [2, 1, 3]);
        assert_eq!(order(vec![tunnel(1, [100_000; 2]), path(2, [1_000; 2], true, false)]), [2, 1]);
    }

    #[test]
    fn a_shrink_asks_at_the_known_address_first_and_not_at_addresses_of_this_machine() {
        let own = "192.0.2.4".parse().expect("an address");
        let interfaces = vec![Interface { name: "br0".to_owned(), address: own, up: true }];
        let addresses = PeerAddresses { is_named: false, route: None, interfaces, defaults: [None; 2] };
        let endpoint = |last: u8, known: u8| LinkEndpoint {
            address: SocketAddr::from(([192, 0, 2, last], 1)),
            speed: Some(100_000 / u32::from(last)),
            is_known: last == known,
        };
        for (known, expected) in [(3, vec![3, 1, 2]), (4, vec![4, 1, 2, 3])] {
            let endpoints = [1, 2, 3, 4].map(|last| endpoint(last, known));
            let expected: Vec<_> = expected.iter().map(|last| endpoint(*last, known).address).collect();
            assert_eq!(addresses.for_shrink(&endpoints, false), expected);
        }
    }

    #[test]
    fn the_loopback_is_for_the_ranks_of_a_node() {
        let addresses =
            PeerAddresses { is_named: false, route: None, interfaces: Vec::new(), defaults: [None; 2] };
        let endpoint = |text: &str| LinkEndpoint {
            address: text.parse().expect("an address"),
            speed: None,
            is_known: false,
        };
        let both = [endpoint("192.0.2.1:1"), endpoint("127.0.0.1:2")];
        assert_eq!(addresses.ordered(&both, true), [both[1].address]);
        assert_eq!(addresses.ordered(&both, false), [both[0].address]);
        assert_eq!(addresses.ordered(&both[1..], false), [both[1].address]);
        let named = Config { socket_ifname: Some("=lo".to_owned()), ..Config::default() };
        let named = PeerAddresses::new(&named, None);
        assert_eq!(named.ordered(&both[..1], true), [both[0].address]);
    }
}
