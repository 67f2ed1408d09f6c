//! GPU memory that the ranks of a node share.
//!
//! Owns the handshake over the control pages, in two steps that all ranks take before the first call, with a
//! barrier between them: each rank publishes its memory, and opens the neighbours' memory. Calls open
//! nothing, because opening may wait for the GPU. Must not know how GPU memory is exported and opened:
//! [`Sharing`] does that.

use super::control_page::{ControlPage, GPU_NEIGHBOURS};
use super::link::Link;
use crate::memory::Sharing;
use std::time::{Duration, Instant};

/// How long a rank that ends waits for its neighbours to close its memory, which they do when they end.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);

/// What this rank shares of its GPU, if it has one.
#[derive(Default)]
pub(super) struct GpuSharing {
    sharing: Option<Box<dyn Sharing>>,
}

impl GpuSharing {
    /// Publishes this rank's memory.
    pub(super) fn publish(&mut self, control: &ControlPage, sharing: Box<dyn Sharing>) {
        control.gpu.publish(&sharing.export());
        self.sharing = Some(sharing);
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
                    "kernels do not reach the GPU memory of rank {}: {}",
                    link.rank,
                    error.message()
                ),
            }
        }
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
