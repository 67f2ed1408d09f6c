//! What the models of the words of GPUs' kernels share: plain memory, and two threads under every
//! interleaving.
//!
//! Owns how a model is checked, and that a broken rule must fail. Must not know a protocol.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::sync::atomic::{AtomicU64 as Untracked, Ordering::Relaxed as Unordered};

/// A value that is not atomic. loom fails when two threads access it, one of them to write, without an order
/// between them.
#[derive(Debug, Default)]
pub struct Plain {
    accesses: UnsafeCell<()>,
    value: Untracked,
}

impl Plain {
    pub fn get(&self) -> u64 {
        self.accesses.with(|_| self.value.load(Unordered))
    }

    pub fn set(&self, value: u64) {
        self.accesses.with_mut(|_| self.value.store(value, Unordered));
    }
}

/// Runs two threads, and `end` after them, under every interleaving with at most this number of preemptions;
/// polls switch threads without one. Panics if one is wrong, or if none runs to its end.
pub fn explore<M: 'static>(
    preemptions: usize,
    memory: impl Fn() -> M + Send + Sync + 'static,
    first: impl Fn(&Arc<M>) -> Option<()> + Send + Sync + 'static,
    second: impl Fn(&Arc<M>) -> Option<()> + Copy + Send + Sync + 'static,
    end: impl Fn(&M) -> Option<()> + Send + Sync + 'static,
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    let complete = std::sync::Arc::new(Untracked::new(0));
    let counter = std::sync::Arc::clone(&complete);
    model.check(move || {
        let memory = Arc::new(memory());
        let other = Arc::clone(&memory);
        let other = thread::spawn(move || second(&other));
        let first = first(&memory);
        if other.join().unwrap().and(first).and_then(|()| end(&memory)).is_some() {
            counter.fetch_add(1, Unordered);
        }
    });
    assert_ne!(complete.load(Unordered), 0, "no interleaving runs to its end");
}

/// What each of these changes breaks: tests that must fail, of a module with a function `check`.
macro_rules! mutants {
    ($($name:ident: $scenario:ident, $field:ident = $value:expr, $panic:literal;)*) => {
        mod mutants {
            use super::*;
            $(
                #[test]
                #[should_panic(expected = $panic)]
                fn $name() {
                    check($scenario, |rules| rules.$field = $value);
                }
            )*
        }
    };
}
pub(crate) use mutants;
