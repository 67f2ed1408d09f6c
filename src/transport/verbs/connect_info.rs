//! What ranks send each other to connect their queue pairs.
//!
//! Owns the messages, and the interface over which ranks send them outside of links. What a rank needs to say
//! once is in [`ConnectInfo`]; what concerns one peer only is in [`LinkConnectInfo`], and is sent to that
//! peer only.

use super::objects::Endpoint;
use super::wire::MAX_RAILS;
use crate::error::{Error, Result};
use crate::rank::Rank;
use std::os::fd::BorrowedFd;

/// What is the same for all links whose control buffers are in one block of memory.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ConnectInfo {
    /// By rail: the active MTU of its port, as verbs number MTUs.
    pub(super) mtus: Vec<u32>,
    /// Address of the remote sides of the control buffers.
    pub(super) address: u64,
    /// Remote keys of these, by rail.
    pub(super) keys: [u32; MAX_RAILS],
}

/// What one peer needs besides.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct LinkConnectInfo {
    /// By queue pair: this rank's end.
    pub(super) endpoints: Vec<Endpoint>,
    /// Where the remote side of the link's control buffer begins, in bytes from the address in
    /// [`ConnectInfo`].
    pub(super) offset: u64,
}

/// A message about one link.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum LinkMessage {
    /// This rank's end of a link that is made when the communicator is created.
    Planned(LinkConnectInfo),
    /// This rank's end of a link that is made because a call needs it.
    /// Also the queue pairs of rails that may have failed, by bit.
    OnDemand(ConnectInfo, LinkConnectInfo, u64),
    /// The queue pairs of a link that a call needs are connected at this end, so that they accept writes.
    Ready,
    /// About a queue pair that is connected again.
    Rail(RailMessage),
}

/// A message about a broken queue pair. Generations are those of `link::reconnection`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum RailMessage {
    /// The sender's end of the next generation, which takes the place of the broken one, and the longest
    /// packets that it uses, as verbs number MTUs.
    Offer { qp: u8, generation: u32, end: Endpoint, mtu: u8 },
    /// The sender's end of this generation is connected to the receiver's, so that it accepts writes.
    Connected { qp: u8, generation: u32 },
    /// The sender's recovery state of this generation, as no queue pair can carry it.
    Broken { qp: u8, generation: u32, state: Vec<u8> },
    /// The sender does not connect the queue pair again.
    Dropped { qp: u8 },
    /// The sender's end of the link has failed, for this reason.
    Aborted {
        #[serde(deserialize_with = "crate::peer_text::one_line")]
        cause: String,
    },
}

impl LinkMessage {
    /// Encodes the message.
    ///
    /// # Errors
    /// `Internal` if it cannot be encoded.
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        postcard::to_stdvec(self)
            .map_err(|cause| Error::internal(format!("cannot encode a message about a link: {cause}")))
    }

    /// Decodes a message of `from`.
    ///
    /// # Errors
    /// `Disagreement` if it is malformed.
    pub(super) fn decode(from: Rank, bytes: &[u8]) -> Result<Self> {
        match postcard::take_from_bytes(bytes) {
            Ok((message, [])) => Ok(message),
            _ => Err(Error::disagreement(format!(
                "rank {from} sent a message about its link that this version does not know; do all ranks run the same version?"
            ))),
        }
    }
}

/// Messages between ranks that have no link.
pub(crate) trait OutOfBand: Send {
    /// Sends messages. Those from one rank to another arrive in their order. Does not block. If the other
    /// rank has left, or leaves later, an empty message from it arrives.
    ///
    /// # Errors
    /// `PeerLost` if no message can be sent any more.
    fn send(&self, messages: &[(Rank, Vec<u8>)]) -> Result<()>;

    /// The oldest unread message, and the rank that sent it. Cheap if there is none.
    fn receive(&self) -> Option<(Rank, Vec<u8>)>;

    /// Whether messages can still be sent and received.
    ///
    /// # Errors
    /// `PeerLost` if not.
    fn check(&self) -> Result<()>;

    /// Readable while a message is unread.
    fn wake_fd(&self) -> BorrowedFd<'_>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_link_of_four_rails_takes_few_bytes() {
        let keys = std::array::from_fn(|rail| if rail < 4 { u32::MAX } else { 0 });
        let info = ConnectInfo { mtus: vec![5; 4], address: 0x7fff_ffff_f000, keys };
        let endpoints = vec![Endpoint { qpn: 0xff_ffff, psn: 0xff_ffff }; 4];
        let link = LinkConnectInfo { endpoints, offset: 16383 * 40960 };
        let once = postcard::to_stdvec(&info).expect("encodes").len();
        assert!(once < 40, "{once} bytes, once for each rank");
        let planned = LinkMessage::Planned(link.clone()).encode().expect("encodes");
        assert!(planned.len() <= 40, "{} bytes for each peer that plans use", planned.len());
        for message in
            [LinkMessage::Planned(link.clone()), LinkMessage::OnDemand(info, link, 2), LinkMessage::Ready]
        {
            let bytes = message.encode().expect("encodes");
            assert_eq!(LinkMessage::decode(3, &bytes).expect("the same version"), message);
            LinkMessage::decode(3, &bytes[..bytes.len() - 1]).expect_err("a part of a message");
        }
        assert!(LinkMessage::decode(3, &[9, 9]).expect_err("no message").message().contains("rank 3"));
        assert!(LinkMessage::decode(3, &[]).is_err());
    }

    proptest! {
        #[test]
        fn no_message_causes_a_panic(bytes: Vec<u8>) {
            if let Ok(message) = LinkMessage::decode(1, &bytes) {
                prop_assert!(message.encode().is_ok());
            }
        }
    }
}
