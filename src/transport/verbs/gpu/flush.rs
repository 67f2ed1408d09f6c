//! Making sure that what an RDMA device wrote to GPU memory has arrived there.
//!
//! Owns the question whether that is needed, and a queue pair that is connected to itself. Must not know messages.
//!
//! A device completes a write when it has left for the PCI bus. The completion goes to host memory and the data to the
//! GPU, on different ways: who acts on the first may be ahead of the second. A read by the same device from the same GPU
//! pushes what it wrote before in front of it, so once that has come back everything is there. One byte is enough, of any
//! memory of that GPU; and one read for all that was completed before it was begun.

use crate::error::{Error, Result};
use crate::memory::Piece;
use crate::transport::verbs::objects::{
    AccessFlags, CompletionQueue, Connected, Depth, MemoryRegion, PortAttributes, ProtectionDomain,
    QueuePair, ReadRequest,
};
use crate::transport::verbs::options::VerbsOptions;
use crate::transport::verbs::port_selection::Rail;
use crate::transport::{Event, Events};
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

/// FlushQueue that can be under way at once.
const DEPTH: u32 = 16;

/// How a GPU sees what other devices write to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport::verbs) struct WriteOrdering {
    /// Whom writes reach in order, as CUDA numbers it, if the driver knows.
    pub ordering: Option<i32>,
    /// The first number of its compute capability.
    pub compute_major: i32,
    /// Whether it uses the processor's page tables, so that a link of their own joins the two.
    pub coherent: bool,
}

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: the GPU that is written to needs no flush to read what was written.
const OWNER: i32 = 100;

/// Whether a GPU must not read what an RDMA device has written to it before a flush.
pub(in crate::transport::verbs) fn needs_flush(gpu: WriteOrdering) -> bool {
    if gpu.coherent {
        // Word of a completion then takes that link and data the PCI bus, which the driver's answer is not about.
        return true;
    }
    match gpu.ordering {
        Some(ordering) => ordering < OWNER,
        // What the driver would say if it could: from Hopper on it is the GPU that keeps order.
        None => gpu.compute_major < 9,
    }
}

/// What flushes at one rail.
pub(in crate::transport::verbs) struct Flusher {
    // The queue pair goes before what it uses, and the memory goes last.
    pair: QueuePair<Connected>,
    queue: Arc<CompletionQueue>,
    landing: MemoryRegion,
    /// Where the byte goes that is read. Nobody looks at it.
    byte: Box<UnsafeCell<u8>>,
    device: String,
    begun: u64,
    done: u64,
}

impl Flusher {
    /// A queue pair at a rail's port that is connected to itself.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(in crate::transport::verbs) fn new(
        pd: &Arc<ProtectionDomain>,
        rail: &Rail,
        port: PortAttributes,
        options: &VerbsOptions,
    ) -> Result<Self> {
        let queue = CompletionQueue::new(pd.context(), DEPTH as usize + 1)?;
        let byte = Box::new(UnsafeCell::new(0));
        let place = NonNull::new(byte.get()).expect("a box is somewhere");
        // SAFETY: the byte lives as long as the region, and nobody but the device touches it.
        let piece = unsafe { Piece::new(place, 1) };
        let landing = pd.register(piece, AccessFlags { remote_write: true, ..AccessFlags::SEND })?;
        let depth = Depth { sends: DEPTH, receives: 1, inline: 0 };
        let pair = QueuePair::loopback(pd, &queue, depth, (rail.port, rail.pkey_index))?;
        let itself = pair.endpoint();
        let pair = pair.connect(0, itself, &options.path_attributes(rail, rail, port.mtu))?;
        let device = rail.device.clone();
        Ok(Self { pair, queue, landing, byte, device, begun: 0, done: 0 })
    }

    /// Begins to flush the GPU that the memory at this address is of, which is registered for reading under this key.
    /// Returns the number of the flush; `None` if so many are under way that some must be over first.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(in crate::transport::verbs) fn begin(&mut self, address: u64, rkey: u32) -> Result<Option<u64>> {
        if self.begun - self.done >= u64::from(DEPTH) {
            return Ok(None);
        }
        let into = self.byte.get() as u64;
        let lkey = self.landing.lkey();
        self.pair.post_read(&ReadRequest { id: self.begun, from: address, rkey, into, lkey, len: 1 })?;
        self.begun += 1;
        Ok(Some(self.begun - 1))
    }

    /// How many flushes are over: those with lesser numbers.
    ///
    /// # Errors
    /// `System` if one failed: then nobody knows what has arrived, and none will succeed any more.
    pub(in crate::transport::verbs) fn poll(&mut self) -> Result<u64> {
        let Self { queue, device, done, .. } = self;
        queue.poll(|completion| match completion.outcome {
            Ok(_) => {
                *done += 1;
                Ok(())
            }
            Err(status) => {
                let words = format!("what {device} wrote to GPU memory cannot be flushed: {status}");
                Err(Error::system(words))
            }
        })?;
        Ok(*done)
    }

    /// The byte that was read last.
    #[cfg(test)]
    pub(super) fn landed(&self) -> u8 {
        // SAFETY: the byte is this object's, and tests look only when no flush is under way.
        unsafe { self.byte.get().read_volatile() }
    }
}

/// Events that say that something has landed on a GPU, until it has arrived there.
///
/// One flush at each rail serves all that came before it was begun; what comes meanwhile waits for the next.
pub(in crate::transport::verbs) struct FlushQueue {
    flushers: Vec<Flusher>,
    /// What is read: an address on the GPU, and its key by rail.
    from: u64,
    keys: Vec<u32>,
    /// By rail: how many flushes must be over before `flushing` is reported.
    targets: Vec<u64>,
    flushing: VecDeque<Event>,
    waiting: VecDeque<Event>,
}

impl FlushQueue {
    /// FlushQueue of the GPU that has the memory at `from`, by every rail.
    pub(in crate::transport::verbs) fn new(flushers: Vec<Flusher>, from: u64, keys: &[u32]) -> Self {
        let (keys, targets) = (keys[..flushers.len()].to_vec(), vec![0; flushers.len()]);
        Self { flushers, from, keys, targets, flushing: VecDeque::new(), waiting: VecDeque::new() }
    }

    /// Holds back those events from number `first` on that say that something has landed.
    pub(in crate::transport::verbs) fn hold(&mut self, events: &mut Events, first: usize) {
        let new = events.split_off(first);
        for event in new {
            let list =
                if matches!(event, Event::RecvComplete { .. }) { &mut self.waiting } else { &mut *events };
            list.push_back(event);
        }
    }

    /// Reports what has arrived, and flushes what has not.
    ///
    /// # Errors
    /// `System` if a flush failed.
    pub(in crate::transport::verbs) fn step(&mut self, events: &mut Events) -> Result<()> {
        if !self.flushing.is_empty() {
            for (flusher, target) in self.flushers.iter_mut().zip(&self.targets) {
                if flusher.poll()? < *target {
                    return Ok(());
                }
            }
            events.append(&mut self.flushing);
        }
        if !self.waiting.is_empty() {
            std::mem::swap(&mut self.flushing, &mut self.waiting);
            for ((flusher, key), target) in self.flushers.iter_mut().zip(&self.keys).zip(&mut self.targets) {
                // There is room: the one before is over.
                *target = flusher.begin(self.from, *key)?.map_or(*target, |number| number + 1);
            }
        }
        Ok(())
    }

    /// Whether anything is held back.
    pub(in crate::transport::verbs) fn is_busy(&self) -> bool {
        !self.flushing.is_empty() || !self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inventory::{GidKind, LinkLayer};
    use super::super::super::objects::{Context, Shim, Verb};
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_flush_is_needed_where_the_gpu_itself_keeps_no_order() {
        let gpu = WriteOrdering { ordering: Some(0), compute_major: 8, coherent: false };
        let cases = [
            (gpu, true),
            (WriteOrdering { ordering: Some(OWNER), ..gpu }, false),
            (WriteOrdering { ordering: Some(200), ..gpu }, false),
            // The driver says nothing.
            (WriteOrdering { ordering: None, ..gpu }, true),
            (WriteOrdering { ordering: None, compute_major: 9, ..gpu }, false),
            // It says no, and has more than one way in mind.
            (WriteOrdering { ordering: Some(200), compute_major: 9, coherent: true }, true),
        ];
        for (gpu, needed) in cases {
            assert_eq!(needs_flush(gpu), needed, "{gpu:?}");
        }
    }

    fn flusher(shim: &Shim) -> Result<Flusher> {
        let pd = ProtectionDomain::new(&Context::inert("inert", shim.clone()))?;
        let rail = Rail {
            device: "inert".to_owned(),
            port: 1,
            layer: LinkLayer::Ethernet,
            gid_index: 1,
            gid: [0; 16],
            gid_kind: GidKind::RoceV2,
            lid: 0,
            pkey_index: 0,
            network: String::new(),
            rate_mbps: 0,
            numa: None,
        };
        let options = VerbsOptions::new(&crate::config::Config::default());
        Flusher::new(&pd, &rail, pd.context().port(1)?, &options)
    }

    #[test]
    fn every_refusal_is_an_error_that_names_verb_and_device() {
        let verbs = [
            (Verb::AllocPd, "ibv_alloc_pd"),
            (Verb::CreateCq, "ibv_create_cq"),
            (Verb::RegMr, "ibv_reg_mr"),
            (Verb::CreateQp, "ibv_create_qp"),
            (Verb::ModifyQpToInit, "ibv_modify_qp to INIT"),
            (Verb::PostRecv, "ibv_post_recv"),
            (Verb::ModifyQpToRtr, "ibv_modify_qp to RTR"),
            (Verb::ModifyQpToRts, "ibv_modify_qp to RTS"),
        ];
        for (verb, name) in verbs {
            let shim = Shim::failing(verb, 0, rustix::io::Errno::INVAL.raw_os_error());
            let Err(error) = flusher(&shim) else { panic!("{name} failed") };
            assert!(error.message().starts_with(&format!("{name} failed on inert")), "{error}");
            assert_eq!((error.kind(), error.suspect()), (ErrorKind::System, None));
        }
        let shim = Shim::failing(Verb::PostSend, 0, rustix::io::Errno::NOMEM.raw_os_error());
        let error = flusher(&shim).expect("posting comes later").begin(64, 1).expect_err("it is refused");
        assert!(error.message().starts_with("ibv_post_send failed on inert port 1: "), "{error}");
    }

    #[test]
    fn so_many_are_under_way_and_no_more() {
        let mut flusher = flusher(&Shim::none()).expect("inert");
        for number in 0..u64::from(DEPTH) {
            assert_eq!(flusher.begin(64, 1).expect("inert"), Some(number));
        }
        assert_eq!(flusher.begin(64, 1).expect("inert"), None);
        let over = |id| crate::transport::verbs::objects::Completion { id, outcome: Ok(None) };
        flusher.queue.injected.lock().expect("no other thread").push_back(over(0));
        assert_eq!(flusher.poll().expect("inert"), 1);
        assert_eq!(flusher.begin(64, 1).expect("inert"), Some(u64::from(DEPTH)));
    }
}
