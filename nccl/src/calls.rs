//! One call that moves data, with its arguments in flexring's terms.

use crate::comm::Live;
use crate::status::{Outcome, check};
use flexring_ffi::collectives::{
    flexring_all_gather, flexring_all_reduce, flexring_broadcast, flexring_reduce, flexring_reduce_scatter,
};
use flexring_ffi::exchanges::{flexring_all_to_all, flexring_gather, flexring_scatter};
use flexring_ffi::groups::{flexring_recv, flexring_send};
use flexring_ffi::types::{flexring_dtype, flexring_op};
use std::ffi::{c_int, c_void};

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Send,
    Recv,
}

/// A call. The count is what NCCL's function of that name takes.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub kind: CallKind,
    /// Its name in NCCL, for errors at the end of a group.
    pub function: &'static str,
    pub send: *const c_void,
    pub recv: *mut c_void,
    pub count: usize,
    pub dtype: flexring_dtype,
    /// Not used by calls that do not reduce.
    pub op: flexring_op,
    /// The root, or the peer of a send or receive. Not used by other calls.
    pub root: c_int,
    pub stream: *mut c_void,
}

// SAFETY: the pointers are not used but by flexring, which accepts them in any thread.
unsafe impl Send for Call {}

impl Call {
    /// What `root` is called in errors; `None` if it is not used.
    pub(crate) fn root_name(&self) -> Option<&'static str> {
        match self.kind {
            CallKind::Broadcast | CallKind::Reduce | CallKind::Gather | CallKind::Scatter => Some("root"),
            CallKind::Send | CallKind::Recv => Some("peer"),
            CallKind::AllReduce | CallKind::AllGather | CallKind::ReduceScatter | CallKind::AllToAll => None,
        }
    }

    /// Whether it concerns one peer only.
    pub(crate) fn is_message(&self) -> bool {
        matches!(self.kind, CallKind::Send | CallKind::Recv)
    }

    /// Makes the call. It returns when it is in its stream.
    ///
    /// # Safety
    /// The buffers and the stream are valid until the stream has passed the call.
    pub(crate) unsafe fn run(&self, live: &Live) -> Outcome {
        let Self { kind, send, recv, count, dtype, op, root, stream, .. } = *self;
        let comm = live.handle();
        // SAFETY: the handle is live; the caller guarantees the rest.
        let result = unsafe {
            match kind {
                CallKind::AllReduce => flexring_all_reduce(send, recv, count, dtype, op, comm, stream),
                CallKind::Broadcast => flexring_broadcast(send, recv, count, dtype, root, comm, stream),
                CallKind::Reduce => flexring_reduce(send, recv, count, dtype, op, root, comm, stream),
                CallKind::AllGather => flexring_all_gather(send, recv, count, dtype, comm, stream),
                CallKind::ReduceScatter => {
                    flexring_reduce_scatter(send, recv, count, dtype, op, comm, stream)
                }
                CallKind::AllToAll => flexring_all_to_all(send, recv, count, dtype, comm, stream),
                CallKind::Gather => flexring_gather(send, recv, count, dtype, root, comm, stream),
                CallKind::Scatter => flexring_scatter(send, recv, count, dtype, root, comm, stream),
                CallKind::Send => flexring_send(send, count, dtype, root, comm, stream),
                CallKind::Recv => flexring_recv(recv, count, dtype, root, comm, stream),
            }
        };
        check(result)
    }
}
