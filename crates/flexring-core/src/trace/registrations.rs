//! Registrations of memory during a call, which happen deep inside a transport.
//!
//! Owns a list of them for the thread that runs a call with a recorder.

use super::clock::now;
use std::cell::RefCell;

/// A registration: begin and end in nanoseconds, and bytes.
pub(super) type TimedRegistration = (u64, u64, usize);

thread_local! {
    /// The registrations since the recorder asked last; `None` unless this thread records.
    static TIMED: RefCell<Option<Vec<TimedRegistration>>> = const { RefCell::new(None) };
}

/// Runs `register`, and records how long it takes if this thread runs a call that is recorded.
pub fn timed_registration<T>(bytes: usize, register: impl FnOnce() -> T) -> T {
    if TIMED.with_borrow(Option::is_none) {
        return register();
    }
    let start = now();
    let registered = register();
    TIMED.with_borrow_mut(|timed| {
        if let Some(timed) = timed {
            timed.push((start, now(), bytes));
        }
    });
    registered
}

/// From now on this thread's registrations are recorded, into memory that is kept from call to call.
pub(super) fn begin(memory: Vec<TimedRegistration>) {
    TIMED.set(Some(memory));
}

/// Passes the registrations of this thread since the last time to `each`.
pub(super) fn drain(mut each: impl FnMut(TimedRegistration)) {
    TIMED.with_borrow_mut(|timed| timed.iter_mut().flat_map(|timed| timed.drain(..)).for_each(&mut each));
}

/// This thread's registrations are not recorded any more. Returns the memory.
pub(super) fn end() -> Vec<TimedRegistration> {
    TIMED.take().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registrations_are_recorded_between_begin_and_end_only() {
        assert_eq!(timed_registration(1, || 7), 7);
        begin(Vec::new());
        assert_eq!(timed_registration(2, || 8), 8);
        let mut bytes = Vec::new();
        drain(|(start, end, len)| {
            assert!(start <= end);
            bytes.push(len);
        });
        assert_eq!(bytes, [2]);
        assert_eq!(end(), []);
        timed_registration(3, || ());
        drain(|_| panic!("nothing is recorded"));
    }
}
