//! The congestion control of a link's sockets.
//!
//! Owns the choice to replace BBR on local networks.
//!
//! BBR learns the round trip of a connection by sending next to nothing for 200 ms, every 10 s in which it
//! has seen no shorter one (Cardwell et al., BBR Congestion-Based Congestion Control, ACM Queue 2016,
//! `ProbeRTT`). All ranks wait for the link that pauses. Where round trips are short and few bytes are in
//! flight, BBR has no advantage.

use super::tcp_info::tcp_info;
use socket2::SockRef;
use std::net::TcpStream;
use std::time::Duration;

/// The longest round trip, when the handshake is done, that counts as one of a local network. Between regions
/// BBR is worth its pauses.
const LONGEST_LOCAL_ROUND_TRIP: Duration = Duration::from_millis(10);

/// What replaces BBR. Every Linux has it. Of 50 calls of 16 MiB on 1+1+1+1+1+1 (network namespaces, 1 Gbit/s)
/// the slowest takes 1.5 times the median with BBR, 1.15 with cubic, whose first call is slower, and 1.05 to
/// 1.1 with reno; the median is 236 ms, 234.7 and 234.
const REPLACEMENT: &[u8] = b"reno";

/// Replaces BBR by reno on a connection of a local network. BBR stays where the kernel does not tell the
/// round trip, or where the administrator or the route forbids another congestion control. Not for
/// connections within a machine: packets that overtake each other halve reno's window, so that on loopback 16
/// MiB take 76 ms instead of 39 with 8 ranks on 2 cores, and 1 MiB 4.0 ms instead of 1.9.
pub(super) fn replace_bbr(stream: &TcpStream) {
    let options = SockRef::from(stream);
    let is_bbr = options.tcp_congestion().is_ok_and(|name| name.starts_with(b"bbr"));
    let is_near = || round_trip(stream).is_some_and(|time| time <= LONGEST_LOCAL_ROUND_TRIP);
    if is_bbr
        && is_near()
        && let Err(cause) = options.set_tcp_congestion(REPLACEMENT)
    {
        log::debug!("BBR stays the congestion control of a link: {cause}");
    }
}

/// The smoothed round trip that the kernel has measured; `None` if it has not, as after a SYN cookie.
fn round_trip(stream: &TcpStream) -> Option<Duration> {
    let info = tcp_info(stream).filter(|info| info.tcpi_rtt > 0)?;
    Some(Duration::from_micros(info.tcpi_rtt.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn bbr_is_replaced_where_round_trips_are_short() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        assert!(round_trip(&stream).is_some_and(|time| time < Duration::from_secs(1)));
        let options = SockRef::from(&stream);
        for (name, expected) in [("bbr", "reno"), ("cubic", "cubic")] {
            // Kernels lack some of them, and some processes may not use all.
            if options.set_tcp_congestion(name.as_bytes()).is_err() {
                eprintln!("skipped: {name} is not available");
                continue;
            }
            replace_bbr(&stream);
            let name = options.tcp_congestion().expect("an option");
            assert!(name.starts_with(expected.as_bytes()), "{}", String::from_utf8_lossy(&name));
        }
    }
}
