//! Waits until data that an RDMA device wrote to GPU memory has arrived there.
//!
//! Owns the flushes by each rail, and the events that wait for one.
//!
//! A device completes a write when it has issued the data as posted PCIe writes. The completion goes to host
//! memory and the data to the GPU, on different paths, so the completion may arrive first. A read by the same
//! device from the same GPU pushes earlier writes ahead of it: when the read completes, they have arrived.
//! One byte of any memory of that GPU is enough, so it is memory of this library, which no user frees; one
//! read covers all writes that were completed before it was posted.

use super::loopback::{DEPTH, Loopback};
use crate::error::{Error, Result};
use crate::transport::verbs::objects::{PortAttributes, ProtectionDomain, ReadRequest};
use crate::transport::verbs::options::VerbsOptions;
use crate::transport::verbs::port_selection::Rail;
use crate::transport::{Event, Events};
use std::collections::VecDeque;
use std::sync::Arc;

/// The flushes by one rail.
pub(in crate::transport::verbs) struct Flusher {
    /// The first byte of its memory receives the byte that is read; the value is not used.
    loopback: Loopback,
    device: String,
    /// Flushes that were started.
    started: u64,
    /// Flushes that are complete.
    completed: u64,
}

impl Flusher {
    /// Creates a queue pair at the rail's port and connects it to itself.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(in crate::transport::verbs) fn new(
        pd: &Arc<ProtectionDomain>,
        rail: &Rail,
        port: PortAttributes,
        options: &VerbsOptions,
    ) -> Result<Self> {
        let loopback = Loopback::new(pd, rail, port, options, 1)?;
        Ok(Self { loopback, device: rail.device.clone(), started: 0, completed: 0 })
    }

    /// Starts to flush the GPU whose memory is at this address, registered for reading under this key.
    /// Returns the number of the flush, from 0; `None` if too many flushes are in progress.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(in crate::transport::verbs) fn start(&mut self, address: u64, rkey: u32) -> Result<Option<u64>> {
        if self.started - self.completed >= u64::from(DEPTH) {
            return Ok(None);
        }
        let into = self.loopback.memory.as_ptr() as u64;
        let lkey = self.loopback.region.lkey();
        self.loopback.qp.post_read(&ReadRequest {
            id: self.started,
            from: address,
            rkey,
            into,
            lkey,
            len: 1,
        })?;
        self.started += 1;
        Ok(Some(self.started - 1))
    }

    /// The number of completed flushes. They complete in order.
    ///
    /// # Errors
    /// `System` if a flush failed: then it is unknown what has arrived, and no later flush succeeds.
    pub(in crate::transport::verbs) fn poll(&mut self) -> Result<u64> {
        let Self { loopback, device, completed, .. } = self;
        loopback.queue.poll(|completion| match completion.outcome {
            Ok(_) => {
                *completed += 1;
                Ok(())
            }
            Err(status) => {
                let message = format!("cannot flush the writes of {device} to GPU memory: {status}");
                Err(Error::system(message))
            }
        })?;
        Ok(*completed)
    }

    /// The byte that was read last.
    #[cfg(test)]
    pub(super) fn last_byte(&self) -> u8 {
        // SAFETY: this object owns the page, and tests read it only when no flush is in progress.
        unsafe { self.loopback.memory.as_ptr().read_volatile() }
    }
}

/// Holds back receive completions of GPU memory until the data has arrived on the GPU.
///
/// One flush by each rail over which messages have arrived since its last one covers all events that were
/// held back before it started; later events wait for the next one. Other rails have nothing to flush, and a
/// read over a port that is down would take long.
pub(in crate::transport::verbs) struct FlushQueue {
    /// By rail; `None` if its device has failed: no data comes over it any more, and no flush by it ends.
    flushers: Vec<Option<Flusher>>,
    /// Flushers of devices that failed. Kept until the end, because destroying one may take long.
    retired: Vec<Flusher>,
    /// Why data of the current call may not have arrived.
    failure: Option<Error>,
    /// The address on the GPU that is read.
    from: u64,
    /// The rkeys of that memory, by rail.
    keys: Vec<u32>,
    /// What had arrived over each rail when its last flush started.
    flushed: Vec<u64>,
    /// The numbers of flushes that must be complete before `flushing` is reported, by rail.
    targets: Vec<u64>,
    /// Events that wait for the current flush.
    flushing: VecDeque<Event>,
    /// Events that wait for the next flush.
    waiting: VecDeque<Event>,
}

impl FlushQueue {
    /// A queue for the GPU with the memory at `from`, flushed by every rail that works.
    pub(in crate::transport::verbs) fn new(flushers: Vec<Option<Flusher>>, from: u64, keys: &[u32]) -> Self {
        let (keys, none) = (keys[..flushers.len()].to_vec(), vec![0; flushers.len()]);
        Self {
            flushers,
            retired: Vec::new(),
            failure: None,
            from,
            keys,
            flushed: none.clone(),
            targets: none,
            flushing: VecDeque::new(),
            waiting: VecDeque::new(),
        }
    }

    /// The device of a rail has failed. `of_call` is why the current call fails, if it is on this GPU: what
    /// the device wrote before cannot be flushed any more.
    pub(in crate::transport::verbs) fn fail(&mut self, rail: usize, of_call: Option<Error>) {
        self.retired.extend(self.flushers[rail].take());
        self.failure = self.failure.take().or(of_call);
    }

    /// Holds back the receive completions among the events from index `first` on.
    pub(in crate::transport::verbs) fn hold(&mut self, events: &mut Events, first: usize) {
        let new = events.split_off(first);
        for event in new {
            let list =
                if matches!(event, Event::RecvComplete { .. }) { &mut self.waiting } else { &mut *events };
            list.push_back(event);
        }
    }

    /// Reports events whose flush is complete, and starts the next flush. `arrivals` are the messages that
    /// have arrived over each rail.
    ///
    /// # Errors
    /// `System` if a flush failed, or a device during a call on this GPU.
    pub(in crate::transport::verbs) fn step(
        &mut self,
        events: &mut Events,
        arrivals: impl Fn(usize) -> u64,
    ) -> Result<()> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        if !self.flushing.is_empty() {
            for (flusher, target) in self.flushers.iter_mut().zip(&self.targets) {
                if let Some(flusher) = flusher
                    && flusher.poll()? < *target
                {
                    return Ok(());
                }
            }
            events.append(&mut self.flushing);
        }
        if !self.waiting.is_empty() {
            std::mem::swap(&mut self.flushing, &mut self.waiting);
            for (rail, flusher) in self.flushers.iter_mut().enumerate() {
                let arrived = arrivals(rail);
                if let Some(flusher) = flusher.as_mut().filter(|_| arrived != self.flushed[rail])
                    // There is room, as the previous flush is complete.
                    && let Some(number) = flusher.start(self.from, self.keys[rail])?
                {
                    (self.targets[rail], self.flushed[rail]) = (number + 1, arrived);
                }
            }
        }
        Ok(())
    }

    /// Whether the flushes of a rail use the completion queue with this number.
    pub(in crate::transport::verbs) fn uses(&self, rail: usize, queue: u64) -> bool {
        self.flushers
            .get(rail)
            .and_then(Option::as_ref)
            .is_some_and(|flusher| flusher.loopback.queue.number() == queue)
    }

    /// Whether events are held back.
    pub(in crate::transport::verbs) fn is_busy(&self) -> bool {
        !self.flushing.is_empty() || !self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::objects::{Context, Shim, Verb};
    use super::*;
    use crate::error::ErrorKind;

    fn flusher(shim: &Shim) -> Result<Flusher> {
        let pd = ProtectionDomain::new(&Context::inert("inert", shim.clone()))?;
        let options = VerbsOptions::new(&crate::config::Config::default());
        Flusher::new(&pd, &Rail::example(), pd.context().port(1)?, &options)
    }

    #[test]
    fn a_refused_verb_is_an_error_that_names_verb_and_device() {
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
        let error = flusher(&shim).expect("nothing is posted yet").start(64, 1).expect_err("it is refused");
        assert!(error.message().starts_with("ibv_post_send failed on inert port 1: "), "{error}");
    }

    #[test]
    fn forked_children_do_not_have_the_memory_that_a_flush_writes() {
        let shim = Shim::none().recording_registrations();
        let _flusher = flusher(&shim).expect("inert");
        let found = shim.registrations();
        assert!(found.len() == 1 && found[0].is_unforked, "{found:?}");
    }

    /// Counter-example: flushes by a device that had failed never ended, although another rail carried the
    /// data.
    #[test]
    fn a_rail_that_failed_ends_the_call_on_the_gpu_and_is_not_flushed_later() {
        let queue = || FlushQueue::new(vec![Some(flusher(&Shim::none()).expect("inert")), None], 64, &[1, 2]);
        let events = || Events::from([Event::RecvComplete { peer: 1 }]);
        let mut failed = queue();
        failed.hold(&mut events(), 0);
        failed.fail(0, Some(Error::system("inert: the device failed")));
        assert!(failed.step(&mut Events::new(), |_| 1).is_err());
        let mut later = queue();
        later.fail(0, None);
        let mut arrived = events();
        later.hold(&mut arrived, 0);
        assert!(arrived.is_empty() && later.is_busy());
        (0..2).for_each(|_| later.step(&mut arrived, |_| 1).expect("no rail is left to flush"));
        assert_eq!(arrived.len(), 1);
    }

    #[test]
    fn rails_are_flushed_over_which_something_has_arrived_since() {
        let flushers = (0..2).map(|_| Some(flusher(&Shim::none()).expect("inert")));
        let mut queue = FlushQueue::new(flushers.collect(), 64, &[1, 2]);
        let started =
            |queue: &FlushQueue| [0, 1].map(|rail| queue.flushers[rail].as_ref().map_or(0, |it| it.started));
        let mut rounds = Vec::new();
        for arrivals in [[0, 5], [3, 5], [3, 5]] {
            let mut events = Events::from([Event::RecvComplete { peer: 1 }]);
            queue.hold(&mut events, 0);
            queue.step(&mut events, |rail| arrivals[rail]).expect("inert");
            rounds.push(started(&queue));
            for (rail, count) in started(&queue).into_iter().enumerate() {
                let flusher = queue.flushers[rail].as_ref().expect("it works");
                let completion = |id| crate::transport::verbs::objects::Completion { id, outcome: Ok(None) };
                let mut injected = flusher.loopback.queue.injected.lock().expect("no other thread");
                injected.extend((flusher.completed..count).map(completion));
            }
            queue.step(&mut events, |rail| arrivals[rail]).expect("inert");
            assert_eq!(events.len(), 1, "{arrivals:?}");
        }
        assert_eq!(rounds, [[0, 1], [1, 1], [1, 1]]);
    }

    #[test]
    fn the_number_of_flushes_in_progress_is_limited() {
        let mut flusher = flusher(&Shim::none()).expect("inert");
        for number in 0..u64::from(DEPTH) {
            assert_eq!(flusher.start(64, 1).expect("inert"), Some(number));
        }
        assert_eq!(flusher.start(64, 1).expect("inert"), None);
        let completion = |id| crate::transport::verbs::objects::Completion { id, outcome: Ok(None) };
        flusher.loopback.queue.injected.lock().expect("no other thread").push_back(completion(0));
        assert_eq!(flusher.poll().expect("inert"), 1);
        assert_eq!(flusher.start(64, 1).expect("inert"), Some(u64::from(DEPTH)));
    }
}
