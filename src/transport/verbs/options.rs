//! Settings of the links, and the path attributes that follow from them.
//!
//! Owns the translation of [`Config`] into what verbs take.

use super::inventory::LinkLayer;
use super::objects::{PathAttributes, PortAttributes, Shim};
use super::port_selection::{Rail, reaches_gpu};
use super::wire::LinkShape;
use crate::config::{AdaptiveRouting, Config, GdrLevel, GpuDirect, Registration};
use std::time::Duration;

/// The acknowledgement timeout that NCCL and others use: 4.3 s. Adapters lose no packets to speak of, and a
/// shorter one fails jobs when a switch changes its routes.
const TIMEOUT: u8 = 20;

/// The timeout of software devices, 67 ms. They lose packets when a queue of the kernel is full, and repeat
/// only then.
const SOFTWARE_TIMEOUT: u8 = 14;

/// The most retransmissions of software devices: Soft-RoCE takes 7 as "without end", which would hide the
/// loss of a peer.
const SOFTWARE_RETRIES: u8 = 6;

/// How queue pairs are connected and how memory is registered.
#[derive(Clone, Debug)]
pub(crate) struct VerbsOptions {
    /// The name or path of libibverbs; `None` for the usual one.
    pub library: Option<String>,
    /// InfiniBand service level of all packets, 0 to 15.
    pub service_level: u8,
    /// Traffic class byte of the global route header.
    pub traffic_class: u8,
    /// Acknowledgement timeout as verbs encode it: 4.096 us times 2 to this power. `None` for the usual one
    /// of the device.
    pub timeout: Option<u8>,
    /// Retransmissions before a queue pair breaks, 0 to 7.
    pub retries: u8,
    /// How long a rank waits for a rail while none to a peer works. Zero: broken queue pairs stay unused.
    pub reconnect: Duration,
    /// Whether long messages are written apart from their immediate data.
    pub adaptive_routing: AdaptiveRouting,
    /// Bytes of the longest message that is not, in any case.
    pub adaptive_routing_threshold: usize,
    /// Queue pairs and eager messages of each link.
    pub link_shape: LinkShape,
    /// What is done with memory that the user did not register.
    pub registration: Registration,
    /// Whether devices may reorder the writes into registered memory.
    pub relaxed_ordering: bool,
    /// How devices reach GPU memory.
    pub gpu_direct: GpuDirect,
    /// Whether packets are half as long as both ports allow, because longer ones were lost.
    pub halves_mtu: bool,
    /// Bytes of a sub-chunk.
    pub subchunk: usize,
    /// Interval at which idle queue pairs are probed while this rank waits.
    pub heartbeat: Duration,
    /// Fault injection for tests. Does nothing in other builds.
    pub shim: Shim,
}

impl VerbsOptions {
    /// The options that the settings ask for.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            library: config.ibverbs.clone(),
            service_level: config.ib_sl as u8,
            traffic_class: config.ib_tc as u8,
            timeout: config.ib_timeout.map(|timeout| timeout as u8),
            retries: config.ib_retries as u8,
            reconnect: config.ib_reconnect,
            adaptive_routing: config.ib_adaptive_routing,
            adaptive_routing_threshold: config.ib_ar_threshold.0,
            link_shape: LinkShape {
                qps_per_rail: config.ib_qps_per_rail.unwrap_or(1),
                longest_eager: config.ib_eager.0,
            },
            registration: config.ib_register,
            relaxed_ordering: config.ib_relaxed_ordering.0,
            gpu_direct: config.gpu_direct,
            halves_mtu: false,
            subchunk: config.subchunk.0,
            heartbeat: config.heartbeat,
            shim: Shim::none(),
        }
    }

    /// These options for a rank whose GPU is this far from its rails. Without direct access to GPU memory if
    /// that is farther than `FLEXRING_GDR_LEVEL`, unless `FLEXRING_GPU_DIRECT` names a way.
    pub(crate) fn at_distance(mut self, rails: &[Rail], level: GdrLevel) -> Self {
        if self.gpu_direct == GpuDirect::Auto && far_rail(rails, level).is_some() {
            self.gpu_direct = GpuDirect::Off;
        }
        self
    }

    /// These options for a world with these rails, by rank. Unless the setting is given, each pair of rails
    /// has four queue pairs where some adapters use RoCE, as switches choose one of several paths for each
    /// connection (ECMP), and two where some are bonds, as a connection uses one of a bond's ports. Chosen,
    /// not measured. All ranks find the same, because they have compared the setting.
    pub(crate) fn for_rails(mut self, rails: &[Vec<Rail>], config: &Config) -> Self {
        let any = |is: fn(&Rail) -> bool| rails.iter().flatten().any(is);
        self.link_shape.qps_per_rail = match config.ib_qps_per_rail {
            Some(given) => given,
            None if any(|rail| rail.layer == LinkLayer::Ethernet && !rail.is_software) => 4,
            None if any(|rail| rail.device.contains("bond")) => 2,
            None => 1,
        };
        self
    }

    /// Attributes of the path from a rail of this rank, whose port has these attributes, to one of the peer,
    /// with packets of `mtu` (as verbs number MTUs: 1 is 256 bytes, 5 is 4096).
    pub(super) fn path_attributes(
        &self,
        (mine, port): (&Rail, &PortAttributes),
        theirs: &Rail,
        mtu: u32,
    ) -> PathAttributes {
        let is_ethernet = mine.layer == LinkLayer::Ethernet;
        let is_routed = mine.network != theirs.network;
        let usual = if mine.is_software { SOFTWARE_TIMEOUT } else { TIMEOUT };
        PathAttributes {
            port: mine.port,
            gid_index: mine.gid_index,
            own_gid: is_ethernet.then_some((mine.gid, mine.gid_kind)),
            gid: theirs.gid,
            lid: if is_routed && theirs.flid != 0 { theirs.flid } else { theirs.lid },
            global: is_ethernet || is_routed || port.needs_global,
            mtu: if self.halves_mtu { mtu.saturating_sub(1).max(1) } else { mtu },
            service_level: self.service_level,
            traffic_class: self.traffic_class,
            timeout: self.timeout.unwrap_or(usual),
            retries: if mine.is_software { self.retries.min(SOFTWARE_RETRIES) } else { self.retries },
            split_above: self.splits_over(mine.layer).then_some(self.adaptive_routing_threshold),
        }
    }

    /// Whether long messages over ports of this layer are written apart from their immediate data. As NCCL,
    /// by default not on RoCE: few of its networks route packets of one connection over several paths.
    fn splits_over(&self, layer: LinkLayer) -> bool {
        match self.adaptive_routing {
            AdaptiveRouting::Auto => layer == LinkLayer::InfiniBand,
            AdaptiveRouting::Off => false,
            AdaptiveRouting::On => true,
        }
    }
}

/// The rail because of which a GPU's memory is copied through host memory: the rank's own one that is the
/// farthest, if that is farther than this level.
pub(crate) fn far_rail(rails: &[Rail], level: GdrLevel) -> Option<&Rail> {
    let own = rails.iter().filter(|rail| !rail.is_reserve);
    own.filter(|rail| !reaches_gpu(rail.distance, level)).max_by_key(|rail| rail.distance)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::verbs::inventory::fake::{
        ETHERNET, FakeMachine, FakePort, GIDS_OF_ETH0, INFINIBAND,
    };
    use crate::transport::verbs::inventory::{Affinity, Inventory};
    use crate::transport::verbs::port_selection::select;

    const PORT: PortAttributes = PortAttributes { active: true, lid: 1, mtu: 5, needs_global: false };

    /// The rails of a machine with an InfiniBand adapter, or with Soft-RoCE.
    fn rail(is_software: bool) -> Rail {
        let machine = FakeMachine::new();
        if is_software {
            machine.device("rxe0", &[FakePort { gids: GIDS_OF_ETH0, ..ETHERNET }]);
        } else {
            machine.hca("mlx5_0", "pci0000:3a/0000:3b:00.0", 0, &[INFINIBAND]);
        }
        let inventory = Inventory::read(machine.root(), Vec::new());
        let mut selection = select(&inventory, &Config::default(), &Affinity::default()).expect("a port");
        selection.rails.swap_remove(0)
    }

    fn path(config: &Config, mine: &Rail, port: PortAttributes, theirs: &Rail) -> PathAttributes {
        VerbsOptions::new(config).path_attributes((mine, &port), theirs, 5)
    }

    #[test]
    fn timeouts_are_those_of_the_field_and_shorter_for_software_devices() {
        let usual = Config::default();
        let set = Config { ib_timeout: Some(18), ib_retries: 3, ..Config::default() };
        for (is_software, config, expected) in
            [(false, &usual, (20, 7)), (true, &usual, (14, 6)), (false, &set, (18, 3)), (true, &set, (18, 3))]
        {
            let rail = rail(is_software);
            let path = path(config, &rail, PORT, &rail);
            assert_eq!((path.timeout, path.retries), expected, "{is_software}");
        }
    }

    #[test]
    fn packets_are_routed_globally_on_ethernet_between_subnets_and_where_the_port_needs_it() {
        let config = Config::default();
        let [adapter, software] = [rail(false), rail(true)];
        let elsewhere = Rail { network: "fec0000000000001".to_owned(), ..adapter.clone() };
        let needy = PortAttributes { needs_global: true, ..PORT };
        assert!(!path(&config, &adapter, PORT, &adapter).global);
        assert!(path(&config, &adapter, needy, &adapter).global);
        assert!(path(&config, &adapter, PORT, &elsewhere).global);
        assert!(path(&config, &software, PORT, &software).global);
    }

    #[test]
    fn long_messages_are_split_on_infiniband_unless_settings_say_otherwise() {
        let [adapter, software] = [rail(false), rail(true)];
        let of = |routing, rail: &Rail| {
            let config = Config { ib_adaptive_routing: routing, ..Config::default() };
            path(&config, rail, PORT, rail).split_above
        };
        assert_eq!(of(AdaptiveRouting::Auto, &adapter), Some(8192));
        assert_eq!(of(AdaptiveRouting::Auto, &software), None);
        assert_eq!([&adapter, &software].map(|rail| of(AdaptiveRouting::Off, rail)), [None, None]);
        assert_eq!([&adapter, &software].map(|rail| of(AdaptiveRouting::On, rail)), [Some(8192); 2]);
    }

    #[test]
    fn memory_of_a_gpu_that_is_far_from_a_rail_is_staged_unless_a_way_is_named() {
        let near = Rail { distance: crate::transport::verbs::inventory::PciDistance::Pix, ..rail(false) };
        let far = rail(false);
        let with = |gpu_direct, rails: &[Rail], level| {
            let config = Config { gpu_direct, ..Config::default() };
            VerbsOptions::new(&config).at_distance(rails, level).gpu_direct
        };
        let both = [near.clone(), far.clone()];
        let reserve = Rail { is_reserve: true, ..far };
        assert_eq!(with(GpuDirect::Auto, &[near.clone(), reserve], GdrLevel::Pxb), GpuDirect::Auto);
        assert_eq!(with(GpuDirect::Auto, &[near], GdrLevel::Pxb), GpuDirect::Auto);
        assert_eq!(
            with(GpuDirect::Auto, &both, GdrLevel::Pxb),
            GpuDirect::Off,
            "a message may take any rail"
        );
        assert_eq!(with(GpuDirect::Auto, &both, GdrLevel::Phb), GpuDirect::Auto);
        assert_eq!(with(GpuDirect::Dmabuf, &both, GdrLevel::Loc), GpuDirect::Dmabuf);
    }
}
