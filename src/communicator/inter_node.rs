//! Links to ranks whose memory this rank does not share: over RDMA devices where all ranks can, else over TCP.
//!
//! Owns that choice and the steps that ranks take together towards it. Must not know how links within a node are
//! made, nor what is sent.

use super::join::PeerInfo;
use crate::bootstrap::{self, ControlConnection};
use crate::config::{Config, TransportChoice};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::memory::{Piece, Registrar};
use crate::rank::Rank;
use crate::transport::PostedTransport;
use crate::transport::tcp::{Listener, Tcp};
use crate::transport::verbs::port_selection::Rail;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

/// What a rank can offer for links over RDMA devices.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct RailOffer {
    /// Its rails, the best first.
    pub rails: Vec<Rail>,
    /// Why there are none.
    pub why_not: Option<Error>,
}

/// What this rank can offer. Looks at nothing where RDMA devices are not wanted.
pub(super) fn offer(config: &Config, world: usize) -> RailOffer {
    let wanted = matches!(config.transport, TransportChoice::Auto | TransportChoice::Verbs) && world > 1;
    if !wanted {
        return RailOffer::default();
    }
    match survey(config) {
        Ok(rails) => RailOffer { rails, why_not: None },
        Err(error) => RailOffer { rails: Vec::new(), why_not: Some(error) },
    }
}

#[cfg(feature = "verbs")]
fn survey(config: &Config) -> Result<Vec<Rail>> {
    use crate::transport::verbs::inventory::{Affinity, Inventory};
    use crate::transport::verbs::port_selection::select;
    let selection = select(&Inventory::local(), config, &Affinity::local(None))?;
    for rail in &selection.rails {
        log::debug!("verbs: {}:{} is a rail, as {}", rail.device, rail.port, rail.network);
    }
    Ok(selection.rails)
}

#[cfg(not(feature = "verbs"))]
fn survey(_config: &Config) -> Result<Vec<Rail>> {
    Err(Error::new(
        ErrorKind::Unsupported,
        "this flexring was built without RDMA: build it with --features verbs, or use FLEXRING_TRANSPORT=tcp",
    ))
}

/// All that making links to far ranks needs.
pub(super) struct InterNodeSetup<'a> {
    pub config: &'a Config,
    pub me: Rank,
    pub infos: &'a [PeerInfo],
    /// By rank, whether it is on this rank's node.
    pub same_node: &'a [bool],
    /// The ranks to link to.
    pub inter_node: &'a [Rank],
    #[cfg_attr(not(feature = "verbs"), expect(dead_code, reason = "tcp needs no steps taken together"))]
    pub control: &'a ControlConnection,
    pub deadline: Instant,
    pub fault: &'a Arc<Fault>,
}

/// Links to far ranks.
pub(super) struct InterNodeTransport {
    pub transport: Box<dyn PostedTransport>,
    pub registrar: Option<Arc<dyn Registrar>>,
}

impl InterNodeSetup<'_> {
    /// Makes the links. `pool` is what messages that cannot lie where they belong are kept in.
    ///
    /// # Errors
    /// Those of the transport: with `FLEXRING_TRANSPORT=auto` those of TCP only.
    pub(super) fn link(&self, listener: Option<Listener>, pool: Piece) -> Result<InterNodeTransport> {
        let choice = self.config.transport;
        if matches!(choice, TransportChoice::Auto | TransportChoice::Verbs) {
            match self.verbs(pool) {
                Ok(linked) => return Ok(linked),
                Err(error) if choice == TransportChoice::Verbs => return Err(error),
                Err(error) => {
                    self.fault.check()?;
                    self.fall_back(&error);
                }
            }
        }
        let Some(listener) = listener else {
            return Err(Error::new(ErrorKind::Internal, "there is no listener for tcp links"));
        };
        Ok(InterNodeTransport { transport: Box::new(self.tcp(listener)?), registrar: None })
    }

    /// Says once, on one rank, that RDMA devices are left unused; quietly where there are none anywhere.
    fn fall_back(&self, error: &Error) {
        let words = format!("links between nodes use tcp, not RDMA devices: {}", error.message());
        let any = self.infos.iter().any(|info| !info.rails.rails.is_empty());
        if any && self.me == 0 { log::warn!("{words}") } else { log::debug!("{words}") }
    }

    fn tcp(&self, listener: Listener) -> Result<Tcp> {
        let Self { config, infos, inter_node, same_node, .. } = *self;
        let peers = inter_node.iter().map(|rank| reach(config, &infos[*rank], *rank, same_node[*rank]));
        let peers = peers.collect::<Result<Vec<_>>>()?;
        let (token, sockets) = (infos[0].token, config.sockets_per_link);
        let tcp = Tcp::connect(listener, self.me, &peers, token, sockets, self.deadline, self.fault)?;
        if config.socket_buffer.0 > 0 {
            tcp.limit_send_buffers(config.socket_buffer.0)?;
        }
        Ok(tcp)
    }

    /// Why not all ranks that must can be linked over RDMA devices, if so. All ranks find the same.
    fn obstacle(&self) -> Option<Error> {
        use crate::transport::verbs::port_selection::{describe_mismatch, pair_rails};
        let infos = self.infos;
        if let Some((rank, error)) =
            (0..).zip(infos).find_map(|(rank, info)| Some((rank, info.rails.why_not.as_ref()?)))
        {
            return Some(error.clone().within(format_args!("rank {rank} on {}", infos[rank].host)));
        }
        let shared = self.config.transport == TransportChoice::Auto;
        for one in 0..infos.len() {
            for other in one + 1..infos.len() {
                let (mine, theirs) = (&infos[one].rails.rails, &infos[other].rails.rails);
                let linked = !(shared && infos[one].node == infos[other].node);
                if linked && pair_rails(mine, theirs).is_empty() {
                    let words = describe_mismatch((one, mine), (other, theirs));
                    return Some(Error::new(ErrorKind::Disagreement, words));
                }
            }
        }
        None
    }

    #[cfg(not(feature = "verbs"))]
    fn verbs(&self, _pool: Piece) -> Result<InterNodeTransport> {
        let without = || Error::new(ErrorKind::Internal, "a build without RDMA offers no rails");
        Err(self.obstacle().unwrap_or_else(without))
    }

    /// Every step is taken by all ranks, which tell each other how it went, so that they go on or fall back together.
    #[cfg(feature = "verbs")]
    fn verbs(&self, pool: Piece) -> Result<InterNodeTransport> {
        use crate::transport::Transport;
        use crate::transport::verbs::{ConnectInfo, UnconnectedVerbs, VerbsOptions};
        if let Some(error) = self.obstacle() {
            return Err(error);
        }
        let rails: Vec<_> = self.infos.iter().map(|info| info.rails.rails.clone()).collect();
        let peers: Vec<_> = self.inter_node.iter().map(|peer| (*peer, self.pairs(*peer))).collect();
        let opened = UnconnectedVerbs::open(self.me, &rails[self.me], &peers, VerbsOptions::new(self.config))
            .and_then(|prepared| {
                prepared.registrar().register(pool)?;
                let invitations = prepared.connect_info()?;
                Ok((prepared, invitations))
            });
        let (mine, prepared) = match opened {
            Ok((prepared, invitations)) => (Ok(invitations), Some(prepared)),
            Err(error) => (Err(error), None),
        };
        let invitations: Vec<ConnectInfo> = self.exchange("queue pairs", &mine)?;
        let prepared =
            prepared.ok_or_else(|| Error::new(ErrorKind::Internal, "a failed step was not reported"))?;
        let registrar = prepared.registrar();
        let connected = prepared.connect(&rails, &invitations, self.fault);
        let (outcome, connected) = split(connected);
        self.exchange::<()>("connections", &outcome)?;
        let mut verbs =
            connected.ok_or_else(|| Error::new(ErrorKind::Internal, "a failed step was not reported"))?;
        let greeted = verbs.handshake(self.deadline.min(Instant::now() + GREETING));
        if let Err(error) = self.exchange::<()>("greetings", &greeted) {
            verbs.abort();
            return Err(error);
        }
        log::debug!("verbs: rank {} uses {}", self.me, verbs.summary());
        Ok(InterNodeTransport { transport: Box::new(verbs), registrar: Some(registrar) })
    }

    /// Which rails of this rank are connected with which of the peer's.
    #[cfg(feature = "verbs")]
    fn pairs(&self, peer: Rank) -> Vec<(usize, usize)> {
        let (low, high) = (self.me.min(peer), self.me.max(peer));
        let rails = |rank: Rank| &self.infos[rank].rails.rails;
        let pairs = crate::transport::verbs::port_selection::pair_rails(rails(low), rails(high));
        if self.me == low { pairs } else { pairs.into_iter().map(|(low, high)| (high, low)).collect() }
    }

    /// Tells all ranks how a step went here, and hears how it went there: all results, or the first rank's error.
    #[cfg(feature = "verbs")]
    fn exchange<T>(&self, what: &str, mine: &Result<T>) -> Result<Vec<T>>
    where
        T: serde::Serialize + serde::de::DeserializeOwned,
    {
        let unreadable =
            |cause: postcard::Error| Error::new(ErrorKind::Internal, format!("cannot read {what}: {cause}"));
        let mine = postcard::to_stdvec(mine).map_err(unreadable)?;
        let results = self.control.all_gather(what, &mine)?;
        let results = results.iter().map(|bytes| postcard::from_bytes(bytes).map_err(unreadable));
        let results: Vec<Result<T>> = results.collect::<Result<_>>()?;
        let within = |(rank, result): (Rank, Result<T>)| {
            result.map_err(|error| error.within(format_args!("rank {rank} on {}", self.infos[rank].host)))
        };
        results.into_iter().enumerate().map(within).collect()
    }
}

/// How long a rank tries to reach its peers by RDMA: several times what a device needs to give a peer up.
#[cfg(feature = "verbs")]
const GREETING: std::time::Duration = std::time::Duration::from_secs(15);

/// What is told of a result, and the result itself.
#[cfg(feature = "verbs")]
fn split<T>(result: Result<T>) -> (Result<()>, Option<T>) {
    match result {
        Ok(value) => (Ok(()), Some(value)),
        Err(error) => (Err(error), None),
    }
}

/// Where this rank listens for links: the interface that others reach it by, and loopback for its own node.
pub(super) fn addresses(config: &Config) -> Result<Vec<IpAddr>> {
    let chosen = bootstrap::choose(config.socket_ifname.as_deref(), config.socket_family)?;
    let loopback: IpAddr = match chosen {
        IpAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
    };
    // An interface that was named is used even within the node.
    let named = config.socket_ifname.is_some();
    Ok(if named || chosen.is_loopback() { vec![chosen] } else { vec![chosen, loopback] })
}

/// The address by which this rank reaches a peer.
fn reach(config: &Config, info: &PeerInfo, peer: Rank, same_node: bool) -> Result<(Rank, SocketAddr)> {
    let intra_node = same_node && config.socket_ifname.is_none();
    let endpoint = info.endpoints.iter().find(|endpoint| endpoint.ip().is_loopback() == intra_node);
    endpoint.or(info.endpoints.first()).map(|endpoint| (peer, *endpoint)).ok_or_else(|| {
        Error::new(
            ErrorKind::Disagreement,
            format!(
                "rank {peer} on {} listens for no TCP links: does it have FLEXRING_TRANSPORT=shm?",
                info.host
            ),
        )
    })
}
