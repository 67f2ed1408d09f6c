//! The hierarchical ring p1 x p2 x ... x ph: one level of rings for each dimension.

use crate::Rank;
use crate::fraction::Span;
use crate::schedule::{Group, ParticipantSet, Schedule};
use crate::topology::Topology;
use flexring_core::error::{Error, Result};
use std::sync::Arc;

/// The hierarchical all-reduce of Ueno and Yokota (CCGrid 2019). The ranks in tree order are the points of a
/// grid with these dimensions, from the innermost. At level l, every line of the grid along dimension l is a
/// ring that divides the spans that its ranks hold.
///
/// # Errors
/// `InvalidSetting` if the product of the dimensions is not the number of ranks.
pub fn plan(topology: &Topology, dimensions: &[usize]) -> Result<Schedule> {
    grid("hierarchical", topology, dimensions)
}

pub(super) fn grid(name: &str, topology: &Topology, dimensions: &[usize]) -> Result<Schedule> {
    let world = topology.world();
    let product = dimensions.iter().try_fold(1usize, |product, fan_out| product.checked_mul(*fan_out));
    if product != Some(world) {
        let shown: Vec<String> = dimensions.iter().map(ToString::to_string).collect();
        let product = product.map_or_else(|| "too many".to_owned(), |p| p.to_string());
        let message =
            format!("dimensions {} have {product} points, but there are {world} ranks", shown.join("x"));
        return Err(Error::invalid_setting(message));
    }
    let order = topology.ranks_in_tree_order();
    // By rank, the index of the part that it holds, of `parts` equal parts.
    let (mut held, mut parts) = (vec![0; world], 1);
    let mut levels = Vec::new();
    // Distance in tree order between neighbours on a line.
    let mut stride = 1;
    for &fan_out in dimensions.iter().filter(|fan_out| **fan_out > 1) {
        let mut groups = Vec::new();
        for start in (0..world).filter(|place| place / stride % fan_out == 0) {
            let line: Vec<Rank> = (0..fan_out).map(|step| order[start + step * stride]).collect();
            let set = ParticipantSet::all(line.clone());
            for (place, root) in line.iter().enumerate() {
                held[*root] = held[*root] * fan_out + place;
                let span = Span::part(held[*root], parts * fan_out);
                groups.push(Group { span, set: Arc::clone(&set), first: (place + 1) % fan_out, root: *root });
            }
        }
        levels.push(groups);
        stride *= fan_out;
        parts *= fan_out;
    }
    Ok(Schedule::new(name, world, levels))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(world: usize) -> Topology {
        Topology::from_names(&(0..world).map(|rank| format!("n{rank}")).collect::<Vec<_>>())
    }

    #[test]
    fn each_line_of_the_grid_is_a_ring() {
        let schedule = plan(&flat(6), &[3, 2]).expect("3 x 2 is 6");
        let row = |group: &Group| {
            format!("{} {:?} {}", group.span, group.participants().collect::<Vec<_>>(), group.root)
        };
        let rows: Vec<Vec<String>> =
            schedule.levels().iter().map(|level| level.groups().iter().map(row).collect()).collect();
        assert_eq!(rows[0][..3], ["[0, 1/3) [1, 2, 0] 0", "[1/3, 2/3) [2, 0, 1] 1", "[2/3, 1) [0, 1, 2] 2"]);
        assert_eq!(rows[0][3], "[0, 1/3) [4, 5, 3] 3");
        assert_eq!(rows[1][..2], ["[0, 1/6) [3, 0] 0", "[1/6, 1/3) [0, 3] 3"]);
        assert_eq!((rows[0].len(), rows[1].len()), (6, 6));
    }

    #[test]
    fn the_product_of_the_dimensions_must_be_the_number_of_ranks() {
        let message =
            |dimensions: &[usize]| plan(&flat(6), dimensions).expect_err("not 6").message().to_owned();
        assert_eq!(message(&[3, 3]), "dimensions 3x3 have 9 points, but there are 6 ranks");
        assert_eq!(
            message(&[usize::MAX, 3]),
            format!("dimensions {}x3 have too many points, but there are 6 ranks", usize::MAX)
        );
        assert_eq!(plan(&flat(6), &[1, 6, 1]).expect("6").levels().len(), 1);
    }
}
