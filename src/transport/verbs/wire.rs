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
pub(super) const EAGER_MESSAGES: u64 = 4;

/// The longest such message. Copying it twice costs less than the grant's way.
pub(super) const MAX_EAGER_BYTES: usize = 4096;

/// RDMA ports that a rank uses at most.
pub(crate) const MAX_RAILS: usize = 8;

/// Words of a [`crate::call::Call`], on the board.
pub(super) const CALL_WORDS: usize = 5;
/// Words of a [`ClearToSend`].
pub(super) const CTS_WORDS: usize = 2 + MAX_RAILS / 2;
/// Words of a [`RecoveryState`].
pub(super) const RECOVERY_WORDS: usize = 13;

const WORD: usize = size_of::<u64>();
/// A call has a cache line of its own.
const CALL_BYTES: usize = 64;
pub(super) const CTS_BYTES: usize = CTS_WORDS * WORD;
const RECOVERY_BYTES: usize = 128;
const EAGER_PLACE: usize = CALL_BYTES + MAX_EAGER_BYTES;

/// What a write is about. `turn` counts the calls that were announced on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImmKind {
    /// The peer's call of this turn is on the board.
    Call,
    /// The same, and the call's first message lies behind it.
    EagerCall,
    /// This message is on the board.
    Eager(u64),
    /// Landings are known, of as many messages below this one as there are grants in the write.
    Cts(u64),
    /// This message is where its grant said.
    Data(u64),
    /// What the peer knows, now that this queue pair is broken, is on the board.
    Recovery(usize),
    /// The peer is there.
    Hello,
    /// The peer makes no more calls.
    Bye,
}

/// Numbers of messages on the wire are modulo this; windows are far smaller.
pub(super) const MESSAGE_NUMBERS: u64 = 1 << 27;

impl ImmKind {
    /// Packs the word with the turn that it belongs to.
    pub(super) fn pack(self, epoch: u64) -> u32 {
        let (kind, number) = match self {
            Self::Call => (0, 0),
            Self::EagerCall => (1, 0),
            Self::Eager(number) => (2, number),
            Self::Cts(number) => (3, number),
            Self::Data(number) => (4, number),
            Self::Recovery(qp) => (5, qp as u64),
            Self::Hello => (6, 0),
            Self::Bye => (7, 0),
        };
        kind << 29 | ((epoch % 4) as u32) << 27 | (number % MESSAGE_NUMBERS) as u32
    }

    /// The word, and its turn modulo 4.
    pub(super) fn unpack(bits: u32) -> (Self, u64) {
        let number = u64::from(bits) % MESSAGE_NUMBERS;
        let word = match bits >> 29 {
            0 => Self::Call,
            1 => Self::EagerCall,
            2 => Self::Eager(number),
            3 => Self::Cts(number),
            4 => Self::Data(number),
            5 => Self::Recovery(number as usize),
            6 => Self::Hello,
            _ => Self::Bye,
        };
        (word, u64::from(bits >> 27 & 3))
    }
}

/// The number that is `low` modulo [`MESSAGE_NUMBERS`] and nearest above `from`.
pub(super) fn widen(low: u64, from: u64) -> u64 {
    from + low.wrapping_sub(from) % MESSAGE_NUMBERS
}

/// Where a message may be written, by whom is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ClearToSend {
    pub address: u64,
    pub len: u32,
    /// By rail of the rank that grants.
    pub keys: [u32; MAX_RAILS],
}

impl ClearToSend {
    pub(super) fn to_words(self) -> [u64; CTS_WORDS] {
        let mut words = [0; CTS_WORDS];
        words[0] = self.address;
        words[1] = self.len.into();
        for (rail, key) in self.keys.into_iter().enumerate() {
            words[2 + rail / 2] |= u64::from(key) << (32 * (rail % 2));
        }
        words
    }

    pub(super) fn from_words(words: [u64; CTS_WORDS]) -> Self {
        let keys = std::array::from_fn(|rail| (words[2 + rail / 2] >> (32 * (rail % 2))) as u32);
        Self { address: words[0], len: words[1] as u32, keys }
    }
}

/// What has come of a call's messages at one end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DeliveryReport {
    /// The peer's call.
    pub call_received: bool,
    /// Grants: of all messages below this one, and of those from it on the ones whose bit is set.
    pub cts_base: u64,
    pub cts_bits: u64,
    /// Which messages came by the board.
    pub eager: u64,
    /// All messages below this one, and of those from it on the ones whose bit is set.
    pub recvs_completed: u64,
    pub filled_bits: u64,
}

impl DeliveryReport {
    /// Whether this message has come where it was granted.
    pub(super) fn has(&self, message: u64) -> bool {
        is_in(message, self.recvs_completed, self.filled_bits)
    }

    /// Whether it is known where this message shall go.
    pub(super) fn has_cts(&self, message: u64) -> bool {
        is_in(message, self.cts_base, self.cts_bits)
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
pub(super) struct RecoveryState {
    pub epoch: u64,
    pub reports: [DeliveryReport; 2],
}

impl RecoveryState {
    pub(super) fn to_words(self) -> [u64; RECOVERY_WORDS] {
        let mut words = [0; RECOVERY_WORDS];
        words[0] = self.epoch;
        for (parity, reports) in self.reports.into_iter().enumerate() {
            let DeliveryReport { call_received, cts_base, cts_bits, eager, recvs_completed, filled_bits } =
                reports;
            let reports = [u64::from(call_received), cts_base, cts_bits, eager, recvs_completed, filled_bits];
            words[1 + 6 * parity..7 + 6 * parity].copy_from_slice(&reports);
        }
        words
    }

    pub(super) fn from_words(words: [u64; RECOVERY_WORDS]) -> Self {
        let reports = |parity: usize| {
            let at = 1 + 6 * parity;
            DeliveryReport {
                call_received: words[at] != 0,
                cts_base: words[at + 1],
                cts_bits: words[at + 2],
                eager: words[at + 3],
                recvs_completed: words[at + 4],
                filled_bits: words[at + 5],
            }
        };
        Self { epoch: words[0], reports: [reports(0), reports(1)] }
    }

    /// What has come of the calls of this turn; `None` if that turn is over.
    pub(super) fn of(&self, epoch: u64) -> Option<DeliveryReport> {
        (epoch >= self.epoch).then(|| {
            if epoch > self.epoch + 1 { DeliveryReport::default() } else { self.reports[parity(epoch)] }
        })
    }
}

/// Which of two places a turn has.
pub(super) fn parity(epoch: u64) -> usize {
    (epoch % 2) as usize
}

/// Where everything is on a board of a link with this many queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControlLayout {
    pub qps: usize,
}

impl ControlLayout {
    /// Bytes of a board.
    pub(super) fn bytes(self) -> usize {
        (self.recovery(self.qps)).next_multiple_of(4096)
    }

    /// The call that stands alone.
    pub(super) fn call(self, epoch: u64) -> usize {
        parity(epoch) * CALL_BYTES
    }

    /// The place of a short message: a call's, then the message's.
    pub(super) fn eager(self, epoch: u64, message: u64) -> usize {
        2 * CALL_BYTES + (parity(epoch) * EAGER_MESSAGES as usize + message as usize) * EAGER_PLACE
    }

    /// Where the message itself begins.
    pub(super) fn eager_bytes(self, epoch: u64, message: u64) -> usize {
        self.eager(epoch, message) + CALL_BYTES
    }

    pub(super) fn cts(self, epoch: u64, message: u64) -> usize {
        let place = parity(epoch) * WINDOW + message as usize % WINDOW;
        self.eager(0, 0) + 2 * EAGER_MESSAGES as usize * EAGER_PLACE + place * CTS_BYTES
    }

    pub(super) fn recovery(self, qp: usize) -> usize {
        self.eager(0, 0)
            + 2 * EAGER_MESSAGES as usize * EAGER_PLACE
            + 2 * WINDOW * CTS_BYTES
            + qp * RECOVERY_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_packing() {
        for word in [
            ImmKind::Call,
            ImmKind::EagerCall,
            ImmKind::Eager(3),
            ImmKind::Cts(MESSAGE_NUMBERS - 1),
            ImmKind::Data(77),
            ImmKind::Recovery(63),
            ImmKind::Hello,
            ImmKind::Bye,
        ] {
            for epoch in 0..9 {
                assert_eq!(ImmKind::unpack(word.pack(epoch)), (word, epoch % 4));
            }
        }
    }

    #[test]
    fn numbers_go_on_where_the_wire_begins_anew() {
        for from in [0, 5, MESSAGE_NUMBERS - 3, 7 * MESSAGE_NUMBERS - 1] {
            for ahead in [0, 1, 40] {
                assert_eq!(widen((from + ahead) % MESSAGE_NUMBERS, from), from + ahead);
            }
        }
    }

    #[test]
    fn grants_and_knowledge_survive_packing() {
        let cts = ClearToSend {
            address: u64::MAX - 1,
            len: 5,
            keys: std::array::from_fn(|rail| u32::MAX - rail as u32),
        };
        assert_eq!(ClearToSend::from_words(cts.to_words()), cts);
        let reports = DeliveryReport {
            call_received: true,
            cts_base: 1,
            cts_bits: 5,
            eager: 2,
            recvs_completed: 3,
            filled_bits: 4,
        };
        let recovery = RecoveryState {
            epoch: 9,
            reports: [reports, DeliveryReport { call_received: false, cts_base: 7, ..reports }],
        };
        assert_eq!(RecoveryState::from_words(recovery.to_words()), recovery);
        assert_eq!(recovery.of(8), None);
        assert_eq!(recovery.of(10), Some(reports));
        assert!(reports.has(2) && !reports.has(3) && !reports.has(4) && reports.has(5) && !reports.has(99));
        assert!(reports.has_cts(1) && !reports.has_cts(2) && reports.has_cts(3));
    }

    #[test]
    fn places_do_not_overlap() {
        let layout = ControlLayout { qps: 3 };
        let mut places = Vec::new();
        for epoch in 0..2 {
            places.push((layout.call(epoch), CALL_WORDS * WORD));
            places.extend((0..EAGER_MESSAGES).map(|message| (layout.eager(epoch, message), EAGER_PLACE)));
            places.extend((0..WINDOW as u64).map(|message| (layout.cts(epoch, message), CTS_BYTES)));
        }
        places.extend((0..3).map(|qp| (layout.recovery(qp), RECOVERY_WORDS * WORD)));
        places.sort_unstable();
        assert!(places.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{places:?}");
        let (last, len) = places.last().expect("places");
        assert!(last + len <= layout.bytes());
        assert!(places.iter().all(|(at, _)| at % WORD == 0));
    }
}
