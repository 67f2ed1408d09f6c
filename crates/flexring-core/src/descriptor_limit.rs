//! How many descriptors this process may have.
//!
//! Owns reading and raising that limit.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Once;

/// The largest number of descriptors that this process may have at a time (`ulimit -n`); `None` if there is
/// no limit.
#[must_use]
pub fn current() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// How many unauthenticated connections a listener may have: `wanted`, but at most a quarter of the
/// descriptors of this process, so that strangers never use up those that ranks need. At least 1.
pub fn unauthenticated(wanted: usize) -> usize {
    let quarter = current().map_or(usize::MAX, |limit| usize::try_from(limit / 4).unwrap_or(usize::MAX));
    wanted.min(quarter).max(1)
}

/// Raises the soft limit to the hard one. Only the first call in a process does something, so a limit that
/// the program sets afterwards stays.
pub fn raise() {
    static RAISED: Once = Once::new();
    RAISED.call_once(raise_to_hard);
}

/// Sets the soft limit to the hard one, unless it is the same already.
fn raise_to_hard() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    let text = |limit: Option<u64>| limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string());
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => log::debug!("raised the limit of descriptors from {} to {}", text(current), text(maximum)),
        Err(cause) => log::debug!("the limit of descriptors stays {}: {cause}", text(current)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_raised_to_the_hard_one() {
        // The tests of a binary may share this process, so the limit is lowered by one only.
        let before = getrlimit(Resource::Nofile);
        let Some(lower) = before.current.map(|limit| limit - 1) else { return };
        setrlimit(Resource::Nofile, Rlimit { current: Some(lower), ..before }).expect("a lower limit");
        raise_to_hard();
        assert_eq!(current(), before.maximum);
    }
}
