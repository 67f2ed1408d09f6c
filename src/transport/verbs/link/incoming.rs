//! What comes in over a link: grants, landings, and the words that say that something was written.

use super::super::regions::Region;
use super::super::wire::{
    CALL_WORDS, Come, EAGER, EAGER_BYTES, GRANT_BYTES, KNOWN_WORDS, Known, WINDOW, Word, parity, widen,
};
use super::{Link, is_eager};
use crate::error::Result;
use crate::memory::Piece;
use std::sync::Arc;

/// A landing that is open.
#[derive(Debug)]
struct Landing {
    piece: Piece,
    /// Kept while the peer may write; none for a message that comes by the board.
    _region: Option<Arc<Region>>,
}

/// What the peer sends in one turn.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// Whether the peer's call is there, whether it stands before the first message, and whether it was reported.
    called: bool,
    with_message: bool,
    reported: bool,
    /// How many of this rank's messages are on their way, and which of those from there on have a place, by bit.
    /// Grants may come in any order, when a queue pair breaks.
    granted: u64,
    grants: u64,
    /// Short messages that are on the board, by bit, and their lengths.
    eager: u64,
    eager_lens: [u32; EAGER as usize],
    /// Whether the call that this rank is in is on a GPU.
    on_gpu: bool,
    /// Landings made, those told to the peer, and those filled and reported.
    landings: u64,
    told: u64,
    landed: u64,
    /// Which landings from `landed` on are filled, by bit.
    filled: u64,
    open: [Option<Landing>; WINDOW],
}

impl Incoming {
    pub(super) fn restart(&mut self) {
        *self = Self::default();
    }

    /// This rank comes to the turn.
    pub(super) fn begin(&mut self, on_gpu: bool) {
        self.on_gpu = on_gpu;
    }

    /// Whether the next landing is for a message that comes by the board.
    pub(super) fn lands_eagerly(&self, len: usize) -> bool {
        is_eager(self.on_gpu, self.landings, len)
    }

    /// Whether this rank's next message has a place.
    pub(super) fn is_granted(&self) -> bool {
        self.grants & 1 == 1
    }

    /// This rank's next message is put on its way.
    pub(super) fn use_grant(&mut self) {
        self.granted += 1;
        self.grants >>= 1;
    }

    /// The peer has given the last `many` messages below `to` a place. `false` if that cannot be.
    fn grant(&mut self, to: u64, many: u64) -> bool {
        let to = widen(to, self.granted);
        let Some(from) = (to - self.granted).checked_sub(many) else { return false };
        if many == 0 || from + many > WINDOW as u64 {
            return false;
        }
        let bits = ((1 << many) - 1) << from;
        let new = self.grants & bits == 0;
        self.grants |= bits;
        new
    }

    pub(super) fn open(&self) -> u64 {
        self.landings - self.landed
    }

    /// Whether something is still to come from the peer: its call, or what some landing is for.
    pub(super) fn lacks(&self) -> bool {
        !self.reported || self.open() > self.filled.count_ones().into()
    }

    /// The peer's call that is to be reported: whether it stands before a message.
    pub(super) fn unreported_call(&self) -> Option<bool> {
        (self.called && !self.reported).then_some(self.with_message)
    }

    pub(super) fn reported(&mut self) {
        self.reported = true;
    }

    /// Opens a landing: its message's number, and whether that comes by the board.
    pub(super) fn land(&mut self, piece: Piece, region: Option<Arc<Region>>) -> (u64, bool) {
        let message = self.landings;
        self.open[message as usize % WINDOW] = Some(Landing { piece, _region: region });
        self.landings += 1;
        (message, is_eager(self.on_gpu, message, piece.len()))
    }

    /// The landings that the peer must be told of, as far as they lie side by side.
    pub(super) fn untold(&mut self) -> Option<(u64, u64)> {
        // Places of landings that are through belong to others.
        self.told = self.told.max(self.landed);
        while self.told < self.landings {
            let landing = self.open[self.told as usize % WINDOW].as_ref();
            let by_board =
                landing.is_none_or(|landing| is_eager(self.on_gpu, self.told, landing.piece.len()));
            if !by_board {
                break;
            }
            self.told += 1;
        }
        let ring = (self.told / WINDOW as u64 + 1) * WINDOW as u64;
        (self.told < self.landings).then(|| (self.told, self.landings.min(ring)))
    }

    pub(super) fn tell(&mut self, to: u64) {
        self.told = to;
    }

    /// A message is where it shall be. `false` if it was already.
    fn fill(&mut self, message: u64) -> bool {
        let bit = 1 << (message - self.landed);
        let new = self.filled & bit == 0;
        self.filled |= bit;
        new
    }

    /// Takes the oldest landing off if it is filled. Nothing is used before the peer's call is known.
    pub(super) fn pop_landed(&mut self) -> bool {
        let filled = self.reported && self.filled & 1 == 1;
        if filled {
            self.open[self.landed as usize % WINDOW] = None;
            self.landed += 1;
            self.filled >>= 1;
        }
        filled
    }

    fn come(&self) -> Come {
        let Self { called, granted, grants, eager, landed, filled, .. } = *self;
        Come { called, granted, grants, eager, landed, filled }
    }
}

impl Link {
    /// All that this rank knows of what the peer has written.
    pub(super) fn known(&self) -> Known {
        Known { turn: self.turn, come: [self.incoming[0].come(), self.incoming[1].come()] }
    }

    /// The peer has written something and said so by `word`; `len` bytes of it.
    pub(in super::super) fn received(&mut self, pair: usize, word: u32, len: u32) -> Result<()> {
        let (word, low) = Word::unpack(word);
        match word {
            Word::Hello => self.greeted |= 1 << pair,
            Word::Bye => self.left = self.left.or(Some(0)),
            Word::Known(broken) if len as usize == size_of::<[u64; KNOWN_WORDS]>() => {
                return self.heard_known(broken);
            }
            Word::Known(_) => return Err(self.nonsense()),
            Word::Call | Word::EagerCall | Word::Eager(_) | Word::Grants(_) | Word::Data(_) => {
                // Nothing is told twice, and this rank left the turn before when it had all of it.
                let ahead = low.wrapping_sub(self.turn) % 4;
                return if ahead > 1 {
                    Err(self.nonsense())
                } else {
                    self.came(self.turn + ahead, word, len)
                };
            }
        }
        Ok(())
    }

    fn came(&mut self, turn: u64, word: Word, len: u32) -> Result<()> {
        let incoming = &mut self.incoming[parity(turn)];
        match word {
            Word::Call | Word::EagerCall if incoming.called => return Err(self.nonsense()),
            Word::Call if len as usize != size_of::<[u64; CALL_WORDS]>() => return Err(self.nonsense()),
            Word::Call => incoming.called = true,
            Word::EagerCall => {
                (incoming.called, incoming.with_message) = (true, true);
                let head = self.board.layout.eager_bytes(turn, 0) - self.board.layout.eager(turn, 0);
                let Some(len) = (len as usize).checked_sub(head) else { return Err(self.nonsense()) };
                return self.eager_came(turn, 0, len as u32);
            }
            Word::Eager(message) => return self.eager_came(turn, message, len),
            Word::Grants(to) => {
                let (many, rest) = (len as usize / GRANT_BYTES, len as usize % GRANT_BYTES);
                if rest != 0 || !incoming.grant(to, many as u64) {
                    return Err(self.nonsense());
                }
            }
            Word::Data(message) => {
                let message = widen(message, incoming.landed);
                let expected = incoming.open[message as usize % WINDOW]
                    .as_ref()
                    .filter(|_| message < incoming.landings && turn == self.turn)
                    .map(|landing| landing.piece.len())
                    .filter(|len| !is_eager(incoming.on_gpu, message, *len));
                if expected != Some(len as usize) || !incoming.fill(message) {
                    return Err(self.disagree(&format!(
                        "sent {len} bytes where {expected:?} were expected; do all ranks run the same version with the same settings?"
                    )));
                }
            }
            Word::Known(_) | Word::Hello | Word::Bye => {}
        }
        Ok(())
    }

    fn eager_came(&mut self, turn: u64, message: u64, len: u32) -> Result<()> {
        let incoming = &mut self.incoming[parity(turn)];
        let known = message >= EAGER || incoming.eager >> message & 1 == 1;
        if known || len as usize > EAGER_BYTES {
            return Err(self.nonsense());
        }
        incoming.eager |= 1 << message;
        incoming.eager_lens[message as usize] = len;
        if turn == self.turn { self.take_eager(turn, message) } else { Ok(()) }
    }

    /// Copies a short message to its landing, once both are there.
    pub(super) fn take_eager(&mut self, turn: u64, message: u64) -> Result<()> {
        let incoming = &mut self.incoming[parity(turn)];
        let there = message < EAGER && incoming.eager >> message & 1 == 1;
        if !there || message < incoming.landed || message >= incoming.landings {
            return Ok(());
        }
        let Some(landing) = &incoming.open[message as usize % WINDOW] else { return Ok(()) };
        let (came, piece) = (incoming.eager_lens[message as usize] as usize, landing.piece);
        // To a GPU nothing comes this way, unless the peer makes another call.
        if came != piece.len() || !piece.is_host() {
            return Err(self.disagree(&format!(
                "sent {came} bytes where {} were expected; do all ranks run the same version with the same settings?",
                piece.len()
            )));
        }
        if incoming.fill(message) {
            self.board.take_eager(turn, message, piece);
        }
        Ok(())
    }

    pub(super) fn nonsense(&mut self) -> crate::error::Error {
        self.disagree("wrote something that makes no sense: is it the same build of flexring?")
    }
}
