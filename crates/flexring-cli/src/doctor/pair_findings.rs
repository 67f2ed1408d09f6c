//! What `flexring doctor --pair` says of nodes and ports that are wrong or unusual.
//!
//! Owns the rules. Pure.

use super::lossless::LosslessFacts;
use super::pair_facts::{NodeFacts, PortFacts, RailTest};
use std::collections::{BTreeMap, BTreeSet};

/// Nodes or ports that a sentence names.
const MOST_NAMED: usize = 4;

/// What is found, with the nodes or ports that it is said of in the place of `{}`: a sentence for all of
/// them, as a cluster has hundreds of ports.
struct PairFindings(Vec<(String, Vec<String>)>);

impl PairFindings {
    fn add(&mut self, subject: &str, text: impl Into<String>) {
        let text = text.into();
        match self.0.iter_mut().find(|(known, _)| *known == text) {
            Some((_, subjects)) => subjects.push(subject.to_owned()),
            None => self.0.push((text, vec![subject.to_owned()])),
        }
    }

    fn sentences(self) -> Vec<String> {
        let sentence = |(text, subjects): (String, Vec<String>)| {
            let each = if subjects.len() > 1 { "each of " } else { "" };
            text.replacen("{}", &format!("{each}{}", listed(&subjects)), 1)
        };
        self.0.into_iter().map(sentence).collect()
    }
}

/// The first names of a list, and how many more there are.
fn listed(names: &[String]) -> String {
    match names {
        [] | [_] => names.concat(),
        [first @ .., last] if names.len() <= MOST_NAMED => format!("{} and {last}", first.join(", ")),
        _ => format!("{} and {} more", names[..MOST_NAMED].join(", "), names.len() - MOST_NAMED),
    }
}

/// What is wrong or unusual.
pub fn findings(nodes: &[NodeFacts], tests: &[RailTest]) -> Vec<String> {
    let mut found = PairFindings(Vec::new());
    let mut counts: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for node in nodes {
        counts.entry(node.ports.len()).or_default().push(node.host.clone());
    }
    let most = counts.keys().max().copied().unwrap_or(0);
    if counts.len() > 1 {
        let each = counts.iter().map(|(count, hosts)| format!("{} has {count}", listed(hosts)));
        let each = each.collect::<Vec<_>>().join(", ");
        found.add("", format!("the nodes have different numbers of ports: {each}"));
    }
    let versions: BTreeSet<&str> = nodes.iter().filter_map(|node| node.libibverbs.as_deref()).collect();
    if versions.len() > 1 {
        let each = Vec::from_iter(versions).join(", ");
        found.add("", format!("the nodes have different versions of libibverbs: {each}"));
    }
    let ports = || nodes.iter().flat_map(|node| &node.ports);
    let firmware: BTreeSet<(&str, &str)> =
        ports().filter_map(|port| Some((port.driver.as_deref()?, port.firmware.as_deref()?))).collect();
    let drivers: BTreeSet<&str> = firmware.iter().map(|(driver, _)| *driver).collect();
    if firmware.len() > drivers.len() {
        let each: Vec<String> =
            firmware.iter().map(|(driver, version)| format!("{driver} {version}")).collect();
        found.add("", format!("adapters have different firmware: {}", each.join(", ")));
    }
    for node in nodes {
        let host = &node.host;
        if let Some(failure) = &node.failure {
            found.add(host, format!("{{}} has no port: {failure}"));
        }
        if let Some(missing) = node.missing.as_ref().filter(|_| node.ports.len() < most) {
            found.add(host, format!("{{}} does not use a port: {missing}"));
        }
        if let Some(bytes) = node.low_memlock {
            found.add(host, format!("{{}} may lock {bytes} bytes of memory only (fix: ulimit -l unlimited, in the job's own limits)"));
        }
        if let Some((gpu, bytes)) = &node.small_window {
            let (window, slots) = (bytes >> 20, node.slot_bytes >> 20);
            found.add(
                &format!("GPU {gpu} of {host}"),
                format!(
                    "{{}} lets adapters access {window} MiB (BAR1), and slots take {slots} MiB, so data may be copied through host \
                     memory (fix: resizable BAR in the firmware)"
                ),
            );
        }
        for port in &node.ports {
            port_findings(&mut found, &format!("{} of {host}", port.name), port);
        }
    }
    for test in tests {
        let named = test.ports.iter().flatten().map(String::as_str).collect::<BTreeSet<_>>();
        let named = listed(&named.into_iter().map(str::to_owned).collect::<Vec<_>>());
        if test.retransmissions > 0 {
            found.add(
                &named,
                format!("{{}} sent {} packets again: the network loses some", test.retransmissions),
            );
        }
        for (sign, count) in &test.signs {
            found.add(&named, format!("{{}} counted {count} {sign}"));
        }
    }
    found.sentences()
}

/// What is unusual about a port.
fn port_findings(found: &mut PairFindings, name: &str, port: &PortFacts) {
    if let Some(network) = &port.network {
        lossless_findings(found, name, network);
    }
    let pci = &port.pci;
    if pci.link != pci.best_link && !pci.link.is_empty() {
        found.add(name, format!("{{}} has a PCI link of {}, and could have {}", pci.link, pci.best_link));
    }
    if let Some(bytes) = pci.read_request.filter(|bytes| *bytes < 512) {
        found.add(
            name,
            format!("{{}} reads {bytes} bytes at a time (fix: setpci CAP_EXP+8.w, MaxReadReq 4096)"),
        );
    }
    if !pci.redirecting.is_empty() {
        let bridges = pci.redirecting.join(", ");
        found.add(
            name,
            format!(
                "{{}} is below bridges whose Access Control Services send transfers to GPUs through the root complex or \
                 refuse them: {bridges} (fix: switch ACS off in the firmware, or setpci ECAP_ACS+6.w=0)"
            ),
        );
    }
    if pci.is_translated {
        found.add(
            name,
            "an IOMMU translates what {} accesses, which GPUs may not bear (fix: boot with iommu=pt)",
        );
    }
    if port.is_ethernet && !port.has_traffic_class && port.driver.is_some() {
        found.add(
            name,
            "{} sends with traffic class 0 (fix: FLEXRING_IB_TC is that of the lossless class, often 106)",
        );
    }
}

/// What is unusual about the network interface of a port.
fn lossless_findings(found: &mut PairFindings, name: &str, network: &LosslessFacts) {
    let LosslessFacts { netdev, has_pfc, trust, has_ecn, bond } = network;
    if *has_pfc == Some(false) {
        found.add(
            name,
            format!("{{}} has flow control (PFC) for no priority (fix: mlnx_qos -i {netdev} --pfc, as the switches have it)"),
        );
    }
    if *has_ecn == Some(false) {
        found.add(
            name,
            format!("{{}} does not answer marks of congestion (ECN) (fix: enable ecn/roce_np and ecn/roce_rp of {netdev})"),
        );
    }
    if let Some(trust) = trust.as_ref().filter(|trust| *trust != "dscp") {
        found.add(
            name,
            format!("{{}} takes the priority from {trust}, not from the traffic class (fix: mlnx_qos -i {netdev} --trust dscp)"),
        );
    }
    if let Some(bond) = bond.as_ref().filter(|bond| !bond.contains("layer3+4")) {
        found.add(
            name,
            format!("{{}} is a bond ({bond}) whose ports may carry unequal shares (fix: xmit_hash_policy layer3+4 for {netdev})"),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::pci::PciFacts;
    use super::*;

    #[test]
    fn what_is_found_of_many_ports_is_one_sentence() {
        let mut found = PairFindings(Vec::new());
        found.add("one", "{} is slow");
        for port in 0..6 {
            found.add(&format!("p{port}"), "packets of {} get lost");
        }
        found.add("two", "{} is slow");
        let expected =
            ["each of one and two is slow", "packets of each of p0, p1, p2, p3 and 2 more get lost"];
        assert_eq!(found.sentences(), expected);
    }

    /// Two nodes with a RoCE port each, as they should be.
    fn good_nodes() -> [NodeFacts; 2] {
        ["a", "b"].map(|host| NodeFacts {
            rank: 0,
            host: host.to_owned(),
            libibverbs: Some("1.14".to_owned()),
            low_memlock: None,
            small_window: None,
            slot_bytes: 28 << 20,
            has_gpu: true,
            ports: vec![PortFacts {
                name: "mlx5_0:1".to_owned(),
                is_ethernet: true,
                rate_gbps: 400.0,
                firmware: Some("28.39".to_owned()),
                driver: Some("mlx5_core".to_owned()),
                has_traffic_class: true,
                network: Some(LosslessFacts {
                    netdev: "eth0".to_owned(),
                    has_pfc: Some(true),
                    trust: Some("dscp".to_owned()),
                    has_ecn: Some(true),
                    bond: None,
                }),
                pci: PciFacts { read_request: Some(4096), ..PciFacts::default() },
            }],
            failure: None,
            missing: None,
        })
    }

    #[test]
    fn each_fault_of_a_node_or_port_is_found_with_its_fix() {
        assert_eq!(findings(&good_nodes(), &[]), [""; 0]);
        type Fault = fn(&mut NodeFacts);
        let faults: [(Fault, &str); 12] = [
            (
                |node| node.libibverbs = Some("1.10".to_owned()),
                "different versions of libibverbs: 1.10, 1.14",
            ),
            (|node| node.low_memlock = Some(65_536), "b may lock 65536 bytes of memory only (fix: ulimit -l"),
            (
                |node| node.small_window = Some(("0".to_owned(), 16 << 20)),
                "GPU 0 of b lets adapters access 16 MiB",
            ),
            (|node| node.failure = Some("no library".to_owned()), "b has no port: no library"),
            (|node| node.ports.clear(), "different numbers of ports: b has 0, a has 1"),
            (
                |node| node.ports[0].firmware = Some("20.1".to_owned()),
                "different firmware: mlx5_core 20.1, mlx5",
            ),
            (
                |node| node.ports[0].has_traffic_class = false,
                "b sends with traffic class 0 (fix: FLEXRING_IB_TC",
            ),
            (|node| node.ports[0].pci.read_request = Some(256), "reads 256 bytes at a time (fix: setpci"),
            (
                |node| node.ports[0].pci.is_translated = true,
                "an IOMMU translates what mlx5_0:1 of b accesses",
            ),
            (
                |node| node.ports[0].pci.redirecting = vec!["0000:00:01.0".to_owned()],
                "refuse them: 0000:00:01.0",
            ),
            (
                |node| node.ports[0].pci.best_link = "32.0 GT/s PCIe x16".to_owned(),
                "has a PCI link of 16.0 GT/s PCIe x8, and could have 32.0 GT/s PCIe x16",
            ),
            (
                |node| node.ports[0].network.iter_mut().for_each(|it| it.has_ecn = Some(false)),
                "b does not answer marks of congestion (ECN) (fix: enable ecn/roce_np and ecn/roce_rp of eth0)",
            ),
        ];
        for (fault, words) in faults {
            let mut nodes = good_nodes();
            nodes[1].ports[0].pci.link = "16.0 GT/s PCIe x8".to_owned();
            nodes[1].ports[0].pci.best_link = "16.0 GT/s PCIe x8".to_owned();
            fault(&mut nodes[1]);
            let found = findings(&nodes, &[]);
            assert!(found.len() == 1 && found[0].contains(words), "{words}: {found:?}");
        }
    }
}
