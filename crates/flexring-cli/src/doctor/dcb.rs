//! The flow control of an interface, as drivers of the kernel report it by netlink (`linux/dcbnl.h`).
//!
//! Owns this request and its reply. Needs no privileges.

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const REQUEST: u16 = 1;
const GET_DCB: u16 = 78;
/// `DCB_CMD_IEEE_GET`
const IEEE_GET: u8 = 21;
const ATTR_IFNAME: u16 = 1;
const ATTR_IEEE: u16 = 13;
const ATTR_IEEE_PFC: u16 = 2;
/// Bytes of the headers of netlink and of these messages.
const HEADERS: usize = 16 + 4;

/// The priorities that have flow control (PFC), by bit; `None` if the driver does not say.
pub fn flow_control(netdev: &str) -> Option<u8> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        // NETLINK_ROUTE
        None,
    );
    let socket = socket.ok()?;
    rustix::net::send(&socket, &request(netdev), SendFlags::empty()).ok()?;
    let mut reply = [0; 8192];
    // The kernel answers while it takes the request.
    let (len, _) = rustix::net::recv(&socket, &mut reply, RecvFlags::DONTWAIT).ok()?;
    priorities(&reply[..len])
}

fn request(netdev: &str) -> Vec<u8> {
    let name_len = 4 + netdev.len() + 1;
    let len = HEADERS + name_len.next_multiple_of(4);
    let mut message = Vec::with_capacity(len);
    message.extend((len as u32).to_ne_bytes());
    message.extend([GET_DCB.to_ne_bytes(), REQUEST.to_ne_bytes()].concat());
    // The sequence number and the sender, which nothing else uses; then the family, the command and padding.
    message.extend([0; 9]);
    message.extend([IEEE_GET, 0, 0]);
    message.extend([(name_len as u16).to_ne_bytes(), ATTR_IFNAME.to_ne_bytes()].concat());
    message.extend(netdev.as_bytes());
    message.resize(len, 0);
    message
}

/// What a reply says.
fn priorities(reply: &[u8]) -> Option<u8> {
    let kind = u16::from_ne_bytes(reply.get(4..6)?.try_into().ok()?);
    if kind != GET_DCB {
        // The driver does not support it.
        return None;
    }
    let pfc = attribute(attribute(reply.get(HEADERS..)?, ATTR_IEEE)?, ATTR_IEEE_PFC)?;
    // After how many priorities may have it.
    pfc.get(1).copied()
}

/// The value of the first attribute of this kind.
fn attribute(mut list: &[u8], wanted: u16) -> Option<&[u8]> {
    /// Bits that say what the value is.
    const FLAGS: u16 = 0xc000;
    loop {
        let word = |at: usize| Some(u16::from_ne_bytes(list.get(at..at + 2)?.try_into().ok()?));
        let (len, kind) = (usize::from(word(0)?), word(2)? & !FLAGS);
        let value = list.get(4..len)?;
        if kind == wanted {
            return Some(value);
        }
        list = list.get(len.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut entry = [((4 + value.len()) as u16).to_ne_bytes(), kind.to_ne_bytes()].concat();
        entry.extend(value);
        entry.resize(entry.len().next_multiple_of(4), 0);
        entry
    }

    /// The reply of a driver with flow control for these priorities.
    fn reply(enabled: u8) -> Vec<u8> {
        const NESTED: u16 = 0x8000;
        let mut pfc = vec![8, enabled];
        pfc.resize(136, 0);
        let ieee = [entry(1, &[0; 59]), entry(ATTR_IEEE_PFC, &pfc)].concat();
        let attributes = [entry(ATTR_IFNAME, b"eth9\0"), entry(ATTR_IEEE | NESTED, &ieee)].concat();
        let mut message = request("eth9")[..HEADERS].to_vec();
        message.extend(attributes);
        message
    }

    #[test]
    fn priorities_are_found_in_replies_and_not_in_parts_of_them() {
        for enabled in [0, 0b1000, 0xff] {
            assert_eq!(priorities(&reply(enabled)), Some(enabled));
        }
        let whole = reply(0b1000);
        let needed = whole.len() - 136;
        for len in 0..needed {
            assert_eq!(priorities(&whole[..len]), None, "{len} bytes");
        }
        let mut error = whole;
        error[4..6].copy_from_slice(&2_u16.to_ne_bytes());
        assert_eq!(priorities(&error), None);
    }

    #[test]
    fn attributes_without_a_length_end_the_search() {
        assert_eq!(attribute(&[0; 64], ATTR_IEEE), None);
        assert_eq!(attribute(&[3, 0, 1, 0, 0, 0, 0, 0], ATTR_IEEE), None);
    }

    #[test]
    fn an_interface_without_flow_control_says_nothing() {
        assert_eq!(flow_control("lo"), None);
        assert_eq!(flow_control("no such interface"), None);
    }
}
