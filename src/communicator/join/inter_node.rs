//! Links to ranks whose memory this rank does not share: over RDMA devices if all ranks can use them, over
//! TCP if none can or the settings allow it.
//!
//! Owns that choice, and the steps that all ranks take together to make the links.

use super::endpoints::PeerAddresses;
use super::peer_info::{PeerInfo, RailOffer};
#[cfg(feature = "verbs")]
use crate::bootstrap::PeerMessages;
use crate::bootstrap::{ControlConnection, JobSecret};
use crate::config::{Config, TransportChoice};
use crate::error::{Error, ErrorKind, Result};
use crate::fault::Fault;
use crate::memory::{Piece, Registrar};
use crate::rank::Rank;
use crate::secret::SecretKey;
use crate::transport::PostedTransport;
use crate::transport::tcp::{LinkOptions, Listener, Tcp};
#[cfg(feature = "verbs")]
use crate::transport::verbs::OutOfBand;
use crate::transport::verbs::RailCounters;
use crate::transport::verbs::port_selection::{
    Offer, Rail, describe_mismatch, first_unreachable, rails_of_world,
};
#[cfg(feature = "verbs")]
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

/// How long a rank tries to reach its peers by RDMA. Less than devices need to declare a peer unreachable,
/// which is half a minute: a peer that answers does so at once.
#[cfg(feature = "verbs")]
const HANDSHAKE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(15);

/// Refuses RDMA for a job whose connections are to be encrypted: devices cannot do that.
///
/// # Errors
/// `InvalidSetting` if the settings require both.
pub(super) fn check_encryption(config: &Config) -> Result<()> {
    if config.tls.0 && config.transport == TransportChoice::Verbs {
        return Err(Error::invalid_setting(
            "FLEXRING_TLS=1 cannot encrypt what FLEXRING_TRANSPORT=verbs sends: use FLEXRING_TRANSPORT=tcp, or auto, which uses tcp \
             then; or encrypt in the network and unset FLEXRING_TLS",
        ));
    }
    Ok(())
}

/// The RDMA ports that this rank offers to its peers. Does not look for devices if the settings exclude RDMA.
pub(super) fn offer(config: &Config, world: usize) -> RailOffer {
    if !config.transport.admits_rdma() || world == 1 {
        return RailOffer::default();
    }
    if config.tls.0 {
        let error = Error::unsupported("FLEXRING_TLS=1 cannot encrypt what RDMA devices send");
        return RailOffer { why_not: Some(error), ..RailOffer::default() };
    }
    match offer_ports(config) {
        // Ports without a library are offered with the reason, so that no rank silently uses TCP.
        Ok((ports, missing)) => {
            RailOffer { ports, why_not: open_library(config).err(), is_idle: false, missing }
        }
        Err(error) => {
            // Devices that settings exclude are not missed.
            let is_idle = error.kind() != ErrorKind::InvalidSetting && has_devices();
            RailOffer { why_not: Some(error), is_idle, ..RailOffer::default() }
        }
    }
}

/// Whether this machine has RDMA devices of any kind.
fn has_devices() -> bool {
    !crate::transport::verbs::inventory::Inventory::local().devices.is_empty()
}

/// The ports that can be used, and one that cannot.
#[cfg(feature = "verbs")]
fn offer_ports(config: &Config) -> Result<(Offer, Option<Error>)> {
    use crate::transport::verbs::inventory::{Affinity, Inventory};
    use crate::transport::verbs::port_selection::{missing, offer};
    let gpu = crate::communicator::gpu_state::address(config.gpu);
    let is_coherent = crate::communicator::gpu_state::is_coherent(config.gpu);
    let affinity = Affinity { is_coherent, ..Affinity::local(gpu.as_deref()) };
    let inventory = Inventory::local();
    Ok((offer(&inventory, config, &affinity)?, missing(&inventory, config, &affinity)?))
}

/// Opens libibverbs.
#[cfg(feature = "verbs")]
fn open_library(config: &Config) -> Result<()> {
    let library = crate::transport::verbs::probe::library(config.ibverbs.as_deref())?;
    log::debug!("verbs: libibverbs is {:?}, without {:?}", library.file, library.missing);
    Ok(())
}

#[cfg(not(feature = "verbs"))]
fn open_library(_config: &Config) -> Result<()> {
    Ok(())
}

#[cfg(not(feature = "verbs"))]
fn offer_ports(_config: &Config) -> Result<(Offer, Option<Error>)> {
    Err(Error::unsupported(
        "this flexring was built without RDMA: build it with --features verbs, or use FLEXRING_TRANSPORT=tcp",
    ))
}

/// What is needed to make links to the ranks that this rank does not share memory with.
pub(super) struct InterNodeSetup<'a> {
    pub config: &'a Config,
    pub me: Rank,
    /// By rank.
    pub infos: &'a [PeerInfo],
    /// The ranks to link to.
    pub peers: &'a [Rank],
    /// Those of them that the plans use, which are the only ones with links over RDMA at first.
    #[cfg_attr(not(feature = "verbs"), expect(dead_code, reason = "TCP has links to all peers at once"))]
    pub planned: &'a [Rank],
    /// By rank, the bytes that the link to it may have in flight. Takes some time.
    pub bytes_in_flight: &'a dyn Fn() -> Vec<usize>,
    pub connection: &'a ControlConnection,
    pub deadline: Instant,
    pub fault: &'a Arc<Fault>,
}

/// The links.
pub(super) struct InterNodeTransport {
    pub transport: Box<dyn PostedTransport>,
    /// Registers memory with the transport's devices, if it has devices.
    pub registrar: Option<Arc<dyn Registrar>>,
    /// What each rail carries. Empty for TCP.
    pub rails: Arc<[RailCounters]>,
}

impl InterNodeSetup<'_> {
    /// Makes the links. `pool` holds the slots through which messages are staged.
    ///
    /// # Errors
    /// Those of the transport; with `FLEXRING_TRANSPORT=auto` those of RDMA only if a rank offers ports, and
    /// the same on all ranks.
    pub(super) fn link(&self, listener: Option<Listener>, pool: Piece) -> Result<InterNodeTransport> {
        if self.config.transport.admits_rdma() {
            match self.verbs(pool)? {
                Ok(linked) => return Ok(linked),
                Err(why_not) => {
                    self.fault.check()?;
                    let offering = self.infos.iter().position(|info| !info.rails.ports.rails.is_empty());
                    let offering = offering.map(|rank| (rank, &*self.infos[rank].host));
                    let idle = (0..).zip(self.infos).find(|(_, info)| info.rails.is_idle);
                    let why_not =
                        match idle.and_then(|(rank, info)| Some((rank, info.rails.why_not.clone()?))) {
                            Some((rank, idle)) if offering.is_none() => self.at_rank(rank, idle),
                            _ => why_not,
                        };
                    let level = fall_back(self.config.transport, offering, idle.is_some(), &why_not)?;
                    let level = if self.me == 0 { level } else { log::Level::Debug };
                    log::log!(level, "links between nodes use tcp, not RDMA devices: {}", why_not.message());
                }
            }
        }
        let Some(listener) = listener else {
            return Err(Error::internal("there is no listener for tcp links"));
        };
        Ok(InterNodeTransport {
            transport: Box::new(self.tcp(listener)?),
            registrar: None,
            rails: Arc::default(),
        })
    }

    fn tcp(&self, listener: Listener) -> Result<Tcp> {
        let Self { config, me, infos, .. } = *self;
        let addresses = PeerAddresses::new(config, self.connection.route());
        let peer = |rank: &Rank| match addresses
            .ordered(&infos[*rank].endpoints, infos[*rank].shares_node(&infos[me]))
        {
            none if none.is_empty() => Err(Error::disagreement(format!(
                "rank {rank} on {} listens for no TCP links: does it have FLEXRING_TRANSPORT=shm?",
                infos[*rank].host
            ))),
            addresses => Ok((*rank, addresses)),
        };
        let peers = self.peers.iter().map(peer).collect::<Result<Vec<_>>>()?;
        let keys = self.link_keys();
        let key = |peer| keys.of_link(peer);
        let options = LinkOptions {
            sockets_per_link: config.sockets_per_link,
            is_encrypted: self.connection.secret().is_encrypted(),
            connect_timeout: config.connect_timeout,
        };
        let tcp = Tcp::connect(listener, self.me, &peers, &key, options, self.deadline, self.fault)?;
        if config.socket_buffer.0 > 0 {
            let bytes = (self.bytes_in_flight)();
            tcp.limit_send_buffers(|peer| bytes[peer])?;
        }
        Ok(tcp)
    }

    fn link_keys(&self) -> LinkKeys {
        LinkKeys {
            me: self.me,
            nonces: self.infos.iter().map(|info| info.nonce).collect(),
            secret: self.connection.secret().clone(),
        }
    }

    /// By rank, the rails that it uses: the ranks of each node divide its ports. All ranks compute the same.
    fn rails(&self) -> Vec<Vec<Rail>> {
        let offers: Vec<&Offer> = self.infos.iter().map(|info| &info.rails.ports).collect();
        let nodes: Vec<&str> = self.infos.iter().map(|info| &*info.node).collect();
        rails_of_world(&offers, &nodes, self.config.transport.shares_memory())
    }

    /// Why some ranks cannot be linked over RDMA devices with these rails; `None` if all can. All ranks find
    /// the same obstacle.
    fn rdma_obstacle(&self, rails: &[Vec<Rail>]) -> Option<Error> {
        let infos = self.infos;
        if let Some((rank, error)) =
            (0..).zip(infos).find_map(|(rank, info)| Some((rank, info.rails.why_not.as_ref()?)))
        {
            return Some(error.clone().context(format_args!("rank {rank} on {}", infos[rank].host)));
        }
        let nodes: Vec<&str> = infos.iter().map(|info| &*info.node).collect();
        let shares_memory = self.config.transport.shares_memory();
        let (one, other) = first_unreachable(rails, shares_memory.then_some(&nodes))?;
        Some(Error::disagreement(describe_mismatch((one, &rails[one]), (other, &rails[other]))))
    }

    #[cfg(not(feature = "verbs"))]
    fn verbs(&self, _pool: Piece) -> Result<Result<InterNodeTransport>> {
        let without = || Error::internal("a build without RDMA offers no rails");
        Ok(Err(self.rdma_obstacle(&self.rails()).unwrap_or_else(without)))
    }

    /// Makes the RDMA links. All ranks take each step together and exchange its outcome. A rail that does not
    /// work on some rank is left out by all, and they begin again. Returns the same reason on all ranks if
    /// RDMA cannot be used.
    ///
    /// # Errors
    /// Those of the exchange.
    #[cfg(feature = "verbs")]
    fn verbs(&self, pool: Piece) -> Result<Result<InterNodeTransport>> {
        use crate::transport::verbs::{rails_to_drop, remove_rails};
        let mut rails = self.rails();
        let level = if self.me == 0 { log::Level::Warn } else { log::Level::Debug };
        self.warn_of_staging(&rails, level);
        self.warn_of_traffic_class(&rails, level);
        self.warn_of_missing_ports(level);
        let mut halves_mtu = false;
        loop {
            if let Some(error) = self.rdma_obstacle(&rails) {
                return Ok(Err(error));
            }
            let faults = match self.link_rails(rails.clone(), pool, halves_mtu)? {
                LinkAttempt::Linked(linked) => return Ok(Ok(linked)),
                LinkAttempt::Failed(error) => return Ok(Err(error)),
                LinkAttempt::LongPacketsLost(faults) if !halves_mtu => {
                    let fault = (0..).zip(&faults).find_map(|(rank, faults)| Some((rank, faults.first()?)));
                    if let Some((rank, fault)) = fault {
                        let host = &self.infos[rank].host;
                        let cause = fault.cause.message();
                        log::log!(
                            level,
                            "verbs: rank {rank} on {host}: {cause}; all ranks try packets of half the length"
                        );
                    }
                    halves_mtu = true;
                    continue;
                }
                LinkAttempt::Faults(faults) | LinkAttempt::LongPacketsLost(faults) => faults,
            };
            halves_mtu = false;
            let dropped = rails_to_drop(&faults);
            for dropped in &dropped {
                let host = &self.infos[dropped.rank].host;
                let Some(rail) = rails.get(dropped.rank).and_then(|rails| rails.get(dropped.rail)) else {
                    let message =
                        format!("rank {} on {host} reports a rail that it does not have", dropped.rank);
                    return Ok(Err(Error::disagreement(message)));
                };
                let what =
                    format!("rank {} on {host} does not use {}:{}", dropped.rank, rail.device, rail.port);
                log::log!(
                    level,
                    "verbs: {what}, nor does any rank connect to it: rank {}: {}",
                    dropped.reporter,
                    dropped.cause.message()
                );
            }
            remove_rails(&mut rails, &dropped);
            let without = dropped.iter().find(|dropped| rails[dropped.rank].is_empty());
            if let Some(dropped) =
                without.or_else(|| dropped.first().filter(|_| self.rdma_obstacle(&rails).is_some()))
            {
                let reporter = dropped.reporter;
                let host = &self.infos[reporter].host;
                let error = dropped.cause.clone().context(format_args!("rank {reporter} on {host}"));
                return Ok(Err(error));
            }
        }
    }

    /// Logs which ranks copy the memory of their GPUs through host memory because of distances, and why.
    #[cfg(feature = "verbs")]
    fn warn_of_staging(&self, rails: &[Vec<Rail>], log_level: log::Level) {
        use crate::config::GpuDirect;
        use crate::transport::verbs::far_rail;
        use crate::transport::verbs::inventory::unusable_topology_file;
        let level = self.config.gdr_level;
        let far = |(rank, info): (Rank, &PeerInfo)| {
            let rail = far_rail(&rails[rank], level).filter(|_| info.rails.ports.is_near_gpu)?;
            Some((rank, rail))
        };
        let far: Vec<(Rank, &Rail)> = (0..).zip(self.infos).filter_map(far).collect();
        if let Some((rank, rail)) = far.first()
            && self.config.gpu_direct == GpuDirect::Auto
        {
            let file = unusable_topology_file().map_or_else(String::new, |path| {
                format!("; NCCL_TOPO_FILE={path} is not used, as it names no place of a device")
            });
            let ranks: Vec<Rank> = far.iter().map(|(rank, _)| *rank).collect();
            log::log!(
                log_level,
                "verbs: GPU memory of {} is copied through host memory: {} is {} from the GPU of rank {rank} on {}, farther than \
                 FLEXRING_GDR_LEVEL={}; if a virtual machine hides the PCI switches, set FLEXRING_GDR_LEVEL=SYS{file}",
                crate::rank::RankList::new(&ranks),
                rail.device,
                rail.distance,
                self.infos[*rank].host,
                level.name(),
            );
        }
    }

    /// Logs that packets of RoCE are in the class that usually loses some, unless the settings or the system
    /// say which class.
    #[cfg(feature = "verbs")]
    fn warn_of_traffic_class(&self, rails: &[Vec<Rail>], level: log::Level) {
        use crate::transport::verbs::inventory::{LinkLayer, sets_traffic_class};
        let is_lossy = |rail: &&Rail| {
            rail.layer == LinkLayer::Ethernet
                && !rail.is_software
                && !sets_traffic_class(std::path::Path::new("/"), &rail.device, rail.port)
        };
        let is_set = self.config.given.contains("FLEXRING_IB_TC") || self.config.ib_tc != 0;
        if let Some(rail) = rails[self.me].iter().find(is_lossy).filter(|_| !is_set) {
            log::log!(
                level,
                "verbs: packets of {}:{} have traffic class 0, for which most RoCE networks guarantee no delivery: set FLEXRING_IB_TC to \
                 that of the lossless class, often 106, or to 0 if that is right",
                rail.device,
                rail.port
            );
        }
    }

    /// Logs which node can use fewer ports than another because one of its ports does not work. Ports that
    /// work on no node are not missed: few clusters use all ports of their adapters.
    #[cfg(feature = "verbs")]
    fn warn_of_missing_ports(&self, level: log::Level) {
        let count = |info: &PeerInfo| info.rails.ports.rails.len();
        let most = self.infos.iter().map(count).max().unwrap_or(0);
        let mut fewer = self.infos.iter().filter(|info| count(info) < most);
        if let Some((info, missing)) = fewer.find_map(|info| Some((info, info.rails.missing.as_ref()?))) {
            let (host, count, missing) = (&info.host, count(info), missing.message());
            log::log!(
                level,
                "verbs: {host} can use fewer ports than another node, {count} instead of {most}: {missing}"
            );
        }
    }

    /// Makes the RDMA links over these rails, by rank. With `halves_mtu`, packets are half as long as they
    /// could be.
    ///
    /// # Errors
    /// Those of the exchange.
    #[cfg(feature = "verbs")]
    fn link_rails(&self, rails: Vec<Vec<Rail>>, pool: Piece, halves_mtu: bool) -> Result<LinkAttempt> {
        use crate::transport::Transport;
        use crate::transport::verbs::{
            ConnectInfo, LinkDirectory, RailFault, SetupFailure, UnconnectedVerbs, VerbsOptions,
        };
        let mine = &rails[self.me];
        for Rail { device, port, network, distance, is_reserve, .. } in mine {
            let as_reserve = if *is_reserve { ", as a reserve" } else { "" };
            log::debug!("verbs: rank {} uses {device}:{port}, {distance}, in {network}{as_reserve}", self.me);
        }
        let mut options =
            VerbsOptions { halves_mtu, ..VerbsOptions::new(self.config) }.for_rails(&rails, self.config);
        if self.infos[self.me].rails.ports.is_near_gpu {
            options = options.at_distance(mine, self.config.gdr_level);
        }
        let unreported = || Error::internal("a failed step was not reported");
        let keys = self.link_keys();
        let directory = LinkDirectory {
            me: self.me,
            rails,
            key: Box::new(move |peer| keys.of_link(peer)),
            out_of_band: Box::new(self.connection.peer_messages()?),
        };
        let opened = UnconnectedVerbs::open(directory, self.planned, options).and_then(|unconnected| {
            unconnected.registrar().register(pool)?;
            let info = unconnected.connect_info()?;
            Ok((unconnected, info))
        });
        let (unconnected, info) =
            opened.map_or_else(|failure| (None, Err(failure)), |(some, info)| (Some(some), Ok(info)));
        let infos: Vec<ConnectInfo> = match self.exchange_step("queue pairs", info)? {
            Ok(infos) => infos,
            Err(attempt) => return Ok(attempt),
        };
        let unconnected = unconnected.ok_or_else(unreported)?;
        let registrar = unconnected.registrar();
        let received =
            unconnected.send_links().and_then(|()| unconnected.receive_links(self.deadline, self.fault));
        let connected = received
            .map_err(SetupFailure::from)
            .and_then(|received| unconnected.connect(&infos, received, self.fault));
        let (connected, outcome) =
            connected.map_or_else(|failure| (None, Err(failure)), |verbs| (Some(verbs), Ok(())));
        if let Err(attempt) = self.exchange_step("connections", outcome)? {
            if let Some(mut verbs) = connected {
                // No goodbyes: the peers may have no queue pairs.
                verbs.abort();
            }
            return Ok(attempt);
        }
        let mut verbs = connected.ok_or_else(unreported)?;
        let (handshake, lost) = verbs.handshake(self.deadline.min(Instant::now() + HANDSHAKE_TIMEOUT));
        let handshakes = self.exchange("handshakes", &Ok((handshake, lost)));
        let failed = match handshakes {
            Ok(Ok(all)) => {
                let (outcomes, lost): (Vec<Result<()>>, Vec<Vec<RailFault>>) = all.into_iter().unzip();
                // Where long packets are lost, other ends are found to be broken.
                if lost.iter().any(|lost| !lost.is_empty()) {
                    Ok(Some(LinkAttempt::LongPacketsLost(lost)))
                } else {
                    let failed = (0..).zip(outcomes).find_map(|(rank, outcome)| Some((rank, outcome.err()?)));
                    Ok(failed.map(|(rank, error)| LinkAttempt::Failed(self.at_rank(rank, error))))
                }
            }
            Ok(Err(error)) => Ok(Some(LinkAttempt::Failed(error))),
            Err(error) => Err(error),
        };
        if !matches!(failed, Ok(None)) {
            verbs.abort();
        }
        if let Some(failed) = failed? {
            return Ok(failed);
        }
        log::debug!("verbs: rank {} uses {}", self.me, verbs.summary());
        let rails = Arc::clone(verbs.counters());
        Ok(LinkAttempt::Linked(InterNodeTransport {
            transport: Box::new(verbs),
            registrar: Some(registrar),
            rails,
        }))
    }

    /// Exchanges the outcome of a step in which rails may prove unusable. The inner result has the values of
    /// all ranks, or what all of them make of the failures.
    ///
    /// # Errors
    /// Those of the exchange itself.
    #[cfg(feature = "verbs")]
    fn exchange_step<T>(
        &self,
        step: &str,
        mine: std::result::Result<T, crate::transport::verbs::SetupFailure>,
    ) -> Result<std::result::Result<Vec<T>, LinkAttempt>>
    where
        T: serde::Serialize + serde::de::DeserializeOwned,
    {
        use crate::transport::verbs::{RailFault, SetupFailure};
        let mine: Result<std::result::Result<T, Vec<RailFault>>> = match mine {
            Ok(value) => Ok(Ok(value)),
            Err(SetupFailure::Rails(faults)) => Ok(Err(faults)),
            Err(SetupFailure::Other(error)) => Err(error),
        };
        let outcomes = match self.exchange(step, &mine)? {
            Ok(outcomes) => outcomes,
            Err(error) => return Ok(Err(LinkAttempt::Failed(error))),
        };
        if outcomes.iter().all(std::result::Result::is_ok) {
            return Ok(Ok(outcomes.into_iter().flatten().collect()));
        }
        let faults = outcomes.into_iter().map(|outcome| outcome.err().unwrap_or_default());
        Ok(Err(LinkAttempt::Faults(faults.collect())))
    }

    /// Exchanges the outcome of a step. The inner result has the values of all ranks, or the error of the
    /// first rank that failed, which is the same on all of them.
    ///
    /// # Errors
    /// Those of the exchange itself.
    #[cfg(feature = "verbs")]
    fn exchange<T>(&self, step: &str, mine: &Result<T>) -> Result<Result<Vec<T>>>
    where
        T: serde::Serialize + serde::de::DeserializeOwned,
    {
        let results = self.connection.gather_values(step, mine)?;
        let named = |(rank, result): (Rank, Result<T>)| result.map_err(|error| self.at_rank(rank, error));
        Ok(results.into_iter().enumerate().map(named).collect())
    }

    /// The error of a rank, which it names.
    fn at_rank(&self, rank: Rank, error: Error) -> Error {
        error.context(format_args!("rank {rank} on {}", self.infos[rank].host))
    }
}

/// How an attempt to make RDMA links ended, on all ranks.
#[cfg(feature = "verbs")]
enum LinkAttempt {
    Linked(InterNodeTransport),
    Failed(Error),
    /// By rank: the rails that cannot be used.
    Faults(Vec<Vec<crate::transport::verbs::RailFault>>),
    /// By rank: the rails that carry short packets only.
    LongPacketsLost(Vec<Vec<crate::transport::verbs::RailFault>>),
}

/// What the keys of links are derived from.
struct LinkKeys {
    me: Rank,
    /// By rank: its random number.
    nonces: Vec<[u8; 16]>,
    secret: JobSecret,
}

impl LinkKeys {
    /// The key of the link to a peer. Both derive it, and no other communicator has the same.
    fn of_link(&self, peer: Rank) -> SecretKey {
        let (low, high) = (self.me.min(peer), self.me.max(peer));
        let ranks = [low, high].map(|rank| (rank as u64).to_le_bytes());
        self.secret.derive("link", &[&ranks[0], &ranks[1], &self.nonces[low], &self.nonces[high]])
    }
}

#[cfg(feature = "verbs")]
impl OutOfBand for PeerMessages {
    fn send(&self, messages: &[(Rank, Vec<u8>)]) -> Result<()> {
        Self::send(self, messages)
    }

    fn receive(&self) -> Option<(Rank, Vec<u8>)> {
        Self::receive(self)
    }

    fn check(&self) -> Result<()> {
        Self::check(self)
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}

/// How TCP in place of RDMA is logged, for this reason. `offering` is the first rank that offers RDMA ports,
/// with its host.
///
/// # Errors
/// `why_not`, with the fix, if TCP may not be used: 400 Gbit/s would become the speed of a management
/// network.
fn fall_back(
    choice: TransportChoice,
    offering: Option<(Rank, &str)>,
    has_idle_devices: bool,
    why_not: &Error,
) -> Result<log::Level> {
    match (choice, offering) {
        (TransportChoice::Verbs, _) => Err(why_not.clone()),
        (TransportChoice::Auto, Some((rank, host))) => Err(why_not.clone().context(format_args!(
            "not all ranks can use RDMA, though rank {rank} on {host} has devices; fix the cause, or allow TCP by \
             FLEXRING_TRANSPORT=auto-tcp on all ranks; the cause"
        ))),
        (_, Some(_)) => Ok(log::Level::Warn),
        (_, None) if has_idle_devices => Ok(log::Level::Warn),
        // There is nothing that could be used.
        (_, None) => Ok(log::Level::Debug),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(choice: TransportChoice, offering: Option<(Rank, &str)>) -> Result<log::Level> {
        fall_back(
            choice,
            offering,
            false,
            &Error::system("rank 1 on b: no RDMA port can be used: mlx5_0:1 is down"),
        )
    }

    #[test]
    fn tcp_in_place_of_rdma_that_some_rank_can_use_must_be_allowed() {
        let error = outcome(TransportChoice::Auto, Some((0, "a"))).expect_err("rank 0 can use RDMA");
        assert_eq!(error.kind(), ErrorKind::System);
        let message = error.message();
        for words in
            ["rank 0 on a has devices", "FLEXRING_TRANSPORT=auto-tcp", "rank 1 on b: no RDMA port", "is down"]
        {
            assert!(message.contains(words), "{words}: {message}");
        }
        assert_eq!(outcome(TransportChoice::AutoTcp, Some((0, "a"))).expect("allowed"), log::Level::Warn);
        let error = outcome(TransportChoice::Verbs, Some((0, "a"))).expect_err("RDMA is required");
        assert!(error.message().starts_with("rank 1 on b: no RDMA port"), "{error}");
    }

    #[test]
    fn ranks_without_usable_devices_use_tcp() {
        for choice in [TransportChoice::Auto, TransportChoice::AutoTcp] {
            assert_eq!(outcome(choice, None).expect("there is nothing better"), log::Level::Debug);
        }
        outcome(TransportChoice::Verbs, None).expect_err("RDMA is required");
    }
}
