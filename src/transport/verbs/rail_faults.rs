//! Rails that cannot be used, found while links are made: which ones all ranks leave out.
//!
//! Pure.

use super::port_selection::Rail;
use crate::error::Error;
use crate::rank::Rank;
use std::collections::BTreeMap;

/// A rail of a rank, as its position in the rank's list.
type RailOfRank = (Rank, usize);

/// A rail of the reporting rank that could not be brought up.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct RailFault {
    /// Position of the rail in the reporting rank's list.
    pub rail: usize,
    /// The rail that it was to be connected to, with its rank; `None` if the device or port itself does not
    /// work.
    pub other_end: Option<RailOfRank>,
    pub cause: Error,
}

/// Why a step of making links failed.
#[derive(Debug)]
pub(crate) enum SetupFailure {
    /// Rails of this rank cannot be used. The others may be enough.
    Rails(Vec<RailFault>),
    Other(Error),
}

#[cfg(test)]
impl SetupFailure {
    /// The first cause.
    pub(crate) fn into_error(self) -> Error {
        match self {
            Self::Rails(faults) => match faults.into_iter().next() {
                Some(fault) => fault.cause,
                None => Error::internal("no rail has failed"),
            },
            Self::Other(error) => error,
        }
    }
}

impl From<Error> for SetupFailure {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// A rail that no rank uses, and why.
#[derive(Clone, Debug)]
pub(crate) struct DroppedRail {
    pub rank: Rank,
    /// Its position in the rank's list.
    pub rail: usize,
    /// The rank that found the cause: this one, or one that was to connect to it.
    pub reporter: Rank,
    pub cause: Error,
}

/// The rails to leave out, from what each rank found, by rank: as few as possible. If a connection of two
/// rails failed, one of them is left out: the one with more failed connections, so that one bad port costs
/// only itself. All ranks compute the same.
pub(crate) fn rails_to_drop(faults: &[Vec<RailFault>]) -> Vec<DroppedRail> {
    let mut open: Vec<(Vec<RailOfRank>, &RailFault)> = Vec::new();
    for (rank, faults) in faults.iter().enumerate() {
        for fault in faults {
            open.push(([(rank, fault.rail)].into_iter().chain(fault.other_end).collect(), fault));
        }
    }
    let mut dropped = Vec::new();
    // Those that do not work by themselves first: they explain failed connections.
    while let Some((rank, rail)) =
        open.iter().find(|(ends, _)| ends.len() == 1).map(|(ends, _)| ends[0]).or_else(|| {
            let mut failures = BTreeMap::new();
            for end in open.iter().flat_map(|(ends, _)| ends) {
                *failures.entry(*end).or_insert(0) += 1;
            }
            // Of equals, the first.
            failures.into_iter().rev().max_by_key(|(_, count)| *count).map(|(end, _)| end)
        })
    {
        let explained = |ends: &[RailOfRank]| ends.contains(&(rank, rail));
        if let Some((ends, fault)) = open.iter().find(|(ends, _)| explained(ends)) {
            dropped.push(DroppedRail { rank, rail, reporter: ends[0].0, cause: fault.cause.clone() });
        }
        open.retain(|(ends, _)| !explained(ends));
    }
    dropped
}

/// Removes rails from the lists, by rank. What is not in the lists is ignored.
pub(crate) fn remove_rails(rails: &mut [Vec<Rail>], dropped: &[DroppedRail]) {
    for (rank, rails) in rails.iter_mut().enumerate() {
        let mut position = 0;
        rails.retain(|_| {
            position += 1;
            !dropped.iter().any(|dropped| (dropped.rank, dropped.rail) == (rank, position - 1))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(rail: usize, other_end: Option<RailOfRank>) -> RailFault {
        RailFault { rail, other_end, cause: Error::system(format!("rail {rail} to {other_end:?}")) }
    }

    fn dropped(faults: &[Vec<RailFault>]) -> Vec<RailOfRank> {
        rails_to_drop(faults).iter().map(|dropped| (dropped.rank, dropped.rail)).collect()
    }

    #[test]
    fn a_port_that_does_not_work_explains_the_failed_connections_to_it() {
        let to_it = || fault(1, Some((2, 0)));
        assert_eq!(dropped(&[vec![to_it()], vec![to_it()], vec![fault(0, None)]]), [(2, 0)]);
        assert_eq!(dropped(&[vec![fault(0, None), fault(1, None)], vec![]]), [(0, 0), (0, 1)]);
        assert_eq!(dropped(&[vec![], vec![]]), []);
    }

    #[test]
    fn of_two_rails_that_do_not_connect_the_one_with_more_failures_is_left_out() {
        let all_but_two = [
            vec![fault(1, Some((2, 1)))],
            vec![fault(1, Some((2, 1)))],
            vec![],
            vec![fault(1, Some((2, 1)))],
        ];
        assert_eq!(dropped(&all_but_two), [(2, 1)]);
        let two_reports = [vec![], vec![], vec![fault(1, Some((0, 1))), fault(1, Some((1, 1)))], vec![]];
        assert_eq!(dropped(&two_reports), [(2, 1)]);
        assert_eq!(dropped(&[vec![fault(0, Some((1, 0)))], vec![fault(0, Some((0, 0)))]]), [(0, 0)]);
    }

    #[test]
    fn independent_faults_each_cost_a_rail() {
        let faults = [vec![fault(0, Some((1, 0)))], vec![], vec![fault(1, Some((3, 1)))], vec![]];
        assert_eq!(dropped(&faults), [(0, 0), (2, 1)]);
        let mut rails = vec![vec![Rail::example(); 2]; 4];
        remove_rails(&mut rails, &rails_to_drop(&faults));
        assert_eq!(rails.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 1, 2]);
    }
}
