//! A member's side of the exchange: it sends its descriptors to the leader and receives those of all others.
//!
//! Owns what a member accepts.

use super::channel::{DescriptorChannel, Received};
use super::gathering::{ExchangeAddress, Gathering, OwnDescriptors};
use super::message::{Answer, ExchangeHello, MAX_PACKET};
use crate::error::{Error, Result};
use crate::fault_point::{FaultPoint, reach};
use crate::secret::random_bytes;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long to wait before another attempt to reach a leader whose queue of connections is full.
const RETRY: Duration = Duration::from_millis(1);

/// How much later than the leader a member gives up, so that it gets the leader's list of missing ranks.
const PATIENCE: Duration = Duration::from_secs(1);

/// Sends this rank's descriptors to the leader, and returns those of all others with their places.
pub(super) fn follow(
    gathering: &Gathering<'_>,
    address: &ExchangeAddress,
    own: &OwnDescriptors<'_>,
) -> Result<Vec<(usize, Vec<OwnedFd>)>> {
    let key = address.key();
    let leader = gathering.ranks[0];
    let channel = connect(gathering, address)?;
    let hello = ExchangeHello { place: gathering.place, nonce: random_bytes()? };
    let ended = || {
        let message = format!("rank {leader} ended while the ranks of this node shared their memory");
        Error::peer_lost(message).with_suspect(leader)
    };
    loop {
        match channel.send(&hello.encode(&key), &own.list()) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(ended()),
            // This user has too many descriptors in queues.
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => pause(gathering)?,
            Err(cause) => {
                return Err(Error::io(format_args!("cannot send descriptors to rank {leader}"), cause));
            }
        }
    }
    reach(FaultPoint::JoinSentDescriptors);
    let mut received: Vec<(usize, Vec<OwnedFd>)> = Vec::new();
    let deadline = gathering.deadline + PATIENCE;
    let mut packet = [0; MAX_PACKET];
    while received.len() + 1 < gathering.ranks.len() {
        gathering.fault.check_waiting()?;
        let (len, descriptors) = match channel.receive(&mut packet)? {
            Received::Packet(len, descriptors) => (len, descriptors),
            Received::OutOfDescriptors => return Err(gathering.out_of_descriptors()),
            Received::Closed => return Err(ended()),
            Received::Nothing => {
                let now = Instant::now();
                if now >= deadline {
                    return Err(gathering.missing(&[0]));
                }
                gathering.wait([channel.as_fd()].into_iter(), deadline - now);
                continue;
            }
        };
        let places = match Answer::decode(&packet[..len], &key, &hello) {
            Some(Answer::Descriptors(places)) => places,
            Some(Answer::Missing(places)) => return Err(gathering.missing(&places)),
            None => return Err(invalid(gathering)),
        };
        if descriptors.len() != places.len() * gathering.per_rank {
            return Err(invalid(gathering));
        }
        let mut descriptors = descriptors.into_iter();
        for place in places {
            if !gathering.is_other(place) || received.iter().any(|(taken, _)| *taken == place) {
                return Err(invalid(gathering));
            }
            received.push((place, descriptors.by_ref().take(gathering.per_rank).collect()));
        }
    }
    reach(FaultPoint::JoinReceivedDescriptors);
    Ok(received)
}

/// Connects to the leader, and checks that it is a process of this user.
fn connect(gathering: &Gathering<'_>, address: &ExchangeAddress) -> Result<DescriptorChannel> {
    let leader = gathering.ranks[0];
    let channel = loop {
        match DescriptorChannel::connect(&address.name) {
            Ok(channel) => break channel,
            Err(Errno::AGAIN | Errno::INTR) => pause(gathering)?,
            Err(Errno::MFILE | Errno::NFILE) => return Err(gathering.out_of_descriptors()),
            Err(cause) => {
                let message = format!(
                    "cannot reach rank {leader} on this node: do both share a network namespace? (set FLEXRING_NODE \
                     to different names where they do not)"
                );
                // If the leader has given up, its own error says why.
                return Err(Error::io(message, cause).with_suspect(leader));
            }
        }
    };
    match channel.foreign_user() {
        None => Ok(channel),
        Some(user) => Err(Error::disagreement(format!(
            "the socket of rank {leader} on this node belongs to {user}, not to the user of this process: run all ranks \
             as one user, or set FLEXRING_NODE to different names"
        ))),
    }
}

fn pause(gathering: &Gathering<'_>) -> Result<()> {
    gathering.fault.check_waiting()?;
    if Instant::now() >= gathering.deadline {
        return Err(gathering.missing(&[0]));
    }
    gathering.wait([].into_iter(), RETRY);
    Ok(())
}

fn invalid(gathering: &Gathering<'_>) -> Error {
    Error::disagreement(format!(
        "rank {} sent an invalid answer while the ranks of this node shared their memory: do all ranks run the same \
         build of flexring?",
        gathering.ranks[0]
    ))
}
