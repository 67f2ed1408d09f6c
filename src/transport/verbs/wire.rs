//! What ranks write into each other's memory: immediate data, control entries, and their layout.
//!
//! Pure. Owns the formats; all numbers are little-endian.
//!
//! A **control buffer** holds the entries that one rank writes for another without a clear-to-send: calls,
//! clear-to-send messages (CTS), eager messages, and recovery states. Each end of a link has one with a local
//! and a remote side of equal layout. A rank fills an entry of its local side and writes it to the same
//! offset of the peer's remote side.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Messages in flight on a link in one direction, and receives posted, at most. At 128 KiB per sub-chunk this
/// is 4 MiB, twice what 200 Gbit/s carry in 80 us. At most 64, the bits of a `u64`.
pub(super) const WINDOW: usize = 32;

/// How many of a call's first messages are eager if they are short: written to the control buffer without
/// waiting for a CTS. A call of few bytes has one or two messages on a link.
pub(super) const EAGER_MESSAGES: u64 = 4;

pub(super) use super::port_selection::MAX_RAILS;

/// A [`Call`](crate::call::Call) as five little-endian words.
pub(super) type CallEntry = [U64; 5];

/// Bytes before the message in an eager call.
pub(super) const EAGER_HEAD: usize = CALL_STRIDE;
/// Bytes of an encoded call.
pub(super) const CALL_BYTES: usize = size_of::<CallEntry>();
/// Bytes of a [`ClearToSend`].
pub(super) const CTS_BYTES: usize = size_of::<ClearToSend>();
/// Bytes of a [`RecoveryState`].
pub(super) const RECOVERY_BYTES: usize = size_of::<RecoveryState>();

/// A call has its own cache line.
const CALL_STRIDE: usize = 64;
const RECOVERY_STRIDE: usize = 128;

/// Message numbers in immediate data are modulo this; windows are far smaller.
pub(super) const MESSAGE_NUMBERS: u64 = 1 << 22;

/// The numbers of immediate data are below this.
pub(super) const NUMBERS: u64 = 1 << 27;

// The number of CTS entries in a write takes the 5 bits above the number of a message.
const _: () = assert!(WINDOW <= 32 && MESSAGE_NUMBERS << 5 == NUMBERS);

/// Generations of a queue pair are modulo this: how often it was connected again.
pub(super) const GENERATIONS: u32 = 1 << 20;

/// What a write is about, as its immediate data says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImmKind {
    /// The sender's call of this epoch is in the control buffer.
    Call,
    /// As `Call`, followed by the call's first message, which has so many bytes.
    EagerCall(u32),
    /// The message with this number, below 8, is in the control buffer, and has so many bytes.
    Eager(u64, u32),
    /// The write carries the CTS entries of the last messages below this number, so many.
    Cts(u64, u64),
    /// The message with this number is where its CTS entry says.
    Data(u64),
    /// The sender's recovery state for this queue pair, whose connection of this number is broken, is in the
    /// control buffer.
    Recovery(usize, u32),
    /// The sender can write over this queue pair, and knows the key of the link, from which this tag is
    /// derived.
    Hello(u64),
    /// The sender makes no more calls.
    Goodbye,
}

/// The immediate data of an RDMA write: 3 bits of kind, 2 bits of epoch, 27 bits of number. With them the
/// length of a write is known, which not all drivers report (`byte_len`), except that of a message, for which
/// the receiver has given it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ImmData {
    /// What the write is about.
    pub kind: ImmKind,
    /// The epoch, which counts the calls announced on the link. Modulo 4 once unpacked.
    pub epoch: u64,
}

impl ImmKind {
    /// The bytes of the write; `None` if it has none, or those of a message at its destination.
    pub(super) fn bytes(self) -> Option<u32> {
        match self {
            Self::Call => Some(CALL_BYTES as u32),
            Self::EagerCall(len) => Some(EAGER_HEAD as u32 + len),
            Self::Eager(_, len) => Some(len),
            Self::Cts(_, count) => Some(count as u32 * CTS_BYTES as u32),
            Self::Recovery(..) => Some(RECOVERY_BYTES as u32),
            Self::Data(_) | Self::Hello(_) | Self::Goodbye => None,
        }
    }
}

impl ImmData {
    /// Encodes the immediate data in 32 bits.
    pub(super) fn pack(self) -> u32 {
        let (kind, number) = match self.kind {
            ImmKind::Call => (0, 0),
            ImmKind::EagerCall(len) => (1, u64::from(len)),
            ImmKind::Eager(number, len) => (2, (number % 8) | (u64::from(len) << 3)),
            ImmKind::Cts(to, count) => {
                (3, (to % MESSAGE_NUMBERS) | (count.wrapping_sub(1) % 32 * MESSAGE_NUMBERS))
            }
            ImmKind::Data(number) => (4, number % MESSAGE_NUMBERS),
            ImmKind::Recovery(qp, generation) => (5, qp as u64 | u64::from(generation) << 7),
            ImmKind::Hello(tag) => (6, tag),
            ImmKind::Goodbye => (7, 0),
        };
        kind << 29 | ((self.epoch % 4) as u32) << 27 | (number % NUMBERS) as u32
    }

    /// Decodes 32 bits. Every value is valid.
    pub(super) fn unpack(bits: u32) -> Self {
        let number = u64::from(bits) % NUMBERS;
        let kind = match bits >> 29 {
            0 => ImmKind::Call,
            1 => ImmKind::EagerCall(number as u32),
            2 => ImmKind::Eager(number % 8, (number >> 3) as u32),
            3 => ImmKind::Cts(number % MESSAGE_NUMBERS, number / MESSAGE_NUMBERS + 1),
            4 => ImmKind::Data(number % MESSAGE_NUMBERS),
            5 => ImmKind::Recovery(number as usize & 0x7f, (number >> 7) as u32),
            6 => ImmKind::Hello(number),
            _ => ImmKind::Goodbye,
        };
        Self { kind, epoch: u64::from(bits >> 27 & 3) }
    }
}

/// The smallest number from `from` on that is `low` modulo [`MESSAGE_NUMBERS`].
pub(super) fn widen(low: u64, from: u64) -> u64 {
    from + low.wrapping_sub(from) % MESSAGE_NUMBERS
}

/// A receiver's permission to write one message, and a credit for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ClearToSend {
    /// Address of the destination, in the receiver's memory.
    pub address: U64,
    /// Bytes of the message.
    pub len: U32,
    reserved: U32,
    /// Remote keys of the destination, by the receiver's rail.
    pub keys: [U32; MAX_RAILS],
}

impl ClearToSend {
    /// Permission to write `len` bytes to `address`.
    pub(super) fn new(address: u64, len: u32, keys: [u32; MAX_RAILS]) -> Self {
        Self { address: address.into(), len: len.into(), reserved: U32::ZERO, keys: keys.map(U32::new) }
    }
}

/// Which writes of one epoch have arrived at one end, as selective acknowledgements (SACK) of TCP report it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct DeliveryReport {
    /// Not 0 if the peer's call has arrived.
    pub call_received: U64,
    /// CTS entries have arrived for all messages below this number.
    pub cts_base: U64,
    /// Later CTS entries that have arrived: bit i stands for message `cts_base + i`.
    pub cts_bits: U64,
    /// Eager messages that have arrived, by bit.
    pub eager_bits: U64,
    /// All messages below this number have arrived.
    pub received_base: U64,
    /// Later messages that have arrived: bit i stands for message `received_base + i`.
    pub received_bits: U64,
}

impl DeliveryReport {
    /// Whether the peer's call has arrived.
    pub(super) fn has_call(&self) -> bool {
        self.call_received != U64::ZERO
    }

    /// Whether this eager message has arrived.
    pub(super) fn has_eager(&self, message: u64) -> bool {
        self.eager_bits.get() >> message & 1 == 1
    }

    /// Whether this message has arrived at its destination.
    pub(super) fn has_message(&self, message: u64) -> bool {
        contains(message, self.received_base, self.received_bits)
    }

    /// Whether the CTS entry for this message has arrived.
    pub(super) fn has_cts(&self, message: u64) -> bool {
        contains(message, self.cts_base, self.cts_bits)
    }
}

/// Whether `number` is below `base`, or at or above it with its bit set.
fn contains(number: u64, base: U64, bits: U64) -> bool {
    let bit = number.wrapping_sub(base.get());
    number < base.get() || (bit < 64 && bits.get() >> bit & 1 == 1)
}

/// What has arrived at one end of a link: of the current epoch, and of the next, whose first writes may
/// arrive early.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct RecoveryState {
    /// The epoch that the reporting rank is in.
    pub epoch: U64,
    /// By parity of the epoch.
    pub reports: [DeliveryReport; 2],
}

impl RecoveryState {
    /// The report for an epoch; `None` if that epoch is over, so that all of it has arrived.
    pub(super) fn report(&self, epoch: u64) -> Option<DeliveryReport> {
        let current = self.epoch.get();
        (epoch >= current).then(|| {
            if epoch > current.saturating_add(1) {
                DeliveryReport::default()
            } else {
                self.reports[parity(epoch)]
            }
        })
    }
}

/// Which of two alternating places belongs to an epoch: 0 or 1.
pub(super) fn parity(epoch: u64) -> usize {
    (epoch % 2) as usize
}

/// What all links of a rank have in common, equally on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkShape {
    /// Queue pairs for each connected pair of rails.
    pub qps_per_rail: usize,
    /// Bytes of the longest eager message.
    pub longest_eager: usize,
}

impl LinkShape {
    /// The layout of the control buffer of a link over this many pairs of rails.
    pub(super) fn control_layout(self, pairs: usize) -> ControlLayout {
        ControlLayout { qps: pairs * self.qps_per_rail, longest_eager: self.longest_eager }
    }
}

/// Bytes of the write that proves that a queue pair carries long packets: two of the longest.
pub(super) const TRIAL_BYTES: usize = 2 * 4096;

/// Offsets of the entries in either side of a control buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControlLayout {
    /// Queue pairs of the link.
    pub qps: usize,
    /// Bytes of the longest eager message, equal at both ends.
    pub longest_eager: usize,
}

impl ControlLayout {
    /// Bytes of one side.
    pub(super) fn bytes(self) -> usize {
        (self.trial() + TRIAL_BYTES).next_multiple_of(4096)
    }

    /// What trials write, which is not read.
    pub(super) fn trial(self) -> usize {
        self.recovery(self.qps)
    }

    /// The call of an epoch, if it is sent without a message.
    pub(super) fn call(self, epoch: u64) -> usize {
        parity(epoch) * CALL_STRIDE
    }

    /// Bytes from an entry of an eager message to the next.
    fn eager_stride(self) -> usize {
        CALL_STRIDE + self.longest_eager.next_multiple_of(CALL_STRIDE)
    }

    /// The entry of an eager message: room for the call, then the message.
    pub(super) fn eager(self, epoch: u64, message: u64) -> usize {
        2 * CALL_STRIDE + (parity(epoch) * EAGER_MESSAGES as usize + message as usize) * self.eager_stride()
    }

    /// The first byte of an eager message.
    pub(super) fn eager_bytes(self, epoch: u64, message: u64) -> usize {
        self.eager(epoch, message) + CALL_STRIDE
    }

    /// The CTS entry of a message.
    pub(super) fn cts(self, epoch: u64, message: u64) -> usize {
        let index = parity(epoch) * WINDOW + message as usize % WINDOW;
        self.cts_begin() + index * CTS_BYTES
    }

    /// The recovery state for a queue pair.
    pub(super) fn recovery(self, qp: usize) -> usize {
        self.cts_begin() + 2 * WINDOW * CTS_BYTES + qp * RECOVERY_STRIDE
    }

    fn cts_begin(self) -> usize {
        self.eager(0, 0) + 2 * EAGER_MESSAGES as usize * self.eager_stride()
    }
}

#[cfg(test)]
impl ControlLayout {
    /// A layout for tests, in which short messages are not eager.
    pub(super) fn example(qps: usize) -> Self {
        Self { qps, longest_eager: 4096 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediate_data_survives_packing() {
        for kind in [
            ImmKind::Call,
            ImmKind::EagerCall(64 << 10),
            ImmKind::Eager(3, 64 << 10),
            ImmKind::Cts(MESSAGE_NUMBERS - 1, WINDOW as u64),
            ImmKind::Cts(0, 1),
            ImmKind::Data(77),
            ImmKind::Recovery(63, 0),
            ImmKind::Recovery(127, GENERATIONS - 1),
            ImmKind::Hello(1 << 26),
            ImmKind::Goodbye,
        ] {
            for epoch in 0..9 {
                let unpacked = ImmData::unpack(ImmData { kind, epoch }.pack());
                assert_eq!(unpacked, ImmData { kind, epoch: epoch % 4 });
            }
        }
    }

    #[test]
    fn message_numbers_widen_across_the_wrap_around() {
        for from in [0, 5, MESSAGE_NUMBERS - 3, 7 * MESSAGE_NUMBERS - 1] {
            for ahead in [0, 1, 40] {
                assert_eq!(widen((from + ahead) % MESSAGE_NUMBERS, from), from + ahead);
            }
        }
    }

    #[test]
    fn control_entries_have_their_wire_format() {
        let cts = ClearToSend::new(0x0102_0304_0506_0708, 5, std::array::from_fn(|rail| rail as u32 + 1));
        let bytes = cts.as_bytes();
        assert_eq!(bytes.len(), 48);
        assert_eq!(bytes[..20], [8, 7, 6, 5, 4, 3, 2, 1, 5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(ClearToSend::read_from_bytes(bytes), Ok(cts));
        let state = RecoveryState { epoch: U64::new(9), ..RecoveryState::default() };
        let bytes = state.as_bytes();
        assert_eq!((bytes.len(), bytes[0]), (104, 9));
        assert_eq!(RecoveryState::read_from_bytes(bytes), Ok(state));
    }

    #[test]
    fn delivery_reports_list_what_has_arrived() {
        let [one, two, three, four, five, seven] = [1, 2, 3, 4, 5, 7].map(U64::new);
        let report = DeliveryReport {
            call_received: one,
            cts_base: one,
            cts_bits: five,
            eager_bits: two,
            received_base: three,
            received_bits: four,
        };
        let other = DeliveryReport { call_received: U64::ZERO, cts_base: seven, ..report };
        let state = RecoveryState { epoch: U64::new(9), reports: [report, other] };
        assert_eq!(state.report(8), None);
        assert_eq!(state.report(9), Some(other));
        assert_eq!(state.report(10), Some(report));
        assert_eq!(state.report(11), Some(DeliveryReport::default()));
        assert!(report.has_call() && !other.has_call());
        assert!(!report.has_eager(0) && report.has_eager(1));
        let messages = [2, 3, 4, 5, 99].map(|message| report.has_message(message));
        assert_eq!(messages, [true, false, false, true, false]);
        assert_eq!([1, 2, 3].map(|message| report.has_cts(message)), [true, false, true]);
    }

    #[test]
    fn control_entries_do_not_overlap() {
        for longest_eager in [0, 1, 64, 4096, 65_536] {
            check_entries(ControlLayout { qps: 3, longest_eager });
        }
    }

    fn check_entries(layout: ControlLayout) {
        let mut entries = Vec::new();
        for epoch in 0..2 {
            entries.push((layout.call(epoch), CALL_BYTES));
            entries.extend(
                (0..EAGER_MESSAGES)
                    .map(|message| (layout.eager(epoch, message), CALL_STRIDE + layout.longest_eager)),
            );
            entries.extend((0..WINDOW as u64).map(|message| (layout.cts(epoch, message), CTS_BYTES)));
        }
        entries.extend((0..3).map(|qp| (layout.recovery(qp), RECOVERY_BYTES)));
        entries.sort_unstable();
        assert!(entries.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{entries:?}");
        let (last, len) = entries.last().expect("entries");
        assert!(last + len <= layout.bytes());
        assert!(entries.iter().all(|(at, _)| at % 8 == 0), "aligned to 8 bytes: {entries:?}");
    }
}
