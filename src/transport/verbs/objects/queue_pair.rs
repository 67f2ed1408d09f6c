//! A reliable connection between two ranks, its states as types.
//!
//! [`Fresh`] takes receives and knows its own end; [`Connected`] knows the peer's and takes writes. Every message
//! is an RDMA write with immediate data, so a receive needs no memory: it is only there to be completed.

use super::completion::CompletionQueue;
use super::protection_domain::ProtectionDomain;
use super::verb::{Site, Verb, errno, failed};
use super::{Context, Handle};
use crate::error::{Error, Result};
use crate::rank::Rank;
use rdma_sys::{
    ibv_access_flags, ibv_ah_attr, ibv_create_qp, ibv_destroy_qp, ibv_gid, ibv_global_route, ibv_modify_qp,
    ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as Mask, ibv_qp_cap,
    ibv_qp_init_attr, ibv_qp_state as State, ibv_qp_type, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge,
    ibv_wr_opcode, imm_data_invalidated_rkey_union_t, rdma_t, wr_t,
};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;

/// How many requests a queue pair takes before it must complete some.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depth {
    pub sends: u32,
    pub receives: u32,
    /// Bytes that shall fit into a request itself; fewer may.
    pub inline: u32,
}

/// One end of a connection, as the other must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Endpoint {
    /// The queue pair's number on its device.
    pub qpn: u32,
    /// The number of the first packet that it sends.
    pub psn: u32,
}

/// How a peer's port is reached from one of this rank's, and how patiently.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathAttributes {
    pub port: u8,
    pub gid_index: u8,
    /// The peer's port.
    pub gid: [u8; 16],
    pub lid: u16,
    /// Whether packets carry a global header: always on Ethernet, and between subnets.
    pub global: bool,
    /// As verbs number it.
    pub mtu: u32,
    pub service_level: u8,
    pub traffic_class: u8,
    /// An acknowledgement is waited for 4.096 us times two to the power of this.
    pub timeout: u8,
    pub retries: u8,
}

/// An RDMA write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteRequest {
    pub id: u64,
    pub from: u64,
    pub len: u32,
    pub lkey: u32,
    pub to: u64,
    pub rkey: u32,
    /// What completes a receive of the peer's; without it the peer does not notice the write.
    pub immediate: Option<u32>,
    /// Whether its completion is told. A failure always is.
    pub signalled: bool,
}

/// An RDMA read, whose completion is told.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadRequest {
    pub id: u64,
    pub from: u64,
    pub rkey: u32,
    pub into: u64,
    pub len: u32,
    pub lkey: u32,
}

/// The state of a queue pair that takes receives and is not connected.
pub(crate) struct Fresh;

/// The state of a queue pair that is connected, until it breaks.
pub(crate) struct Connected {
    inline: u32,
    /// Room for a chain of requests, so that posting one allocates nothing.
    chain: Vec<(ibv_send_wr, ibv_sge)>,
}

// SAFETY: the pointers in the chain point into the chain itself and are set anew whenever it is posted.
unsafe impl Send for Connected {}

/// A queue pair. Destroying it ends all access of the device to memory on its behalf.
pub(crate) struct QueuePair<S> {
    inner: Inner,
    state: S,
}

/// What a queue pair of no device was told to do, for tests that play the device.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct RecordedCalls {
    pub posted: Vec<WriteRequest>,
    pub receives: usize,
    pub in_error: bool,
}

/// What a queue pair consists of, whatever its state.
struct Inner {
    handle: Handle<ibv_qp>,
    depth: Depth,
    endpoint: Endpoint,
    site: Site,
    context: Arc<Context>,
    _queue: Arc<CompletionQueue>,
    _pd: Arc<ProtectionDomain>,
    #[cfg(test)]
    recorded: std::cell::RefCell<RecordedCalls>,
}

impl Inner {
    fn modify(&self, verb: Verb, attributes: &mut ibv_qp_attr, mask: Mask) -> Result<()> {
        let refused = |errno| Err(failed(verb, &self.site, errno));
        if let Some(errno) = self.context.shim.injected_errno(verb) {
            return refused(errno);
        }
        let Some(raw) = self.handle.raw() else {
            #[cfg(test)]
            if verb == Verb::ModifyQpToErr {
                self.recorded.borrow_mut().in_error = true;
            }
            return Ok(());
        };
        // SAFETY: the queue pair is alive, and the attributes are valid for the mask.
        match unsafe { ibv_modify_qp(raw, attributes, mask.0 as i32) } {
            0 => Ok(()),
            errno => refused(errno),
        }
    }

    fn post_recv(&mut self, id: u64, count: usize) -> Result<()> {
        let refused = |errno| Err(failed(Verb::PostRecv, &self.site, errno));
        for _ in 0..count {
            if let Some(errno) = self.context.shim.injected_errno(Verb::PostRecv) {
                return refused(errno);
            }
            let Some(raw) = self.handle.raw() else {
                #[cfg(test)]
                {
                    self.recorded.get_mut().receives += 1;
                }
                continue;
            };
            let mut request = ibv_recv_wr { wr_id: id, next: null_mut(), sg_list: null_mut(), num_sge: 0 };
            let mut bad = null_mut();
            // SAFETY: the queue pair is alive; the request, which names no memory, is copied before this returns.
            match unsafe { ibv_post_recv(raw, &raw mut request, &raw mut bad) } {
                0 => {}
                errno => return refused(errno),
            }
        }
        Ok(())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(raw) = self.handle.raw() {
            // SAFETY: the queue pair is alive and owned by this alone; completions of it that nobody has taken yet
            // go with it.
            let code = unsafe { ibv_destroy_qp(raw) };
            if code != 0 {
                let cause = std::io::Error::from_raw_os_error(code);
                log::warn!("cannot destroy a queue pair {}: {cause}", self.site);
            }
        }
    }
}

fn zeroed_attributes() -> ibv_qp_attr {
    // SAFETY: ibv_qp_attr consists of integers and of unions of them, for which zeros are valid.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

impl QueuePair<Fresh> {
    /// A queue pair at a port, all of whose completions go to `queue`.
    ///
    /// # Errors
    /// `System` if the device has none left.
    pub(crate) fn new(
        pd: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        depth: Depth,
        place: (u8, u16),
        peer: Rank,
        psn: u32,
    ) -> Result<Self> {
        let access = ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        Self::create(pd, queue, depth, place, (Some(peer), access), psn)
    }

    /// A queue pair that is to be connected to itself, and may read.
    ///
    /// # Errors
    /// `System` if the device has none left.
    pub(crate) fn loopback(
        pd: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        depth: Depth,
        place: (u8, u16),
    ) -> Result<Self> {
        Self::create(pd, queue, depth, place, (None, ibv_access_flags::IBV_ACCESS_REMOTE_READ), 0)
    }

    fn create(
        pd: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        depth: Depth,
        (port, pkey_index): (u8, u16),
        (peer, access): (Option<Rank>, ibv_access_flags),
        psn: u32,
    ) -> Result<Self> {
        let context = Arc::clone(pd.context());
        let site = Site { port: Some(port), peer, ..context.site() };
        let refused = |errno| failed(Verb::CreateQp, &site, errno);
        if let Some(errno) = context.shim.injected_errno(Verb::CreateQp) {
            return Err(refused(errno));
        }
        let (handle, qpn, inline) = match (pd.raw(), queue.raw()) {
            (Some(pd), Some(queue)) => {
                let mut attributes = ibv_qp_init_attr {
                    qp_context: null_mut(),
                    send_cq: queue,
                    recv_cq: queue,
                    srq: null_mut(),
                    cap: ibv_qp_cap {
                        max_send_wr: depth.sends,
                        max_recv_wr: depth.receives,
                        max_send_sge: 1,
                        max_recv_sge: 1,
                        max_inline_data: depth.inline,
                    },
                    qp_type: ibv_qp_type::IBV_QPT_RC,
                    sq_sig_all: 0,
                };
                // SAFETY: domain and queue are alive; the attributes may be read and written.
                let mut raw = unsafe { ibv_create_qp(pd, &raw mut attributes) };
                if raw.is_null() && depth.inline > 0 {
                    // There is no other way to learn how much a device takes than to ask for less.
                    attributes.cap.max_inline_data = 0;
                    // SAFETY: as above.
                    raw = unsafe { ibv_create_qp(pd, &raw mut attributes) };
                }
                let handle = Handle::returned(raw).ok_or_else(|| refused(errno()))?;
                // SAFETY: the queue pair was just made.
                (handle, unsafe { (*raw).qp_num }, attributes.cap.max_inline_data)
            }
            _ => (Handle(None), peer.unwrap_or_default() as u32, depth.inline),
        };
        let qp = Self {
            inner: Inner {
                handle,
                depth: Depth { inline, ..depth },
                endpoint: Endpoint { qpn, psn },
                site,
                context,
                _queue: Arc::clone(queue),
                _pd: Arc::clone(pd),
                #[cfg(test)]
                recorded: std::cell::RefCell::default(),
            },
            state: Fresh,
        };
        let mut attributes = zeroed_attributes();
        attributes.qp_state = State::IBV_QPS_INIT;
        attributes.pkey_index = pkey_index;
        attributes.port_num = port;
        attributes.qp_access_flags = access.0;
        let mask =
            Mask::IBV_QP_STATE | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS;
        qp.inner.modify(Verb::ModifyQpToInit, &mut attributes, mask)?;
        Ok(qp)
    }

    /// This end, as the peer must know it.
    pub(crate) fn endpoint(&self) -> Endpoint {
        self.inner.endpoint
    }

    /// Posts as many receives as fit, each numbered `id`, and connects to the peer's end.
    ///
    /// # Errors
    /// `System` if the device refuses or the peer's address cannot be resolved.
    pub(crate) fn connect(
        mut self,
        id: u64,
        peer: Endpoint,
        path: &PathAttributes,
    ) -> Result<QueuePair<Connected>> {
        self.inner.post_recv(id, self.inner.depth.receives as usize)?;
        let mut attributes = zeroed_attributes();
        attributes.qp_state = State::IBV_QPS_RTR;
        attributes.path_mtu = path.mtu;
        attributes.dest_qp_num = peer.qpn;
        attributes.rq_psn = peer.psn;
        attributes.max_dest_rd_atomic = 1;
        attributes.min_rnr_timer = 12;
        attributes.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: path.gid },
                flow_label: 0,
                sgid_index: path.gid_index,
                hop_limit: 64,
                traffic_class: path.traffic_class,
            },
            dlid: path.lid,
            sl: path.service_level,
            src_path_bits: 0,
            static_rate: 0,
            is_global: u8::from(path.global),
            port_num: path.port,
        };
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        self.inner.modify(Verb::ModifyQpToRtr, &mut attributes, mask)?;
        let mut attributes = zeroed_attributes();
        attributes.qp_state = State::IBV_QPS_RTS;
        attributes.timeout = path.timeout;
        attributes.retry_cnt = path.retries;
        attributes.rnr_retry = path.retries;
        attributes.sq_psn = self.inner.endpoint.psn;
        attributes.max_rd_atomic = 1;
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.inner.modify(Verb::ModifyQpToRts, &mut attributes, mask)?;
        let Depth { sends, inline, .. } = self.inner.depth;
        let state = Connected { inline, chain: Vec::with_capacity(sends as usize) };
        Ok(QueuePair { inner: self.inner, state })
    }
}

impl QueuePair<Connected> {
    /// Posts requests as one chain, at most as many as the queue pair takes.
    ///
    /// # Errors
    /// `System` if the device refuses, with the number of requests that it took before.
    pub(crate) fn post_send(&mut self, requests: &[WriteRequest]) -> std::result::Result<(), (usize, Error)> {
        if requests.is_empty() {
            return Ok(());
        }
        let Connected { inline, chain } = &mut self.state;
        chain.clear();
        chain.extend(requests.iter().map(|request| work_request(request, *inline)));
        self.post_chain()?;
        #[cfg(test)]
        if self.inner.handle.raw().is_none() {
            self.inner.recorded.get_mut().posted.extend_from_slice(requests);
        }
        Ok(())
    }

    /// Posts a read.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn post_read(&mut self, request: &ReadRequest) -> Result<()> {
        let ReadRequest { id, from, rkey, into, len, lkey } = *request;
        let write =
            WriteRequest { id, from: into, len, lkey, to: from, rkey, immediate: None, signalled: true };
        // Reads name the same things as writes; only the bytes go the other way, so they cannot go along.
        let (mut wr, sge) = work_request(&write, 0);
        wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_READ;
        self.state.chain.clear();
        self.state.chain.push((wr, sge));
        self.post_chain().map_err(|(_, error)| error)
    }

    /// Posts what is in the chain.
    fn post_chain(&mut self) -> std::result::Result<(), (usize, Error)> {
        let refused = |taken, errno| Err((taken, failed(Verb::PostSend, &self.inner.site, errno)));
        if let Some(errno) = self.inner.context.shim.injected_errno(Verb::PostSend) {
            return refused(0, errno);
        }
        let Some(raw) = self.inner.handle.raw() else { return Ok(()) };
        let chain = &mut self.state.chain;
        for index in 0..chain.len() {
            let sge = &raw mut chain[index].1;
            // Of no bytes a device need not be told where they are.
            let empty = chain[index].1.length == 0;
            chain[index].0.sg_list = if empty { null_mut() } else { sge };
            chain[index].0.num_sge = i32::from(!empty);
            chain[index].0.next =
                chain.get_mut(index + 1).map_or(null_mut(), |(next, _)| std::ptr::from_mut(next));
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair is alive. The requests and their lists lie in the chain, which is not touched until
        // this returns, and are copied by then. The memory they name is registered, and stays so and unchanged
        // until their completion: links keep the region of each piece until then.
        match unsafe { ibv_post_send(raw, &raw mut chain[0].0, &raw mut bad) } {
            0 => Ok(()),
            errno => {
                let taken = chain.iter().position(|(request, _)| std::ptr::eq(request, bad)).unwrap_or(0);
                refused(taken, errno)
            }
        }
    }

    /// Posts one receive in place of one that was completed.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn post_recv(&mut self, id: u64) -> Result<()> {
        self.inner.post_recv(id, 1)
    }

    /// Breaks the connection: nothing that the peer sends is carried out any more, and all requests complete.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn move_to_error(&mut self) -> Result<()> {
        self.enter(State::IBV_QPS_ERR, Verb::ModifyQpToErr)
    }

    /// Has the device forget all that came and all that was asked for, once the connection is broken.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.enter(State::IBV_QPS_RESET, Verb::ModifyQpToReset)
    }

    /// Enters a state that needs no other attribute.
    fn enter(&self, state: State::Type, verb: Verb) -> Result<()> {
        let mut attributes = zeroed_attributes();
        attributes.qp_state = state;
        self.inner.modify(verb, &mut attributes, Mask::IBV_QP_STATE)
    }

    /// What this was told since this was last asked. Of an inert one only.
    #[cfg(test)]
    pub(crate) fn recorded_calls(&mut self) -> RecordedCalls {
        std::mem::take(self.inner.recorded.get_mut())
    }
}

fn work_request(request: &WriteRequest, inline: u32) -> (ibv_send_wr, ibv_sge) {
    let mut flags = 0;
    if request.signalled {
        flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
    }
    if request.len <= inline && request.len > 0 {
        flags |= ibv_send_flags::IBV_SEND_INLINE.0;
    }
    // SAFETY: ibv_send_wr consists of integers, pointers and unions of them, for which zeros are valid.
    let mut wr: ibv_send_wr = unsafe { MaybeUninit::zeroed().assume_init() };
    wr.wr_id = request.id;
    wr.opcode = match request.immediate {
        Some(_) => ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        None => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
    };
    wr.send_flags = flags;
    let imm_data = request.immediate.unwrap_or(0).to_be();
    wr.imm_data_invalidated_rkey_union = imm_data_invalidated_rkey_union_t { imm_data };
    wr.wr = wr_t { rdma: rdma_t { remote_addr: request.to, rkey: request.rkey } };
    (wr, ibv_sge { addr: request.from, length: request.len, lkey: request.lkey })
}
