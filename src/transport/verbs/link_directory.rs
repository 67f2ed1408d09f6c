//! What a rank needs to make a link to any other rank.
//!
//! Owns which rails are connected, and the paths between them.

use super::connect_info::{ConnectInfo, LinkConnectInfo, OutOfBand};
use super::control_buffer::ControlBuffer;
use super::link::Link;
use super::objects::{Endpoint, PathAttributes, PortAttributes};
use super::options::VerbsOptions;
use super::port_selection::{Rail, pair_rails};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::secret::SecretKey;

/// What a rank needs to make links to any other.
pub(crate) struct LinkDirectory {
    /// This rank.
    pub me: Rank,
    /// By rank: the rails that it uses.
    pub rails: Vec<Vec<Rail>>,
    /// The key of the link to a rank.
    pub key: Box<dyn Fn(Rank) -> SecretKey + Send>,
    /// How ranks without a link send each other messages.
    pub out_of_band: Box<dyn OutOfBand>,
}

impl LinkDirectory {
    /// Which rails of this rank are connected with which of the peer's, as (this rank's, the peer's). Empty
    /// if the peer cannot be reached.
    pub(super) fn pairs(&self, peer: Rank) -> Vec<(usize, usize)> {
        let (low, high) = (self.me.min(peer), self.me.max(peer));
        let (Some(of_low), Some(of_high)) = (self.rails.get(low), self.rails.get(high)) else {
            return Vec::new();
        };
        let pairs = pair_rails(of_low, of_high);
        if self.me == low { pairs } else { pairs.into_iter().map(|(low, high)| (high, low)).collect() }
    }

    /// This rank's end of a link to a peer, which has a queue pair for each of these pairs of rails.
    pub(super) fn link(&self, peer: Rank, control: ControlBuffer, rails: &[(usize, usize)]) -> Link {
        let rate = |rank: Rank, rail: usize| self.rails[rank].get(rail).map_or(0, |rail| rail.rate_mbps);
        let rates: Vec<u64> =
            rails.iter().map(|(mine, theirs)| rate(self.me, *mine).min(rate(peer, *theirs))).collect();
        Link::new(peer, control, rails).with_rates(&rates).with_key(self.me, &(self.key)(peer))
    }

    /// The path of each queue pair of a link, and its end at the peer, which has published `info` and
    /// `link_info`.
    ///
    /// # Errors
    /// `Disagreement` if what the peer published does not fit this rank's queue pairs, which are on these
    /// rails.
    pub(super) fn paths(
        &self,
        peer: Rank,
        rails: &[(usize, usize)],
        mine: &[(Rail, PortAttributes)],
        options: &VerbsOptions,
        (info, link_info): (&ConnectInfo, &LinkConnectInfo),
    ) -> Result<Vec<(Endpoint, PathAttributes)>> {
        let missing = |what: &str| {
            let message = format!("rank {peer} published no {what}; do all ranks run the same version?");
            Error::disagreement(message)
        };
        let (found, expected) = (link_info.endpoints.len(), rails.len());
        if found != expected {
            return Err(Error::disagreement(format!(
                "rank {peer} has {found} queue pairs for this rank's {expected}; do all ranks run with the same settings?"
            )));
        }
        let path = |((mine_at, theirs_at), end): (&(usize, usize), &Endpoint)| {
            let theirs = self.rails[peer].get(*theirs_at).ok_or_else(|| missing("matching rail"))?;
            let mtu = info.mtus.get(*theirs_at).ok_or_else(|| missing("MTU of its rail"))?;
            let (rail, port) = &mine[*mine_at];
            Ok((*end, options.path_attributes((rail, port), theirs, port.mtu.min(*mtu))))
        };
        rails.iter().zip(&link_info.endpoints).map(path).collect()
    }
}
