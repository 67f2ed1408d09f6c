//! Pieces: ranges of memory that an operation may access.

use std::marker::PhantomData;
use std::ptr::NonNull;

/// The owner of memory: the host or a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemorySpace {
    /// Host memory: this process may access it, and devices may once it is registered with them.
    Host,
    /// Memory of the GPU with this number among those that this process sees. Only GPUs access it, and
    /// devices that it is registered with.
    Gpu(u32),
}

impl std::fmt::Display for MemorySpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => write!(f, "the host"),
            Self::Gpu(number) => write!(f, "GPU {number}"),
        }
    }
}

/// Bytes that are valid while the operation that they belong to runs.
///
/// A piece is a pointer with a checked length. Code that makes one guarantees that the bytes stay valid
/// (readable, and writable if the piece is a destination) until the operation is over. In return the executor
/// guarantees that no link and no device holds a piece after the operation, however it ends. A piece can only
/// be narrowed, so code that gets one does no arithmetic on raw pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    start: NonNull<u8>,
    len: usize,
    /// The number of the GPU that owns the memory, or [`HOST`]. A whole word: pieces are copied for each
    /// message, and a processor that loads a word of which only a part was just written waits until that part
    /// has reached the cache (store forwarding).
    owner: u64,
}

/// The owner of host memory: no GPU has this number.
const HOST: u64 = u64::MAX;

// SAFETY: a piece is an address with a length. Access to the bytes is governed by the contract above, which
// does not depend on the thread that drives the operation.
unsafe impl Send for Piece {}

// SAFETY: as above. A shared piece gives no more than a copy of it does.
unsafe impl Sync for Piece {}

impl Piece {
    /// A piece without bytes.
    pub const EMPTY: Self = Self { start: NonNull::dangling(), len: 0, owner: HOST };

    /// The `len` bytes of host memory at `start`.
    ///
    /// # Safety
    /// The bytes must be valid for reads until the operation that gets this piece is over, valid for writes
    /// if the piece is a destination of it, and must not be written by anything else meanwhile.
    #[must_use]
    pub unsafe fn new(start: NonNull<u8>, len: usize) -> Self {
        Self { start, len, owner: HOST }
    }

    /// The `len` bytes at `start` in the memory of a GPU.
    ///
    /// # Safety
    /// As for [`new`](Self::new), with GPUs as readers and writers.
    #[must_use]
    pub unsafe fn on_gpu(start: NonNull<u8>, len: usize, gpu: u32) -> Self {
        Self { start, len, owner: gpu.into() }
    }

    /// The owner of the memory.
    #[must_use]
    pub fn memory(self) -> MemorySpace {
        if self.is_host() { MemorySpace::Host } else { MemorySpace::Gpu(self.owner as u32) }
    }

    /// Whether it is host memory.
    #[must_use]
    pub fn is_host(self) -> bool {
        self.owner == HOST
    }

    /// The address of the first byte. The host must not dereference an address of GPU memory.
    #[must_use]
    pub fn as_ptr(self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If the range exceeds this piece.
    #[must_use]
    pub fn narrow(self, offset: usize, len: usize) -> Self {
        let end = offset.checked_add(len).expect("a piece's end fits in the address space");
        assert!(end <= self.len, "{offset}+{len} reaches beyond a piece of {} bytes", self.len);
        // SAFETY: offset <= self.len was just checked, so the result stays within the same allocation or one
        // past it.
        let start = unsafe { self.start.add(offset) };
        Self { start, len, ..self }
    }
}

/// Makes the pages of `piece`, whose bytes may be written, exist, so that touching them later does not fault.
/// Contents stay. Best effort: where the kernel refuses, the first touch of a page allocates it.
pub(crate) fn populate(piece: Piece) {
    // SAFETY: the piece is valid for writes while the caller has it, and the advice changes no contents.
    let outcome = unsafe {
        rustix::mm::madvise(piece.as_ptr().cast(), piece.len(), rustix::mm::Advice::LinuxPopulateWrite)
    };
    if let Err(cause) = outcome {
        log::debug!("cannot allocate the pages of {} bytes in advance: {cause}", piece.len());
    }
}

/// Copies a few bytes to the start of host memory that its user may write. `false` if the piece is shorter,
/// or on a GPU.
#[must_use]
pub(crate) fn write_bytes<const N: usize>(into: Piece, bytes: [u8; N]) -> bool {
    let fits = into.is_host() && into.len() >= N;
    if fits {
        // SAFETY: the piece is host memory that is valid for writes, and long enough.
        unsafe { into.as_ptr().cast::<[u8; N]>().write_unaligned(bytes) };
    }
    fits
}

/// The length in bytes from which on memcpy may use `rep movsb`, which is slow for some addresses: such
/// vectors are copied by the host device.
pub(crate) const LONG_COPY: usize = 2048;

/// Copies a vector of less than [`LONG_COPY`] bytes in host memory to one of the same length. `false` if it
/// is longer, or the two differ in length, or one is on a GPU.
#[must_use]
pub(crate) fn copy_short(into: Piece, from: Piece) -> bool {
    let is_short = into.is_host() && from.is_host() && into.len() == from.len() && into.len() < LONG_COPY;
    if is_short {
        // SAFETY: both pieces are host memory of this length, valid for reads and writes. They may overlap.
        unsafe { std::ptr::copy(from.as_ptr(), into.as_ptr(), into.len()) };
    }
    is_short
}

/// The bytes at the start of host memory. `None` if the piece is shorter, or on a GPU.
#[must_use]
pub(crate) fn read_bytes<const N: usize>(from: Piece) -> Option<[u8; N]> {
    // SAFETY: the piece is host memory that is valid for reads, and long enough. Any bytes are valid.
    (from.is_host() && from.len() >= N).then(|| unsafe { from.as_ptr().cast::<[u8; N]>().read_unaligned() })
}

/// A vector that is borrowed until the operation that uses its piece is over.
#[derive(Debug)]
pub(crate) struct Loan<'a> {
    piece: Piece,
    vector: PhantomData<&'a mut [u8]>,
}

impl<'a> Loan<'a> {
    /// A vector that is only read.
    pub(crate) fn of<T: crate::Element>(vector: &'a [T]) -> Self {
        // SAFETY: the slice stays borrowed for 'a, and the function that takes the piece uses it no longer,
        // as a source only.
        let piece = unsafe { Piece::new(NonNull::from(vector).cast(), size_of_val(vector)) };
        Self { piece, vector: PhantomData }
    }

    /// A vector that is written.
    pub(crate) fn of_mut<T: crate::Element>(vector: &'a mut [T]) -> Self {
        let bytes = size_of_val(vector);
        // SAFETY: the slice stays exclusively borrowed for 'a, and the function that takes the piece uses it
        // no longer.
        let piece = unsafe { Piece::new(NonNull::from(vector).cast(), bytes) };
        Self { piece, vector: PhantomData }
    }

    /// The vector's bytes. No operation may use them after the loan's end.
    pub(crate) fn piece(&self) -> Piece {
        self.piece
    }
}

/// Passes the two vectors of a blocking operation to `operation` as pieces. The vectors stay borrowed while
/// it runs; `operation` must not let a piece outlive it.
pub(crate) fn lend<T: crate::Element, R>(
    input: &[T],
    output: &mut [T],
    operation: impl FnOnce(Piece, Piece) -> R,
) -> R {
    // SAFETY: both slices stay borrowed until `operation` returns, the output exclusively, and the input is
    // never written: it is only a source.
    let pieces = unsafe {
        let input = Piece::new(NonNull::from(input).cast(), size_of_val(input));
        (input, Piece::new(NonNull::from(&mut *output).cast(), size_of_val(output)))
    };
    operation(pieces.0, pieces.1)
}

/// Passes the one vector of a blocking in-place operation to `operation`, as [`lend`] does.
pub(crate) fn lend_in_place<T: crate::Element, R>(vector: &mut [T], operation: impl FnOnce(Piece) -> R) -> R {
    // SAFETY: the slice stays exclusively borrowed until `operation` returns.
    let piece = unsafe { Piece::new(NonNull::from(&mut *vector).cast(), size_of_val(vector)) };
    operation(piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_three_words_and_every_gpu_is_told_from_the_host() {
        assert_eq!(size_of::<Piece>(), 3 * size_of::<usize>());
        assert_eq!(size_of::<Option<Piece>>(), size_of::<Piece>());
        assert!(Piece::EMPTY.is_host());
        for gpu in [0, 7, u32::MAX] {
            // SAFETY: the piece has no bytes.
            let piece = unsafe { Piece::on_gpu(NonNull::dangling(), 0, gpu) };
            assert_eq!((piece.memory(), piece.is_host()), (MemorySpace::Gpu(gpu), false));
        }
    }

    #[test]
    fn short_vectors_are_copied_and_others_left() {
        let from: Vec<u8> = (0..=LONG_COPY).map(|at| at as u8).collect();
        let copies = |into_len: usize, from_len: usize| {
            let mut into = vec![0; into_len];
            let copied = copy_short(Loan::of_mut(&mut into).piece(), Loan::of(&from[..from_len]).piece());
            assert_eq!(into, if copied { from[..from_len].to_vec() } else { vec![0; into_len] });
            copied
        };
        assert!([0, 1, 8, LONG_COPY - 1].iter().all(|len| copies(*len, *len)));
        assert!(!copies(LONG_COPY, LONG_COPY) && !copies(8, 9));
    }
}
