//! Splits an input into numbers and blocks of bytes, for targets that take more than one stream of bytes.
//!
//! Owns this format. After the end of an input every number is 0 and every block is empty.

/// Reads an input from front to back.
#[derive(Debug)]
pub struct InputReader<'a> {
    rest: &'a [u8],
}

impl<'a> InputReader<'a> {
    /// Reads this input.
    #[must_use]
    pub fn new(input: &'a [u8]) -> Self {
        Self { rest: input }
    }

    /// Whether nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `bytes` bytes, or all that are left.
    pub fn bytes(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.rest.split_at(bytes.min(self.rest.len()));
        self.rest = rest;
        taken
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    /// A number below `limit`, which is at most 256 and not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit
    }

    /// A little-endian number of 8 bytes.
    pub fn word(&mut self) -> u64 {
        let mut word = [0; 8];
        let taken = self.bytes(8);
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word)
    }

    /// A block: its length, two bytes, and as many bytes.
    pub fn block(&mut self) -> &'a [u8] {
        let length = usize::from(self.byte()) | usize::from(self.byte()) << 8;
        self.bytes(length)
    }
}

/// The bytes that [`InputReader::block`] reads as this block, for seeds.
pub fn block(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_le_bytes(), bytes].concat()
}
