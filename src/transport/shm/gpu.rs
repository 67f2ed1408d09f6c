//! What neighbours share of their GPUs.
//!
//! Owns the notice that a rank gives of such memory, and who has opened whose. Every rank gives notice when its GPU is ready,
//! and opens its neighbours' memory when it sees theirs; a rank sends from there once all its neighbours have. So nobody waits
//! for anybody: until then, and where it cannot be had, messages are staged in the host's memory.

use super::Shm;
use crate::memory::{Export, Piece};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Ranks of a node beyond which nothing is shared.
const NEIGHBOURS: usize = 256;

/// How long a rank that ends waits for neighbours to close its memory; they do when they end.
const TIMEOUT: Duration = Duration::from_millis(500);

/// What a rank shows its neighbours. Consists of zeros before there is any.
#[derive(Debug)]
#[repr(C)]
pub(super) struct GpuNotice {
    /// 1 once the rest is there.
    given: AtomicU64,
    /// Process and GPU, address, length, handle.
    words: [AtomicU64; 12],
    /// By place on the node, one bit each: whose memory this rank has open.
    opened: [AtomicU64; NEIGHBOURS / 64],
}

impl GpuNotice {
    pub(super) fn give(&self, export: &Export) {
        let head = [export.process, export.gpu.into(), export.address, export.len];
        for (place, word) in self.words.iter().zip(head.into_iter().chain(export.handle)) {
            place.store(word, Ordering::Relaxed);
        }
        self.given.store(1, Ordering::Release);
    }

    /// What the rank shares, if it has said so.
    fn read(&self) -> Option<Export> {
        if self.given.load(Ordering::Acquire) == 0 {
            return None;
        }
        let word = |at: usize| self.words[at].load(Ordering::Relaxed);
        Some(Export {
            process: word(0),
            gpu: word(1) as u32,
            address: word(2),
            len: word(3),
            handle: std::array::from_fn(|at| word(4 + at)),
        })
    }

    fn has_open(&self, place: usize) -> bool {
        let word = self.opened.get(place / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (place % 64) & 1 == 1)
    }

    fn set_open(&self, place: usize) {
        if let Some(word) = self.opened.get(place / 64) {
            word.fetch_or(1 << (place % 64), Ordering::AcqRel);
        }
    }

    fn close_all(&self) {
        self.opened.iter().for_each(|word| word.store(0, Ordering::Release));
    }
}

/// What a rank has of a neighbour's GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum PeerGpu {
    /// It has given no notice yet.
    #[default]
    Unknown,
    Open(Piece),
    /// It cannot be opened.
    Closed,
}

impl PeerGpu {
    /// A range of it, if it lies within. What the peer says is not trusted to do so.
    pub(super) fn piece(self, offset: u64, len: u64) -> Option<Piece> {
        let Self::Open(all) = self else { return None };
        let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        (offset.checked_add(len)? <= all.len()).then(|| all.narrow(offset, len))
    }
}

impl Shm {
    /// Opens what neighbours have given notice of, and looks who has opened this rank's.
    pub(super) fn open_peer_gpus(&mut self) {
        let Some(sharing) = &mut self.sharing else { return };
        if self.links.len() >= NEIGHBOURS {
            return;
        }
        for link in &mut self.links {
            let PeerGpu::Unknown = link.on_gpu else { continue };
            let Some(export) = link.control.gpu.read() else { continue };
            link.on_gpu = match sharing.open(&export) {
                Ok(piece) => {
                    self.control.gpu.set_open(link.place);
                    PeerGpu::Open(piece)
                }
                Err(error) => {
                    log::info!(
                        "what rank {} has on its GPU comes by the host's memory: {}",
                        link.rank,
                        error.message()
                    );
                    PeerGpu::Closed
                }
            };
        }
        self.shared = self.links.iter().all(|link| link.control.gpu.has_open(self.place));
    }

    /// Where a piece lies in what this rank shares of its GPU, if it does.
    pub(super) fn offset_on_gpu(&self, piece: Piece) -> Option<usize> {
        let own = self.sharing.as_ref()?.own();
        let offset = (piece.as_ptr() as usize).checked_sub(own.as_ptr() as usize)?;
        (piece.memory() == own.memory() && offset.checked_add(piece.len())? <= own.len()).then_some(offset)
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        let Some(sharing) = &mut self.sharing else { return };
        if sharing.close() {
            self.control.gpu.close_all();
        }
        let until = Instant::now() + TIMEOUT;
        while self.links.iter().any(|link| link.control.gpu.has_open(self.place)) {
            if Instant::now() > until {
                log::debug!("a neighbour still has this rank's GPU memory open after {TIMEOUT:?}");
                sharing.abandon();
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
