//! NCCL's types and numbers, as in nccl.h.

use std::ffi::{c_int, c_uint, c_void};

/// The version of nccl.h whose functions this library exports, as MAJOR * 10000 + MINOR * 100 + PATCH.
pub(crate) const NCCL_VERSION_CODE: c_int = 23007;

/// The result of every call.
#[allow(clippy::enum_variant_names, reason = "named as in nccl.h")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub enum ncclResult_t {
    /// The call succeeded.
    ncclSuccess = 0,
    /// CUDA's driver reported an error.
    ncclUnhandledCudaError = 1,
    /// The operating system or a device reported an error, or the ranks did not find each other.
    ncclSystemError = 2,
    /// A bug in flexring.
    ncclInternalError = 3,
    /// An argument is not valid.
    ncclInvalidArgument = 4,
    /// The call is not possible here, or not supported.
    ncclInvalidUsage = 5,
    /// Another rank failed or aborted.
    ncclRemoteError = 6,
    /// The communicator is still being made, finalized or split.
    ncclInProgress = 7,
    /// A timeout expired.
    ncclTimeout = 8,
}

/// What a communicator's handle points to. Handles are numbers, and no memory is there.
#[repr(C)]
pub struct ncclComm {
    opaque: [u8; 0],
}

/// The handle of a communicator.
pub type ncclComm_t = *mut ncclComm;
/// The number of an element type.
pub type ncclDataType_t = c_int;
/// The number of a reduction operation.
pub type ncclRedOp_t = c_int;
/// Where a scalar is.
pub type ncclScalarResidence_t = c_int;
/// A CUDA stream.
pub type cudaStream_t = *mut c_void;

/// The number of element types: the numbers are those of flexring's first types.
pub(crate) const NCCL_NUM_TYPES: ncclDataType_t = 12;
/// The first number of an operation that a program creates.
pub(crate) const NCCL_NUM_OPS: ncclRedOp_t = 5;
/// A scalar that is read by the call that gets it.
pub(crate) const NCCL_SCALAR_HOST_IMMEDIATE: ncclScalarResidence_t = 1;
/// A scalar that is read when a collective runs.
pub(crate) const NCCL_SCALAR_DEVICE: ncclScalarResidence_t = 0;
/// The default stream of the thread that makes a call.
pub(crate) const CUDA_STREAM_PER_THREAD: usize = 2;

/// Identifies a communicator that is about to be made.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ncclUniqueId {
    pub(crate) internal: [u8; 128],
}

/// The fields of a communicator's configuration that every version of nccl.h has.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ncclConfig_t {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) blocking: c_int,
}
