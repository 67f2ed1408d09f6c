//! Random inputs without an engine: changes of known inputs.
//!
//! Owns the changes.

use fastrand::Rng;

/// Numbers at the edges of what lengths, counts and ranks can be.
const EDGES: [u64; 12] =
    [0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 32, i64::MAX as u64, 1 << 63, u64::MAX];

/// Makes inputs.
pub(super) struct Mutator {
    known: Vec<Vec<u8>>,
    longest: usize,
    random: Rng,
}

impl Mutator {
    /// Changes the `known` inputs, and keeps them shorter than `longest` bytes. Equal seeds give equal
    /// inputs.
    pub(super) fn new(known: Vec<Vec<u8>>, longest: usize, seed: u64) -> Self {
        Self { known, longest, random: Rng::with_seed(seed) }
    }

    /// The next input.
    pub(super) fn next(&mut self) -> Vec<u8> {
        let mut input = self.some_known();
        if input.is_empty() || self.random.u8(..16) == 0 {
            let length = self.random.usize(..=self.longest.min(64));
            input = std::iter::repeat_with(|| self.random.u8(..)).take(length).collect();
        }
        for _ in 0..1 << self.random.u8(..4) {
            self.change(&mut input);
        }
        input.truncate(self.longest);
        input
    }

    fn some_known(&mut self) -> Vec<u8> {
        let at = self.random.usize(..=self.known.len());
        self.known.get(at).cloned().unwrap_or_default()
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let at = self.random.usize(..=input.len());
        let end = self.random.usize(at..=input.len().min(at + 16));
        match self.random.u8(..8) {
            0 if at < input.len() => input[at] ^= 1 << self.random.u8(..8),
            1 if at < input.len() => input[at] = self.random.u8(..),
            2 => drop(input.drain(at..end)),
            3 => {
                let copy = input[at..end].to_vec();
                let to = self.random.usize(..=input.len());
                input.splice(to..to, copy);
            }
            4 => input.truncate(at),
            5 => {
                let other = self.some_known();
                let from = self.random.usize(..=other.len());
                input.splice(at.., other[from..].iter().copied());
            }
            6 => {
                // A number in place of another: a varint, as in postcard, or little-endian.
                let number = EDGES[self.random.usize(..EDGES.len())];
                let bytes = if self.random.bool() {
                    postcard::to_stdvec(&number).unwrap_or_default()
                } else {
                    number.to_le_bytes()[..1 << self.random.u8(..4)].to_vec()
                };
                let until = if self.random.bool() { at } else { (at + bytes.len()).min(input.len()) };
                input.splice(at..until, bytes);
            }
            _ => {
                let length = self.random.usize(..8);
                let bytes: Vec<u8> = std::iter::repeat_with(|| self.random.u8(..)).take(length).collect();
                input.splice(at..end, bytes);
            }
        }
    }
}
