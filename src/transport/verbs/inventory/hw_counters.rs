//! The counters that drivers keep of a port.
//!
//! Owns their files, which of them count retransmissions, and which count other signs of loss or
//! congestion. Must not know whose traffic they count: it is that of all programs.

use super::sysfs::number;
use std::path::Path;

/// Counters of retransmissions, or of the events that cause one. Each driver counts an event in one of these
/// counters only.
const RETRANSMISSIONS: &[&str] = &[
    // mlx5, mlx4
    "local_ack_timeout_err",
    "packet_seq_err",
    "implied_nak_seq_err",
    "rnr_nak_retry_err",
    // Soft-RoCE
    "completer_retry_err",
    "rcvd_rnr_err",
    // bnxt_re
    "to_retransmits",
    "seq_err_naks_rcvd",
    "rnr_naks_rcvd",
    // EFA
    "retrans_pkts",
    // irdma
    "RetransSegs",
];

/// Counters of what a port received in a wrong order, refused or threw away, of notices of congestion, and of
/// faults of its cable, each with what it means.
const SIGNS: &[(&str, &str)] = &[
    (
        "hw_counters/out_of_sequence",
        "packets came out of order: packets before were lost, or switches route adaptively",
    ),
    ("hw_counters/rnr_nak_retry_err", "this port's peers had no receive"),
    ("hw_counters/rx_icrc_encapsulated", "packets came damaged"),
    ("hw_counters/np_cnp_sent", "packets came marked as congested (ECN)"),
    ("hw_counters/rp_cnp_handled", "peers reported congestion (ECN)"),
    ("hw_counters/local_ack_timeout_err", "no acknowledgement came in time"),
    ("counters/port_rcv_errors", "packets came damaged"),
    ("counters/port_xmit_discards", "packets were thrown away: the port was down or congested"),
    ("counters/port_xmit_wait", "the port waited for the network (flow control)"),
    ("counters/symbol_error", "the cable or transceiver is damaged"),
    ("counters/link_downed", "the link went down"),
];

/// The signs of loss or congestion that the driver counts at a port, on the machine whose `/sys` is below
/// `root`: the counter's name, what it means, and its value since the driver was loaded.
#[must_use]
pub fn loss_signs(root: &Path, device: &str, port: u8) -> Vec<(&'static str, &'static str, u64)> {
    let folder = root.join("sys/class/infiniband").join(device).join("ports").join(port.to_string());
    let sign = |(name, meaning): &(&'static str, &'static str)| {
        let short = name.rsplit('/').next().unwrap_or(name);
        Some((short, *meaning, number::<u64>(&folder.join(name))?))
    };
    SIGNS.iter().filter_map(sign).collect()
}

/// How often a port has sent something again since its driver was loaded, on the machine whose `/sys` is
/// below `root`; `None` if the driver does not count that.
#[must_use]
pub fn retransmissions(root: &Path, device: &str, port: u8) -> Option<u64> {
    let device = root.join("sys/class/infiniband").join(device);
    let of_port = device.join("ports").join(port.to_string()).join("hw_counters");
    // Some drivers count per device.
    [of_port, device.join("hw_counters")].iter().find_map(|folder| {
        let counts = RETRANSMISSIONS.iter().filter_map(|name| number::<u64>(&folder.join(name)));
        counts.reduce(u64::saturating_add)
    })
}

#[cfg(test)]
mod tests {
    use super::super::fake::{FakeMachine, INFINIBAND};
    use super::*;

    #[test]
    fn retransmissions_are_the_sum_of_what_the_driver_counts() {
        let machine = FakeMachine::new();
        machine.device("mlx5_0", &[INFINIBAND]).device("rxe0", &[INFINIBAND]).device("irdma0", &[INFINIBAND]);
        let count = |device: &str| retransmissions(machine.root(), device, 1);
        assert_eq!(count("mlx5_0"), None, "no counters");
        for (file, text) in [
            ("mlx5_0/ports/1/hw_counters/local_ack_timeout_err", "3"),
            ("mlx5_0/ports/1/hw_counters/packet_seq_err", "40"),
            ("mlx5_0/ports/1/hw_counters/out_of_sequence", "500"),
            ("rxe0/ports/1/hw_counters/completer_retry_err", "7"),
            ("rxe0/ports/1/hw_counters/rcvd_rnr_err", "no number"),
            ("irdma0/hw_counters/RetransSegs", "18446744073709551615"),
        ] {
            machine.file(&format!("sys/class/infiniband/{file}"), text);
        }
        assert_eq!(
            count("mlx5_0"),
            Some(43),
            "what this port received out of order, another port sent again"
        );
        assert_eq!((count("rxe0"), count("irdma0"), count("gone")), (Some(7), Some(u64::MAX), None));
    }
}
