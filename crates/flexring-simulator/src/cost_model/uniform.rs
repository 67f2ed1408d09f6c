//! All-reduces between `p` machines whose links are alike: the table of Yuan, "On the Time Complexity of
//! Common All-Reduce Methods", slide "After discussion with Hao".
//!
//! Owns the models with the time t_m of a byte and t_c of setting up a transmission. Must not know
//! topologies.

/// Row "star": the master takes and returns the vectors of all machines one by one.
#[must_use]
pub fn star(n: f64, p: usize, t_m: f64, t_c: f64) -> f64 {
    2.0 * p as f64 * (n * t_m + t_c)
}

/// Row "tree": a binary tree. In each of its levels, whole vectors travel.
#[must_use]
pub fn tree(n: f64, p: usize, t_m: f64, t_c: f64) -> f64 {
    2.0 * (p as f64).log2() * (n * t_m + t_c)
}

/// Row "BytePS": as many servers as workers, each of which adds one part of the vector.
#[must_use]
pub fn byteps(n: f64, p: usize, t_m: f64, t_c: f64) -> f64 {
    2.0 * n * t_m + p as f64 * t_c
}

/// Row "ring". The time of the bytes is that of infinitely many machines; see [`ring_bytes`].
#[must_use]
pub fn ring(n: f64, p: usize, t_m: f64, t_c: f64) -> f64 {
    2.0 * n * t_m + p as f64 * t_c
}

/// Slide "Ring-allreduce": the time of the bytes in a ring, without t_c.
#[must_use]
pub fn ring_bytes(n: f64, p: usize, t_m: f64) -> f64 {
    let p = p as f64;
    2.0 * (p - 1.0) * n / p * t_m
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ring_and_servers_are_never_slower_than_tree_and_star_with_long_vectors(
            p in 2usize..10_000, t_m in 1e-12..1e-6f64, t_c in 0.0..1e-6f64
        ) {
            // The bytes of one vector take much longer than all set-ups.
            let n = 1e6 * p as f64 * t_c.max(1e-9) / t_m;
            let ring = ring(n, p, t_m, t_c);
            prop_assert_eq!(ring, byteps(n, p, t_m, t_c));
            prop_assert!(ring <= tree(n, p, t_m, t_c) * (1.0 + 1e-5));
            prop_assert!(tree(n, p, t_m, t_c) <= star(n, p, t_m, t_c));
        }

        #[test]
        fn the_bytes_of_a_ring_approach_the_table_from_below(n in 1.0..1e12f64, p in 2usize..100_000, t_m in 1e-12..1e-6f64) {
            let (bytes, limit) = (ring_bytes(n, p, t_m), ring(n, p, t_m, 0.0));
            prop_assert!(bytes < limit && bytes >= limit * (1.0 - 1.1 / p as f64));
        }
    }
}
