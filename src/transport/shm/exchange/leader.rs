//! The leader's side of the exchange: it collects the descriptors of all ranks and hands them over.
//!
//! Owns who is refused.

use super::channel::{ChannelListener, DescriptorChannel, PACKET_DESCRIPTORS, Received, warn_of_refusal};
use super::gathering::{Gathering, OwnDescriptors};
use super::message::{Answer, ExchangeHello, MAX_PACKET};
use crate::error::{Error, Result};
use crate::secret::SecretKey;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long to wait before a packet that the kernel did not take is sent again.
const RETRY: Duration = Duration::from_millis(1);

/// A rank that has proved that it belongs to the job.
struct ExchangeMember {
    channel: DescriptorChannel,
    hello: ExchangeHello,
    descriptors: Vec<OwnedFd>,
}

/// Collects the descriptors of all ranks, hands them over, and returns those of the others with their places.
pub(super) fn lead(
    gathering: &Gathering<'_>,
    listener: ChannelListener,
    key: &SecretKey,
    own: &OwnDescriptors<'_>,
) -> Result<Vec<(usize, Vec<OwnedFd>)>> {
    let mut leader = ExchangeLeader {
        gathering,
        listener,
        key,
        unproven: Vec::new(),
        members: gathering.ranks.iter().map(|_| None).collect(),
    };
    leader.collect()?;
    leader.hand_over(own)?;
    let members = leader.members.into_iter().flatten();
    Ok(members.map(|member| (member.hello.place, member.descriptors)).collect())
}

struct ExchangeLeader<'a> {
    gathering: &'a Gathering<'a>,
    listener: ChannelListener,
    key: &'a SecretKey,
    /// Connections of which no packet has come yet.
    unproven: Vec<DescriptorChannel>,
    /// By place.
    members: Vec<Option<ExchangeMember>>,
}

impl ExchangeLeader<'_> {
    /// Waits until all ranks have sent their descriptors.
    fn collect(&mut self) -> Result<()> {
        loop {
            self.gathering.fault.check_waiting()?;
            while let Some(channel) = self.listener.accept()? {
                self.unproven.push(channel);
            }
            for channel in std::mem::take(&mut self.unproven) {
                self.greet(channel)?;
            }
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            let now = Instant::now();
            if now >= self.gathering.deadline {
                let answer = Answer::Missing(missing.clone());
                for member in self.members.iter().flatten() {
                    // A member that does not get it gives up by itself.
                    let _ = member.channel.send(&answer.encode(self.key, &member.hello), &[]);
                }
                return Err(self.gathering.missing(&missing));
            }
            let sockets = [self.listener.as_fd()].into_iter().chain(self.unproven.iter().map(AsFd::as_fd));
            self.gathering.wait(sockets, self.gathering.deadline - now);
        }
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.members.len())
            .filter(|place| self.gathering.is_other(*place) && self.members[*place].is_none())
            .collect()
    }

    /// Takes the first packet of a connection, if it has come. A connection that does not prove to be that of
    /// a missing rank of the job is closed, without consequences for the others.
    fn greet(&mut self, channel: DescriptorChannel) -> Result<()> {
        let mut packet = [0; MAX_PACKET];
        let (len, descriptors) = match channel.receive(&mut packet)? {
            Received::Nothing => {
                self.unproven.push(channel);
                return Ok(());
            }
            Received::Closed => return Ok(()),
            Received::OutOfDescriptors => return Err(self.gathering.out_of_descriptors()),
            Received::Packet(len, descriptors) => (len, descriptors),
        };
        let refuse = |reason: &str| {
            warn_of_refusal(reason);
            Ok(())
        };
        let Some(hello) = ExchangeHello::decode(&packet[..len], self.key) else {
            return refuse("it does not have the secret of this job");
        };
        if !self.gathering.is_other(hello.place) {
            return refuse("its place is this rank's own, or not on this node");
        }
        if descriptors.len() != self.gathering.per_rank {
            return refuse("it has another number of descriptors than this rank");
        }
        match &mut self.members[hello.place] {
            Some(_) => refuse("its place is taken"),
            free => {
                *free = Some(ExchangeMember { channel, hello, descriptors });
                Ok(())
            }
        }
    }

    /// Sends every member the descriptors of all others.
    fn hand_over(&self, own: &OwnDescriptors<'_>) -> Result<()> {
        let own = own.list();
        let of = |place: usize| match &self.members[place] {
            Some(member) => member.descriptors.iter().map(AsFd::as_fd).collect(),
            None => own.clone(),
        };
        let all: Vec<Vec<BorrowedFd<'_>>> = (0..self.members.len()).map(of).collect();
        for member in self.members.iter().flatten() {
            let others: Vec<usize> = (0..all.len()).filter(|place| *place != member.hello.place).collect();
            for places in others.chunks(PACKET_DESCRIPTORS / self.gathering.per_rank) {
                let packet = Answer::Descriptors(places.to_vec()).encode(self.key, &member.hello);
                let descriptors: Vec<_> = places.iter().flat_map(|place| &all[*place]).copied().collect();
                self.send(member, &packet, &descriptors)?;
            }
        }
        Ok(())
    }

    fn send(&self, member: &ExchangeMember, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        let rank = self.gathering.ranks[member.hello.place];
        loop {
            match member.channel.send(packet, descriptors) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                // Its queue is full, or this user has too many descriptors in queues, until members take
                // some.
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => {
                    self.gathering.fault.check_waiting()?;
                    if Instant::now() >= self.gathering.deadline {
                        return Err(self.gathering.missing(&[member.hello.place]));
                    }
                    self.gathering.wait([].into_iter(), RETRY);
                }
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    let message =
                        format!("rank {rank} ended while the ranks of this node shared their memory");
                    return Err(Error::peer_lost(message).with_suspect(rank));
                }
                Err(cause) => {
                    return Err(Error::io(format_args!("cannot send descriptors to rank {rank}"), cause));
                }
            }
        }
    }
}
