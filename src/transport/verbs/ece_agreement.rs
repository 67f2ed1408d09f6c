//! How the two ends of a link agree on options of Enhanced Connection Establishment (ECE).
//!
//! Owns which end accepts.
//!
//! The ends send each other the options that their queue pairs support. The lower rank **accepts**: it sets
//! those of the peer and connects, and its device reduces them to what both support. The result goes back,
//! and the other end sets it before it connects. (So NCCL does it, and librdmacm.) A queue pair that is
//! connected again has the options of the one before it, so nothing is sent then.

use super::objects::{EceOptions, Endpoint, PathAttributes};
use crate::rank::Rank;

/// ECE options by queue pair; empty if there are none.
pub(super) type QpEce = Vec<Option<EceOptions>>;

/// These options by queue pair.
pub(super) fn by_qp(ece: impl Iterator<Item = Option<EceOptions>>) -> QpEce {
    let ece: QpEce = ece.collect();
    if ece.iter().any(Option::is_some) { ece } else { QpEce::new() }
}

/// Whether rank `me` accepts the options of a peer, or else the peer those of rank `me`.
pub(super) fn accepts(me: Rank, peer: Rank) -> bool {
    me < peer
}

/// The options that the end with these queue pairs sets if it accepts: the peer's, and none where one end has
/// no ECE or the vendors differ. `None` if there are none at all, so that the ends have nothing to agree on;
/// both ends find that out equally.
pub(super) fn proposals(mine: &[Option<EceOptions>], theirs: &[Option<EceOptions>]) -> Option<QpEce> {
    let proposal = |(mine, theirs): (&Option<EceOptions>, &Option<EceOptions>)| {
        theirs.filter(|theirs| mine.is_some_and(|mine| mine.vendor_id == theirs.vendor_id))
    };
    let proposals: QpEce = mine.iter().zip(theirs).map(proposal).collect();
    proposals.iter().any(Option::is_some).then_some(proposals)
}

/// Has queue pairs over these paths set these options when they are connected.
pub(super) fn set(paths: &mut [(Endpoint, PathAttributes)], ece: &[Option<EceOptions>]) {
    for ((_, path), ece) in paths.iter_mut().zip(ece) {
        path.ece = *ece;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_proposed_where_both_ends_have_devices_of_one_vendor() {
        let of = |vendor_id, options| Some(EceOptions { vendor_id, options, comp_mask: 0 });
        let (mine, theirs) = (of(7, 0b011), of(7, 0b110));
        assert_eq!(proposals(&[mine, None, mine], &[theirs, theirs, None]), Some(vec![theirs, None, None]));
        for (mine, theirs) in [(mine, None), (None, theirs), (None, None), (mine, of(8, 0b110))] {
            assert_eq!(proposals(&[mine], &[theirs]), None);
        }
        assert_eq!(proposals(&[mine], &[]), None);
        assert_eq!((accepts(1, 2), accepts(2, 1)), (true, false));
    }
}
