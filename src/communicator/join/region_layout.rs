//! The layout of a rank's part of the memory that its node shares.
//!
//! Owns which settings it follows from.

use crate::communicator::gpu;
use crate::config::Config;
use crate::plan::thresholds::small_limits;
use crate::transport::shm::ArenaLayout;

/// The layout of a rank's region. `local_ranks` is the number of ranks that share memory, this rank included,
/// and `may_use_gpus` whether any of them may use a GPU, now or later. `kernel_node` is the number of ranks
/// of the largest node if all ranks of the world have their GPUs by now, so that kernels may run their
/// calls, else 0. `ranks_per_core` is as in
/// [`ExecutorParts`](crate::executor::ExecutorParts).
pub(super) fn region_layout(
    config: &Config,
    local_ranks: usize,
    world: usize,
    ranks_per_core: usize,
    may_use_gpus: bool,
    kernel_node: usize,
) -> ArenaLayout {
    // The executor uses one more slot for itself.
    let slots = config.slots_for(local_ranks, world) + 1;
    let [on_host, on_gpu] = small_limits(config, world, ranks_per_core);
    // Mailboxes are for nodes that have all ranks.
    let small = if local_ranks == world && world > 1 { on_host.max(on_gpu) } else { 0 };
    let on_gpus = gpu::slot_bytes(config, kernel_node, world);
    let (relay_slots, relay_bytes) = gpu::relay_slots(world);
    let layout = ArenaLayout::new(local_ranks, small, slots, config.subchunk.0, on_gpus)
        .with_relays(relay_slots, relay_bytes);
    if may_use_gpus { layout } else { layout.without_gpus() }
}
