//! The lengths and numbers of ranks at which a call takes another way through the executor, with what was
//! measured around each of them. (Thresholds within one way stand beside it.) The settings FLEXRING_DIRECT,
//! FLEXRING_SMALL and FLEXRING_MAILBOX are upper bounds, whose defaults `flexring_core::config` has.

use crate::topology::Topology;
use flexring_core::config::Config;

// Small vectors, through the mailboxes of a node.

/// From this number of ranks on, a leader adds for all of them if they have to share cores.
const LEADER_RANKS: usize = 8;

/// Longest vector, in bytes, if a leader adds for all. On 2 cores 64 KiB take 0.73 ms with 64 ranks (9.2 by a
/// ring), 0.10 with 16 (0.32) and 0.044 with 8 (0.063).
const LONGEST_BY_LEADER: usize = 64 << 10;

/// Longest vector, in bytes, of three ranks that share cores. On 2 cores 64 KiB take 27 us (57 by a ring).
const LONGEST_OF_THREE: usize = 64 << 10;

/// Longest vector, in bytes, of four to seven ranks that share cores. On 2 cores 16 KiB take 14 us with 4
/// ranks (17 by a ring) and 22 with 6 (38); 32 KiB 19 to 22 with 4 (27) and 31 to 37 with 7 (50 to 53); 64
/// KiB 38 with 4 (28 to 35) and 63 with 7 (62 to 66).
const LONGEST_ON_SHARED_CORES: usize = 32 << 10;

/// Longest vector, in bytes, if there are two ranks or each has a core. Two ranks on 2 cores, 8 KiB: 2.1 us
/// (3.5 by a ring); 16 KiB 4.5 (5.1); 32 KiB 5.7 (5.4); 64 KiB 12 to 13 (9). On cores of their own (Xeon, 300
/// MiB of L3) 8 KiB take 5 us with 3 ranks (7), 6 with 4 (10), 10 with 8 (18); 16 KiB 8 (9), 11 (11), 16 to
/// 20 (17 to 21); 32 KiB 14 (9 to 13), 18 to 20 (12 to 15), 31 to 35 (20 to 23).
const LONGEST_ON_OWN_CORES: usize = 16 << 10;

/// Length in bytes of the vectors of all ranks together there: each rank reads them all. 16 ranks with a core
/// each (Xeon) take 8.7 to 12.9 us for 4 KiB (41 by a ring) and 14 us for 8 KiB (40).
const ALL_VECTORS: usize = 128 << 10;

/// The limit is not less than this for any number of ranks.
const LEAST_LIMIT: usize = 4 << 10;

/// Longest vector, in bytes, that takes the path for small messages on a node with all ranks, which are
/// `ranks`. `ranks_per_core` is the number of ranks of this node for each of its cores, rounded up.
#[must_use]
pub fn mailbox_limit(config: &Config, ranks: usize, ranks_per_core: usize) -> usize {
    let longest = if goes_through_leader(ranks, ranks_per_core) {
        LONGEST_BY_LEADER
    } else if ranks_per_core > 1 && ranks == 3 {
        LONGEST_OF_THREE
    } else if ranks_per_core > 1 && ranks > 2 {
        LONGEST_ON_SHARED_CORES
    } else {
        (ALL_VECTORS / ranks.max(1)).clamp(LEAST_LIMIT, LONGEST_ON_OWN_CORES)
    };
    longest.min(config.mailbox.0)
}

/// Whether one rank of a node, its leader, adds for all of them.
#[must_use]
pub fn goes_through_leader(ranks: usize, ranks_per_core: usize) -> bool {
    ranks_per_core > 1 && ranks >= LEADER_RANKS
}

// Short vectors between ranks that share no memory.

/// Most ranks that exchange short vectors directly, and most nodes between which a level of the selected plan
/// is short enough for them. A direct exchange of 4 KiB between ranks on 2 cores over TCP takes 10 ms with 32
/// ranks and 61 ms with 64.
pub const MOST_DIRECT: usize = 16;

/// Between nodes, at most this many participants send to one root directly. More are chained, because each of
/// them would get only that fraction of the root's link.
pub(crate) const DIRECT_BETWEEN_NODES: usize = 16;

/// Most ranks for which plans are chosen by calculation: 1,024 ranks take 0.2 s on one core, and four times
/// as many about five times as long.
pub(crate) const MOST_CALCULATED: usize = 2048;

/// Most ranks for which plans are chosen by simulation, too. A simulation of one length takes up to 30 ms of
/// processor time with 64 ranks.
pub(crate) const MOST_SIMULATED: usize = 64;

/// Longest vector in bytes that ranks exchange in one hop by a direct plan, where each adds all contributions
/// itself. Two ranks send as many bytes as with any other algorithm, and half of the messages: over TCP on
/// loopback 8 KiB take 7 us instead of 12, 16 KiB 8.3 instead of 12.6, and 64 KiB 19 us both ways. More ranks
/// send (p - 1) (p - 2) / p of the vector more, so they do it for shorter ones.
#[must_use]
pub fn longest_one_shot(config: &Config, world: usize) -> usize {
    let (small, direct) = (config.small.0, config.direct.0);
    if world == 2 { small.max(direct) } else { small.min(direct / world.saturating_sub(1).max(1)) }
}

/// Longest block of an all-to-all, in bytes, that goes by node. Time of a call with straight blocks, divided
/// by that by node, and the same of processor time, over TCP on one busy machine with 2 cores (medians of 3):
/// 64 B blocks 1.4 and 1.8 on 2+3, 3.4 and 3.7 on 4+4, 3.2 and 3.2 on 3+3+3+3; 16 KiB 1.3 and 1.4, 2.4 and
/// 1.9, 1.7 and 1.5; 64 KiB 2.0 and 1.3, 1.6 and 1.6, 1.6 and 1.1; 256 KiB 0.5 and 0.8, 0.7 and 0.7. Long
/// blocks are copied twice more, by one rank for several.
const LONGEST_BY_NODE: usize = 16 << 10;

/// The longest block of an all-to-all, in bytes, that goes by node, in one message for each pair of nodes; 0
/// where all go straight. It takes two more hops within nodes, so these must be cheaper than messages between
/// nodes.
#[must_use]
pub fn longest_block_by_node(config: &Config, topology: &Topology) -> usize {
    let shares_memory = topology.nodes() < topology.world() && config.transport.shares_memory();
    if topology.nodes() > 1 && shares_memory { LONGEST_BY_NODE } else { 0 }
}

// Long vectors.

/// Outputs of more bytes than this are written with non-temporal stores. Half of a last-level cache of a few
/// dozen MiB: a shorter result is still in the cache when it is read next.
pub(crate) const STREAMING_BYTES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_core::config::{Size, TransportChoice};

    #[test]
    fn mailboxes_take_longer_vectors_where_ranks_share_cores() {
        let limit = |most, ranks, ranks_per_core| {
            mailbox_limit(&Config { mailbox: Size(most), ..Config::default() }, ranks, ranks_per_core)
        };
        for (ranks, alone, sharing) in [
            (2, 16, 16),
            (3, 16, 64),
            (4, 16, 32),
            (7, 16, 32),
            (8, 16, 64),
            (16, 8, 64),
            (64, 4, 64),
            (1000, 4, 64),
        ] {
            let kib = [1, 2].map(|ranks_per_core| limit(usize::MAX, ranks, ranks_per_core) >> 10);
            assert_eq!(kib, [alone, sharing], "{ranks} ranks");
            assert!([1, 2].iter().all(|ranks_per_core| limit(100, ranks, *ranks_per_core) == 100));
            assert_eq!(limit(0, ranks, 2), 0);
        }
    }

    #[test]
    fn ranks_exchange_vectors_in_one_hop_while_that_sends_few_bytes_more() {
        let config = Config { small: Size(4 << 10), direct: Size(64 << 10), ..Config::default() };
        for (world, longest) in [(2, 64 << 10), (3, 4 << 10), (16, 4 << 10), (17, 4 << 10), (65, 1 << 10)] {
            assert_eq!(longest_one_shot(&config, world), longest, "{world} ranks");
        }
        let never = Config { small: Size(0), direct: Size(0), ..config };
        assert_eq!([1, 2, 3].map(|world| longest_one_shot(&never, world)), [0; 3]);
    }

    #[test]
    fn short_blocks_go_by_node_where_ranks_of_several_nodes_share_memory() {
        let auto = Config::default();
        let tcp = Config { transport: TransportChoice::Tcp, ..Config::default() };
        for (names, config, by_node) in [
            (&["a", "a", "b"][..], &auto, true),
            (&["a", "a", "b"], &tcp, false),
            (&["a", "b", "c"], &auto, false),
            (&["a", "a", "a"], &auto, false),
        ] {
            let longest = longest_block_by_node(config, &Topology::from_names(names));
            assert_eq!(longest > 0, by_node, "{names:?}");
        }
    }
}
