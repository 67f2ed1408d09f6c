//! RDMA writes and reads, and the libibverbs work requests made from them.
//!
//! Owns the translation.

use super::bindings::{
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
    ibv_send_wr, ibv_sge, imm_data_invalidated_rkey_union_t, rdma_t, wr_t,
};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// An RDMA write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteRequest {
    /// Returned by the completion.
    pub id: u64,
    /// Local address.
    pub from: u64,
    /// Bytes.
    pub len: u32,
    pub lkey: u32,
    /// Remote address.
    pub to: u64,
    pub rkey: u32,
    /// Immediate data, which completes a receive of the peer. Without it, the peer does not notice the write.
    pub immediate: Option<u32>,
    /// Whether a successful write causes a completion. A failed one always does.
    pub signalled: bool,
}

/// An RDMA read. It always causes a completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadRequest {
    /// Returned by the completion.
    pub id: u64,
    /// Remote address.
    pub from: u64,
    pub rkey: u32,
    /// Local address.
    pub into: u64,
    /// Bytes.
    pub len: u32,
    pub lkey: u32,
}

/// A linked list of work requests, in memory that is reused so that posting allocates nothing.
pub(super) struct Chain(Vec<(ibv_send_wr, ibv_sge)>);

// SAFETY: the pointers in the chain point into the chain itself and are set by `link` whenever it is posted.
unsafe impl Send for Chain {}

impl Chain {
    pub(super) fn with_capacity(requests: usize) -> Self {
        Self(Vec::with_capacity(requests))
    }

    /// Replaces the contents with writes. Those of at most `inline` bytes carry their data in the request
    /// itself.
    pub(super) fn set_writes(&mut self, requests: &[WriteRequest], inline: u32) {
        self.0.clear();
        self.0.extend(requests.iter().map(|request| work_request(request, inline)));
    }

    /// Replaces the contents with one read.
    pub(super) fn set_read(&mut self, request: &ReadRequest) {
        let ReadRequest { id, from, rkey, into, len, lkey } = *request;
        let write =
            WriteRequest { id, from: into, len, lkey, to: from, rkey, immediate: None, signalled: true };
        // A read has the same fields as a write. Its data flows to this rank, so it cannot be inline.
        let (mut wr, sge) = work_request(&write, 0);
        wr.opcode = IBV_WR_RDMA_READ;
        self.0.clear();
        self.0.push((wr, sge));
    }

    /// Links the requests and returns the first. The pointer is valid until the chain is changed or moved.
    ///
    /// # Panics
    /// If the chain is empty.
    pub(super) fn link(&mut self) -> *mut ibv_send_wr {
        let chain = &mut self.0;
        for index in 0..chain.len() {
            let sge = &raw mut chain[index].1;
            // A request without data has no scatter/gather list.
            let empty = chain[index].1.length == 0;
            chain[index].0.sg_list = if empty { null_mut() } else { sge };
            chain[index].0.num_sge = i32::from(!empty);
            chain[index].0.next =
                chain.get_mut(index + 1).map_or(null_mut(), |(next, _)| std::ptr::from_mut(next));
        }
        &raw mut chain[0].0
    }

    /// The position of a request that `ibv_post_send` returned; 0 if it is not part of the chain.
    pub(super) fn position(&self, of: *mut ibv_send_wr) -> usize {
        self.0.iter().position(|(request, _)| std::ptr::eq(request, of)).unwrap_or(0)
    }
}

fn work_request(request: &WriteRequest, inline: u32) -> (ibv_send_wr, ibv_sge) {
    let mut flags = 0;
    if request.signalled {
        flags |= IBV_SEND_SIGNALED;
    }
    if request.len <= inline && request.len > 0 {
        flags |= IBV_SEND_INLINE;
    }
    // SAFETY: ibv_send_wr consists of integers, pointers and unions of them, for which zeros are valid.
    let mut wr: ibv_send_wr = unsafe { MaybeUninit::zeroed().assume_init() };
    wr.wr_id = request.id;
    wr.opcode = match request.immediate {
        Some(_) => IBV_WR_RDMA_WRITE_WITH_IMM,
        None => IBV_WR_RDMA_WRITE,
    };
    wr.send_flags = flags;
    let imm_data = request.immediate.unwrap_or(0).to_be();
    wr.imm_data_invalidated_rkey_union = imm_data_invalidated_rkey_union_t { imm_data };
    wr.wr = wr_t { rdma: rdma_t { remote_addr: request.to, rkey: request.rkey } };
    (wr, ibv_sge { addr: request.from, length: request.len, lkey: request.lkey })
}
