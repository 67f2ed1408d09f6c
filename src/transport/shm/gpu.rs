//! GPU memory that the ranks of a node share.
//!
//! Owns the handshake over the control pages, in three steps that all ranks take before the first call, with
//! a barrier between them: each rank publishes its memory, opens the neighbours' memory, and checks whether
//! all of them have opened its own. If so it sends from GPU memory; otherwise messages are staged in host
//! memory. Calls open nothing, because opening may wait for the GPU. Must not know how GPU memory is exported
//! and opened: [`Sharing`] does that.

use super::control_page::{ControlPage, GPU_NEIGHBOURS};
use super::link::Link;
use crate::memory::{Piece, Sharing};
use std::time::{Duration, Instant};

/// How long a rank that ends waits for its neighbours to close its memory, which they do when they end.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// What this rank shares of its GPU, if it has one.
#[derive(Default)]
pub(super) struct GpuSharing {
    sharing: Option<Box<dyn Sharing>>,
    /// Whether all neighbours have this rank's memory open.
    opened_by_all: bool,
}

impl GpuSharing {
    /// Publishes this rank's memory.
    pub(super) fn publish(&mut self, control: &ControlPage, sharing: Box<dyn Sharing>) {
        control.gpu.publish(&sharing.export());
        self.sharing = Some(sharing);
    }

    pub(super) fn is_opened_by_all(&self) -> bool {
        self.opened_by_all
    }

    /// Opens the memory that neighbours have published.
    pub(super) fn open_neighbours(&mut self, control: &ControlPage, links: &mut [Link]) {
        let Some(sharing) = &mut self.sharing else { return };
        if links.len() >= GPU_NEIGHBOURS {
            return;
        }
        for link in links.iter_mut() {
            let Some(export) = link.control.gpu.read() else { continue };
            match sharing.open(&export) {
                Ok(piece) => {
                    link.gpu = Some(piece);
                    control.gpu.set_open(link.local_rank);
                }
                Err(error) => log::info!(
                    "messages from the GPU of rank {} are staged through host memory: {}",
                    link.rank,
                    error.message()
                ),
            }
        }
    }

    /// Checks whether all neighbours have opened this rank's memory. `local_rank` is this rank's index on the
    /// node.
    pub(super) fn settle(&mut self, local_rank: usize, links: &[Link]) {
        self.opened_by_all = links.iter().all(|link| link.control.gpu.has_open(local_rank));
    }

    /// The offset of `piece` in this rank's shared GPU memory, if it lies there.
    pub(super) fn offset_of(&self, piece: Piece) -> Option<usize> {
        let own = self.sharing.as_ref()?.own();
        let offset = (piece.as_ptr() as usize).checked_sub(own.as_ptr() as usize)?;
        (piece.memory() == own.memory() && offset.checked_add(piece.len())? <= own.len()).then_some(offset)
    }

    /// Closes the neighbours' memory, and waits until they have closed this rank's.
    pub(super) fn close(&mut self, control: &ControlPage, local_rank: usize, links: &[Link]) {
        let Some(sharing) = &mut self.sharing else { return };
        if sharing.close() {
            control.gpu.clear_open();
        }
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while links.iter().any(|link| link.control.gpu.has_open(local_rank)) {
            if Instant::now() > deadline {
                log::debug!("a neighbour still has this rank's GPU memory open after {CLOSE_TIMEOUT:?}");
                sharing.abandon();
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
