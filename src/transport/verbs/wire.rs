//! What ranks write into each other's memory: the 32 bits that go with every write, and the layout of boards.
//!
//! Pure. A **board** is what one rank writes for another without asking: calls, grants, small messages, and what it
//! knows when a queue pair breaks. Every link has two, one at each end, laid out alike: a rank fills a place of its
//! own outbox and writes it to the same place of the peer's inbox.

/// Messages of a link that may be under way in one direction, and landings that may be open. At 128 KiB a
/// sub-chunk this is 4 MiB, twice what 200 Gbit/s carry in 80 us. At most 64, the bits of a word.
pub(super) const WINDOW: usize = 32;

/// The first messages of a call that are written to the board if they are short, without waiting for a grant.
/// A call of few bytes has one or two messages on a link.
pub(super) const EAGER: u64 = 4;

/// The longest such message. Copying it twice costs less than the grant's way.
pub(super) const EAGER_BYTES: usize = 4096;

/// RDMA ports that a rank uses at most.
pub(crate) const RAILS: usize = 8;

/// Words of a [`crate::call::Call`], on the board.
pub(super) const CALL_WORDS: usize = 5;
/// Words of a [`Grant`].
pub(super) const GRANT_WORDS: usize = 2 + RAILS / 2;
/// Words of a [`Known`].
pub(super) const KNOWN_WORDS: usize = 13;

const WORD: usize = size_of::<u64>();
/// A call has a cache line of its own.
const CALL_BYTES: usize = 64;
pub(super) const GRANT_BYTES: usize = GRANT_WORDS * WORD;
const KNOWN_BYTES: usize = 128;
const EAGER_PLACE: usize = CALL_BYTES + EAGER_BYTES;

/// What a write is about. `turn` counts the calls that were announced on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The peer's call of this turn is on the board.
    Call,
    /// The same, and the call's first message lies behind it.
    EagerCall,
    /// This message is on the board.
    Eager(u64),
    /// Landings are known, of as many messages below this one as there are grants in the write.
    Grants(u64),
    /// This message is where its grant said.
    Data(u64),
    /// What the peer knows, now that this queue pair is broken, is on the board.
    Known(usize),
    /// The peer is there.
    Hello,
    /// The peer makes no more calls.
    Bye,
}

/// Numbers of messages on the wire are modulo this; windows are far smaller.
pub(super) const NUMBERS: u64 = 1 << 27;

impl Word {
    /// Packs the word with the turn that it belongs to.
    pub(super) fn pack(self, turn: u64) -> u32 {
        let (kind, number) = match self {
            Self::Call => (0, 0),
            Self::EagerCall => (1, 0),
            Self::Eager(number) => (2, number),
            Self::Grants(number) => (3, number),
            Self::Data(number) => (4, number),
            Self::Known(pair) => (5, pair as u64),
            Self::Hello => (6, 0),
            Self::Bye => (7, 0),
        };
        kind << 29 | ((turn % 4) as u32) << 27 | (number % NUMBERS) as u32
    }

    /// The word, and its turn modulo 4.
    pub(super) fn unpack(bits: u32) -> (Self, u64) {
        let number = u64::from(bits) % NUMBERS;
        let word = match bits >> 29 {
            0 => Self::Call,
            1 => Self::EagerCall,
            2 => Self::Eager(number),
            3 => Self::Grants(number),
            4 => Self::Data(number),
            5 => Self::Known(number as usize),
            6 => Self::Hello,
            _ => Self::Bye,
        };
        (word, u64::from(bits >> 27 & 3))
    }
}

/// The number that is `low` modulo [`NUMBERS`] and nearest above `from`.
pub(super) fn widen(low: u64, from: u64) -> u64 {
    from + low.wrapping_sub(from) % NUMBERS
}

/// Where a message may be written, by whom is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grant {
    pub address: u64,
    pub len: u32,
    /// By rail of the rank that grants.
    pub keys: [u32; RAILS],
}

impl Grant {
    pub(super) fn to_words(self) -> [u64; GRANT_WORDS] {
        let mut words = [0; GRANT_WORDS];
        words[0] = self.address;
        words[1] = self.len.into();
        for (rail, key) in self.keys.into_iter().enumerate() {
            words[2 + rail / 2] |= u64::from(key) << (32 * (rail % 2));
        }
        words
    }

    pub(super) fn from_words(words: [u64; GRANT_WORDS]) -> Self {
        let keys = std::array::from_fn(|rail| (words[2 + rail / 2] >> (32 * (rail % 2))) as u32);
        Self { address: words[0], len: words[1] as u32, keys }
    }
}

/// What has come of a call's messages at one end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Come {
    /// The peer's call.
    pub called: bool,
    /// Grants: of all messages below this one, and of those from it on the ones whose bit is set.
    pub granted: u64,
    pub grants: u64,
    /// Which messages came by the board.
    pub eager: u64,
    /// All messages below this one, and of those from it on the ones whose bit is set.
    pub landed: u64,
    pub filled: u64,
}

impl Come {
    /// Whether this message has come where it was granted.
    pub(super) fn has(&self, message: u64) -> bool {
        is_in(message, self.landed, self.filled)
    }

    /// Whether it is known where this message shall go.
    pub(super) fn has_grant(&self, message: u64) -> bool {
        is_in(message, self.granted, self.grants)
    }
}

/// Whether a number is one of all below `from`, and of those from it on whose bit is set.
fn is_in(number: u64, from: u64, bits: u64) -> bool {
    let place = number.wrapping_sub(from);
    number < from || (place < 64 && bits >> place & 1 == 1)
}

/// All that a rank knows of a link: of its own turn, and of the next, of which something may have come early.
/// By parity of the turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    pub turn: u64,
    pub come: [Come; 2],
}

impl Known {
    pub(super) fn to_words(self) -> [u64; KNOWN_WORDS] {
        let mut words = [0; KNOWN_WORDS];
        words[0] = self.turn;
        for (parity, come) in self.come.into_iter().enumerate() {
            let Come { called, granted, grants, eager, landed, filled } = come;
            let come = [u64::from(called), granted, grants, eager, landed, filled];
            words[1 + 6 * parity..7 + 6 * parity].copy_from_slice(&come);
        }
        words
    }

    pub(super) fn from_words(words: [u64; KNOWN_WORDS]) -> Self {
        let come = |parity: usize| {
            let at = 1 + 6 * parity;
            Come {
                called: words[at] != 0,
                granted: words[at + 1],
                grants: words[at + 2],
                eager: words[at + 3],
                landed: words[at + 4],
                filled: words[at + 5],
            }
        };
        Self { turn: words[0], come: [come(0), come(1)] }
    }

    /// What has come of the calls of this turn; `None` if that turn is over.
    pub(super) fn of(&self, turn: u64) -> Option<Come> {
        (turn >= self.turn)
            .then(|| if turn > self.turn + 1 { Come::default() } else { self.come[parity(turn)] })
    }
}

/// Which of two places a turn has.
pub(super) fn parity(turn: u64) -> usize {
    (turn % 2) as usize
}

/// Where everything is on a board of a link with this many queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub pairs: usize,
}

impl Layout {
    /// Bytes of a board.
    pub(super) fn bytes(self) -> usize {
        (self.known(self.pairs)).next_multiple_of(4096)
    }

    /// The call that stands alone.
    pub(super) fn call(self, turn: u64) -> usize {
        parity(turn) * CALL_BYTES
    }

    /// The place of a short message: a call's, then the message's.
    pub(super) fn eager(self, turn: u64, message: u64) -> usize {
        2 * CALL_BYTES + (parity(turn) * EAGER as usize + message as usize) * EAGER_PLACE
    }

    /// Where the message itself begins.
    pub(super) fn eager_bytes(self, turn: u64, message: u64) -> usize {
        self.eager(turn, message) + CALL_BYTES
    }

    pub(super) fn grant(self, turn: u64, message: u64) -> usize {
        let place = parity(turn) * WINDOW + message as usize % WINDOW;
        self.eager(0, 0) + 2 * EAGER as usize * EAGER_PLACE + place * GRANT_BYTES
    }

    pub(super) fn known(self, pair: usize) -> usize {
        self.eager(0, 0) + 2 * EAGER as usize * EAGER_PLACE + 2 * WINDOW * GRANT_BYTES + pair * KNOWN_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_packing() {
        for word in [
            Word::Call,
            Word::EagerCall,
            Word::Eager(3),
            Word::Grants(NUMBERS - 1),
            Word::Data(77),
            Word::Known(63),
            Word::Hello,
            Word::Bye,
        ] {
            for turn in 0..9 {
                assert_eq!(Word::unpack(word.pack(turn)), (word, turn % 4));
            }
        }
    }

    #[test]
    fn numbers_go_on_where_the_wire_begins_anew() {
        for from in [0, 5, NUMBERS - 3, 7 * NUMBERS - 1] {
            for ahead in [0, 1, 40] {
                assert_eq!(widen((from + ahead) % NUMBERS, from), from + ahead);
            }
        }
    }

    #[test]
    fn grants_and_knowledge_survive_packing() {
        let grant =
            Grant { address: u64::MAX - 1, len: 5, keys: std::array::from_fn(|rail| u32::MAX - rail as u32) };
        assert_eq!(Grant::from_words(grant.to_words()), grant);
        let come = Come { called: true, granted: 1, grants: 5, eager: 2, landed: 3, filled: 4 };
        let known = Known { turn: 9, come: [come, Come { called: false, granted: 7, ..come }] };
        assert_eq!(Known::from_words(known.to_words()), known);
        assert_eq!(known.of(8), None);
        assert_eq!(known.of(10), Some(come));
        assert!(come.has(2) && !come.has(3) && !come.has(4) && come.has(5) && !come.has(99));
        assert!(come.has_grant(1) && !come.has_grant(2) && come.has_grant(3));
    }

    #[test]
    fn places_do_not_overlap() {
        let layout = Layout { pairs: 3 };
        let mut places = Vec::new();
        for turn in 0..2 {
            places.push((layout.call(turn), CALL_WORDS * WORD));
            places.extend((0..EAGER).map(|message| (layout.eager(turn, message), EAGER_PLACE)));
            places.extend((0..WINDOW as u64).map(|message| (layout.grant(turn, message), GRANT_BYTES)));
        }
        places.extend((0..3).map(|pair| (layout.known(pair), KNOWN_WORDS * WORD)));
        places.sort_unstable();
        assert!(places.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{places:?}");
        let (last, len) = places.last().expect("places");
        assert!(last + len <= layout.bytes());
        assert!(places.iter().all(|(at, _)| at % WORD == 0));
    }
}
