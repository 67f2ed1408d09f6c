//! What happens when a queue pair breaks while others of the link live, and when one of the ranks leaves.
//!
//! Whatever was under way on it may or may not have come. Nothing is written anew before that is known, since the
//! peer may have used the place for something else meanwhile. So each end breaks its side off, waits until the
//! device has let go of all requests and receives, after which nothing can come over it any more, and then tells
//! the other, over a pair that lives, all that has come ([`Known`]). What the peer lacks is then written again over
//! the living pairs, and nothing twice.
//!
//! What an end knows of a pair when the device has let go of it stays true, so it is told in the same words as often
//! as the pair that it is told over breaks too, and waits for nothing.

use super::super::wire::{Known, WINDOW};
use super::{Link, RECEIVES, Request, SENDS, What, parity};
use crate::error::{Error, ErrorKind, Result};
use std::collections::VecDeque;

/// One queue pair of a link, as the link sees it.
#[derive(Debug)]
pub(in super::super) struct Pair {
    /// The rail of this rank's, and of the peer's, that it connects.
    pub rail: usize,
    pub peer_rail: usize,
    /// Bytes of messages that are under way, and of all so far.
    pub bytes: u64,
    pub carried: u64,
    alive: bool,
    /// Whether its device will tell when it has let go of everything, now that it is broken.
    ending: bool,
    /// What the peer is told of it, as often as it may have been lost, since the device has let go of everything.
    pub(super) told: Option<Known>,
    /// What the peer has said came over it, and all else that it knew then.
    heard: Option<Known>,
    serial: u32,
    under_way: VecDeque<Post>,
    /// What was under way when it broke.
    lost: Vec<What>,
    /// Receives that are posted.
    receives: usize,
}

#[derive(Debug)]
struct Post {
    serial: u32,
    what: What,
    bytes: u64,
}

impl Pair {
    pub(super) fn new(rail: usize, peer_rail: usize) -> Self {
        Self {
            rail,
            peer_rail,
            bytes: 0,
            carried: 0,
            alive: true,
            ending: false,
            told: None,
            heard: None,
            serial: 0,
            under_way: VecDeque::with_capacity(SENDS),
            lost: Vec::with_capacity(SENDS),
            receives: RECEIVES,
        }
    }

    pub(in super::super) fn is_alive(&self) -> bool {
        self.alive
    }

    pub(in super::super) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether it is broken and the device has let go of all requests and receives.
    pub(in super::super) fn is_let_go(&self) -> bool {
        !self.alive && self.under_way.is_empty() && self.receives == 0
    }

    /// Whether the device has let go of it and the peer is not told yet.
    fn is_untold(&self) -> bool {
        self.told.is_none() && self.is_let_go()
    }

    /// Whether it lives and no completion will tell anything.
    pub(super) fn is_silent(&self) -> bool {
        self.alive && self.has_room() && !self.under_way.iter().any(|post| post.what.is_awaited())
    }

    /// Whether it is known that all that was put on it has come, or will over another one.
    pub(super) fn is_settled(&self) -> bool {
        self.under_way.is_empty() && self.lost.is_empty() && (self.alive || self.told.is_some())
    }

    pub(super) fn has_room(&self) -> bool {
        self.under_way.len() < SENDS
    }

    /// Notes a request; its number.
    pub(super) fn post(&mut self, what: What, bytes: u64) -> u32 {
        self.serial = self.serial.wrapping_add(1);
        self.bytes += bytes;
        self.carried += bytes;
        self.under_way.push_back(Post { serial: self.serial, what, bytes });
        self.serial
    }

    /// Takes the oldest request off if it is not younger than this one.
    pub(super) fn acknowledged(&mut self, serial: u32) -> Option<What> {
        // Numbers go round; fewer than half of all are ever under way.
        self.take(|post| serial.wrapping_sub(post.serial) < u32::MAX / 2)
    }

    fn take(&mut self, of: impl Fn(&Post) -> bool) -> Option<What> {
        self.under_way.front().filter(|post| of(post))?;
        let post = self.under_way.pop_front()?;
        self.bytes -= post.bytes;
        Some(post.what)
    }
}

impl Link {
    /// A receive was completed, well or not; `true` if another is to be posted.
    pub(in super::super) fn received_one(&mut self, pair: usize) -> bool {
        let pair = &mut self.pairs[pair];
        if !pair.alive {
            pair.receives = pair.receives.saturating_sub(1);
        }
        pair.alive
    }

    /// A request was not carried out. Those before it were, as the ones after it are told one by one.
    pub(in super::super) fn failed(&mut self, pair: usize, serial: u32) {
        while let Some(what) = self.pairs[pair]
            .take(|post| post.serial != serial && serial.wrapping_sub(post.serial) < u32::MAX / 2)
        {
            self.over(what);
        }
        let pair = &mut self.pairs[pair];
        let failed = pair.take(|post| post.serial == serial);
        pair.lost.extend(failed.filter(|what| what.matters()));
    }

    /// A request was never posted, nor any after it, be it the mark of an end.
    pub(in super::super) fn withdraw(&mut self, pair: usize, serial: u32) {
        let pair = &mut self.pairs[pair];
        pair.ending = false;
        let young = |post: &Post| post.serial.wrapping_sub(serial) < u32::MAX / 2;
        let at = pair.under_way.iter().position(young).unwrap_or(pair.under_way.len());
        for post in pair.under_way.drain(at..) {
            pair.bytes -= post.bytes;
            pair.lost.extend(Some(post.what).filter(|what| what.matters()));
        }
    }

    /// A write of nothing to a queue pair that was broken off, which fails after all that was written before it: what
    /// has no completion of its own by then was carried out.
    pub(in super::super) fn mark_end(&mut self, pair: usize) -> Result<Request> {
        self.pairs[pair].ending = true;
        self.request(pair, What::Probe)
    }

    /// The link is lost, for this reason.
    pub(in super::super) fn give_out(&mut self, cause: &Error) {
        self.lose(format!("cannot be reached any more: {}", cause.message()));
    }

    /// A queue pair is of no use any more, for this reason. `true` if that is news, and it must be broken off.
    pub(in super::super) fn break_pair(&mut self, pair: usize, cause: &Error) -> bool {
        if !std::mem::replace(&mut self.pairs[pair].alive, false) {
            return false;
        }
        let living = self.pairs.iter().filter(|pair| pair.alive).count();
        if living == 0 {
            self.give_out(cause);
        } else if self.broken.is_none() {
            log::warn!(
                "verbs: a queue pair to rank {} broke ({}); {living} of {} carry on, and what was under way goes again",
                self.peer,
                cause.message(),
                self.pairs.len()
            );
        }
        true
    }

    /// The peer has told what came over a queue pair that is broken at its end.
    pub(super) fn heard_known(&mut self, pair: usize) -> Result<()> {
        let known = match self.pairs.get_mut(pair) {
            Some(broken) => &mut broken.heard,
            None => return Err(self.nonsense()),
        };
        known.get_or_insert_with(|| self.board.known(pair));
        Ok(())
    }

    /// A queue pair that is broken at the peer's end and not yet at this one.
    pub(in super::super) fn to_break_off(&self) -> Option<usize> {
        self.pairs.iter().position(|pair| pair.alive && pair.heard.is_some())
    }

    /// Broken queue pairs that the device has let go of, which [`settle`](Self::settle) does not know yet.
    pub(in super::super) fn let_go(&self) -> impl Iterator<Item = usize> {
        self.pairs.iter().enumerate().filter(|(_, pair)| pair.is_untold()).map(|(number, _)| number)
    }

    /// Whether a device may still be at work for a queue pair that has broken.
    pub(super) fn is_breaking(&self) -> bool {
        self.pairs.iter().any(|pair| pair.ending && pair.told.is_none())
    }

    /// Goes on with what broken queue pairs need: telling what came, and writing again what did not.
    pub(in super::super) fn settle(&mut self) {
        for number in 0..self.pairs.len() {
            let pair = &mut self.pairs[number];
            if pair.alive {
                continue;
            }
            // If each end waited here for what the other knows, both might wait for ever.
            let known = |what: &mut What| matches!(what, What::Known { .. });
            self.again.extend(pair.lost.extract_if(.., known));
            if pair.is_untold() {
                self.pairs[number].told = Some(self.known());
                self.again.push_back(What::Known { pair: number });
            }
            if let Pair { told: Some(_), heard: Some(known), .. } = self.pairs[number] {
                for index in 0..self.pairs[number].lost.len() {
                    let what = self.pairs[number].lost[index];
                    let lacking = match what {
                        What::Call { turn } | What::EagerCall { turn, .. } => {
                            known.of(turn).is_some_and(|come| !come.called)
                        }
                        What::Eager { turn, message, .. } => {
                            known.of(turn).is_some_and(|come| come.eager >> message & 1 == 0)
                        }
                        What::Grants { turn, from, .. } => {
                            known.of(turn).is_some_and(|come| !come.has_grant(from))
                        }
                        What::Data { turn, message } => known.of(turn).is_some_and(|come| !come.has(message)),
                        What::Known { .. } => true,
                        What::Bye => {
                            // After all else that was lost.
                            self.leaving = true;
                            false
                        }
                        What::Hello | What::Probe => false,
                    };
                    if lacking {
                        self.again.push_back(what);
                    } else {
                        self.over(what);
                    }
                }
                self.pairs[number].lost.clear();
            }
        }
    }

    /// An error if the link cannot be used any more and the call that this rank is in needs it.
    pub(in super::super) fn check_needed(&self) -> Result<()> {
        match &self.broken {
            Some(error) if error.kind() != ErrorKind::PeerLost || self.needs() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Whether the peer said that it makes no more calls.
    pub(in super::super) fn has_left(&self) -> bool {
        self.left.is_some()
    }

    /// An error if the peer has left while this rank needs something that it has not written. What it wrote before it
    /// left may lie in another rail's completion queue, so all of them are looked at once more first. What it has not
    /// acknowledged it may have got.
    pub(super) fn check_left(&mut self) -> Result<()> {
        let (outgoing, incoming) = (&self.outgoing[parity(self.turn)], &self.incoming[parity(self.turn)]);
        let lacks = outgoing.next < outgoing.posted || incoming.lacks();
        match &mut self.left {
            Some(looks) if lacks => {
                *looks += 1;
                if *looks > 2 { Err(self.lose("closed its communicator".to_owned())) } else { Ok(()) }
            }
            _ => Ok(()),
        }
    }

    /// Says that this rank makes no more calls, once the peer has or gets all that was told before.
    pub(in super::super) fn bye(&mut self) {
        self.leaving = true;
    }

    /// Whether it is time for that.
    pub(super) fn goodbye(&self) -> Option<What> {
        let all = self.pairs.iter().all(|pair| pair.alive || pair.is_settled());
        (self.leaving && all).then_some(What::Bye)
    }

    /// A write of nothing over a queue pair that is silent: if the peer cannot be reached any more, that shows. One
    /// that has left is let go, unless something is still to be heard of it.
    pub(in super::super) fn probe(&mut self, pair: usize) -> Result<Option<Request>> {
        let silent = (self.left.is_none() || self.needs()) && self.pairs[pair].is_silent();
        if silent { self.request(pair, What::Probe).map(Some) } else { Ok(None) }
    }

    /// Whether all that was written has been acknowledged, and nothing is waiting to be written, or can be.
    pub(in super::super) fn is_flushed(&self) -> bool {
        let said = !self.leaving && self.again.is_empty();
        self.broken.is_some() || (said && self.pairs.iter().all(Pair::is_settled))
    }
}

// Bits of a word stand for the messages of a window.
const _: () = assert!(WINDOW <= 64);
