//! The collectives as nccl-tests measures them.
//!
//! Owns, for each collective, how a size in bytes translates to element counts, the busbw factor, and the
//! columns for operation and root.

use super::redop::RedOp;
use flexring_core::call::Collective;

/// Parts of a vector, one per rank, are multiples of this many bytes, as in nccl-tests.
const PART_ALIGNMENT: usize = 16;

/// The lengths of one call's vectors, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length of the longer vector.
    pub whole: usize,
    /// Length of each rank's part of it. Equal to `whole` for collectives without parts.
    pub part: usize,
}

impl Extent {
    /// The lengths for a vector of at most `bytes` bytes whose elements have `size` bytes. Collectives with
    /// parts round each part down to [`PART_ALIGNMENT`]. A barrier has no elements.
    pub fn new(collective: Collective, bytes: usize, size: usize, world: usize) -> Self {
        let whole = bytes / size;
        match collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::SendRecv => {
                Self { whole, part: whole }
            }
            Collective::Barrier => Self { whole: 0, part: 0 },
            Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll
            | Collective::AllToAllV => {
                let step = PART_ALIGNMENT / size;
                let part = whole / world / step * step;
                Self { whole: part * world, part }
            }
        }
    }
}

/// All that can be measured: the collectives, and groups in which each rank sends to the next one. Blocks of
/// different lengths are not measured, whose lengths a size does not give.
pub fn measurable() -> impl Iterator<Item = Collective> {
    let collectives = Collective::ALL.into_iter().filter(|collective| *collective != Collective::AllToAllV);
    collectives.chain([Collective::SendRecv])
}

/// Parses a collective's name, written with `_` or `-`, or without either as nccl-tests does.
///
/// # Errors
/// A message that lists the names.
pub fn parse(text: &str) -> Result<Collective, String> {
    let letters = |name: &str| name.replace(['-', '_'], "");
    measurable().find(|collective| letters(collective.name()) == letters(text)).ok_or_else(|| {
        let names: Vec<&str> = measurable().map(Collective::name).collect();
        let (last, all) = names.split_last().unwrap_or((&"", &[]));
        format!("expected {} or {last}", all.join(", "))
    })
}

/// busbw / algbw: the share of the vector that each rank must send over its link at least (as nccl-tests
/// defines it).
pub fn bus_factor(collective: Collective, world: usize) -> f64 {
    let others = (world - 1) as f64 / world as f64;
    match collective {
        Collective::AllReduce => 2.0 * others,
        Collective::ReduceScatter
        | Collective::AllGather
        | Collective::Gather
        | Collective::Scatter
        | Collective::AllToAll
        | Collective::AllToAllV => others,
        Collective::Broadcast | Collective::Reduce | Collective::SendRecv => 1.0,
        Collective::Barrier => 0.0,
    }
}

/// Whether the collective has a form in place. Where it has none, both halves of a row are measured out of
/// place.
pub fn has_in_place(collective: Collective) -> bool {
    !collective.is_all_to_all() && collective != Collective::SendRecv
}

/// The entry of the `redop` column.
pub fn redop(collective: Collective, op: RedOp) -> &'static str {
    if collective.reduces() { op.name() } else { "none" }
}

/// The entry of the `root` column; -1 for collectives without a root.
pub fn root(collective: Collective, root: usize) -> i64 {
    if collective.has_root() { root as i64 } else { -1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_divided_into_parts_as_in_nccl_tests() {
        let extent = |collective, bytes, size| Extent::new(collective, bytes, size, 3);
        for collective in [Collective::AllReduce, Collective::Broadcast, Collective::Reduce] {
            assert_eq!(extent(collective, 1000, 8), Extent { whole: 125, part: 125 });
        }
        for collective in Collective::ALL.into_iter().filter(|collective| collective.has_parts()) {
            assert_eq!(extent(collective, 1 << 20, 4), Extent { whole: 262_140, part: 87_380 });
            assert_eq!(extent(collective, 1 << 20, 1), Extent { whole: 1_048_560, part: 349_520 });
            assert_eq!(extent(collective, 47, 4), Extent { whole: 0, part: 0 });
        }
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        assert_eq!(
            Collective::ALL.map(|collective| bus_factor(collective, 4)),
            [1.5, 0.75, 0.75, 1.0, 1.0, 0.75, 0.75, 0.75, 0.0, 0.75]
        );
        assert_eq!(bus_factor(Collective::SendRecv, 4), 1.0);
        assert_eq!(bus_factor(Collective::AllReduce, 1), 0.0);
    }

    #[test]
    fn names_are_parsed_with_and_without_underscores_and_hyphens() {
        for collective in measurable() {
            assert_eq!(parse(collective.name()), Ok(collective));
            assert_eq!(parse(&collective.name().replace('_', "-")), Ok(collective));
        }
        let expected = "expected all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, \
                        all_to_all, barrier or send_recv";
        assert_eq!(parse("sendrecv"), Ok(Collective::SendRecv));
        assert_eq!(parse("gathers"), Err(expected.to_owned()));
    }
}
