//! The collectives as nccl-tests measures them.
//!
//! Owns what a size means to each, what of it a bus carries, and the columns that only some have. Must not know how
//! anything is measured.

use super::redop::RedOp;
use flexring::call::Collective;

/// Bytes of which the parts of a vector are multiples, where it has one for each rank.
const PART: usize = 16;

/// The lengths of one call's vectors, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Of the longer one.
    pub whole: usize,
    /// Of each rank's part of it; where there are no parts, the same.
    pub part: usize,
}

impl Extent {
    /// What a vector of `bytes` bytes in all is to `collective`, whose elements have `size` of them.
    pub fn new(collective: Collective, bytes: usize, size: usize, world: usize) -> Self {
        let whole = bytes / size;
        match collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => Self { whole, part: whole },
            Collective::ReduceScatter | Collective::AllGather => {
                let step = PART / size;
                let part = whole / world / step * step;
                Self { whole: part * world, part }
            }
        }
    }
}

/// The collective of this name.
pub fn parse(text: &str) -> Result<Collective, String> {
    let name = text.replace('-', "_");
    Collective::ALL.into_iter().find(|collective| collective.name() == name).ok_or_else(|| {
        let names = Collective::ALL.map(Collective::name);
        let [all @ .., last] = &names;
        format!("expected {} or {last}", all.join(", "))
    })
}

/// How much of its bytes a collective moves over the busiest link of each rank.
pub fn bus_factor(collective: Collective, world: usize) -> f64 {
    let others = (world - 1) as f64 / world as f64;
    match collective {
        Collective::AllReduce => 2.0 * others,
        Collective::ReduceScatter | Collective::AllGather => others,
        Collective::Broadcast | Collective::Reduce => 1.0,
    }
}

/// What the column of the operation says.
pub fn redop(collective: Collective, op: RedOp) -> &'static str {
    if collective.reduces() { op.name() } else { "none" }
}

/// What the column of the root says.
pub fn root(collective: Collective, root: usize) -> i64 {
    if collective.has_root() { root as i64 } else { -1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_mean_what_they_mean_to_nccl_tests() {
        let extent = |collective, bytes, size| Extent::new(collective, bytes, size, 3);
        for collective in [Collective::AllReduce, Collective::Broadcast, Collective::Reduce] {
            assert_eq!(extent(collective, 1000, 8), Extent { whole: 125, part: 125 });
        }
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            assert_eq!(extent(collective, 1 << 20, 4), Extent { whole: 262_140, part: 87_380 });
            assert_eq!(extent(collective, 1 << 20, 1), Extent { whole: 1_048_560, part: 349_520 });
            assert_eq!(extent(collective, 47, 4), Extent { whole: 0, part: 0 });
        }
    }

    #[test]
    fn buses_carry_what_they_carry_to_nccl_tests() {
        assert_eq!(Collective::ALL.map(|collective| bus_factor(collective, 4)), [1.5, 0.75, 0.75, 1.0, 1.0]);
        assert_eq!(bus_factor(Collective::AllReduce, 1), 0.0);
    }

    #[test]
    fn names_have_either_stroke() {
        for collective in Collective::ALL {
            assert_eq!(parse(collective.name()), Ok(collective));
            assert_eq!(parse(&collective.name().replace('_', "-")), Ok(collective));
        }
        let expected = "expected all_reduce, reduce_scatter, all_gather, broadcast or reduce";
        assert_eq!(parse("gather"), Err(expected.to_owned()));
    }
}
