//! What ranks agree on before their kernels run collectives.
//!
//! Owns the number of CTAs. Must not know how kernels are launched.

use serde::{Deserialize, Serialize};

/// CTAs of a call among ranks with a GPU each, whose links fewer CTAs fill than its memory; and of ranks that
/// share a GPU, where 64 CTAs of two ranks reach the memory's rate on an H100 (bench/results: 256 MiB 404 us,
/// and 458 with 32).
const CTAS: u32 = 32;
const CTAS_ON_SHARED_GPU: u32 = 64;

/// What a rank says of the kernels by which it can run collectives.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(in crate::communicator) struct KernelOffer {
    /// The GPU, by a name that ranks give to no other one.
    pub gpu: String,
    /// CTAs that it holds at a time.
    pub resident: u32,
    /// What the user wants.
    pub wanted: Option<u32>,
    /// Whether its kernels reach the GPU memory of all other ranks of its node.
    pub reaches_node: bool,
}

/// The most CTAs of a kernel, equal on all ranks: all of those that share a GPU fit there at the same time,
/// and leave half of a GPU that they do not share to others. A rank without an offer opens its GPU later.
/// Ranks that share a GPU have a power of two, which leaves some of it free: with 33 CTAs each, 4 ranks
/// took 905 us for 256 MiB.
pub(in crate::communicator) fn most_ctas(offers: &[Option<KernelOffer>]) -> u32 {
    let most = offers.iter().map(|offer| {
        let Some(KernelOffer { gpu, resident, wanted, .. }) = offer else { return CTAS };
        let sharing = offers.iter().flatten().filter(|other| other.gpu == *gpu).count() as u32;
        let default = if sharing > 1 { CTAS_ON_SHARED_GPU } else { CTAS };
        let room = resident / sharing.max(2);
        let room = if sharing > 1 { 1 << room.max(1).ilog2() } else { room };
        wanted.unwrap_or(default).min(room).max(1)
    });
    most.min().unwrap_or(CTAS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_all_ranks_fit_on_their_gpus() {
        let offer = |gpu: usize, wanted| {
            Some(KernelOffer { gpu: gpu.to_string(), resident: 132, wanted, reaches_node: true })
        };
        let sharing = |ranks, wanted| most_ctas(&vec![offer(0, wanted); ranks]);
        assert_eq!([1, 2, 4, 8].map(|ranks| sharing(ranks, None)), [32, 64, 32, 16]);
        assert_eq!([1, 2, 3].map(|ranks| sharing(ranks, Some(1024))), [66, 64, 32]);
        assert_eq!(most_ctas(&[offer(0, None), offer(1, None)]), 32);
        assert_eq!(most_ctas(&[offer(0, Some(4)), offer(1, None)]), 4);
        assert_eq!(most_ctas(&[offer(0, None), offer(1, None), offer(1, None)]), 32);
        assert_eq!(most_ctas(&[offer(0, Some(4)), None]), 4);
        assert_eq!(sharing(200, None), 1);
    }
}
