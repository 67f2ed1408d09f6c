//! A queue pair: a reliable connection between two ranks, its states as types.
//!
//! A [`Fresh`] queue pair has its own endpoint and accepts receives. A [`Connected`] one also has the peer's
//! endpoint and accepts writes. Every message is an RDMA write with immediate data, so a posted receive needs
//! no memory: it exists to be completed.

use super::bindings::{
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN,
    IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU,
    IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN,
    IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS,
    IBV_QPT_RC, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr,
    ibv_recv_wr,
};
use super::completion::CompletionQueue;
use super::context::Context;
use super::destruction::Destruction;
use super::handle::VerbsHandle;
use super::library::{ibv_post_recv, ibv_post_send};
use super::protection_domain::ProtectionDomain;
use super::verb::{CallSite, Verb, errno, failed};
use super::work_request::{Chain, ReadRequest, WriteRequest};
use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::transport::verbs::inventory::{GidKind, gid_index};
use std::mem::MaybeUninit;
use std::net::Ipv6Addr;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

/// The capacity of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depth {
    /// Writes and reads that are posted and not completed.
    pub sends: u32,
    /// Receives that are posted and not completed.
    pub receives: u32,
    /// Bytes that a request can carry inline. The device may provide fewer.
    pub inline: u32,
}

/// One end of a connection; the peer needs it to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Endpoint {
    /// The number of the queue pair on its device.
    pub qpn: u32,
    /// The packet sequence number of the first packet that it sends, 24 bits.
    pub psn: u32,
}

/// The path from a local port to a peer's port (`ibv_ah_attr`), with MTU and retries, and how messages are
/// written to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathAttributes {
    /// The local port, from 1.
    pub port: u8,
    /// The index of the local GID when the communicator was created.
    pub gid_index: u8,
    /// On Ethernet, the local GID, whose index may change.
    pub own_gid: Option<([u8; 16], GidKind)>,
    /// The GID of the peer's port.
    pub gid: [u8; 16],
    /// The LID of the peer's port, or its FLID if it is in another subnet; 0 on Ethernet.
    pub lid: u16,
    /// Whether packets have a global routing header: always on Ethernet, between InfiniBand subnets, and
    /// where the port needs it.
    pub global: bool,
    /// Numbered as `ibv_mtu`: 1 is 256 bytes, 5 is 4096.
    pub mtu: u32,
    pub service_level: u8,
    pub traffic_class: u8,
    /// The acknowledgement timeout is 4.096 us times two to the power of this.
    pub timeout: u8,
    pub retries: u8,
    /// Messages of more bytes are written apart from their immediate data, so that switches may route them
    /// adaptively. `None`: no message is.
    pub split_above: Option<usize>,
}

/// How often a device repeats a request for which the peer has no receive: without end. A slow peer is not a
/// lost one, and credits make this rare.
const FOREVER: u8 = 7;

/// The state of a queue pair that accepts receives and is not connected.
pub(crate) struct Fresh;

/// The state of a queue pair that is connected, or was until an error.
pub(crate) struct Connected {
    /// Bytes that a request can carry inline.
    inline: u32,
    chain: Chain,
    /// The number of the peer's queue pair on its device.
    peer_qpn: u32,
}

/// A queue pair. Once it is destroyed, the device no longer accesses memory on its behalf.
pub(crate) struct QueuePair<S> {
    inner: Inner,
    state: S,
}

/// What a queue pair is created from, to create one in its place.
#[derive(Clone)]
pub(crate) struct QueuePairSpec {
    pd: Arc<ProtectionDomain>,
    queue: Arc<CompletionQueue>,
    depth: Depth,
    /// The port's number and the index of the partition key.
    port: (u8, u16),
    peer: Rank,
}

impl QueuePairSpec {
    /// Creates a queue pair, as [`QueuePair::new`].
    ///
    /// # Errors
    /// `System` if the device has none left.
    pub(crate) fn create(&self, psn: u32) -> Result<QueuePair<Fresh>> {
        QueuePair::new(&self.pd, &self.queue, self.depth, self.port, self.peer, psn)
    }
}

/// The calls that a queue pair without a device received, for tests that simulate the device.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct RecordedCalls {
    pub posted: Vec<WriteRequest>,
    /// Receives that were posted.
    pub receives: usize,
    /// Whether it was moved to the error state.
    pub in_error: bool,
}

/// The part of a queue pair that is common to all states.
struct Inner {
    handle: VerbsHandle<ibv_qp>,
    depth: Depth,
    endpoint: Endpoint,
    site: CallSite,
    context: Arc<Context>,
    /// The index of the partition key.
    pkey_index: u16,
    queue: Arc<CompletionQueue>,
    pd: Arc<ProtectionDomain>,
    #[cfg(test)]
    recorded: std::cell::RefCell<RecordedCalls>,
}

impl Inner {
    fn modify(&self, verb: Verb, attributes: &mut ibv_qp_attr, mask: u32) -> Result<()> {
        let error = |errno| Err(failed(verb, &self.site, errno));
        if let Some(errno) = self.context.shim.injected_errno(verb) {
            return error(errno);
        }
        self.context.shim.modified(verb, attributes);
        let Some((raw, library)) = self.handle.raw() else {
            #[cfg(test)]
            if verb == Verb::ModifyQpToErr {
                self.recorded.borrow_mut().in_error = true;
            }
            return Ok(());
        };
        // SAFETY: the queue pair is alive, and the attributes are valid for the mask.
        match unsafe { (library.ibv_modify_qp)(raw, attributes, mask as i32) } {
            0 => Ok(()),
            errno => error(errno),
        }
    }

    /// The index of the local GID now.
    fn gid_index(&self, path: &PathAttributes) -> Result<u8> {
        let (Some(own), Some(_)) = (path.own_gid, self.handle.raw()) else { return Ok(path.gid_index) };
        gid_index(Path::new("/"), self.context.name(), path.port, own, path.gid_index).ok_or_else(|| {
            let gone = format!("port {} of {} has lost its address", path.port, self.context.name());
            Error::system(format!("{gone} {}: is its interface up?", Ipv6Addr::from(own.0).to_canonical()))
        })
    }

    /// Posts this many receives as one chain.
    fn post_recv(&mut self, id: u64, count: usize) -> Result<()> {
        let error = |errno| Err(failed(Verb::PostRecv, &self.site, errno));
        if let Some(errno) = self.context.shim.injected_errno(Verb::PostRecv) {
            return error(errno);
        }
        let Some((raw, _)) = self.handle.raw() else {
            #[cfg(test)]
            {
                self.recorded.get_mut().receives += count;
            }
            return Ok(());
        };
        let request = ibv_recv_wr { wr_id: id, next: null_mut(), sg_list: null_mut(), num_sge: 0 };
        // A receive that replaces another one is posted without an allocation.
        let (mut one, mut many) = ([request], Vec::new());
        let chain: &mut [ibv_recv_wr] = if count == 1 {
            &mut one
        } else {
            many.resize(count, request);
            &mut many
        };
        let Some(last) = chain.len().checked_sub(1) else { return Ok(()) };
        let first = chain.as_mut_ptr();
        for index in 0..last {
            // SAFETY: both indexes are within the chain.
            unsafe { (*first.add(index)).next = first.add(index + 1) };
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair is alive; the requests, which refer to no memory, are copied before this
        // returns.
        match unsafe { ibv_post_recv(raw, first, &mut bad) } {
            0 => Ok(()),
            errno => error(errno),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some((raw, library)) = self.handle.raw() {
            // SAFETY: the queue pair is alive and has this one owner. Its completions that were not polled
            // are removed with it.
            let code = unsafe { (library.ibv_destroy_qp)(raw) };
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

impl<S: Send + 'static> QueuePair<S> {
    /// Destroys the queue pair in a thread of its own.
    pub(crate) fn destroy_in_background(self) -> Destruction {
        if self.inner.handle.raw().is_none() { Destruction::default() } else { Destruction::begin(self) }
    }

    /// What it was created from.
    pub(crate) fn spec(&self) -> QueuePairSpec {
        let Inner { site, pkey_index, queue, pd, depth, .. } = &self.inner;
        QueuePairSpec {
            pd: Arc::clone(pd),
            queue: Arc::clone(queue),
            depth: *depth,
            port: (site.port.unwrap_or(1), *pkey_index),
            peer: site.peer.unwrap_or_default(),
        }
    }
}

impl QueuePair<Fresh> {
    /// Creates a queue pair in the INIT state; `port` is the port's number and the index of the partition
    /// key. `queue` receives all its completions.
    ///
    /// # Errors
    /// `System` if the device has none left.
    pub(crate) fn new(
        pd: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        depth: Depth,
        port: (u8, u16),
        peer: Rank,
        psn: u32,
    ) -> Result<Self> {
        let access = IBV_ACCESS_REMOTE_WRITE;
        Self::create(pd, queue, depth, port, (Some(peer), access), psn)
    }

    /// Creates a queue pair that can be connected to itself, and that accepts RDMA reads and writes. `port`
    /// is as in
    /// [`new`](Self::new).
    ///
    /// # Errors
    /// `System` if the device has none left.
    pub(crate) fn loopback(
        pd: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        depth: Depth,
        port: (u8, u16),
    ) -> Result<Self> {
        Self::create(pd, queue, depth, port, (None, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE), 0)
    }

    fn create(
        pd: &Arc<ProtectionDomain>,
        queue: &Arc<CompletionQueue>,
        depth: Depth,
        (port, pkey_index): (u8, u16),
        (peer, access): (Option<Rank>, u32),
        psn: u32,
    ) -> Result<Self> {
        let context = Arc::clone(pd.context());
        let site = CallSite { port: Some(port), peer, ..context.site() };
        let error = |errno| failed(Verb::CreateQp, &site, errno);
        if let Some(errno) = context.shim.injected_errno(Verb::CreateQp) {
            return Err(error(errno));
        }
        let (handle, qpn, inline) = match (pd.raw(), queue.raw()) {
            (Some((pd, library)), Some((queue, _))) => {
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
                    qp_type: IBV_QPT_RC,
                    sq_sig_all: 0,
                };
                // SAFETY: domain and queue are alive; the attributes are valid for reads and writes.
                let mut raw = unsafe { (library.ibv_create_qp)(pd, &raw mut attributes) };
                // A device does not report how much inline data it supports: 96 bytes or a little more are
                // common.
                for inline in [96, 64, 0] {
                    if raw.is_null() && inline < depth.inline {
                        attributes.cap.max_inline_data = inline;
                        // SAFETY: as above.
                        raw = unsafe { (library.ibv_create_qp)(pd, &raw mut attributes) };
                    }
                }
                let handle = VerbsHandle::from_raw(raw, library).ok_or_else(|| {
                    let error = error(errno());
                    let Some(limits) = context.limits() else { return error };
                    let (pairs, requests) = (limits.queue_pairs, limits.requests);
                    error.context(format_args!(
                        "a queue pair of {} and {} requests, where the device allows {pairs} of {requests}",
                        depth.sends, depth.receives
                    ))
                })?;
                // SAFETY: the queue pair was just created.
                (handle, unsafe { (*raw).qp_num }, attributes.cap.max_inline_data)
            }
            _ => (VerbsHandle::inert(), peer.unwrap_or_default() as u32, depth.inline),
        };
        let qp = Self {
            inner: Inner {
                handle,
                depth: Depth { inline, ..depth },
                endpoint: Endpoint { qpn, psn },
                site,
                context,
                pkey_index,
                queue: Arc::clone(queue),
                pd: Arc::clone(pd),
                #[cfg(test)]
                recorded: std::cell::RefCell::default(),
            },
            state: Fresh,
        };
        let mut attributes = zeroed_attributes();
        attributes.qp_state = IBV_QPS_INIT;
        attributes.pkey_index = pkey_index;
        attributes.port_num = port;
        attributes.qp_access_flags = access;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        qp.inner.modify(Verb::ModifyQpToInit, &mut attributes, mask)?;
        Ok(qp)
    }

    /// This end of the connection.
    pub(crate) fn endpoint(&self) -> Endpoint {
        self.inner.endpoint
    }

    /// Fills the receive queue with receives of this `id`, and connects to the peer's end over `path`.
    ///
    /// # Errors
    /// `System` if the device refuses, the port has lost its address or the peer's cannot be resolved.
    pub(crate) fn connect(
        mut self,
        id: u64,
        peer: Endpoint,
        path: &PathAttributes,
    ) -> Result<QueuePair<Connected>> {
        let gid_index = self.inner.gid_index(path)?;
        self.inner.post_recv(id, self.inner.depth.receives as usize)?;
        let mut attributes = zeroed_attributes();
        attributes.qp_state = IBV_QPS_RTR;
        attributes.path_mtu = path.mtu;
        attributes.dest_qp_num = peer.qpn;
        attributes.rq_psn = peer.psn;
        attributes.max_dest_rd_atomic = 1;
        attributes.min_rnr_timer = 12;
        attributes.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: path.gid },
                flow_label: 0,
                sgid_index: gid_index,
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
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.inner.modify(Verb::ModifyQpToRtr, &mut attributes, mask)?;
        let mut attributes = zeroed_attributes();
        attributes.qp_state = IBV_QPS_RTS;
        attributes.timeout = path.timeout;
        attributes.retry_cnt = path.retries;
        attributes.rnr_retry = FOREVER;
        attributes.sq_psn = self.inner.endpoint.psn;
        attributes.max_rd_atomic = 1;
        let mask = IBV_QP_STATE
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.inner.modify(Verb::ModifyQpToRts, &mut attributes, mask)?;
        let Depth { sends, inline, .. } = self.inner.depth;
        let chain = Chain::with_capacity(sends as usize);
        let state = Connected { inline, chain, peer_qpn: peer.qpn };
        Ok(QueuePair { inner: self.inner, state })
    }
}

impl QueuePair<Connected> {
    /// Both ends, for error messages: `on rxe0 port 1 for rank 3, queue pair 17 to 23`.
    pub(crate) fn ends(&self) -> String {
        let Endpoint { qpn, .. } = self.inner.endpoint;
        format!("{}, queue pair {qpn} to {}", self.inner.site, self.state.peer_qpn)
    }

    /// Posts writes as one chain, at most as many as the send queue has room for.
    ///
    /// # Errors
    /// `System` if the device refuses, with the number of requests that it accepted before.
    pub(crate) fn post_send(&mut self, requests: &[WriteRequest]) -> std::result::Result<(), (usize, Error)> {
        if requests.is_empty() {
            return Ok(());
        }
        self.state.chain.set_writes(requests, self.state.inline);
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
        self.state.chain.set_read(request);
        self.post_chain().map_err(|(_, error)| error)
    }

    fn post_chain(&mut self) -> std::result::Result<(), (usize, Error)> {
        let error = |accepted, errno| Err((accepted, failed(Verb::PostSend, &self.inner.site, errno)));
        if let Some(errno) = self.inner.context.shim.injected_errno(Verb::PostSend) {
            return error(0, errno);
        }
        let Some((raw, _)) = self.inner.handle.raw() else { return Ok(()) };
        let first = self.state.chain.link();
        let mut bad = null_mut();
        // SAFETY: the queue pair is alive. The requests and their lists are in the chain, which is not
        // changed until this returns, and are copied by then. The memory that they refer to is registered,
        // and stays registered and unchanged until their completion: links keep the region of each piece
        // until then.
        match unsafe { ibv_post_send(raw, first, &mut bad) } {
            0 => Ok(()),
            errno => error(self.state.chain.position(bad), errno),
        }
    }

    /// Posts one receive, to replace one that was completed.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn post_recv(&mut self, id: u64) -> Result<()> {
        self.inner.post_recv(id, 1)
    }

    /// Moves the queue pair to the error state: the device no longer executes the peer's requests, and
    /// flushes all posted ones.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn move_to_error(&mut self) -> Result<()> {
        self.move_to(IBV_QPS_ERR, Verb::ModifyQpToErr)
    }

    /// Moves the queue pair from the error state to the RESET state: the device discards all that was
    /// received and posted.
    ///
    /// # Errors
    /// `System` if the device refuses.
    pub(crate) fn reset(&mut self) -> Result<()> {
        self.move_to(IBV_QPS_RESET, Verb::ModifyQpToReset)
    }

    /// Moves the queue pair to a state that needs no other attribute.
    fn move_to(&self, state: u32, verb: Verb) -> Result<()> {
        let mut attributes = zeroed_attributes();
        attributes.qp_state = state;
        self.inner.modify(verb, &mut attributes, IBV_QP_STATE)
    }

    /// The calls since the last call of this. Only for a queue pair without a device.
    #[cfg(test)]
    pub(crate) fn recorded_calls(&mut self) -> RecordedCalls {
        std::mem::take(self.inner.recorded.get_mut())
    }
}
