//! How much work a property test does: `FLEXRING_TEST_EFFORT` scales the number of random cases.
//!
//! Owns the factor. Unset, it is 1: a property test then takes about a
//! minute at most. `make check` lowers it and `make test-long` raises it.

/// `usual` cases times `FLEXRING_TEST_EFFORT`, at least one.
pub fn cases(usual: u64) -> u64 {
    let factor = match std::env::var("FLEXRING_TEST_EFFORT") {
        Ok(text) => match text.parse::<f64>() {
            Ok(factor) if factor.is_finite() && factor > 0.0 => factor,
            _ => panic!("FLEXRING_TEST_EFFORT={text} is not a positive number"),
        },
        Err(_) => 1.0,
    };
    ((usual as f64 * factor) as u64).max(1)
}
