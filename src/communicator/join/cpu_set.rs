//! The cores that the ranks of a node may use.
//!
//! Owns how they are counted, equally on all ranks.

/// The cores that one process may use.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct CpuSet {
    /// By number, 64 in a word; a bit that is set stands for a core.
    mask: Vec<u64>,
    /// How many of them its control group grants.
    granted: usize,
}

impl CpuSet {
    /// The cores that this process may use.
    pub(super) fn of_this_process() -> Self {
        let granted = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let mut mask = vec![0; rustix::thread::CpuSet::MAX_CPU / 64];
        match rustix::thread::sched_getaffinity(None) {
            Ok(set) => {
                let cores = (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core));
                cores.for_each(|core| mask[core / 64] |= 1 << (core % 64));
            }
            // More cores than the set has room for.
            Err(_) => mask.fill(u64::MAX),
        }
        while mask.last() == Some(&0) {
            mask.pop();
        }
        Self { mask, granted }
    }

    fn count(&self) -> usize {
        self.mask.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Number of these processes, the ranks of one node, for each core that they may use together, rounded
    /// up.
    pub(super) fn ranks_per_core<'a>(ranks: impl Iterator<Item = &'a Self>) -> usize {
        let (count, cores) = Self::shared_by(ranks);
        count.div_ceil(cores.max(1))
    }

    /// The number of processes, and of the cores that they may use together.
    fn shared_by<'a>(ranks: impl Iterator<Item = &'a Self>) -> (usize, usize) {
        let (mut all, mut count, mut limited) = (Self::default(), 0, false);
        for rank in ranks {
            count += 1;
            all.mask.resize(all.mask.len().max(rank.mask.len()), 0);
            all.mask.iter_mut().zip(&rank.mask).for_each(|(all, word)| *all |= word);
            all.granted = all.granted.max(rank.granted);
            limited |= rank.granted < rank.count();
        }
        // The ranks of a node mostly share a control group, and so its limit.
        (count, if limited { all.count().min(all.granted) } else { all.count() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(mask: u64, granted: usize) -> CpuSet {
        CpuSet { mask: vec![mask], granted }
    }

    #[test]
    fn the_ranks_of_a_node_share_the_cores_that_any_of_them_may_use() {
        for (ranks, ranks_per_core) in [
            (vec![cores(0b11, 2); 2], 1),
            (vec![cores(0b11, 2); 3], 2),
            (vec![cores(0b11, 2); 5], 3),
            // Each rank is bound to a core of its own.
            ((0..8).map(|core| cores(1 << core, 1)).collect(), 1),
            // A control group grants two of eight cores.
            (vec![cores(0xff, 2); 3], 2),
            (vec![cores(0xff, 2); 2], 1),
        ] {
            assert_eq!(CpuSet::ranks_per_core(ranks.iter()), ranks_per_core, "{ranks:?}");
        }
        let here = CpuSet::of_this_process();
        assert_eq!(CpuSet::ranks_per_core(std::iter::once(&here)), 1);
    }
}
