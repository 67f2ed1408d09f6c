//! The interface of `cuda.rs` in builds without the feature `cuda`.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::fault::Fault;
use crate::memory::{Arena, MemorySpace, Piece, Registrar};
use crate::rank::Rank;
use crate::transport::shm::{ArenaLayout, MemoryNotices};
use std::sync::Arc;

const WHY: &str = "this build of flexring has no CUDA";

pub(in crate::communicator) fn known(_requested: Option<usize>) -> Option<u32> {
    None
}

pub(in crate::communicator) fn may_exist(_requested: Option<usize>) -> bool {
    false
}

pub(in crate::communicator) fn numa_node(_requested: Option<usize>) -> Option<u32> {
    None
}

#[cfg(feature = "verbs")]
pub(in crate::communicator) fn is_coherent(_requested: Option<usize>) -> bool {
    false
}

#[cfg(feature = "verbs")]
pub(in crate::communicator) fn address(_requested: Option<usize>) -> Option<String> {
    None
}

pub(in crate::communicator) fn relay_slots(_world: usize) -> (usize, usize) {
    (0, 0)
}

/// There are no driver calls to forbid.
pub(in crate::communicator) struct ForbidCalls;

pub(in crate::communicator) fn forbid_calls() -> ForbidCalls {
    ForbidCalls
}

/// Stands for the absence of a GPU.
pub(in crate::communicator) struct GpuState;

/// Cannot be constructed, because there are no kernels.
pub(in crate::communicator) enum RelayedCall {}

#[allow(clippy::unused_self, reason = "the interface of cuda.rs")]
impl GpuState {
    pub(in crate::communicator) fn new(
        _config: &Config,
        _shares_process: bool,
        _ranks_of_node: usize,
        _layout: ArenaLayout,
        _arena: &Arc<Arena>,
        _registrar: Option<Arc<dyn Registrar>>,
    ) -> Self {
        Self
    }

    pub(in crate::communicator) fn set_notices(&mut self, _: Rank, _: MemoryNotices) {}

    pub(in crate::communicator) fn locate(
        &self,
        _start: *const u8,
        _len: usize,
    ) -> Result<Option<MemorySpace>> {
        Ok(None)
    }

    pub(in crate::communicator) fn known_memory(&self) -> Option<MemorySpace> {
        None
    }

    pub(in crate::communicator) fn why_none(&self) -> Option<String> {
        Some(WHY.to_owned())
    }

    pub(in crate::communicator) fn open_known(&self, _executor: &mut Executor) -> Result<()> {
        Ok(())
    }

    pub(in crate::communicator) fn serves(&self, _: MemorySpace) -> Result<bool> {
        Ok(true)
    }

    pub(in crate::communicator) fn open_late(&self, _: MemorySpace, _: &mut Executor) -> Result<()> {
        Ok(())
    }

    pub(in crate::communicator) fn is_open(&self) -> bool {
        false
    }

    pub(in crate::communicator) fn check(&self) -> Result<()> {
        Ok(())
    }

    pub(in crate::communicator) fn end(&self, _: &Fault) -> bool {
        true
    }
}
