//! The hierarchical ring p1 x p2 x ... x ph. Sections and equation numbers are those of Ueno and Yokota,
//! CCGrid 2019.
//!
//! Owns the models with latency alpha, inverse bandwidth beta and pipeline granularity s. Must not know
//! topologies. The additions are hidden behind the transfers, because each part is cut into s pieces, each of
//! which costs alpha.

/// One layer of rings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingLayer {
    /// Ranks of each ring: p_i.
    pub processes: usize,
    /// Inverse bandwidth between them: beta_i.
    pub beta: f64,
}

/// Section IV-C, T_i,all(n): one layer's reduce-scatter and all-gather of `n` bytes.
#[must_use]
pub fn ring_layer(n: f64, layer: RingLayer, alpha: f64, s: f64) -> f64 {
    let p = layer.processes as f64;
    2.0 * s * alpha * (p - 1.0) + 2.0 * layer.beta * (n / p) * (p - 1.0)
}

/// Section IV-C, T(n): the hierarchical ring of these layers, from the innermost.
#[must_use]
pub fn hierarchical(n: f64, layers: &[RingLayer], alpha: f64, s: f64) -> f64 {
    let mut held = n;
    let times = layers.iter().map(|layer| {
        let time = ring_layer(held, *layer, alpha, s);
        held /= layer.processes as f64;
        time
    });
    times.sum()
}

/// Section III-A 1: the flat ring of `p` ranks.
#[must_use]
pub fn ring(n: f64, p: usize, alpha: f64, beta: f64, s: f64) -> f64 {
    let p = p as f64;
    2.0 * (p - 1.0) * (s * alpha + n / p * beta)
}

/// Section III-A 2: Rabenseifner's algorithm for 2^`doublings` ranks, that is, as many exchanges of halves
/// each way.
#[must_use]
pub fn rabenseifner(n: f64, doublings: u32, alpha: f64, beta: f64, s: f64) -> f64 {
    let p = f64::from(doublings).exp2();
    2.0 * f64::from(doublings) * s * alpha + 2.0 * n * beta * (p - 1.0) / p
}

/// Eq. 1 in its general form: `nodes` nodes of 4 GPUs, a ring in each node and 4 rings between nodes. Each of
/// these has half of an adapter, because 4 GPUs share 2. The paper then takes `beta_nvlink` for a twelfth of
/// `beta_ib`.
#[must_use]
pub fn abci_hierarchical(n: f64, nodes: usize, alpha: f64, s: f64, beta_nvlink: f64, beta_ib: f64) -> f64 {
    let nodes = nodes as f64;
    let between = 2.0 * beta_ib * (nodes - 1.0) / (4.0 * nodes);
    2.0 * s * alpha * (2.0 + nodes) + 2.0 * n * (beta_nvlink * 0.75 + between)
}

/// Eq. 2: the flat ring of the 4 GPUs of each of `nodes` nodes, over both adapters of each node.
#[must_use]
pub fn abci_ring(n: f64, nodes: usize, alpha: f64, s: f64, beta_ib: f64) -> f64 {
    ring(n, 4 * nodes, alpha, beta_ib / 2.0, s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(one: f64, other: f64) -> bool {
        (one - other).abs() <= 1e-9 * one.abs().max(other.abs())
    }

    fn layers() -> impl Strategy<Value = Vec<RingLayer>> {
        let layer = (1usize..20, 1e-12..1e-6f64);
        let layer = layer.prop_map(|(processes, beta)| RingLayer { processes, beta });
        proptest::collection::vec(layer, 1..6)
    }

    proptest! {
        #[test]
        fn the_ring_is_the_hierarchy_of_one_layer(
            n in 1.0..1e12f64, p in 1usize..5000, alpha in 0.0..1e-3, beta in 1e-12..1e-6f64, s in 1.0..8.0
        ) {
            let layer = RingLayer { processes: p, beta };
            prop_assert!(close(hierarchical(n, &[layer], alpha, s), ring(n, p, alpha, beta, s)));
        }

        #[test]
        fn rabenseifner_is_the_hierarchy_of_pairs(
            n in 1.0..1e12f64, doublings in 1u32..20, alpha in 0.0..1e-3, beta in 1e-12..1e-6f64, s in 1.0..8.0
        ) {
            let pairs = vec![RingLayer { processes: 2, beta }; doublings as usize];
            prop_assert!(close(hierarchical(n, &pairs, alpha, s), rabenseifner(n, doublings, alpha, beta, s)));
        }

        #[test]
        fn the_bandwidth_term_does_not_depend_on_how_uniform_layers_are_decomposed(
            n in 1.0..1e12f64, outer in layers(), parts in proptest::collection::vec(1usize..9, 1..5), at in 0usize..6,
            beta in 1e-12..1e-6f64
        ) {
            let at = at.min(outer.len());
            let with = |inner: Vec<RingLayer>| {
                let mut all = outer.clone();
                all.splice(at..at, inner);
                hierarchical(n, &all, 0.0, 1.0)
            };
            let whole = with(vec![RingLayer { processes: parts.iter().product(), beta }]);
            let cut = with(parts.iter().map(|processes| RingLayer { processes: *processes, beta }).collect());
            prop_assert!(close(whole, cut), "{whole} as one layer, {cut} as {parts:?}");
        }

        #[test]
        fn the_sum_of_layers_is_the_closed_form(n in 1.0..1e12f64, layers in layers(), alpha in 0.0..1e-3, s in 1.0..8.0) {
            let processes: f64 = layers.iter().map(|layer| layer.processes as f64).sum();
            let (mut product, mut bandwidth) = (1.0, 0.0);
            for layer in &layers {
                product *= layer.processes as f64;
                bandwidth += layer.beta * (layer.processes as f64 - 1.0) / product;
            }
            let closed = 2.0 * s * alpha * (processes - layers.len() as f64) + 2.0 * n * bandwidth;
            prop_assert!(close(hierarchical(n, &layers, alpha, s), closed));
        }
    }

    #[test]
    fn the_equations_of_abci_are_those_of_its_layers() {
        let (n, alpha, s, beta) = (512e6, 4.8e-6, 2.0, 1.0 / 9301.19e6);
        for nodes in [2, 8, 32, 512] {
            let layers = [
                RingLayer { processes: 4, beta: beta / 12.0 },
                RingLayer { processes: nodes, beta: 2.0 * beta },
            ];
            let of_layers = hierarchical(n, &layers, alpha, s);
            assert!(close(abci_hierarchical(n, nodes, alpha, s, beta / 12.0, beta), of_layers));
            // The forms to which the paper simplifies.
            let p = nodes as f64;
            let simplified = 2.0 * s * alpha * (2.0 + p) + 2.0 * n * beta * (9.0 / 16.0 - 0.5 / p);
            assert!(close(of_layers, simplified));
            let simplified = 2.0 * s * alpha * (4.0 * p - 1.0) + 2.0 * n * beta * (0.5 - 0.125 / p);
            assert!(close(abci_ring(n, nodes, alpha, s, beta), simplified));
        }
    }
}
