//! Where rank 0 listens for the other ranks.
//!
//! Owns the choice of addresses: those where the ranks look for it, and no others.
//!
//! - Addresses of this node: the coordinator listens at those.
//! - A loopback address that is this node's own name: ranks of this node see that address, others another
//!   one. It listens at both: the other one is that of the interface that `FLEXRING_SOCKET_IFNAME` names,
//!   else of the first suitable one.
//! - An address of no interface of this node, as behind address translation: it listens at the address of the
//!   interface that `FLEXRING_SOCKET_IFNAME` names, else of the one with the route there.
//!
//! It never listens at all addresses: a process that reaches it can join a job without a secret.

use super::coordinator_target::{resolve, with_port};
use super::heartbeat::seconds;
use super::interfaces::{choose_address, route_source};
use super::listening_process::ListeningProcess;
use super::node_secret::{NodeSecret, NodeSecretListener};
use super::secret::SecretSource;
use crate::config::Config;
use crate::descriptor;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::interrupt::longest_sleep;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Once;
use std::time::{Duration, Instant};

/// How long rank 0 retries a port that is in use. A rank that connects before rank 0 listens can hold the
/// port briefly.
const BIND_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between attempts to listen, and to resolve a name.
const PAUSE: Duration = Duration::from_millis(200);
/// Length of the queue of pending connections; the system may impose a lower limit.
const BACKLOG: i32 = 4096;

/// Listens at exactly this address, even if a previous coordinator closed the port a moment ago.
pub(super) fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = descriptor::tcp_socket(address)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Where the other ranks look for rank 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListenAddress<'a> {
    pub(super) host: &'a str,
    pub(super) port: u16,
    /// The ports for the case that another process has `port`.
    pub(super) further_ports: &'a [u16],
}

/// Listens as rank 0 where the other ranks look for it, and hands out `node_secret` at its name. Until
/// `deadline` the host's name need not be known. `owner` finds out which process listens at one of these
/// addresses, if it can.
///
/// # Errors
/// `Rendezvous` if the port is in use, and there is no further one or this job's own coordinator has it; if
/// the name is not known by the deadline; or if there is no address to listen at. The fault, if it is raised
/// meanwhile.
pub(super) fn listen(
    ListenAddress { host, port, further_ports }: ListenAddress<'_>,
    config: &Config,
    node_secret: Option<NodeSecret>,
    deadline: Instant,
    fault: &Fault,
    owner: impl Fn(&[SocketAddr]) -> Option<ListeningProcess>,
) -> Result<(Vec<TcpListener>, Option<NodeSecretListener>)> {
    let mut addresses = resolve_until(deadline, host, fault, || resolve(host, port))?;
    // The secret first: a rank that reaches the port must find it.
    let node_secret = hand_out(host, port, node_secret, fault, || owner(&addresses))?;
    let interface = |to: SocketAddr| interface_for(to, config);
    for further in further_ports {
        match bind(host, &addresses, &interface) {
            Err(cause) if cause.kind() == io::ErrorKind::AddrInUse => {}
            outcome => {
                let at = addresses[0];
                let failed = |cause| cannot_listen(host, at.port(), cause, fault, || None);
                return Ok((outcome.map_err(failed)?, node_secret));
            }
        }
        // The other ranks find the next port, but a second rank 0 of this job is an error.
        if owner(&addresses).is_some_and(|owner| owner.is_of_this_job) {
            break;
        }
        fault.check_waiting()?;
        addresses = with_port(&addresses, *further).collect();
        log::debug!("rank 0 uses port {further}, because another process has the one before");
    }
    match retry_in_use(fault, || bind(host, &addresses, &interface))? {
        Ok(listeners) => Ok((listeners, node_secret)),
        Err(cause) => Err(cannot_listen(host, addresses[0].port(), cause, fault, || owner(&addresses))),
    }
}

/// Hands out `node_secret` at its name, for the ranks that look for rank 0 at this host and port. `owner` as
/// for [`listen`].
///
/// # Errors
/// `Rendezvous` if the name is in use; the fault, if it is raised meanwhile.
pub(super) fn hand_out(
    host: &str,
    port: u16,
    node_secret: Option<NodeSecret>,
    fault: &Fault,
    owner: impl Fn() -> Option<ListeningProcess>,
) -> Result<Option<NodeSecretListener>> {
    let Some(secret) = node_secret else {
        return Ok(None);
    };
    let bound = retry_in_use(fault, || NodeSecretListener::bind(&secret))?;
    bound.map(Some).map_err(|cause| cannot_listen(host, port, cause, fault, owner))
}

fn cannot_listen(
    host: &str,
    port: u16,
    cause: io::Error,
    fault: &Fault,
    owner: impl Fn() -> Option<ListeningProcess>,
) -> Error {
    let owner = if cause.kind() == io::ErrorKind::AddrInUse { owner() } else { None };
    // Asking for the owner takes a while.
    if let Err(error) = fault.check_waiting() {
        return error;
    }
    let why = owner.map_or_else(|| cause.to_string(), |owner| format!("the port is in use: {}", owner.text));
    Error::rendezvous(format!(
        "rank 0 cannot listen on {host} port {port}: {why}; set FLEXRING_MASTER_PORT to a port that is free \
         on its node, the same on all ranks"
    ))
    .with_source(cause)
}

/// The addresses of `host`, by `resolve`. Kubernetes publishes the names of pods, and Slurm those of nodes
/// that start, after the pods and nodes run.
///
/// # Errors
/// `Rendezvous` if there are none by the deadline; the fault, if it is raised meanwhile.
fn resolve_until(
    deadline: Instant,
    host: &str,
    fault: &Fault,
    resolve: impl FnMut() -> io::Result<Vec<SocketAddr>>,
) -> Result<Vec<SocketAddr>> {
    let begun = Instant::now();
    retry(fault, deadline, |_| true, resolve)?.map_err(|cause| {
        Error::rendezvous(format!(
            "rank 0 cannot resolve the master address {host} within {}: {cause}; check that FLEXRING_MASTER_ADDR, or the launcher's \
             address, is a name that resolves on rank 0's node",
            seconds(begun.elapsed())
        ))
        .with_source(cause)
    })
}

/// Repeats `bind` for a while if the address is in use.
///
/// # Errors
/// The fault, if it is raised meanwhile.
fn retry_in_use<T>(fault: &Fault, bind: impl FnMut() -> io::Result<T>) -> Result<io::Result<T>> {
    let is_in_use = |cause: &io::Error| cause.kind() == io::ErrorKind::AddrInUse;
    retry(fault, Instant::now() + BIND_TIMEOUT, is_in_use, bind)
}

/// Repeats `action` until a time as long as it fails with a cause that may pass.
///
/// # Errors
/// The fault, if it is raised meanwhile.
fn retry<T>(
    fault: &Fault,
    until: Instant,
    may_pass: impl Fn(&io::Error) -> bool,
    mut action: impl FnMut() -> io::Result<T>,
) -> Result<io::Result<T>> {
    let watch = fault.watch()?;
    loop {
        match action() {
            Err(cause) if may_pass(&cause) && Instant::now() < until => {
                let pause = Timespec::try_from(PAUSE.min(longest_sleep())).ok();
                // An early wake-up is harmless.
                let _ = poll(&mut [PollFd::new(&watch, PollFlags::IN)], pause.as_ref());
                fault.check_waiting()?;
            }
            outcome => return Ok(outcome),
        }
    }
}

/// Listens at the addresses of this node among `addresses`, or at the one that `interface` gives where those
/// are not enough.
fn bind(
    host: &str,
    addresses: &[SocketAddr],
    interface: &dyn Fn(SocketAddr) -> io::Result<IpAddr>,
) -> io::Result<Vec<TcpListener>> {
    let mut listeners = Vec::new();
    for address in addresses {
        match listen_at(specific(*address)) {
            Ok(listener) => listeners.push(listener),
            Err(cause) if cause.kind() == io::ErrorKind::AddrNotAvailable => {}
            // A machine without IPv6 may still have a name for ::1.
            Err(cause) if cause.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) => {}
            Err(cause) => return Err(cause),
        }
    }
    // Many systems map their own name to a loopback address, which other nodes cannot reach.
    let is_own_name = host.parse::<IpAddr>().is_err()
        && !host.eq_ignore_ascii_case("localhost")
        && addresses.iter().all(|address| address.ip().is_loopback());
    if (listeners.is_empty() || is_own_name)
        && let Some(address) = addresses.first()
    {
        let chosen = SocketAddr::new(interface(*address)?, address.port());
        if addresses.iter().all(|address| specific(*address).ip() != chosen.ip()) {
            listeners.push(listen_at(chosen)?);
        }
    }
    Ok(listeners)
}

/// An address at which one interface is meant. The unspecified address, at which connecting leads to this
/// node, means loopback.
fn specific(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

/// The address of the interface for ranks that look for rank 0 at `to`, which is no address of this node that
/// others reach.
fn interface_for(to: SocketAddr, config: &Config) -> io::Result<IpAddr> {
    let route = || route_source(to.ip()).filter(|local| !local.is_loopback());
    let chosen = || choose_address(config).map_err(io::Error::other);
    if config.socket_ifname.is_some() { chosen() } else { route().map_or_else(chosen, Ok) }
}

/// Warns, once in a process, if processes on other hosts can join the job because it has no secret.
pub(super) fn warn_of_strangers(listeners: &[TcpListener], source: &SecretSource) {
    static WARNED: Once = Once::new();
    if source.is_secret() {
        return;
    }
    let addresses = listeners.iter().filter_map(|listener| listener.local_addr().ok());
    if let Some(open) = addresses.into_iter().find(|address| !address.ip().is_loopback()) {
        WARNED.call_once(|| {
            log::warn!(
                "the job has no secret: every process that reaches {open} can join or end it; set FLEXRING_SECRET on all \
                 ranks, for example to the output of `openssl rand -hex 32`"
            );
        });
    }
}

/// The addresses that these listeners listen at.
pub(super) fn addresses_of(listeners: &[TcpListener]) -> Result<Vec<SocketAddr>> {
    let address = |listener: &TcpListener| {
        listener
            .local_addr()
            .map_err(|cause| Error::io("cannot read the coordinator's listening address", cause))
    };
    listeners.iter().map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An address of the documentation, which no interface has.
    const NOT_LOCAL: &str = "192.0.2.1:0";

    fn listening(host: &str, resolved: &[&str], interface: &str) -> Vec<String> {
        let resolved: Vec<SocketAddr> =
            resolved.iter().map(|address| address.parse().expect("an address")).collect();
        let interface = |_| Ok(interface.parse().expect("an address"));
        let listeners = bind(host, &resolved, &interface).expect("bound");
        let addresses = addresses_of(&listeners).expect("bound");
        addresses.iter().map(|address| address.ip().to_string()).collect()
    }

    #[test]
    fn listens_only_where_ranks_look_for_it() {
        for (host, resolved, expected) in [
            ("127.0.0.1", vec!["127.0.0.1:0"], vec!["127.0.0.1"]),
            ("localhost", vec!["127.0.0.1:0"], vec!["127.0.0.1"]),
            // Connecting to it leads to this node.
            ("0.0.0.0", vec!["0.0.0.0:0"], vec!["127.0.0.1"]),
            // Debian's name for itself.
            ("node7", vec!["127.0.1.1:0"], vec!["127.0.1.1", "127.0.0.7"]),
            ("node7", vec!["127.0.0.9:0", NOT_LOCAL], vec!["127.0.0.9"]),
            // Address translation.
            ("203.0.113.5", vec![NOT_LOCAL], vec!["127.0.0.7"]),
        ] {
            assert_eq!(listening(host, &resolved, "127.0.0.7"), expected, "{host} at {resolved:?}");
        }
    }

    #[test]
    fn a_name_that_is_known_later_is_waited_for() {
        let soon = || Instant::now() + Duration::from_secs(20);
        let unknown = || Err(io::Error::other("failed to lookup address information"));
        let fault = Fault::new();
        let mut attempts = 0;
        let address: SocketAddr = "127.0.0.1:9".parse().expect("an address");
        let resolved = resolve_until(soon(), "rank-0.job", &fault, || {
            attempts += 1;
            if attempts < 3 { unknown() } else { Ok(vec![address]) }
        });
        assert_eq!(resolved.expect("known at the third attempt"), [address]);
        let error = resolve_until(Instant::now(), "rank-0.job", &fault, unknown).expect_err("never known");
        let message = error.message();
        assert!(message.contains("cannot resolve the master address rank-0.job within"), "{error}");
        assert!(message.contains("failed to lookup") && message.contains("FLEXRING_MASTER_ADDR"), "{error}");
        fault.raise(Error::aborted("called off"));
        let error = resolve_until(soon(), "rank-0.job", &fault, unknown).expect_err("aborted");
        assert_eq!(error.message(), "called off");
    }

    #[test]
    fn the_named_interface_is_used_for_an_address_of_no_interface() {
        let config = Config { socket_ifname: Some("=lo".to_owned()), ..Config::default() };
        let to = NOT_LOCAL.parse().expect("an address");
        assert!(interface_for(to, &config).expect("an interface").is_loopback());
        let error = interface_for(to, &Config { socket_ifname: Some("=none".to_owned()), ..config });
        assert!(error.expect_err("no interface").to_string().contains("FLEXRING_SOCKET_IFNAME"));
    }

    #[test]
    fn an_interface_without_a_name_is_never_the_unspecified_address() {
        for to in ["192.0.2.1:9", "[2001:db8::1]:9", "127.0.1.1:9"] {
            // A machine may have no interface at all but loopback.
            if let Ok(chosen) = interface_for(to.parse().expect("an address"), &Config::default()) {
                assert!(!chosen.is_unspecified(), "{to}");
            }
        }
    }
}
