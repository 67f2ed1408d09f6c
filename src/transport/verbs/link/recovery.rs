//! What happens when a queue pair breaks while others of the link live.
//!
//! Whatever was under way on it may or may not have come. Nothing is written anew before that is known, since the
//! peer may have used the place for something else meanwhile. So each end breaks its side off, waits until the
//! device has let go of all requests and receives, after which nothing can come over it any more, and then tells
//! the other, over a pair that lives, all that has come ([`Known`](super::super::wire::Known)). What the peer lacks
//! is then written again over the living pairs, and nothing twice.

use super::super::wire::WINDOW;
use super::{Link, RECEIVES, SENDS, What};
use crate::error::{Error, Result};
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
    /// Whether the device has let go of everything and the peer was told.
    quiet: bool,
    /// Whether the peer has said what came over it.
    heard: bool,
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
            quiet: false,
            heard: false,
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
    /// A receive was completed and no other was posted in its place.
    pub(in super::super) fn receive_gone(&mut self, pair: usize) {
        let pair = &mut self.pairs[pair];
        pair.receives = pair.receives.saturating_sub(1);
    }

    /// A request was not carried out. Those before it were, as the ones after it are told one by one.
    pub(in super::super) fn failed(&mut self, pair: usize, serial: u32) {
        while let Some(what) = self.pairs[pair]
            .take(|post| post.serial != serial && serial.wrapping_sub(post.serial) < u32::MAX / 2)
        {
            self.over(what);
        }
        if let Some(what) = self.pairs[pair].take(|post| post.serial == serial) {
            self.pairs[pair].lost.push(what);
        }
    }

    /// A request was never posted, nor any after it.
    pub(in super::super) fn withdraw(&mut self, pair: usize, serial: u32) {
        let pair = &mut self.pairs[pair];
        let young = |post: &Post| post.serial.wrapping_sub(serial) < u32::MAX / 2;
        let at = pair.under_way.iter().position(young).unwrap_or(pair.under_way.len());
        for post in pair.under_way.drain(at..) {
            pair.bytes -= post.bytes;
            pair.lost.push(post.what);
        }
    }

    /// A queue pair is of no use any more, for this reason. `true` if that is news, and it must be broken off.
    pub(in super::super) fn break_pair(&mut self, pair: usize, cause: &Error) -> bool {
        if !std::mem::replace(&mut self.pairs[pair].alive, false) {
            return false;
        }
        if self.broken.is_some() {
            return true;
        }
        let living = self.pairs.iter().filter(|pair| pair.alive).count();
        if living == 0 {
            let broke = format!("cannot be reached any more: {}", cause.message());
            self.lose(broke);
        } else {
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
        match self.pairs.get_mut(pair) {
            Some(pair) => pair.heard = true,
            None => return Err(self.nonsense()),
        }
        Ok(())
    }

    /// A queue pair that is broken at the peer's end and not yet at this one.
    pub(in super::super) fn to_break_off(&self) -> Option<usize> {
        self.pairs.iter().position(|pair| pair.alive && pair.heard)
    }

    /// Goes on with what broken queue pairs need: telling what came, and writing again what did not.
    pub(in super::super) fn settle(&mut self) {
        for number in 0..self.pairs.len() {
            let pair = &mut self.pairs[number];
            if pair.alive {
                continue;
            }
            if !pair.quiet && pair.is_let_go() {
                pair.quiet = true;
                self.again.push_back(What::Known { pair: number });
            }
            if self.pairs[number].quiet && self.pairs[number].heard {
                let known = self.board.known(number);
                for index in 0..self.pairs[number].lost.len() {
                    let what = self.pairs[number].lost[index];
                    let lacking = match what {
                        What::Call { turn } | What::EagerCall { turn, .. } => {
                            known.of(turn).is_some_and(|come| !come.called)
                        }
                        What::Eager { turn, message, .. } => {
                            known.of(turn).is_some_and(|come| come.eager >> message & 1 == 0)
                        }
                        What::Grants { turn, to, .. } => known.of(turn).is_some_and(|come| come.granted < to),
                        What::Data { turn, message } => known.of(turn).is_some_and(|come| !come.has(message)),
                        What::Known { .. } | What::Bye => true,
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
}

// Bits of a word stand for the messages of a window.
const _: () = assert!(WINDOW <= 64);
