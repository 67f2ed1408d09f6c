//! The types and numbers of `infiniband/verbs.h` that flexring uses, for a library that is opened at run
//! time.
//!
//! They are those of the crate rdma-sys. It cannot be a dependency of every build: its build script needs
//! libclang and the headers of libibverbs and librdmacm, and it links programs to both libraries, so that
//! they start only where both are installed. So its bindings are copied here, as far as they are used. With
//! the feature `rdma-sys-check`, which `make lint` builds where it can be built, every size, alignment,
//! offset and number is compared with those of rdma-sys when this file is compiled, and every function's type
//! in `library.rs`. Must not call anything.

#![allow(non_camel_case_types, dead_code, reason = "names and fields are those of the header")]

use libc::{pthread_cond_t, pthread_mutex_t};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Defines structures, and compares their layout with rdma-sys. Fields in brackets, and those behind `..`,
/// stand for several that are not used.
macro_rules! structures {
    ($(struct $name:ident {
        $($([$unused:ident: $unused_ty:ty],)? $field:ident: $ty:ty,)*
        $(.. $rest:ident: $rest_ty:ty,)?
    })*) => {$(
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub(crate) struct $name {
            $($($unused: $unused_ty,)? pub(super) $field: $ty,)*
            $($rest: $rest_ty,)?
        }

        #[cfg(feature = "rdma-sys-check")]
        const _: () = {
            same_layout::<$name, rdma_sys::$name>();
            $(
                assert!(std::mem::offset_of!($name, $field) == std::mem::offset_of!(rdma_sys::$name, $field));
                assert!(width(|it: &$name| &raw const it.$field) == width(|it: &rdma_sys::$name| &raw const it.$field));
            )*
        };
    )*};
}

/// Defines unions, and compares their layout with rdma-sys. All fields of a union have the offset 0.
macro_rules! unions {
    ($(union $name:ident { $($field:ident: $ty:ty,)* })*) => {$(
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub(crate) union $name { $(pub(super) $field: $ty,)* }

        #[cfg(feature = "rdma-sys-check")]
        const _: () = same_layout::<$name, rdma_sys::$name>();
    )*};
}

/// Defines structures of which only pointers are used.
macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[repr(C)]
        pub(crate) struct $name([u8; 0]);
    )*};
}

/// Defines the numbers of C enumerations, and compares them with rdma-sys.
macro_rules! numbers {
    ($($(#[$meta:meta])* $group:ident { $($name:ident = $value:literal,)* })*) => {$($(
        pub(crate) const $name: u32 = $value;

        #[cfg(feature = "rdma-sys-check")]
        const _: () = {
            // SAFETY: rdma-sys has each as an integer, as a wrapper of one, or as an enumeration: four bytes
            // without padding.
            #[allow(unsafe_code, clippy::useless_transmute, reason = "it runs in the compiler; some have the type")]
            let theirs: u32 = unsafe { std::mem::transmute(rdma_sys::$group::$name) };
            assert!(theirs == $value);
        };
    )*)*};
}

#[cfg(feature = "rdma-sys-check")]
const fn same_layout<A, B>() {
    assert!(size_of::<A>() == size_of::<B>() && align_of::<A>() == align_of::<B>());
}

/// The size of a field, which is given by its address.
#[cfg(feature = "rdma-sys-check")]
const fn width<S, F>(_field: fn(&S) -> *const F) -> usize {
    size_of::<F>()
}

opaque! { ibv_device ibv_srq _compat_ibv_port_attr }

/// An operation of a context that flexring does not use.
type Unused = Option<unsafe extern "C" fn()>;

structures! {
    struct ibv_context {
        device: *mut ibv_device,
        ops: ibv_context_ops,
        cmd_fd: c_int,
        async_fd: c_int,
        num_comp_vectors: c_int,
        mutex: pthread_mutex_t,
        abi_compat: *mut c_void,
    }

    struct ibv_context_ops {
        [before_poll_cq: [Unused; 11]],
        poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
        req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
        [before_post_send: [Unused; 12]],
        post_send: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
        post_recv: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
        ..rest: [Unused; 5],
    }

    struct ibv_device_attr {
        fw_ver: [c_char; 64],
        [ids: [u64; 4]],
        vendor_id: u32,
        [versions: [u32; 2]],
        max_qp: c_int,
        max_qp_wr: c_int,
        [before_max_cq: [c_int; 3]],
        max_cq: c_int,
        max_cqe: c_int,
        ..rest: [c_int; 23],
    }

    struct ibv_port_attr {
        state: u32,
        [max_mtu: u32],
        active_mtu: u32,
        [before_lid: [u16; 11]],
        lid: u16,
        [before_flags: [u8; 11]],
        flags: u8,
        ..port_cap_flags2: u16,
    }

    struct ibv_pd {
        context: *mut ibv_context,
        handle: u32,
    }

    struct ibv_mr {
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        handle: u32,
        lkey: u32,
        rkey: u32,
    }

    struct ibv_comp_channel {
        context: *mut ibv_context,
        fd: c_int,
        refcnt: c_int,
    }

    struct ibv_cq {
        context: *mut ibv_context,
        channel: *mut ibv_comp_channel,
        cq_context: *mut c_void,
        handle: u32,
        cqe: c_int,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        comp_events_completed: u32,
        async_events_completed: u32,
    }

    struct ibv_wc {
        wr_id: u64,
        status: u32,
        opcode: u32,
        vendor_err: u32,
        byte_len: u32,
        imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t,
        qp_num: u32,
        ..rest: [u32; 4],
    }

    struct ibv_qp {
        context: *mut ibv_context,
        qp_context: *mut c_void,
        pd: *mut ibv_pd,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        handle: u32,
        qp_num: u32,
        state: u32,
        qp_type: u32,
        mutex: pthread_mutex_t,
        cond: pthread_cond_t,
        events_completed: u32,
    }

    struct ibv_qp_cap {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }

    struct ibv_qp_init_attr {
        qp_context: *mut c_void,
        send_cq: *mut ibv_cq,
        recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq,
        cap: ibv_qp_cap,
        qp_type: u32,
        sq_sig_all: c_int,
    }

    struct ibv_global_route {
        dgid: ibv_gid,
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
    }

    struct ibv_ah_attr {
        grh: ibv_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
    }

    struct ibv_qp_attr {
        qp_state: u32,
        cur_qp_state: u32,
        path_mtu: u32,
        path_mig_state: u32,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: c_uint,
        cap: ibv_qp_cap,
        ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        rate_limit: u32,
    }

    struct ibv_sge {
        addr: u64,
        length: u32,
        lkey: u32,
    }

    struct ibv_recv_wr {
        wr_id: u64,
        next: *mut ibv_recv_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
    }

    struct ibv_send_wr {
        wr_id: u64,
        next: *mut ibv_send_wr,
        sg_list: *mut ibv_sge,
        num_sge: c_int,
        opcode: u32,
        send_flags: c_uint,
        imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t,
        wr: wr_t,
        ..rest: [u64; 7],
    }

    struct rdma_t {
        remote_addr: u64,
        rkey: u32,
    }

    struct ibv_async_event {
        element: ibv_async_event_element_t,
        event_type: u32,
    }
}

unions! {
    union ibv_gid {
        raw: [u8; 16],
        words: [u64; 2],
    }

    union imm_data_invalidated_rkey_union_t {
        imm_data: u32,
    }

    union wr_t {
        rdma: rdma_t,
        longest: [u64; 4],
    }

    union ibv_async_event_element_t {
        cq: *mut ibv_cq,
        port_num: c_int,
    }
}

/// A context with the operations that later versions of libibverbs added, each above the older ones.
#[repr(C)]
pub(crate) struct verbs_context {
    pub(super) query_port:
        Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
    others: [Unused; 38],
    /// Bytes of this structure, in the version of the library.
    pub(super) sz: usize,
    pub(super) context: ibv_context,
}

#[cfg(feature = "rdma-sys-check")]
const _: () = {
    use std::mem::offset_of;
    same_layout::<verbs_context, rdma_sys::verbs_context>();
    assert!(offset_of!(verbs_context, query_port) == offset_of!(rdma_sys::verbs_context, query_port));
    assert!(offset_of!(verbs_context, sz) == offset_of!(rdma_sys::verbs_context, sz));
    assert!(offset_of!(verbs_context, context) == offset_of!(rdma_sys::verbs_context, context));
};

/// A flag of a port: packets need a global routing header even within the subnet. It has no name in rdma-sys.
pub(crate) const IBV_QPF_GRH_REQUIRED: u8 = 1;

/// The values of `ibv_fork_status`, which rdma-sys has as plain numbers: the library was not initialized for
/// forks, it was, or the kernel does not need it.
pub(crate) const IBV_FORK_DISABLED: u32 = 0;
pub(crate) const IBV_FORK_ENABLED: u32 = 1;
pub(crate) const IBV_FORK_UNNEEDED: u32 = 2;

#[cfg(feature = "rdma-sys-check")]
const _: () = {
    assert!(IBV_FORK_DISABLED == rdma_sys::IBV_FORK_DISABLED);
    assert!(IBV_FORK_ENABLED == rdma_sys::IBV_FORK_ENABLED);
    assert!(IBV_FORK_UNNEEDED == rdma_sys::IBV_FORK_UNNEEDED);
};

numbers! {
    ibv_port_state {
        IBV_PORT_ACTIVE = 4,
    }
    ibv_access_flags {
        IBV_ACCESS_LOCAL_WRITE = 1,
        IBV_ACCESS_REMOTE_WRITE = 2,
        IBV_ACCESS_REMOTE_READ = 4,
        IBV_ACCESS_RELAXED_ORDERING = 0x10_0000,
    }
    ibv_qp_type {
        IBV_QPT_RC = 2,
    }
    ibv_qp_state {
        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        IBV_QPS_RTR = 2,
        IBV_QPS_RTS = 3,
        IBV_QPS_ERR = 6,
    }
    ibv_qp_attr_mask {
        IBV_QP_STATE = 0x1,
        IBV_QP_ACCESS_FLAGS = 0x8,
        IBV_QP_PKEY_INDEX = 0x10,
        IBV_QP_PORT = 0x20,
        IBV_QP_AV = 0x80,
        IBV_QP_PATH_MTU = 0x100,
        IBV_QP_TIMEOUT = 0x200,
        IBV_QP_RETRY_CNT = 0x400,
        IBV_QP_RNR_RETRY = 0x800,
        IBV_QP_RQ_PSN = 0x1000,
        IBV_QP_MAX_QP_RD_ATOMIC = 0x2000,
        IBV_QP_MIN_RNR_TIMER = 0x8000,
        IBV_QP_SQ_PSN = 0x1_0000,
        IBV_QP_MAX_DEST_RD_ATOMIC = 0x2_0000,
        IBV_QP_DEST_QPN = 0x10_0000,
    }
    ibv_wr_opcode {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_RDMA_READ = 4,
    }
    ibv_send_flags {
        IBV_SEND_SIGNALED = 2,
        IBV_SEND_INLINE = 8,
    }
    ibv_wc_opcode {
        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RDMA_READ = 2,
        IBV_WC_RECV_RDMA_WITH_IMM = 129,
    }
    ibv_wc_status {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_BAD_RESP_ERR = 7,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,
    }
    ibv_event_type {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_GID_CHANGE = 18,
    }
}
