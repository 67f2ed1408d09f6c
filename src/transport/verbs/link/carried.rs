//! Which queue pair carried each write of one epoch, as long as the peer may not have received it.
//!
//! Owns the answer to what is lost with a queue pair whose completions never came.

use super::super::wire::WINDOW;
use super::request::RequestKind;

/// A write, and the index of the queue pair that it was posted to last.
type CarriedWrite = Option<(u8, RequestKind)>;

/// The writes of one epoch that the peer may not have received. Those of an earlier epoch with the same
/// parity remain until they are replaced; recovery skips them.
#[derive(Debug)]
pub(super) struct CarriedWrites {
    call: CarriedWrite,
    /// By message number modulo the window: the message, and the CTS entry for the peer's message.
    messages: [CarriedWrite; WINDOW],
    cts: [CarriedWrite; WINDOW],
}

impl Default for CarriedWrites {
    fn default() -> Self {
        Self { call: None, messages: [None; WINDOW], cts: [None; WINDOW] }
    }
}

impl CarriedWrites {
    /// Notes the queue pair of a write.
    pub(super) fn set(&mut self, kind: RequestKind, qp: usize) {
        let on_qp = |kind| Some((qp as u8, kind));
        match kind {
            RequestKind::Call { .. } => self.call = on_qp(kind),
            RequestKind::EagerCall { epoch, len } => {
                // Either may be lost without the other being missing at the peer.
                self.call = on_qp(RequestKind::Call { epoch });
                self.messages[0] = on_qp(RequestKind::Eager { epoch, message: 0, len });
            }
            RequestKind::Eager { message, .. } | RequestKind::Data { message, .. } => {
                self.messages[message as usize % WINDOW] = on_qp(kind);
            }
            RequestKind::Cts { epoch, from, to } => {
                for message in from..to {
                    let kind = RequestKind::Cts { epoch, from: message, to: message + 1 };
                    self.cts[message as usize % WINDOW] = on_qp(kind);
                }
            }
            RequestKind::Recovery { .. }
            | RequestKind::Hello
            | RequestKind::Trial
            | RequestKind::Goodbye
            | RequestKind::Probe => {}
        }
    }

    /// Removes the writes of a queue pair, the call first, messages and CTS entries in no particular order.
    pub(super) fn take(&mut self, qp: usize) -> Vec<RequestKind> {
        let all = [&mut self.call].into_iter().chain(&mut self.messages).chain(&mut self.cts);
        all.filter_map(|write| write.take_if(|(on, _)| usize::from(*on) == qp))
            .map(|(_, kind)| kind)
            .collect()
    }
}
