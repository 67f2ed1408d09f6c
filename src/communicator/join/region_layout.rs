//! The layout of a rank's part of the memory that its node shares.
//!
//! Owns which settings it follows from.

use crate::communicator::gpu;
use crate::config::Config;
use crate::plan::thresholds::small_limits;
use crate::transport::shm::ArenaLayout;

/// Which ranks of a node have GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GpuUse {
    /// None has one, now or later.
    None,
    /// Some may have one later.
    Later,
    /// All have one by now.
    All,
}

impl GpuUse {
    /// By rank, whether it has one now, and whether it may have one later.
    pub(super) fn of(ranks: impl Iterator<Item = (bool, bool)> + Clone) -> Self {
        if ranks.clone().all(|(has, _)| has) {
            return Self::All;
        }
        if ranks.clone().any(|(has, may)| has || may) { Self::Later } else { Self::None }
    }
}

/// The layout of a rank's region. `local_ranks` is the number of ranks that share memory, this rank included,
/// and `gpus` which of them use GPUs. `ranks_per_core` is as in
/// [`ExecutorParts`](crate::executor::ExecutorParts).
pub(super) fn region_layout(
    config: &Config,
    local_ranks: usize,
    world: usize,
    ranks_per_core: usize,
    gpus: GpuUse,
) -> ArenaLayout {
    // The executor uses one more slot for itself.
    let slots = config.slots_for(local_ranks, world) + 1;
    let [on_host, on_gpu] = small_limits(config, world, ranks_per_core);
    // Mailboxes are for nodes that have all ranks.
    let small = if local_ranks == world && world > 1 { on_host.max(on_gpu) } else { 0 };
    // Kernels run collectives if all ranks have their GPUs by now.
    let node_of_all = if local_ranks == world && gpus == GpuUse::All { world } else { 0 };
    let on_gpus = gpu::slot_bytes(config, node_of_all, world);
    let layout = ArenaLayout::new(local_ranks, small, slots, config.subchunk.0, on_gpus);
    if gpus == GpuUse::None { layout.without_gpus() } else { layout }
}
