//! Fault injection for tests: the k-th call of a verb fails, or the k-th completion has an error status.
//!
//! Owns both forms of the [`Shim`]: outside of tests, it is empty and does nothing.

#[cfg(test)]
pub(crate) use injecting::{ModifiedQp, Shim};
#[cfg(not(test))]
pub(crate) use passing::Shim;

#[cfg(not(test))]
mod passing {
    use super::super::bindings::{ibv_qp_attr, ibv_wc};
    use super::super::verb::Verb;

    /// Lets every verb pass.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) struct Shim;

    impl Shim {
        pub(crate) fn none() -> Self {
            Self
        }

        /// The errno with which this call fails; `None` to make the call.
        #[inline]
        pub(crate) fn injected_errno(&self, _verb: Verb) -> Option<i32> {
            None
        }

        /// The `ibv_fork_status` to assume; `None` to ask the library.
        pub(crate) fn fork_status(&self) -> Option<u32> {
            None
        }

        /// The `ibv_event_type` of an asynchronous event to report.
        #[inline]
        pub(crate) fn injected_event(&self) -> Option<u32> {
            None
        }

        /// Notes that memory was registered.
        #[inline]
        pub(crate) fn registered(&self, _address: u64, _len: usize) {}

        /// Notes the attributes of a queue pair.
        #[inline]
        pub(crate) fn modified(&self, _verb: Verb, _attributes: &ibv_qp_attr) {}

        /// Changes the status of a completion.
        #[inline]
        pub(crate) fn alter(&self, _completion: &mut ibv_wc) {}

        /// Whether a device that does not exist has Data Direct.
        #[inline]
        pub(crate) fn has_data_direct(&self) -> bool {
            false
        }
    }
}

#[cfg(test)]
mod injecting {
    use super::super::bindings::{
        IBV_FORK_DISABLED, IBV_FORK_UNNEEDED, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WR_FLUSH_ERR, ibv_qp_attr,
        ibv_wc,
    };
    use super::super::verb::Verb;
    use crate::memory::is_unforked;
    use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

    /// The faults to inject, and the numbers of calls and completions so far.
    #[derive(Debug, Default)]
    struct InjectedFaults {
        /// This call of this verb (from 0) fails with this errno.
        call: Option<(Verb, u64, i32)>,
        calls: u64,
        /// Calls of each verb, by its number.
        calls_by_verb: [u64; Verb::ALL.len()],
        /// This completion (from 0) has this status.
        completion: Option<(u64, u32)>,
        completions: u64,
        /// What libibverbs reports of the kernel.
        fork_status: Option<u32>,
        /// An asynchronous event that the next device reports which is asked.
        event: Option<u32>,
        /// Whether devices without a driver have Data Direct.
        has_data_direct: bool,
        /// The memory that was registered, if it is recorded.
        registered: Option<Vec<RecordedRegistration>>,
        /// The attributes of queue pairs, if they are recorded.
        modified: Option<Vec<(Verb, ModifiedQp)>>,
    }

    /// Attributes that a queue pair was given. Those that do not belong to its new state are 0.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct ModifiedQp {
        pub port: u8,
        pub pkey_index: u16,
        pub dlid: u16,
        pub is_global: bool,
        pub gid_index: u8,
        pub service_level: u8,
        pub traffic_class: u8,
    }

    /// Memory that was registered.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct RecordedRegistration {
        #[allow(dead_code, reason = "for messages of failed tests")]
        pub address: u64,
        #[allow(dead_code, reason = "for messages of failed tests")]
        pub len: usize,
        /// Whether forked children do not have its first and last page.
        pub is_unforked: bool,
    }

    /// The faults of a device, shared by all objects created on it.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Shim(Arc<Mutex<InjectedFaults>>);

    /// Whether both are the shim of the same devices.
    impl PartialEq for Shim {
        fn eq(&self, other: &Self) -> bool {
            Arc::ptr_eq(&self.0, &other.0)
        }
    }

    impl Shim {
        /// Lets every verb pass.
        pub(crate) fn none() -> Self {
            Self::default()
        }

        /// The `k`-th call of `verb`, from 0, fails with `errno`.
        pub(crate) fn failing(verb: Verb, k: u64, errno: i32) -> Self {
            Self(Arc::new(Mutex::new(InjectedFaults {
                call: Some((verb, k, errno)),
                ..InjectedFaults::default()
            })))
        }

        /// The `k`-th completion, from 0, has this status.
        pub(crate) fn failing_completion(k: u64, status: u32) -> Self {
            Self(Arc::new(Mutex::new(InjectedFaults {
                completion: Some((k, status)),
                ..InjectedFaults::default()
            })))
        }

        /// Also gives devices without a driver Data Direct.
        pub(crate) fn with_data_direct(self) -> Self {
            self.faults().has_data_direct = true;
            self
        }

        pub(crate) fn has_data_direct(&self) -> bool {
            self.faults().has_data_direct
        }

        /// Also makes the `k`-th completion, counted from 0, end with this `ibv_wc_status`.
        pub(crate) fn and_failing_completion(self, k: u64, status: u32) -> Self {
            self.faults().completion = Some((k, status));
            self
        }

        /// Also reports a kernel that does not copy pinned pages at a fork.
        pub(crate) fn on_old_kernel(self) -> Self {
            self.faults().fork_status = Some(IBV_FORK_DISABLED);
            self
        }

        /// Also reports a kernel that copies pinned pages at a fork.
        pub(crate) fn on_new_kernel(self) -> Self {
            self.faults().fork_status = Some(IBV_FORK_UNNEEDED);
            self
        }

        pub(crate) fn fork_status(&self) -> Option<u32> {
            self.faults().fork_status
        }

        /// Also reports an asynchronous event of this `ibv_event_type`, once.
        pub(crate) fn with_event(self, event_type: u32) -> Self {
            self.faults().event = Some(event_type);
            self
        }

        pub(crate) fn injected_event(&self) -> Option<u32> {
            self.faults().event.take()
        }

        /// Whether an event is still to be reported.
        pub(crate) fn has_event(&self) -> bool {
            self.faults().event.is_some()
        }

        pub(crate) fn registered(&self, address: u64, len: usize) {
            if let Some(registered) = &mut self.faults().registered {
                let is_unforked = is_unforked(address) && is_unforked(address + len as u64 - 1);
                registered.push(RecordedRegistration { address, len, is_unforked });
            }
        }

        /// Also records what is registered.
        pub(crate) fn recording_registrations(self) -> Self {
            self.faults().registered = Some(Vec::new());
            self
        }

        /// What was registered while recording.
        pub(crate) fn registrations(&self) -> Vec<RecordedRegistration> {
            self.faults().registered.clone().unwrap_or_default()
        }

        /// Also records the attributes of queue pairs.
        pub(crate) fn recording_attributes(self) -> Self {
            self.faults().modified = Some(Vec::new());
            self
        }

        pub(crate) fn modified(&self, verb: Verb, attributes: &ibv_qp_attr) {
            if let Some(modified) = &mut self.faults().modified {
                let path = &attributes.ah_attr;
                let attributes = ModifiedQp {
                    port: attributes.port_num,
                    pkey_index: attributes.pkey_index,
                    dlid: path.dlid,
                    is_global: path.is_global != 0,
                    gid_index: path.grh.sgid_index,
                    service_level: path.sl,
                    traffic_class: path.grh.traffic_class,
                };
                modified.push((verb, attributes));
            }
        }

        /// The attributes of the last queue pair that this verb was called for.
        pub(crate) fn attributes(&self, verb: Verb) -> Option<ModifiedQp> {
            let faults = self.faults();
            let modified = faults.modified.iter().flatten().rev();
            modified.into_iter().find(|(called, _)| *called == verb).map(|(_, attributes)| *attributes)
        }

        fn faults(&self) -> MutexGuard<'_, InjectedFaults> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// How often a verb was called so far.
        pub(crate) fn calls(&self, verb: Verb) -> u64 {
            self.faults().calls_by_verb[verb as usize]
        }

        /// Whether a fault was injected.
        pub(crate) fn triggered(&self) -> bool {
            let faults = self.faults();
            let call = faults.call.is_some_and(|(_, k, _)| faults.calls > k);
            call || faults.completion.is_some_and(|(k, _)| faults.completions > k)
        }

        pub(crate) fn injected_errno(&self, verb: Verb) -> Option<i32> {
            let mut faults = self.faults();
            faults.calls_by_verb[verb as usize] += 1;
            let (failing, k, errno) = faults.call?;
            if failing != verb {
                return None;
            }
            faults.calls += 1;
            (faults.calls == k + 1).then_some(errno)
        }

        pub(crate) fn alter(&self, completion: &mut ibv_wc) {
            let mut faults = self.faults();
            let Some((k, status)) = faults.completion else { return };
            // No real device accepts a write, acknowledges it and flushes its receive, so the next completion
            // fails instead.
            let received = completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
            if faults.completions == k && received && status == IBV_WC_WR_FLUSH_ERR {
                return;
            }
            if faults.completions == k {
                completion.status = status;
            }
            faults.completions += 1;
        }
    }
}
