//! Network interfaces, and the choice of the address that other ranks connect to.
//!
//! Owns the meaning of `FLEXRING_SOCKET_IFNAME`. Must not know what the address is used for.

use crate::config::Family;
use crate::error::{Error, Result};
use std::net::IpAddr;

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

/// Chooses the address that other ranks connect to.
///
/// `ifname` has the syntax of `NCCL_SOCKET_IFNAME`: a comma-separated list of prefixes of which any may
/// match; a leading `=` makes them whole names; a leading `^` (or `^=`) excludes matching interfaces. The
/// first remaining interface that is up wins. Bridges of container engines and the loopback are chosen only
/// if nothing else remains, and link-local addresses only after those.
///
/// # Errors
/// `InvalidSetting`, listing the existing interfaces, if none qualifies; `System` if they cannot be listed.
pub fn choose_address(ifname: Option<&str>, family: Family) -> Result<IpAddr> {
    choose_from(&list_interfaces()?, ifname, family)
}

fn choose_from(interfaces: &[Interface], ifname: Option<&str>, family: Family) -> Result<IpAddr> {
    let pattern = ifname.map(Pattern::parse);
    interfaces
        .iter()
        .filter(|interface| interface.up && is_in_family(interface.address, family))
        .filter(|interface| pattern.as_ref().is_none_or(|pattern| pattern.matches(&interface.name)))
        .min_by_key(|interface| {
            // The system lists all IPv4 addresses before all IPv6 ones, so the position of an interface is
            // that of its first address.
            let position = interfaces.iter().position(|other| other.name == interface.name);
            (
                is_link_local(interface.address),
                reachability_penalty(interface),
                position,
                interface.address.is_ipv6(),
            )
        })
        .map(|interface| interface.address)
        .ok_or_else(|| no_interface(interfaces, ifname, family))
}

fn no_interface(interfaces: &[Interface], ifname: Option<&str>, family: Family) -> Error {
    let listed: Vec<String> = interfaces
        .iter()
        .map(|interface| {
            let down = if interface.up { "" } else { ", down" };
            format!("{} ({}{down})", interface.name, interface.address)
        })
        .collect();
    let wanted = match ifname {
        Some(ifname) => format!("FLEXRING_SOCKET_IFNAME=\"{ifname}\" leaves no interface"),
        None => "there is no interface".to_owned(),
    };
    let family = match family {
        Family::Auto => String::new(),
        Family::Ipv4 | Family::Ipv6 => format!(" and has an address of {}", family.name()),
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

/// How unlikely it is that other nodes can reach the interface: 0 is best, 2 worst.
fn reachability_penalty(interface: &Interface) -> u8 {
    const BRIDGES: [&str; 5] = ["docker", "virbr", "veth", "br-", "podman"];
    if interface.address.is_loopback() {
        2
    } else {
        u8::from(BRIDGES.iter().any(|bridge| interface.name.starts_with(bridge)))
    }
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
        choose_from(&machine(), ifname, family).map_or_else(|e| e.to_string(), |a| a.to_string())
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
        assert!(choose_from(&only_link_local, None, Family::Auto).is_ok());
    }

    #[test]
    fn error_lists_existing_interfaces() {
        for (ifname, family) in [
            (Some("eno"), Family::Auto),
            (Some("=eth"), Family::Auto),
            (Some("eth0"), Family::Auto),
            (Some("ib0"), Family::Ipv6),
        ] {
            let error = choose_from(&machine(), ifname, family).expect_err("no interface qualifies");
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(error.message().contains(ifname.unwrap_or_default()), "{error}");
            assert!(error.message().contains("eth0 (10.0.0.1, down), eth1 (10.0.1.1)"), "{error}");
        }
    }

    #[test]
    fn this_machine_has_a_usable_address() {
        assert!(list_interfaces().expect("interfaces").iter().any(|interface| interface.up));
        assert!(choose_address(None, Family::Auto).is_ok());
    }
}
