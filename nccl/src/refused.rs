//! The functions of NCCL that flexring does not have: exported, so that programs start, and refused with a
//! sentence.

use crate::status::{Failure, guarded};
use crate::types::ncclResult_t;
use std::ffi::c_int;

/// Declares functions that return `ncclInvalidUsage`, and lists them. They are declared without their
/// arguments, which a C caller removes itself.
macro_rules! refused {
    ($($reason:literal: $($name:ident / $profiled:ident)*;)*) => {
        $($(
            #[doc = concat!("Refused: ", $reason, ".")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> ncclResult_t {
                refuse(stringify!($name), $reason)
            }

            #[doc = concat!("Refused: ", $reason, ".")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $profiled() -> ncclResult_t {
                refuse(stringify!($name), $reason)
            }
        )*)*

        /// The functions that return `ncclInvalidUsage`, under their first names, with the reasons.
        pub const REFUSED: &[(&str, &str)] = &[
            $($((stringify!($name), $reason),)*)*
            ("ncclGroupSimulateEnd", "`flexring plan` shows what a call would do"),
            ("ncclLLA2ACalcSlots", KERNELS),
            ("ncclTeamWorld", KERNELS),
            ("ncclTeamLsa", KERNELS),
            ("ncclTeamRail", KERNELS),
            ("ncclTeamRankToWorld", KERNELS),
            ("ncclTeamRankToLsa", KERNELS),
            ("ncclParamDumpAll", SETTINGS),
            ("ncclResetDebugInit", LOGGING),
        ];
    };
}

fn refuse(name: &str, reason: &str) -> ncclResult_t {
    guarded(name, || Err(Failure::usage(format!("not supported by flexring: {reason}"))))
}

const SETTINGS: &str = "its settings are the variables that `flexring env` shows";
const KERNELS: &str = "kernels of programs cannot communicate by it";
const LOGGING: &str = "FLEXRING_LOG is read once";

refused! {
    "a communicator does not grow: make a new one":
        ncclCommGetUniqueId / pncclCommGetUniqueId
        ncclCommGrow / pncclCommGrow
        ;
    "pass one id to ncclCommInitRankConfig":
        ncclCommInitRankScalable / pncclCommInitRankScalable
        ;
    "use ncclCommAbort, or ncclCommShrink with NCCL_SHRINK_ABORT":
        ncclCommRevoke / pncclCommRevoke
        ;
    "a communicator cannot be suspended":
        ncclCommSuspend / pncclCommSuspend
        ncclCommResume / pncclCommResume
        ncclCommMemStats / pncclCommMemStats
        ;
    "it has no windows of symmetric memory: use ncclCommRegister":
        ncclCommWindowRegister / pncclCommWindowRegister
        ncclCommWindowDeregister / pncclCommWindowDeregister
        ncclWinGetUserPtr / pncclWinGetUserPtr
        ;
    "it has no one-sided operations":
        ncclPutSignal / pncclPutSignal
        ncclSignal / pncclSignal
        ncclWaitSignal / pncclWaitSignal
        ;
    "its settings are the variables that `flexring env` shows":
        ncclParamBind / pncclParamBind
        ncclParamGet / pncclParamGet
        ncclParamGetI8 / pncclParamGetI8
        ncclParamGetI16 / pncclParamGetI16
        ncclParamGetI32 / pncclParamGetI32
        ncclParamGetI64 / pncclParamGetI64
        ncclParamGetU8 / pncclParamGetU8
        ncclParamGetU16 / pncclParamGetU16
        ncclParamGetU32 / pncclParamGetU32
        ncclParamGetU64 / pncclParamGetU64
        ncclParamGetStr / pncclParamGetStr
        ncclParamGetParameter / pncclParamGetParameter
        ncclParamGetAllParameterKeys / pncclParamGetAllParameterKeys
        ;
    "kernels of programs cannot communicate by it":
        ncclCommQueryProperties / pncclCommQueryProperties
        ncclDevCommCreate / pncclDevCommCreate
        ncclDevCommDestroy / pncclDevCommDestroy
        ncclGetLsaDevicePointer / pncclGetLsaDevicePointer
        ncclGetLsaMultimemDevicePointer / pncclGetLsaMultimemDevicePointer
        ncclGetMultimemDevicePointer / pncclGetMultimemDevicePointer
        ncclGetPeerDevicePointer / pncclGetPeerDevicePointer
        ncclGinBarrierCreateRequirement / pncclGinBarrierCreateRequirement
        ncclGinInboxA2ACreateRequirement / pncclGinInboxA2ACreateRequirement
        ncclGinOutboxCreateRequirement / pncclGinOutboxCreateRequirement
        ncclLLA2ACreateRequirement / pncclLLA2ACreateRequirement
        ncclLsaBarrierCreateRequirement / pncclLsaBarrierCreateRequirement
        ;
}

/// Some of the ranks of a communicator.
#[derive(Default)]
#[repr(C)]
pub struct ncclTeam_t {
    n_ranks: c_int,
    rank: c_int,
    stride: c_int,
}

/// Declares functions that have no code to return. They leave a sentence for `ncclGetLastError`.
macro_rules! without_code {
    ($($reason:ident { $($name:ident / $profiled:ident -> $type:ty = $value:expr;)* })*) => {$($(
        #[doc = concat!("Refused with `", stringify!($value), "`.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> $type {
            refuse(stringify!($name), $reason);
            $value
        }

        #[doc = concat!("Refused with `", stringify!($value), "`.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $profiled() -> $type {
            refuse(stringify!($name), $reason);
            $value
        }
    )*)*};
}

without_code! {
    KERNELS {
        ncclLLA2ACalcSlots / pncclLLA2ACalcSlots -> c_int = 0;
        ncclTeamWorld / pncclTeamWorld -> ncclTeam_t = ncclTeam_t::default();
        ncclTeamLsa / pncclTeamLsa -> ncclTeam_t = ncclTeam_t::default();
        ncclTeamRail / pncclTeamRail -> ncclTeam_t = ncclTeam_t::default();
        ncclTeamRankToWorld / pncclTeamRankToWorld -> c_int = -1;
        ncclTeamRankToLsa / pncclTeamRankToLsa -> c_int = -1;
    }
    SETTINGS {
        ncclParamDumpAll / pncclParamDumpAll -> () = ();
    }
    LOGGING {
        ncclResetDebugInit / pncclResetDebugInit -> () = ();
    }
}
