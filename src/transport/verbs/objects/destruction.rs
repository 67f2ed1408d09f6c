//! Destroying queue pairs in a thread of its own: a driver may wait for packets that cannot be sent.
//!
//! Owns the thread.

use crate::process;
use std::sync::{Arc, Weak};

/// Progress of a destruction in another thread. The default value is complete.
#[derive(Debug, Default)]
pub(crate) struct Destruction(Weak<()>);

impl Destruction {
    /// Drops a value in a thread. Without a thread, drops it at once.
    pub(crate) fn begin(value: impl Send + 'static) -> Self {
        let (destruction, unfinished) = Self::unfinished();
        // The fields are dropped in this order.
        let owned = (value, unfinished);
        let builder = std::thread::Builder::new().name("flexring-drop".to_owned());
        if let Err(cause) = process::spawn(builder, move || drop(owned)) {
            log::debug!("verbs: queue pairs are destroyed without a thread: {cause}");
        }
        destruction
    }

    /// A destruction that is over once the other value is dropped.
    pub(crate) fn unfinished() -> (Self, Arc<()>) {
        let unfinished = Arc::new(());
        (Self(Arc::downgrade(&unfinished)), unfinished)
    }

    /// Whether everything is destroyed, so that no device accesses memory on its behalf any more.
    pub(crate) fn is_over(&self) -> bool {
        self.0.strong_count() == 0
    }
}
