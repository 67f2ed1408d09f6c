//! A queue pair of a rail that is connected to itself, and the trial of a GPU's memory over it.
//!
//! Owns the host memory that these requests read and write.

use crate::error::{Error, Result};
use crate::memory::{Piece, map_unforked};
use crate::transport::verbs::objects::{
    AccessFlags, CompletionQueue, Connected, Depth, MemoryRegion, PortAttributes, ProtectionDomain,
    QueuePair, WriteRequest,
};
use crate::transport::verbs::options::VerbsOptions;
use crate::transport::verbs::port_selection::Rail;
use crate::transport::verbs::wire::TRIAL_BYTES;
use memmap2::MmapRaw;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests that can be in progress at once.
pub(super) const DEPTH: u32 = 16;

/// How long a device may take for a trial. Those that reach the memory need microseconds.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(2);

/// A queue pair that is connected to itself, and memory of the host.
pub(super) struct Loopback {
    // Fields are dropped in this order: the queue pair before what it uses, and the memory last.
    pub(super) qp: QueuePair<Connected>,
    pub(super) queue: Arc<CompletionQueue>,
    pub(super) region: MemoryRegion,
    pub(super) memory: MmapRaw,
}

impl Loopback {
    /// Creates a queue pair at the rail's port, and this many bytes of memory.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(super) fn new(
        pd: &Arc<ProtectionDomain>,
        rail: &Rail,
        port: PortAttributes,
        options: &VerbsOptions,
        bytes: usize,
    ) -> Result<Self> {
        let queue = CompletionQueue::new(pd.context(), DEPTH as usize + 1)?;
        let memory = MmapRaw::from(map_unforked(bytes)?);
        let address = NonNull::new(memory.as_mut_ptr()).expect("a mapping has an address");
        // SAFETY: the memory lives as long as the region, and is accessed here while no request is posted.
        let piece = unsafe { Piece::new(address, bytes) };
        let region = pd.register(piece, AccessFlags { remote_write: true, ..AccessFlags::SEND })?;
        let depth = Depth { sends: DEPTH, receives: 1, inline: 0 };
        let qp = QueuePair::loopback(pd, &queue, depth, (rail.port, rail.pkey_index))?;
        let endpoint = qp.endpoint();
        let qp = qp.connect(0, endpoint, &options.path_attributes((rail, &port), rail, port.mtu))?;
        Ok(Self { qp, queue, region, memory })
    }

    /// Writes two of the longest packets to memory of a GPU, writes them back, and compares them.
    ///
    /// # Errors
    /// `System` if the device does not reach the memory, or other bytes come back.
    fn try_gpu(&mut self, address: u64, region: &MemoryRegion) -> Result<()> {
        let (mine, half) = (self.memory.as_mut_ptr(), TRIAL_BYTES);
        // SAFETY: both halves belong to this object, and no request is posted.
        let [pattern, back] =
            unsafe { [mine, mine.add(half)].map(|half| std::slice::from_raw_parts_mut(half, TRIAL_BYTES)) };
        (0..)
            .zip(pattern.iter_mut())
            .for_each(|(at, byte): (usize, &mut u8)| *byte = ((at * 31) >> 3) as u8 | 1);
        back.fill(0);
        let there = WriteRequest {
            id: 0,
            from: mine as u64,
            len: half as u32,
            lkey: self.region.lkey(),
            to: address,
            rkey: region.rkey(),
            immediate: None,
            signalled: true,
        };
        let to = mine as u64 + half as u64;
        let here = WriteRequest { from: address, lkey: region.lkey(), to, rkey: self.region.rkey(), ..there };
        for (request, what) in [(there, "write to"), (here, "read")] {
            self.qp.post_send(&[request]).map_err(|(_, error)| error)?;
            self.wait().map_err(|cause| Error::system(format!("cannot {what} it: {cause}")))?;
        }
        // SAFETY: as above. The device has written the second half.
        let [pattern, back] =
            unsafe { [mine, mine.add(half)].map(|half| std::slice::from_raw_parts(half, TRIAL_BYTES)) };
        if pattern == back { Ok(()) } else { Err(Error::system("reads other bytes than it wrote")) }
    }

    /// Waits for the completion of the only request.
    fn wait(&self) -> std::result::Result<(), String> {
        let deadline = Instant::now() + TRIAL_TIMEOUT;
        let mut outcome = None;
        while outcome.is_none() {
            if Instant::now() > deadline {
                return Err(format!("it has not answered after {} s", TRIAL_TIMEOUT.as_secs()));
            }
            let polled = self.queue.poll(|completion| {
                // After a failure the rest is flushed.
                outcome.get_or_insert(completion.outcome.map(drop).map_err(|status| status.to_string()));
                Ok(())
            });
            polled.map_err(|error| error.message().to_owned())?;
        }
        outcome.unwrap_or(Ok(()))
    }
}

/// What trials of GPU memory need.
pub(in crate::transport::verbs) struct GpuTrials {
    /// By rail: it, and its port.
    pub rails: Vec<(Rail, PortAttributes)>,
    pub options: VerbsOptions,
}

impl GpuTrials {
    /// Tries whether the device of a rail reaches memory of a GPU, whose contents it changes: it may be
    /// registered, and bridges or IOMMUs refuse every transfer.
    ///
    /// # Errors
    /// `System` if not.
    pub(in crate::transport::verbs) fn run(
        &self,
        rail: usize,
        pd: &Arc<ProtectionDomain>,
        address: u64,
        region: &MemoryRegion,
    ) -> Result<()> {
        let (rail, port) = &self.rails[rail];
        let context = pd.context();
        if context.has_failed() || !context.port(rail.port)?.active {
            // It says nothing of the memory.
            return Ok(());
        }
        Loopback::new(pd, rail, *port, &self.options, 2 * TRIAL_BYTES)?.try_gpu(address, region)
    }
}
