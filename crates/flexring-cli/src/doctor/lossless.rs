//! How the network interface of a RoCE port guards packets against loss, and whether it is a bond.
//!
//! Owns the files of `/sys` that say so. Those of flow control are from NVIDIA's driver package; drivers of
//! the kernel are asked for it otherwise, and for nothing else. Must not judge.

use super::dcb;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Facts about an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LosslessFacts {
    /// The interface.
    pub netdev: String,
    /// Whether a priority has flow control (PFC).
    pub has_pfc: Option<bool>,
    /// Which field of packets gives the priority: `dscp`, the traffic class, or `pcp`, the VLAN's.
    pub trust: Option<String>,
    /// Whether the port answers marks of congestion, and slows down when it is asked to (ECN).
    pub has_ecn: Option<bool>,
    /// Mode of the bond, and what it chooses ports by, as in `802.3ad, layer3+4`.
    pub bond: Option<String>,
}

impl LosslessFacts {
    /// The facts about an interface of the machine whose files are below `root`.
    pub fn read(root: &Path, netdev: &str) -> Self {
        let folder = root.join("sys/class/net").join(netdev);
        let text = |name: &str| Some(std::fs::read_to_string(folder.join(name)).ok()?.trim().to_owned());
        let word = |name: &str| Some(text(name)?.split_whitespace().next()?.to_owned());
        let is_on = |text: String| text.bytes().any(|byte| matches!(byte, b'1'..=b'9'));
        // One file for each priority.
        let answers = |end: &str| {
            let files = (0..8).filter_map(|priority| text(&format!("ecn/{end}/enable/{priority}")));
            files.map(is_on).reduce(|one, other| one || other)
        };
        let (notes, slows) = (answers("roce_np"), answers("roce_rp"));
        Self {
            netdev: netdev.to_owned(),
            has_pfc: text("qos/pfc").map(is_on).or_else(|| Some(dcb::flow_control(netdev)? != 0)),
            trust: word("qos/trust"),
            has_ecn: notes.zip(slows).map(|(notes, slows)| notes && slows),
            bond: word("bonding/mode").map(|mode| {
                let policy =
                    word("bonding/xmit_hash_policy").map_or_else(String::new, |it| format!(", {it}"));
                mode + &policy
            }),
        }
    }
}
