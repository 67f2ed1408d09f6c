//! The congestion control of a link's sockets.
//!
//! Owns the choice to replace BBR on local networks. Must not know what is sent.
//!
//! BBR learns the round trip of a connection by sending next to nothing for 200 ms, every 10 s in which it has seen no shorter one (Cardwell et al., BBR
//! Congestion-Based Congestion Control, ACM Queue 2016, `ProbeRTT`). All ranks wait for the link that pauses. Short round trips and bounded bytes in flight
//! need none of this.

use rustix::fd::AsRawFd;
use socket2::SockRef;
use std::io;
use std::net::TcpStream;
use std::time::Duration;

/// The longest round trip, when a socket connects, that counts as one of a local network. Between regions BBR is worth its pauses.
const LONGEST_LOCAL_ROUND_TRIP: Duration = Duration::from_millis(5);

/// What replaces BBR. Every Linux has it and lets every process use it. Of 50 calls of 16 MiB on 1+1+1+1+1+1 (network namespaces, 1 Gbit/s) the slowest takes
/// 1.5 times the median with BBR, 1.15 with cubic, whose first call is slower, and 1.1 with reno; the median is 236 ms, 234.7 and 234.7.
const REPLACEMENT: &[u8] = b"reno";

/// Uses another congestion control than BBR for the socket if it has it and the peer is near.
///
/// # Errors
/// That of the system call.
pub(super) fn replace_bbr(stream: &TcpStream) -> io::Result<()> {
    let options = SockRef::from(stream);
    let name = options.tcp_congestion()?;
    if name.starts_with(b"bbr") && round_trip(stream)? <= LONGEST_LOCAL_ROUND_TRIP {
        options.set_tcp_congestion(REPLACEMENT)?;
    }
    Ok(())
}

/// The round trip that the kernel has measured, since the connection began.
fn round_trip(stream: &TcpStream) -> io::Result<Duration> {
    // SAFETY: the structure consists of integers, for which zeros are a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and the kernel writes at most `len` bytes of the structure, which outlives the call.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            std::ptr::from_mut(&mut info).cast(),
            &mut len,
        )
    };
    if result == 0 {
        Ok(Duration::from_micros(info.tcpi_rtt.into()))
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn bbr_is_replaced_on_a_local_network_and_others_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let connect =
            || TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        for (name, expected) in [("bbr", "reno"), ("cubic", "cubic"), ("reno", "reno")] {
            let stream = connect();
            let options = SockRef::from(&stream);
            // Kernels lack some of them, and some processes may not use all.
            if options.set_tcp_congestion(name.as_bytes()).is_err() {
                eprintln!("skipped: {name} is not available");
                continue;
            }
            replace_bbr(&stream).expect("options");
            let name = options.tcp_congestion().expect("an option");
            assert!(name.starts_with(expected.as_bytes()), "{}", String::from_utf8_lossy(&name));
        }
        assert!(round_trip(&connect()).expect("an option") < Duration::from_secs(1));
    }
}
