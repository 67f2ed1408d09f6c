//! The calls that move data. flexring checks their buffers.

use crate::calls::{Call, CallKind};
use crate::group;
use crate::handles;
use crate::status::{Failure, Outcome, nccl_functions};
use crate::types::{NCCL_NUM_TYPES, cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

/// The arguments of a call, as the caller passed them.
struct Arguments {
    function: &'static str,
    kind: CallKind,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    datatype: ncclDataType_t,
    /// `None` for calls that do not reduce.
    op: Option<ncclRedOp_t>,
    root: c_int,
    stream: cudaStream_t,
}

impl Arguments {
    /// Makes the call, or defers it to the end of the group. What can be checked without the buffers is
    /// checked at once.
    ///
    /// # Safety
    /// The buffers and the stream are valid until the stream has passed the call.
    unsafe fn make(self, handle: ncclComm_t) -> Outcome<ncclResult_t> {
        let Self { function, kind, send, recv, count, datatype, op, root, stream } = self;
        let comm = handles::find(handle)?;
        let world = comm.ready()?.world;
        let dtype = checked_type(datatype)?;
        let op = match op {
            Some(op) => crate::red_op::lock(&comm).flexring_op(op, dtype)?,
            None => 0,
        };
        let call = Call { kind, function, send, recv, count, dtype, op, root, stream };
        if let Some(name) = call.root_name().filter(|_| !(0..world).contains(&root)) {
            return Err(Failure::argument(format!(
                "{name} is {root}, but there are {world} ranks, numbered from 0"
            )));
        }
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { group::call(comm, call) }
    }
}

/// An element type. NCCL and flexring have the same numbers for NCCL's types.
pub(crate) fn checked_type(datatype: ncclDataType_t) -> Outcome<c_int> {
    if (0..NCCL_NUM_TYPES).contains(&datatype) {
        return Ok(datatype);
    }
    Err(Failure::argument(format!("{datatype} is no ncclDataType_t: expected 0 to {}", NCCL_NUM_TYPES - 1)))
}

nccl_functions! { guarded_in_group:
    /// Reduces vectors of all ranks onto all ranks.
    fn ncclAllReduce / pncclAllReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t,
    ) {
        let (function, kind) = ("ncclAllReduce", CallKind::AllReduce);
        let call = Arguments { function, kind, send: sendbuff, recv: recvbuff, count, datatype, op: Some(op), root: 0, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// Copies the root's vector to all ranks.
    fn ncclBroadcast / pncclBroadcast(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t,
    ) {
        let (function, kind) = ("ncclBroadcast", CallKind::Broadcast);
        let call = Arguments { function, kind, send: sendbuff, recv: recvbuff, count, datatype, op: None, root, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// `ncclBroadcast` in place.
    fn ncclBcast / pncclBcast(
        buff: *mut c_void, count: usize, datatype: ncclDataType_t, root: c_int, comm: ncclComm_t,
        stream: cudaStream_t,
    ) {
        let (function, kind) = ("ncclBroadcast", CallKind::Broadcast);
        let call = Arguments { function, kind, send: buff, recv: buff, count, datatype, op: None, root, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// Reduces vectors of all ranks onto the root.
    fn ncclReduce / pncclReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, root: c_int, comm: ncclComm_t, stream: cudaStream_t,
    ) {
        let (function, kind) = ("ncclReduce", CallKind::Reduce);
        let call = Arguments { function, kind, send: sendbuff, recv: recvbuff, count, datatype, op: Some(op), root, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// Concatenates vectors of all ranks on all ranks.
    fn ncclAllGather / pncclAllGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t,
    ) {
        let (function, kind, count) = ("ncclAllGather", CallKind::AllGather, sendcount);
        let call = Arguments { function, kind, send: sendbuff, recv: recvbuff, count, datatype, op: None, root: 0, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// Reduces vectors of all ranks; each rank gets one part.
    fn ncclReduceScatter / pncclReduceScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: ncclDataType_t,
        op: ncclRedOp_t, comm: ncclComm_t, stream: cudaStream_t,
    ) {
        let (function, kind, count) = ("ncclReduceScatter", CallKind::ReduceScatter, recvcount);
        let call = Arguments { function, kind, send: sendbuff, recv: recvbuff, count, datatype, op: Some(op), root: 0, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// Sends one block to each rank, and receives one from each.
    fn ncclAlltoAll / pncclAlltoAll(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        comm: ncclComm_t, stream: cudaStream_t,
    ) {
        let (function, kind) = ("ncclAlltoAll", CallKind::AllToAll);
        let call = Arguments { function, kind, send: sendbuff, recv: recvbuff, count, datatype, op: None, root: 0, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// Concatenates vectors of all ranks on the root.
    fn ncclGather / pncclGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t,
    ) {
        let (function, kind) = ("ncclGather", CallKind::Gather);
        let call = Arguments { function, kind, send: sendbuff, recv: recvbuff, count, datatype, op: None, root, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// Gives each rank one part of the root's vector.
    fn ncclScatter / pncclScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t,
        root: c_int, comm: ncclComm_t, stream: cudaStream_t,
    ) {
        let (function, kind) = ("ncclScatter", CallKind::Scatter);
        let call = Arguments { function, kind, send: sendbuff, recv: recvbuff, count, datatype, op: None, root, stream };
        // SAFETY: the caller guarantees buffers and stream.
        unsafe { call.make(comm) }
    }

    /// Sends a vector to a peer, which receives it.
    fn ncclSend / pncclSend(
        sendbuff: *const c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t,
    ) {
        let (function, kind, recv) = ("ncclSend", CallKind::Send, null_mut());
        let call = Arguments { function, kind, send: sendbuff, recv, count, datatype, op: None, root: peer, stream };
        // SAFETY: the caller guarantees buffer and stream.
        unsafe { call.make(comm) }
    }

    /// Receives a vector that a peer sends.
    fn ncclRecv / pncclRecv(
        recvbuff: *mut c_void, count: usize, datatype: ncclDataType_t, peer: c_int, comm: ncclComm_t,
        stream: cudaStream_t,
    ) {
        let (function, kind, send) = ("ncclRecv", CallKind::Recv, null());
        let call = Arguments { function, kind, send, recv: recvbuff, count, datatype, op: None, root: peer, stream };
        // SAFETY: the caller guarantees buffer and stream.
        unsafe { call.make(comm) }
    }
}
