//! Registration of GPU memory and calls on GPUs exclude each other in a process.
//!
//! Registering GPU memory with an RDMA device may take locks of CUDA's driver and wait for the GPU, and it
//! locks the list of registered memory that running calls read. So it waits until no call of this process
//! runs on a GPU, and calls that are made later wait for it.
//!
//! Owns that exclusion.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The gate of this process.
pub(super) static GATE: RegistrationGate = RegistrationGate::new();

/// Lets calls or registrations pass, but not both.
pub(super) struct RegistrationGate {
    state: Mutex<GateState>,
    changed: Condvar,
}

struct GateState {
    /// Calls that were launched and are not over.
    calls: usize,
    /// Registrations that wait or take place.
    registrations: usize,
}

/// States of a call: changed only while the gate is locked.
const PREPARED: u8 = 0;
const RUNNING: u8 = 1;
const OVER: u8 = 2;

/// Permission to launch one call.
pub(super) struct LaunchPermit(Arc<AtomicU8>);

impl LaunchPermit {
    /// Waits until no registration takes place, and lets the call run.
    pub(super) fn begin(&self) {
        GATE.begin([self]);
    }
}

/// A call that runs or will run. Dropped when the call is over.
pub(super) struct RunningCall(Arc<AtomicU8>);

/// The launch permit of a call, and the guard that ends it.
pub(super) fn permit() -> (LaunchPermit, RunningCall) {
    let state = Arc::new(AtomicU8::new(PREPARED));
    (LaunchPermit(Arc::clone(&state)), RunningCall(state))
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        GATE.end(self);
    }
}

impl RegistrationGate {
    const fn new() -> Self {
        Self { state: Mutex::new(GateState { calls: 0, registrations: 0 }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no registration takes place, and lets these calls run.
    pub(super) fn begin<'a>(&self, permits: impl IntoIterator<Item = &'a LaunchPermit>) {
        let mut state = self.lock();
        while state.registrations > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        for permit in permits {
            // A call whose communicator has failed may be over before its launch.
            if permit.0.load(Ordering::Relaxed) == PREPARED {
                permit.0.store(RUNNING, Ordering::Relaxed);
                state.calls += 1;
            }
        }
    }

    fn end(&self, call: &RunningCall) {
        let mut state = self.lock();
        if call.0.swap(OVER, Ordering::Relaxed) == RUNNING {
            state.calls -= 1;
            if state.registrations > 0 {
                self.changed.notify_all();
            }
        }
    }

    /// Waits until no call runs, and runs `registration`.
    ///
    /// # Errors
    /// `Timeout` if calls still run after `limit`; the error of `registration`.
    pub(super) fn register<R>(&self, limit: Duration, registration: impl FnOnce() -> Result<R>) -> Result<R> {
        let since = Instant::now();
        let mut state = self.lock();
        state.registrations += 1;
        let _registering = Registering(self);
        while state.calls > 0 {
            let left = limit.saturating_sub(since.elapsed());
            if left.is_zero() {
                let calls = state.calls;
                // Unlock before `Registering` locks it.
                drop(state);
                let message = format!(
                    "GPU memory cannot be registered: {calls} calls on GPUs of this process are not over after {limit:?}; \
                     register memory before calls that wait for other ranks"
                );
                return Err(Error::timeout(message));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        registration()
    }
}

/// A registration that waits or takes place.
struct Registering<'a>(&'a RegistrationGate);

impl Drop for Registering<'_> {
    fn drop(&mut self) {
        self.0.lock().registrations -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_and_calls_wait_for_each_other() {
        let gate = RegistrationGate::new();
        let ((first, first_call), (second, second_call)) = (permit(), permit());
        gate.begin([&first]);
        let early = gate.register(Duration::from_millis(10), || Ok(()));
        assert!(early.expect_err("a call runs").message().contains("1 calls on GPUs"));
        let registered = AtomicU8::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let slow = || {
                    std::thread::sleep(Duration::from_millis(20));
                    registered.store(1, Ordering::Relaxed);
                    Ok(())
                };
                gate.register(Duration::from_secs(20), slow).expect("the call ends");
            });
            while gate.lock().registrations == 0 {
                std::thread::yield_now();
            }
            scope.spawn(|| {
                gate.begin([&second]);
                assert_eq!(registered.load(Ordering::Relaxed), 1);
            });
            gate.end(&first_call);
        });
        gate.end(&second_call);
        assert_eq!(gate.lock().calls, 0);
    }

    #[test]
    fn a_call_that_ended_before_its_launch_does_not_count() {
        let gate = RegistrationGate::new();
        let (launch, call) = permit();
        gate.end(&call);
        gate.begin([&launch]);
        gate.register(Duration::ZERO, || Ok(())).expect("no call runs");
    }
}
