//! The memory that the host and a resident kernel share.
//!
//! Owns its layout, which is that of `kernels/engine.h`; the comments there say who writes each word. Must
//! not know who allocates it, nor in which order words are written.

use std::sync::atomic::AtomicU64;

/// Threads of a CTA.
pub(super) const THREADS: u32 = 512;
/// Number of rings.
pub(super) const RINGS: usize = 3;
/// The ring of jobs that move data out of GPU memory into host memory.
pub(super) const OUT: usize = 0;
/// The ring of jobs that copy from host memory into GPU memory.
pub(super) const IN: usize = 1;
/// The ring of all other jobs.
pub(super) const REDUCE: usize = 2;
/// Entries of a ring.
pub(super) const ENTRIES: usize = 256;
/// Operands in the first entry of a descriptor.
pub(super) const FIRST_OPERANDS: usize = 10;
/// Operands in each further entry.
pub(super) const MORE_OPERANDS: usize = 16;
/// Set in the address of an operand whose elements are multiplied by the descriptor's factor.
pub(super) const SCALED: u64 = 1 << 63;
/// Bits of a share word that count tiles, so that a descriptor has fewer tiles than 2 to this power.
pub(super) const TILE_BITS: u32 = 24;

/// Set in the flags of a descriptor that copies bytes.
pub(super) const COPIES: u32 = 1;
/// Set in the flags of a descriptor some of whose memory is the host's.
pub(super) const ON_HOST: u32 = 2;

/// 8-byte words of an entry.
pub(super) const ENTRY_WORDS: usize = 16;

/// One job. Its operands are written separately, because they may take several entries.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C, align(128))]
pub(super) struct Descriptor {
    /// Address of the destination.
    pub into: u64,
    /// Number of elements; of bytes for a copy.
    pub count: u64,
    /// Multiplies the elements of operands that are marked with [`SCALED`].
    pub factor: f64,
    /// Number of operands, at least 1.
    pub operands: u32,
    /// The number of ranks to divide the result by; 0 and 1 mean no division.
    pub divide: u32,
    /// Elements of a tile; bytes for a copy.
    pub tile: u32,
    /// Number of tiles.
    pub tiles: u32,
    /// [`COPIES`] and [`ON_HOST`].
    pub flags: u32,
    /// How two elements are combined: an [`Arithmetic`](crate::device::Arithmetic) as a number.
    pub operation: u32,
    /// Addresses of the first operands.
    pub at: [u64; FIRST_OPERANDS],
}

impl Descriptor {
    /// The descriptor as the words of an entry.
    pub(super) fn words(&self) -> [u64; ENTRY_WORDS] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let mut words = [0; ENTRY_WORDS];
        words[..6].copy_from_slice(&[
            self.into,
            self.count,
            self.factor.to_bits(),
            pair(self.operands, self.divide),
            pair(self.tile, self.tiles),
            pair(self.flags, self.operation),
        ]);
        words[6..].copy_from_slice(&self.at);
        words
    }
}

/// Written by the host alone.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct HostLine {
    /// By ring, the running index one past the last published entry.
    pub head: [AtomicU64; RINGS],
    /// The number of the last call that has finished.
    pub finished: AtomicU64,
    /// Kernels of calls up to this number end at once.
    pub aborted: AtomicU64,
}

/// Written by kernels alone.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct KernelLine {
    /// The number of the last call whose kernel has started.
    pub started: AtomicU64,
    /// The number of the last call whose kernel has ended.
    pub ended: AtomicU64,
}

/// By ring and entry, a completion word.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct DoneWords(pub [[AtomicU64; ENTRIES]; RINGS]);

/// One entry of a ring: a descriptor, or further operands. Words are atomics, because kernels read them.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Entry(pub [AtomicU64; ENTRY_WORDS]);

/// In pinned host memory.
#[derive(Debug)]
#[repr(C)]
pub(super) struct HostControl {
    pub host: HostLine,
    pub kernel: KernelLine,
    pub done: DoneWords,
    pub ring: [[Entry; ENTRIES]; RINGS],
}

/// `GpuLine`, of which the host only needs the size.
#[repr(C, align(128))]
struct KernelCopyOfHeads([u64; RINGS + 1]);

#[repr(C, align(128))]
struct CtaCounters([u32; 2]);

#[repr(C, align(128))]
struct FinishedTiles([[u32; ENTRIES]; RINGS]);

#[repr(C, align(128))]
struct ShareWords([[u64; ENTRIES]; RINGS]);

/// `GpuState`, in GPU memory, of which the host only needs the size. Zero before the first launch.
#[repr(C)]
struct KernelState {
    line: KernelCopyOfHeads,
    counters: CtaCounters,
    finished_tiles: FinishedTiles,
    shares: ShareWords,
    ring: [[Descriptor; ENTRIES]; RINGS],
}

/// Bytes of the state that a communicator's kernels keep in GPU memory.
pub(super) const STATE_BYTES: usize = size_of::<KernelState>();

/// The parameter of every kernel. All addresses are the GPU's.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct LaunchParameters {
    pub gpu: u64,
    pub host: u64,
    /// The number of the call, from 1; 0 for the launch that only loads the kernel.
    pub call: u64,
    pub input: u64,
    pub staged_input: u64,
    pub output: u64,
    pub staged_output: u64,
    pub input_bytes: u64,
    pub output_bytes: u64,
}

const _: () = assert!(size_of::<Descriptor>() == 128 && size_of::<Entry>() == 128);
const _: () = assert!(size_of::<HostLine>() == 128 && size_of::<KernelLine>() == 128);
const _: () = assert!(size_of::<HostControl>() == 104_704 && align_of::<HostControl>() == 128);
const _: () = assert!(STATE_BYTES == 107_776);
const _: () = assert!(size_of::<LaunchParameters>() == 72);

#[cfg(test)]
impl HostControl {
    /// Control memory that no GPU reads.
    pub(super) fn zeroed() -> Box<Self> {
        const fn words<const N: usize>() -> [AtomicU64; N] {
            [const { AtomicU64::new(0) }; N]
        }
        Box::new(Self {
            host: HostLine { head: words(), finished: AtomicU64::new(0), aborted: AtomicU64::new(0) },
            kernel: KernelLine { started: AtomicU64::new(0), ended: AtomicU64::new(0) },
            done: DoneWords([const { words() }; RINGS]),
            ring: [const { [const { Entry(words()) }; ENTRIES] }; RINGS],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    const HEADER: &str = include_str!("../../../../kernels/engine.h");

    #[test]
    fn constants_match_the_header() {
        for (name, number) in [
            ("kMaxThreads", THREADS as usize),
            ("kRings", RINGS),
            ("kRingOut", OUT),
            ("kRingIn", IN),
            ("kRingReduce", REDUCE),
            ("kEntries", ENTRIES),
            ("kFirstOperands", FIRST_OPERANDS),
            ("kMoreOperands", MORE_OPERANDS),
            ("kTileBits", TILE_BITS as usize),
        ] {
            assert!(HEADER.contains(&format!("constexpr int {name} = {number};")), "{name}");
        }
        for (name, number) in [("kCopies", COPIES), ("kOnHost", ON_HOST)] {
            assert!(HEADER.contains(&format!("constexpr unsigned int {name} = {number};")), "{name}");
        }
        assert!(HEADER.contains("kScaled = 1ull << 63;"));
        assert_eq!(SCALED, 1 << 63);
    }

    /// The names of the fields of a struct of the header, in order.
    fn fields(name: &str) -> Vec<String> {
        let body = HEADER.split_once(&format!(" {name} {{\n")).expect(name).1;
        let body = body.split_once("\n};").expect(name).0;
        let lines = body.lines().map(str::trim).filter(|line| !line.starts_with("//"));
        lines
            .filter_map(|line| {
                let declared = line.strip_suffix(';')?.split('[').next()?;
                Some(declared.rsplit([' ', '*']).next()?.to_owned())
            })
            .collect()
    }

    #[test]
    fn fields_have_the_order_of_the_header() {
        assert_eq!(
            fields("Descriptor"),
            ["into", "count", "factor", "operands", "divide", "tile", "tiles", "flags", "operation", "at"]
        );
        assert_eq!(fields("HostLine"), ["head", "finished", "aborted"]);
        assert_eq!(fields("KernelLine"), ["started", "ended"]);
        assert_eq!(fields("HostControl"), ["host", "kernel", "done", "ring"]);
        assert_eq!(fields("GpuState"), ["line", "arrived", "left", "finished_tiles", "shares", "ring"]);
        assert_eq!(
            fields("LaunchParameters"),
            [
                "gpu",
                "host",
                "call",
                "input",
                "staged_input",
                "output",
                "staged_output",
                "input_bytes",
                "output_bytes"
            ]
        );
        assert_eq!(offset_of!(HostControl, kernel), 128);
        assert_eq!(offset_of!(HostControl, done), 256);
        assert_eq!(offset_of!(HostControl, ring), 256 + RINGS * ENTRIES * 8);
    }

    #[test]
    fn words_of_a_descriptor_are_its_memory() {
        let descriptor = Descriptor {
            into: 1,
            count: 2,
            factor: 3.5,
            operands: 4,
            divide: 5,
            tile: 6,
            tiles: 7,
            flags: 8,
            operation: 9,
            at: std::array::from_fn(|nth| 10 + nth as u64),
        };
        // SAFETY: both are 128 bytes without padding, and all bit patterns are valid integers.
        let memory: [u64; ENTRY_WORDS] = unsafe { std::mem::transmute(descriptor) };
        assert_eq!(descriptor.words(), memory);
    }
}
