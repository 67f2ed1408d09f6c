//! Network interfaces, and the choice of the addresses that other ranks connect to.
//!
//! Owns the meaning of `FLEXRING_SOCKET_IFNAME`.

use crate::config::{Config, Family};
use crate::descriptor;
use crate::error::{Error, Result};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

/// What the kernel says about interfaces, in a folder for each.
const INTERFACES: &str = "/sys/class/net";

/// How many interfaces a bridge may be away from a device, such as a bond of VLANs.
const STACKED: usize = 4;

/// Addresses that a rank listens on, at most.
const MOST_ADDRESSES: usize = 8;

/// One address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name. An interface with several addresses is listed once for each.
    pub name: String,
    /// The address, IPv4 or IPv6.
    pub address: IpAddr,
    /// Whether the interface is up and has a carrier.
    pub up: bool,
}

impl Interface {
    /// Its speed in Mbit/s, if its driver says so.
    #[must_use]
    pub fn speed(&self) -> Option<u32> {
        let text = std::fs::read_to_string(self.file("speed")).ok()?;
        // Drivers that cannot say write -1.
        text.trim().parse().ok().filter(|speed| *speed > 0)
    }

    /// Whether it is a bridge within this machine, as container engines and hypervisors make them. The bridge
    /// that has a network device is the machine's connection to that network.
    #[must_use]
    pub fn is_inner_bridge(&self) -> bool {
        const PREFIXES: [&str; 5] = ["docker", "virbr", "veth", "br-", "podman"];
        let is_bridge = PREFIXES.iter().any(|prefix| self.name.starts_with(prefix))
            || Path::new(&self.file("bridge")).exists();
        is_bridge && !has_device_behind(Path::new(INTERFACES), &self.name)
    }

    /// Whether it is a tunnel, such as that of a VPN: its packets travel over another interface.
    #[must_use]
    pub fn is_tunnel(&self) -> bool {
        // ARPHRD_PPP, ARPHRD_TUNNEL, ARPHRD_TUNNEL6, ARPHRD_SIT, ARPHRD_IPGRE, ARPHRD_IP6GRE, and ARPHRD_NONE
        // of tun devices and WireGuard.
        const TYPES: [&str; 7] = ["512", "768", "769", "776", "778", "823", "65534"];
        let kind = std::fs::read_to_string(self.file("type")).unwrap_or_default();
        TYPES.contains(&kind.trim())
    }

    fn file(&self, name: &str) -> String {
        format!("{INTERFACES}/{}/{name}", self.name)
    }
}

/// Whether a bridge has a port that is a network device, or lies above one. `interfaces` is the kernel's
/// folder of interfaces.
fn has_device_behind(interfaces: &Path, bridge: &str) -> bool {
    let names = |folder: &str| -> Vec<String> {
        let entries = std::fs::read_dir(interfaces.join(folder)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let mut behind = names(&format!("{bridge}/brif"));
    for _ in 0..STACKED {
        if behind.iter().any(|name| interfaces.join(name).join("device").exists()) {
            return true;
        }
        let lower = behind.iter().flat_map(|name| names(name));
        behind = lower.filter_map(|entry| entry.strip_prefix("lower_").map(str::to_owned)).collect();
    }
    false
}

/// The addresses of this machine from which it connects to hosts outside of its networks.
#[must_use]
pub fn default_sources() -> [Option<IpAddr>; 2] {
    // Addresses of the documentation, which no interface has.
    let outside: [IpAddr; 2] =
        [Ipv4Addr::new(192, 0, 2, 1).into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()];
    outside.map(route_source)
}

/// Lists the addresses of all interfaces, in the system's order.
///
/// # Errors
/// `System` if the operating system refuses.
pub fn list_interfaces() -> Result<Vec<Interface>> {
    let found =
        if_addrs::get_if_addrs().map_err(|cause| Error::io("cannot list network interfaces", cause))?;
    Ok(found
        .into_iter()
        .map(|interface| Interface {
            address: interface.ip(),
            up: interface.is_oper_up(),
            name: interface.name,
        })
        .collect())
}

/// Chooses the address that other ranks connect to, if nothing is known about them: the first of
/// `choose_addresses`.
///
/// # Errors
/// As `choose_addresses`.
pub fn choose_address(config: &Config) -> Result<IpAddr> {
    let chosen = choose_addresses(config, None)?;
    chosen.first().copied().ok_or_else(|| Error::internal("no address was chosen"))
}

/// Chooses the addresses that other ranks may connect to, the best one first. `known` is an address of this
/// machine that others reach, if one is known.
///
/// `FLEXRING_SOCKET_IFNAME` has the syntax of `NCCL_SOCKET_IFNAME`: a comma-separated list of prefixes of
/// which any may match; a leading `=` makes them whole names; a leading `^` (or `^=`) excludes matching
/// interfaces. Of the remaining interfaces that are up, the one with the known address is the best, then the
/// one with the default route, then the first. Link-local addresses, bridges with neither the default route
/// nor a network device, which mostly are those of container engines, and the loopback are chosen only if
/// they are known, or one if nothing else remains. If the loopback is known, the best other address is
/// chosen, too. Addresses that cannot be listened on are left out if others remain.
///
/// # Errors
/// `InvalidSetting`, listing the existing interfaces, if none qualifies; `System` if they cannot be listed.
pub fn choose_addresses(config: &Config, known: Option<IpAddr>) -> Result<Vec<IpAddr>> {
    let chosen = choose_from(&list_interfaces()?, config, known, &default_sources())?;
    Ok(without_unassigned(chosen, is_assigned))
}

/// Leaves out the addresses that cannot be listened on, unless nothing but loopback is left: listening on
/// them names the cause.
fn without_unassigned(mut addresses: Vec<IpAddr>, is_assigned: impl Fn(&IpAddr) -> bool) -> Vec<IpAddr> {
    if addresses.iter().any(|address| !address.is_loopback() && is_assigned(address)) {
        addresses.retain(is_assigned);
    }
    addresses
}

/// Whether sockets can have this address. The kernel also lists IPv6 addresses that it is still checking for
/// duplicates, and those of which it has found one. Link-local IPv6 addresses are invalid without an
/// interface (a scope), which has another number on each machine.
fn is_assigned(address: &IpAddr) -> bool {
    let bound = descriptor::udp_socket((*address, 0).into());
    let refused = [io::ErrorKind::AddrNotAvailable, io::ErrorKind::InvalidInput];
    !bound.is_err_and(|cause| refused.contains(&cause.kind()))
}

/// The address of this machine from which it would connect to `to`. `None` if there is no route.
#[must_use]
pub fn route_source(to: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a UDP socket sends nothing. It selects the route, and with it the local address. The port
    // means nothing.
    let socket = descriptor::udp_socket((any, 0).into()).ok()?;
    socket.connect((to, 9)).ok()?;
    let local = socket.local_addr().ok()?.ip();
    (!local.is_unspecified()).then_some(local)
}

fn choose_from(
    interfaces: &[Interface],
    config: &Config,
    known: Option<IpAddr>,
    defaults: &[Option<IpAddr>],
) -> Result<Vec<IpAddr>> {
    let family = config.socket_family;
    let pattern = config.socket_ifname.as_deref().map(Pattern::parse);
    let mut usable: Vec<&Interface> = interfaces
        .iter()
        .filter(|interface| interface.up && is_in_family(interface.address, family))
        .filter(|interface| pattern.as_ref().is_none_or(|pattern| pattern.matches(&interface.name)))
        .collect();
    let is_known = |interface: &Interface| known == Some(interface.address);
    let is_default = |interface: &Interface| defaults.contains(&Some(interface.address));
    let penalty = |interface: &Interface| {
        (is_link_local(interface.address), reachability_penalty(interface, is_default(interface)))
    };
    usable.sort_by_key(|interface| {
        // The system lists all IPv4 addresses before all IPv6 ones, so the position of an interface is
        // that of its first address.
        let position = interfaces.iter().position(|other| other.name == interface.name);
        let is_default = is_default(interface);
        (!is_known(interface), penalty(interface), !is_default, position, interface.address.is_ipv6())
    });
    if usable.is_empty() {
        return Err(no_interface(interfaces, config));
    }
    // Other nodes cannot reach the loopback, even if it is the known address.
    let best_other = usable.iter().position(|interface| !interface.address.is_loopback());
    let mut chosen: Vec<IpAddr> = usable
        .iter()
        .enumerate()
        .filter(|(index, interface)| {
            *index == 0 || Some(*index) == best_other || penalty(interface) == (false, 0)
        })
        .map(|(_, interface)| interface.address)
        .collect();
    chosen.truncate(MOST_ADDRESSES);
    Ok(chosen)
}

fn no_interface(interfaces: &[Interface], config: &Config) -> Error {
    let listed: Vec<String> = interfaces
        .iter()
        .map(|interface| {
            let down = if interface.up { "" } else { ", down" };
            format!("{} ({}{down})", interface.name, interface.address)
        })
        .collect();
    let wanted = match &config.socket_ifname {
        Some(ifname) => {
            format!("{}=\"{ifname}\" leaves no interface", config.source("FLEXRING_SOCKET_IFNAME"))
        }
        None => "there is no interface".to_owned(),
    };
    let family = match config.socket_family {
        Family::Auto => String::new(),
        Family::Ipv4 | Family::Ipv6 => format!(" and has an address of {}", config.socket_family.name()),
    };
    Error::invalid_setting(format!("{wanted} that is up{family}; there are: {}", listed.join(", ")))
}

fn is_in_family(address: IpAddr, family: Family) -> bool {
    match family {
        Family::Auto => true,
        Family::Ipv4 => address.is_ipv4(),
        Family::Ipv6 => address.is_ipv6(),
    }
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// How unlikely it is that other nodes can reach the interface: 0 is best, 2 worst. The bridge of a
/// hypervisor may be the node's connection to its network; then it has the default route.
fn reachability_penalty(interface: &Interface, is_default: bool) -> u8 {
    if interface.address.is_loopback() { 2 } else { u8::from(!is_default && interface.is_inner_bridge()) }
}

/// A parsed `FLEXRING_SOCKET_IFNAME`.
struct Pattern<'a> {
    exclude: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl<'a> Pattern<'a> {
    fn parse(text: &'a str) -> Self {
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        Self { exclude, exact, names }
    }

    fn matches(&self, interface: &str) -> bool {
        let matches = self
            .names
            .iter()
            .any(|name| if self.exact { interface == *name } else { interface.starts_with(name) });
        matches != self.exclude
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_bridge_with_a_network_device_leads_out_of_the_machine() {
        let folder = tempfile::tempdir().expect("a folder");
        for path in [
            "br0/brif/eth0",
            "eth0/device",
            "br1/brif/bond0.5",
            "bond0.5/lower_bond0",
            "bond0/lower_eth1",
            "eth1/device",
            "br-5f/brif/veth1",
            "veth1",
            "docker0/brif",
        ] {
            std::fs::create_dir_all(folder.path().join(path)).expect("a folder");
        }
        let bridges = ["br0", "br1", "br-5f", "docker0", "missing"];
        let lead_out = bridges.map(|bridge| has_device_behind(folder.path(), bridge));
        assert_eq!(lead_out, [true, true, false, false, false]);
    }

    fn machine() -> Vec<Interface> {
        [
            ("lo", "127.0.0.1", true),
            ("docker0", "172.17.0.1", true),
            ("eth0", "10.0.0.1", false),
            ("eth1", "10.0.1.1", true),
            ("eth10", "10.0.10.1", true),
            ("ib0", "192.168.0.1", true),
            ("lo", "::1", true),
            ("eth1", "fe80::1", true),
            ("eth1", "fd00::1", true),
            ("wg0", "fd00::9", true),
        ]
        .into_iter()
        .map(|(name, address, up)| Interface {
            name: name.to_owned(),
            address: address.parse().expect("an address"),
            up,
        })
        .collect()
    }

    fn chosen(ifname: Option<&str>, family: Family) -> String {
        all_chosen(ifname, family, None, None).map_or_else(|e| e.to_string(), |a| a[0].clone())
    }

    fn all_chosen(
        ifname: Option<&str>,
        family: Family,
        known: Option<&str>,
        default: Option<&str>,
    ) -> Result<Vec<String>> {
        let parse = |text: &str| text.parse().expect("an address");
        let defaults = [default.map(parse), None];
        let socket_ifname = ifname.map(str::to_owned);
        let config = Config { socket_ifname, socket_family: family, ..Config::default() };
        let chosen = choose_from(&machine(), &config, known.map(parse), &defaults)?;
        Ok(chosen.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_address_that_is_known_to_work_comes_first() {
        let all = ["10.0.1.1", "10.0.10.1", "192.168.0.1", "fd00::1", "fd00::9"].map(str::to_owned);
        let first = |known, default| {
            let chosen = all_chosen(None, Family::Auto, known, default).expect("interfaces");
            assert!(all.iter().all(|address| chosen.contains(address)), "{chosen:?}");
            (chosen[0].clone(), chosen.len())
        };
        for (known, default, expected) in [
            (None, None, ("10.0.1.1", 5)),
            (None, Some("192.168.0.1"), ("192.168.0.1", 5)),
            (Some("10.0.10.1"), Some("192.168.0.1"), ("10.0.10.1", 5)),
            // A bridge, a loopback and a link-local address are others only if they are known.
            (Some("172.17.0.1"), None, ("172.17.0.1", 6)),
            (Some("fe80::1"), None, ("fe80::1", 6)),
            (Some("127.0.0.1"), None, ("127.0.0.1", 6)),
            // A bridge with the default route is the connection to the network.
            (None, Some("172.17.0.1"), ("172.17.0.1", 6)),
            (Some("127.0.0.1"), Some("172.17.0.1"), ("127.0.0.1", 7)),
            // One that no interface has, as behind address translation.
            (Some("203.0.113.5"), None, ("10.0.1.1", 5)),
        ] {
            assert_eq!(first(known, default), (expected.0.to_owned(), expected.1), "{known:?} {default:?}");
        }
        let named = all_chosen(Some("ib,eth1"), Family::Ipv4, Some("172.17.0.1"), None).expect("interfaces");
        assert_eq!(named, ["10.0.1.1", "10.0.10.1", "192.168.0.1"], "the setting excludes the known one");
        let only_bridge =
            all_chosen(Some("lo,docker"), Family::Auto, Some("127.0.0.1"), None).expect("interfaces");
        assert_eq!(only_bridge, ["127.0.0.1", "172.17.0.1"], "other nodes reach the bridge only");
    }

    #[test]
    fn names_select_like_nccl_socket_ifname() {
        for (ifname, address) in [
            (None, "10.0.1.1"),
            (Some("ib"), "192.168.0.1"),
            (Some("ib,eth"), "10.0.1.1"),
            (Some("=eth10"), "10.0.10.1"),
            (Some("=eth10, ib0"), "10.0.10.1"),
            (Some("^eth"), "192.168.0.1"),
            (Some("^=eth1"), "10.0.10.1"),
            (Some("^eth,ib,wg"), "172.17.0.1"),
            (Some("docker"), "172.17.0.1"),
            (Some("lo"), "127.0.0.1"),
            (Some("wg0"), "fd00::9"),
        ] {
            assert_eq!(chosen(ifname, Family::Auto), address, "{ifname:?}");
        }
    }

    #[test]
    fn address_family_is_respected_and_link_local_comes_last() {
        assert_eq!(chosen(None, Family::Ipv6), "fd00::1");
        assert_eq!(chosen(Some("=lo"), Family::Ipv6), "::1");
        let only_link_local: Vec<Interface> =
            machine().into_iter().filter(|interface| interface.address.to_string() == "fe80::1").collect();
        assert!(choose_from(&only_link_local, &Config::default(), None, &[]).is_ok());
    }

    #[test]
    fn error_lists_existing_interfaces() {
        for (ifname, family) in [
            (Some("eno"), Family::Auto),
            (Some("=eth"), Family::Auto),
            (Some("eth0"), Family::Auto),
            (Some("ib0"), Family::Ipv6),
        ] {
            let error = all_chosen(ifname, family, None, None).expect_err("no interface qualifies");
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(error.message().contains(ifname.unwrap_or_default()), "{error}");
            assert!(error.message().contains("eth0 (10.0.0.1, down), eth1 (10.0.1.1)"), "{error}");
        }
    }

    #[test]
    fn addresses_that_cannot_be_listened_on_are_left_out_unless_none_remains() {
        let addresses = |text: &[&str]| -> Vec<IpAddr> {
            text.iter().map(|address| address.parse().expect("an address")).collect()
        };
        // Of the documentation, which no interface has.
        let [unassigned, loopback] = ["2001:db8::1", "127.0.0.1"];
        assert!(is_assigned(&addresses(&[loopback])[0]));
        assert!(!is_assigned(&addresses(&["192.0.2.1"])[0]));
        assert!(!is_assigned(&addresses(&["fe80::1"])[0]), "it needs an interface");
        let is_assigned = |address: &IpAddr| address.to_string() != unassigned;
        for (chosen, left) in [
            (vec![unassigned, "10.0.0.1", loopback], vec!["10.0.0.1", loopback]),
            (vec![unassigned, loopback], vec![unassigned, loopback]),
            (vec![unassigned], vec![unassigned]),
        ] {
            assert_eq!(without_unassigned(addresses(&chosen), is_assigned), addresses(&left));
        }
    }

    #[test]
    fn this_machine_has_a_usable_address() {
        assert!(list_interfaces().expect("interfaces").iter().any(|interface| interface.up));
        assert!(choose_address(&Config::default()).is_ok());
    }
}
