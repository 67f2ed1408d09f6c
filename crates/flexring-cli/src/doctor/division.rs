//! Which ports the ranks of a job would use that has a rank for each GPU, or one for each node without GPUs.
//!
//! Owns what `doctor --pair` says of them. The library divides the ports, as for a communicator.

use super::gpu;
use flexring::internal::transport::verbs::inventory::{Affinity, Inventory};
use flexring::internal::transport::verbs::port_selection::{
    self, Offer, Rail, match_rails, rails_of_world, reaches_gpu,
};
use flexring_core::config::Config;
use serde::Serialize;
use std::path::Path;

/// The ranks of one number on their nodes, by node. Of a node with fewer ranks there is none.
#[derive(Clone, Debug, Serialize)]
pub struct DividedPorts {
    /// As in `mlx5_0:1 (PIX)`, joined by commas; without those that are used only where others reach no peer.
    pub ports: Vec<Option<String>>,
    /// Of them, those too far from the rank's GPU to access its memory.
    pub far: Vec<Option<String>>,
    /// Whether one of these ports of each rank reaches one of every other.
    pub is_connected: bool,
}

impl DividedPorts {
    /// A line of the report on the ranks of this number.
    pub fn line(&self, number: usize, hosts: &[&str]) -> String {
        let named = |ports: &Option<String>| ports.clone().unwrap_or_else(|| "none".to_owned());
        let first = named(&self.ports[0]);
        let is_same = self.ports.iter().all(|ports| named(ports) == first);
        let each = || hosts.iter().zip(&self.ports).map(|(host, ports)| format!("{host} {}", named(ports)));
        let text =
            if is_same { format!("{first} on each node") } else { each().collect::<Vec<_>>().join(" - ") };
        format!("ranks {number:<2} {text}")
    }

    /// What is unusual about it.
    pub fn findings(&self, number: usize, hosts: &[&str], config: &Config) -> Vec<String> {
        let level = config.gdr_level.name();
        let far = hosts.iter().zip(&self.far).filter_map(|(host, far)| {
            Some(format!(
                "rank {number} of {host} uses {}, too far for direct access to its GPU (FLEXRING_GDR_LEVEL={level})",
                far.as_ref()?
            ))
        });
        let apart = (!self.is_connected && self.ports.iter().all(Option::is_some)).then(|| {
            format!("ports of ranks {number} do not reach each other: links use other ports of their nodes, if these do")
        });
        far.chain(apart).collect()
    }
}

/// The ports that the ranks of this node can use.
pub fn offers(root: &Path, inventory: &Inventory, config: &Config) -> Vec<Offer> {
    let gpus = gpu::gpus_of(root);
    let near = |gpu: Option<&str>| port_selection::offer(inventory, config, &Affinity::read(root, gpu));
    let offers: Vec<_> = if gpus.is_empty() {
        vec![near(None)]
    } else {
        gpus.iter().map(|gpu| near(Some(&gpu.address))).collect()
    };
    offers.into_iter().map(Result::unwrap_or_default).collect()
}

/// Divides the ports of nodes whose ranks have these offers.
pub fn divide(of_nodes: &[Vec<Offer>], config: &Config) -> Vec<DividedPorts> {
    let names: Vec<String> = (0..of_nodes.len()).map(|node| node.to_string()).collect();
    let (nodes, offers): (Vec<&str>, Vec<&Offer>) = names
        .iter()
        .zip(of_nodes)
        .flat_map(|(name, offers)| offers.iter().map(move |it| (&**name, it)))
        .unzip();
    let mut rails = rails_of_world(&offers, &nodes, config.transport.shares_memory()).into_iter();
    let mut offers = offers.into_iter();
    let by_node: Vec<Vec<(&Offer, Vec<Rail>)>> = of_nodes
        .iter()
        .map(|of_node| offers.by_ref().zip(rails.by_ref()).take(of_node.len()).collect())
        .collect();
    let most = of_nodes.iter().map(Vec::len).max().unwrap_or(0);
    (0..most)
        .map(|number| {
            let ranks: Vec<Option<&(&Offer, Vec<Rail>)>> =
                by_node.iter().map(|node| node.get(number)).collect();
            let named = |admits: &dyn Fn(&Offer, &Rail) -> bool| {
                let of_rank = |(offer, rails): &(&Offer, Vec<Rail>)| {
                    let admitted = rails.iter().filter(|rail| !rail.is_reserve && admits(offer, rail));
                    let name = |rail: &Rail| format!("{}:{} ({})", rail.device, rail.port, rail.distance);
                    admitted.map(name).collect::<Vec<_>>().join(", ")
                };
                ranks.iter().map(|rank| Some(of_rank((*rank)?)).filter(|names| !names.is_empty())).collect()
            };
            let own = |rails: &[Rail]| rails.iter().filter(|rail| !rail.is_reserve).cloned().collect();
            let there: Vec<Vec<Rail>> = ranks.iter().flatten().map(|(_, rails)| own(rails)).collect();
            DividedPorts {
                ports: named(&|_, _| true),
                far: named(&|offer, rail| offer.is_near_gpu && !reaches_gpu(rail.distance, config.gdr_level)),
                is_connected: match_rails(&there).iter().any(|group| group.iter().all(Option::is_some)),
            }
        })
        .collect()
}
