//! The interface of `cuda.rs` in builds without the feature `cuda`.

use crate::device::CallerStream;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::fault::Fault;
use crate::memory::{Arena, MemorySpace, Piece, Registrar};
use crate::transport::shm::ArenaLayout;
use std::sync::Arc;

const WHY: &str = "this build of flexring has no CUDA";

pub(in crate::communicator) fn numa_node(_requested: Option<usize>) -> Option<u32> {
    None
}

/// Stands for the absence of a GPU.
pub(in crate::communicator) struct GpuState;

/// Cannot be constructed, because there are no streams.
pub(in crate::communicator) enum StreamGate {}

impl StreamGate {
    pub(in crate::communicator) fn wait_started(&self, _fault: &Fault) -> Result<()> {
        match *self {}
    }
}

#[allow(clippy::unused_self, reason = "the interface of cuda.rs")]
impl GpuState {
    pub(in crate::communicator) fn new(
        _requested: Option<usize>,
        _ipc: bool,
        _layout: ArenaLayout,
        _arena: &Arc<Arena>,
        _registrar: Option<Arc<dyn Registrar>>,
    ) -> Self {
        Self
    }

    pub(in crate::communicator) fn locate(
        &self,
        _start: *const u8,
        _len: usize,
    ) -> Result<Option<MemorySpace>> {
        Ok(None)
    }

    pub(in crate::communicator) fn why_none(&self) -> Option<String> {
        Some(WHY.to_owned())
    }

    pub(in crate::communicator) fn prepare_early(&self, _executor: &mut Executor) -> Result<()> {
        Ok(())
    }

    pub(in crate::communicator) fn serves(&self, _: MemorySpace) -> Result<bool> {
        Ok(true)
    }

    pub(in crate::communicator) fn prepare(&self, _: MemorySpace, _: &mut Executor) -> Result<()> {
        Ok(())
    }

    pub(in crate::communicator) fn reserve(&self, _bytes: usize) -> Result<()> {
        Err(Error::unsupported(WHY))
    }

    pub(in crate::communicator) fn scratch(&self, _bytes: usize) -> Result<Piece> {
        Err(Error::unsupported(WHY))
    }

    pub(in crate::communicator) fn gate(
        &self,
        _: CallerStream,
        _: Option<CallerStream>,
    ) -> Result<StreamGate> {
        Err(Error::unsupported(WHY))
    }
}
