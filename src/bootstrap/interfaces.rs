//! Network interfaces, and which of their addresses this rank is reached at.
//!
//! Owns the meaning of `FLEXRING_SOCKET_IFNAME`. Must not know who connects.

use crate::config::Family;
use crate::error::{Error, Result};
use std::net::IpAddr;

/// An address of a network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The interface's name; one with several addresses is listed once for each.
    pub name: String,
    /// The address.
    pub address: IpAddr,
    /// Whether it is up and has a carrier.
    pub up: bool,
}

/// Lists the addresses of all interfaces, in the system's order.
///
/// # Errors
/// `System` if the operating system does not tell.
pub fn list() -> Result<Vec<Interface>> {
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
/// `ifname` reads like `NCCL_SOCKET_IFNAME`: a list of prefixes separated by commas, of which any may match;
/// a leading `=` makes them whole names; a leading `^` (or `^=`) excludes what matches. Of what is left the
/// first interface that is up is taken, bridges of container engines and the loopback only if there is
/// nothing else, and link-local addresses only if there is not even that.
///
/// # Errors
/// `InvalidSetting`, listing what exists, if no interface qualifies; `System` if they cannot be listed.
pub fn choose(ifname: Option<&str>, family: Family) -> Result<IpAddr> {
    choose_from(&list()?, ifname, family)
}

fn choose_from(interfaces: &[Interface], ifname: Option<&str>, family: Family) -> Result<IpAddr> {
    let pattern = ifname.map(Pattern::parse);
    interfaces
        .iter()
        .filter(|interface| interface.up && speaks(interface.address, family))
        .filter(|interface| pattern.as_ref().is_none_or(|pattern| pattern.admits(&interface.name)))
        .min_by_key(|interface| {
            // The system lists all IPv4 addresses before all IPv6 ones, so an interface's own order is
            // that of its first address.
            let position = interfaces.iter().position(|other| other.name == interface.name);
            (is_link_local(interface.address), reluctance(interface), position, interface.address.is_ipv6())
        })
        .map(|interface| interface.address)
        .ok_or_else(|| nothing(interfaces, ifname, family))
}

fn nothing(interfaces: &[Interface], ifname: Option<&str>, family: Family) -> Error {
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
        Family::Ipv4 | Family::Ipv6 => format!(" and speaks {}", family.name()),
    };
    Error::invalid_setting(format!("{wanted} that is up{family}; there are: {}", listed.join(", ")))
}

fn speaks(address: IpAddr, family: Family) -> bool {
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

/// How unlikely it is that other nodes can reach this interface.
fn reluctance(interface: &Interface) -> u8 {
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

    fn admits(&self, interface: &str) -> bool {
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
    fn names_select_as_nccl_has_it() {
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
    fn families_are_kept_and_link_local_comes_last() {
        assert_eq!(chosen(None, Family::Ipv6), "fd00::1");
        assert_eq!(chosen(Some("=lo"), Family::Ipv6), "::1");
        let only_link_local: Vec<Interface> =
            machine().into_iter().filter(|interface| interface.address.to_string() == "fe80::1").collect();
        assert!(choose_from(&only_link_local, None, Family::Auto).is_ok());
    }

    #[test]
    fn what_selects_nothing_is_told_what_exists() {
        for (ifname, family) in [
            (Some("eno"), Family::Auto),
            (Some("=eth"), Family::Auto),
            (Some("eth0"), Family::Auto),
            (Some("ib0"), Family::Ipv6),
        ] {
            let error = choose_from(&machine(), ifname, family).expect_err("nothing");
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert!(error.message().contains(ifname.unwrap_or_default()), "{error}");
            assert!(error.message().contains("eth0 (10.0.0.1, down), eth1 (10.0.1.1)"), "{error}");
        }
    }

    #[test]
    fn this_machine_has_an_address() {
        assert!(list().expect("interfaces").iter().any(|interface| interface.up));
        assert!(choose(None, Family::Auto).is_ok());
    }
}
