//! A stretch of memory that an operation may touch.

use std::ptr::NonNull;

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// The host's: this process may read it, and devices may once they were told of it.
    Host,
    /// That of the GPU with this number among those that this process sees. Only GPUs touch it, and devices that were
    /// told of it.
    Gpu(u32),
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => write!(f, "the host"),
            Self::Gpu(number) => write!(f, "GPU {number}"),
        }
    }
}

/// Bytes that are valid for as long as the operation they belong to runs.
///
/// A piece is a pointer with a length that was checked where it was made. Whoever makes one promises that
/// the bytes stay valid (readable, and writable if it is used as a destination) until the operation is over;
/// in return the executor promises that no link and no device holds a piece after the operation's end,
/// however it ends. Below that line nobody does arithmetic on raw pointers: a piece can only be narrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    start: NonNull<u8>,
    len: usize,
    memory: Memory,
}

// SAFETY: a piece is an address with a length. What is done with the bytes is governed by the contract above,
// which holds whichever thread drives the operation.
unsafe impl Send for Piece {}

impl Piece {
    /// A piece of no bytes.
    pub const EMPTY: Self = Self { start: NonNull::dangling(), len: 0, memory: Memory::Host };

    /// The `len` bytes of the host's memory at `start`.
    ///
    /// # Safety
    /// The bytes must be valid for reads until the operation that this piece is handed to is over, valid for
    /// writes if the piece is a destination there, and not written by anybody else meanwhile.
    #[must_use]
    pub unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len, memory: Memory::Host }
    }

    /// The `len` bytes at `start` in the memory of a GPU.
    ///
    /// # Safety
    /// As for [`new`](Self::new), where those who read and write are GPUs.
    #[must_use]
    pub unsafe fn on_gpu(start: NonNull<u8>, len: usize, gpu: u32) -> Self {
        Self { start, len, memory: Memory::Gpu(gpu) }
    }

    /// Whose memory it is.
    #[must_use]
    pub fn memory(self) -> Memory {
        self.memory
    }

    /// Whether it is the host's memory.
    #[must_use]
    pub fn is_host(self) -> bool {
        self.memory == Memory::Host
    }

    /// The first byte's address. That of a GPU's memory is not to be followed.
    #[must_use]
    pub fn as_ptr(self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// How many bytes.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If they reach beyond this piece.
    #[must_use]
    pub fn narrow(self, offset: usize, len: usize) -> Self {
        let end = offset.checked_add(len).expect("a piece's end fits in the address space");
        assert!(end <= self.len, "{offset}+{len} reaches beyond a piece of {} bytes", self.len);
        // SAFETY: offset <= self.len was just checked, so the result stays within the same allocation or one past it.
        let start = unsafe { self.start.add(offset) };
        Self { start, len, ..self }
    }
}

/// Lends the two vectors of a blocking operation to `operation` as pieces. They are borrowed for as long as it
/// runs, so all that is left to it is to let no piece survive it.
pub(crate) fn lend<T: crate::Element, R>(
    input: &[T],
    output: &mut [T],
    operation: impl FnOnce(Piece, Piece) -> R,
) -> R {
    // SAFETY: both slices stay borrowed until `operation` returns, the output exclusively, and nobody writes to
    // the input: it is only ever a source.
    let pieces = unsafe {
        let input = Piece::new(NonNull::from(input).cast(), size_of_val(input));
        (input, Piece::new(NonNull::from(&mut *output).cast(), size_of_val(output)))
    };
    operation(pieces.0, pieces.1)
}

/// Lends the one vector of a blocking in-place operation, as [`lend`] does.
pub(crate) fn lend_in_place<T: crate::Element, R>(vector: &mut [T], operation: impl FnOnce(Piece) -> R) -> R {
    // SAFETY: the slice stays exclusively borrowed until `operation` returns.
    let piece = unsafe { Piece::new(NonNull::from(&mut *vector).cast(), size_of_val(vector)) };
    operation(piece)
}
