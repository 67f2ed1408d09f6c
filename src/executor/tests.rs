//! What happens when a call fails or links are leaked, with a transport that records what is asked of it.

use super::*;
use crate::call::Collective;
use crate::config::Simd;
use crate::device::host::Host;
use crate::dtype::DType;
use crate::error::ErrorKind;
use crate::transport::{Events, PostedTransport, Transport};
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, PoisonError};

/// What happened, in order.
type Journal = Arc<Mutex<Vec<String>>>;

fn note(journal: &Journal, what: impl Into<String>) {
    journal.lock().unwrap_or_else(PoisonError::into_inner).push(what.into());
}

/// A transport on which every call fails.
struct FailingTransport {
    journal: Journal,
    /// Whether it panics instead of returning an error.
    panics: bool,
}

impl Transport for FailingTransport {
    fn name(&self) -> &'static str {
        "failing"
    }

    fn can_send_from(&self, _piece: Piece) -> bool {
        true
    }

    fn window(&self) -> usize {
        1
    }

    fn begin(&mut self, _sequence: u64) {}

    fn begin_link(&mut self, _peer: Rank, _sequence: u64) -> Result<()> {
        assert!(!self.panics, "a test wants a panic");
        Err(Error::system("the device failed"))
    }

    fn announce(&mut self, _peer: Rank, _call: &Call) -> Result<()> {
        Ok(())
    }

    fn send(&mut self, _peer: Rank, _piece: Piece) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, _events: &mut Events) -> Result<bool> {
        Ok(false)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn set_need_wakeup(&mut self) -> bool {
        false
    }

    fn clear_need_wakeup(&mut self) {}

    fn end_sharing(&self) {
        note(&self.journal, "sharing ended");
    }

    fn abort(&mut self) {
        note(&self.journal, "aborted");
    }
}

impl Drop for FailingTransport {
    fn drop(&mut self) {
        note(&self.journal, "dropped");
    }
}

impl PostedTransport for FailingTransport {
    fn can_recv_into(&self, _piece: Piece) -> bool {
        true
    }

    fn stages_host_memory(&self) -> bool {
        false
    }

    fn post_recv(&mut self, _peer: Rank, _piece: Piece) -> Result<()> {
        Ok(())
    }
}

/// The executor of rank 0 of two.
fn executor(journal: &Journal, panics: bool) -> Executor {
    let transport = FailingTransport { journal: Arc::clone(journal), panics };
    let parts = ExecutorParts {
        rank: 0,
        world: 2,
        transports: vec![AnyTransport::Posted(Box::new(transport))],
        routes: vec![0, 0],
        device: Box::new(Host::new(Simd::Auto).expect("portable kernels")),
        slots: vec![Piece::EMPTY; 2],
        mailbox: None,
        fault: Arc::new(Fault::new()),
        spin: Duration::ZERO,
        timeout: Duration::from_secs(60),
        ranks_per_core: 1,
        trace: Trace::new(None),
    };
    Executor::new(parts).expect("a descriptor")
}

/// A group that receives one message of rank 1.
fn group() -> BoundGroup {
    let call = Call {
        sequence: 1,
        collective: Collective::SendRecv,
        dtype: DType::U8,
        op: 0,
        root: 0,
        count: 0,
        program: 0,
        on_gpu: false,
        factor: 1.0,
    };
    let message = PeerMessage { is_send: false, peer: 1, dtype: DType::U8, piece: Piece::EMPTY };
    BoundGroup { call, messages: Arc::new([message]) }
}

/// Otherwise the other ranks would wait for a device that this rank waits for while it aborts.
#[test]
fn a_failure_is_reported_before_the_links_are_aborted() {
    for (panics, expected) in [
        (false, "the device failed"),
        (true, "rank 0: flexring panicked, please report this: a test wants a panic"),
    ] {
        let journal = Journal::default();
        let mut executor = executor(&journal, panics);
        let report = |error: Error| {
            note(&journal, format!("reported: {}", error.message()));
            Error::peer_lost("the root cause")
        };
        let error = executor.run_group(&group(), &report).expect_err("the link fails");
        assert_eq!(error.message(), "the root cause");
        let error = executor.run_group(&group(), &|error| error).expect_err("it has failed before");
        assert_eq!(error.kind(), ErrorKind::Aborted);
        let happened = journal.lock().unwrap_or_else(PoisonError::into_inner).clone();
        assert_eq!(happened, [format!("reported: {expected}"), "aborted".to_owned()]);
    }
}

#[test]
fn a_call_is_aborted_even_if_reporting_its_failure_panics() {
    let journal = Journal::default();
    let mut executor = executor(&journal, false);
    let report = |_| panic!("a test wants a panic");
    let outcome = catch_unwind(AssertUnwindSafe(|| executor.run_group(&group(), &report)));
    outcome.expect_err("it panics");
    assert_eq!(*journal.lock().unwrap_or_else(PoisonError::into_inner), ["aborted"]);
}

/// Other communicators of the process would otherwise use registrations whose memory is other memory by then.
#[test]
fn leaked_links_stay_but_their_registrations_are_not_shared_any_more() {
    let journal = Journal::default();
    let mut executor = executor(&journal, false);
    executor.leak();
    drop(executor);
    assert_eq!(*journal.lock().unwrap_or_else(PoisonError::into_inner), ["sharing ended"]);
}
