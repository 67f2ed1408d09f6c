//! The layout of a rank's part of the memory that its node shares.
//!
//! Owns which settings it follows from.

use crate::communicator::gpu;
use crate::config::Config;
use crate::plan::thresholds::small_limits;
use crate::transport::shm::ArenaLayout;

/// The layout of a rank's region. `local_ranks` is the number of ranks that share memory, this rank included,
/// and `has_gpus` whether one of them may use a GPU. `ranks_per_core` is as in
/// [`ExecutorParts`](crate::executor::ExecutorParts).
pub(super) fn region_layout(
    config: &Config,
    local_ranks: usize,
    world: usize,
    ranks_per_core: usize,
    has_gpus: bool,
) -> ArenaLayout {
    // The executor uses one more slot for itself.
    let slots = config.slots_for(local_ranks, world) + 1;
    let [on_host, on_gpu] = small_limits(config, world, ranks_per_core);
    // Mailboxes are for nodes that have all ranks.
    let small = if local_ranks == world && world > 1 { on_host.max(on_gpu) } else { 0 };
    let node_of_all = if local_ranks == world { world } else { 0 };
    let on_gpus = gpu::slot_bytes(config, node_of_all, world);
    let layout = ArenaLayout::new(local_ranks, small, slots, config.subchunk.0, on_gpus);
    if has_gpus { layout } else { layout.without_gpus() }
}
