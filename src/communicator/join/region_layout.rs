//! The layout of a rank's part of the memory that its node shares.
//!
//! Owns which settings it follows from.

use crate::communicator::gpu_state;
use crate::config::Config;
use crate::plan::thresholds::mailbox_limit;
use crate::transport::shm::ArenaLayout;

/// The layout of a rank's region. `local_ranks` is the number of ranks that share memory, this rank included,
/// and `may_use_gpus` whether any of them may use a GPU, now or later. `ranks_per_core` is as in
/// [`ExecutorParts`](crate::executor::ExecutorParts).
pub(super) fn region_layout(
    config: &Config,
    local_ranks: usize,
    world: usize,
    ranks_per_core: usize,
    may_use_gpus: bool,
) -> ArenaLayout {
    // The executor uses one more slot for itself.
    let slots = config.slots_for(local_ranks, world) + 1;
    // Mailboxes are for nodes that have all ranks.
    let has_mailboxes = local_ranks == world && world > 1;
    let small = if has_mailboxes { mailbox_limit(config, world, ranks_per_core) } else { 0 };
    let layout = ArenaLayout::new(local_ranks, small, slots, config.subchunk.0);
    let (relay_slots, relay_bytes) = gpu_state::relay_slots(world);
    if may_use_gpus { layout.with_relays(relay_slots, relay_bytes) } else { layout }
}
