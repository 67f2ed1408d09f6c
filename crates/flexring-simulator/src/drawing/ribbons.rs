//! The ends of the ribbons that show flows between two columns.
//!
//! Owns the stacking: ribbons of one rank are side by side in the middle of its bar, in the order of the rows
//! at their other ends, so that few of them cross. Must not know how they are painted.

use super::geometry::Geometry;
use super::holdings::Flow;
use flexring_plan::Rank;

/// Least thickness that is visible.
const MIN_THICKNESS: f64 = 0.8;

/// A flow with the y of both ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ribbon {
    pub(super) to: Rank,
    /// Whether it is a hop of a chain.
    pub(super) is_chained: bool,
    /// y of its middle at the sender and at the receiver.
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) thickness: f64,
}

/// The flows of a level as ribbons. A whole vector is as thick as a bar is high. If some rank sends or
/// receives more than that, all ribbons are thinner.
pub(super) fn ribbons(flows: &[Flow], geometry: &Geometry) -> Vec<Ribbon> {
    let mut sums = vec![(0.0, 0.0); geometry.order.len()];
    for flow in flows {
        sums[flow.from].0 += flow.amount;
        sums[flow.to].1 += flow.amount;
    }
    let most = sums.iter().fold(1.0, |most: f64, (out, into)| most.max(*out).max(*into));
    let thickness = |flow: &Flow| (flow.amount * geometry.bar_height / most).max(MIN_THICKNESS);
    let starts = stack(flows, geometry, thickness, |flow| (flow.from, flow.to));
    let ends = stack(flows, geometry, thickness, |flow| (flow.to, flow.from));
    let ribbon = |(flow, (start, end)): (&Flow, (f64, f64))| Ribbon {
        to: flow.to,
        is_chained: flow.is_chained,
        start,
        end,
        thickness: thickness(flow),
    };
    flows.iter().zip(starts.into_iter().zip(ends)).map(ribbon).collect()
}

/// By flow, the y of its middle in the stack at its near end.
fn stack(
    flows: &[Flow],
    geometry: &Geometry,
    thickness: impl Fn(&Flow) -> f64,
    near_and_far: impl Fn(&Flow) -> (Rank, Rank),
) -> Vec<f64> {
    let mut total = vec![0.0; geometry.order.len()];
    flows.iter().for_each(|flow| total[near_and_far(flow).0] += thickness(flow));
    // A stack is higher than the bar if many ribbons have the least thickness.
    let squeeze = |rank: Rank| (geometry.bar_height / total[rank]).min(1.0);
    let mut next: Vec<f64> = (0..geometry.order.len())
        .map(|rank| geometry.bar(rank) + (geometry.bar_height - total[rank] * squeeze(rank)) / 2.0)
        .collect();
    let mut order: Vec<usize> = (0..flows.len()).collect();
    order.sort_by(|one, other| {
        let far = |flow: usize| geometry.bar(near_and_far(&flows[flow]).1);
        far(*one).total_cmp(&far(*other))
    });
    let mut middles = vec![0.0; flows.len()];
    for number in order {
        let rank = near_and_far(&flows[number]).0;
        let height = thickness(&flows[number]) * squeeze(rank);
        middles[number] = next[rank] + height / 2.0;
        next[rank] += height;
    }
    middles
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::topology::Topology;

    #[test]
    fn ribbons_of_one_rank_do_not_overlap() {
        let topology = Topology::from_names(&["a"; 3]);
        let geometry = Geometry::new(&topology, 2, 60.0);
        let flow = |from, amount| Flow { from, to: 1, amount, is_chained: false };
        let ribbons = ribbons(&[flow(2, 0.25), flow(0, 0.5)], &geometry);
        let [lower, upper] = ribbons[..] else { panic!("two ribbons") };
        assert!(upper.end < lower.end, "ribbons keep the order of their senders");
        assert_eq!(
            (upper.thickness, lower.thickness),
            (geometry.bar_height / 2.0, geometry.bar_height / 4.0)
        );
        assert!((lower.end - upper.end - (upper.thickness + lower.thickness) / 2.0).abs() < 1e-9);
        let (top, bottom) = (upper.end - upper.thickness / 2.0, lower.end + lower.thickness / 2.0);
        assert!(top > geometry.bar(1) && bottom < geometry.bar(1) + geometry.bar_height);
    }

    #[test]
    fn stacks_never_exceed_the_bar() {
        for (world, amount) in [(4, 1.0), (100, 0.001)] {
            let topology = Topology::from_names(&vec!["a"; world]);
            let geometry = Geometry::new(&topology, 2, 60.0);
            let flows: Vec<Flow> =
                (1..world).map(|from| Flow { from, to: 0, amount, is_chained: false }).collect();
            for ribbon in ribbons(&flows, &geometry) {
                assert!((geometry.bar(0)..geometry.bar(0) + geometry.bar_height).contains(&ribbon.end));
            }
        }
    }
}
