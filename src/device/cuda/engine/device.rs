//! The device that reduces and copies on a GPU, by the kernel that is resident there.
//!
//! Owns which ring a job goes to, its tiles, and the jobs that wait for bounce slots. Must not know what jobs
//! belong to, nor how kernels are launched. Submitting, polling and aborting call no function of the driver.

use super::address_map::{AddressMap, HostSide, OperandPlace};
use super::instance::GpuEngine;
use super::kernel_kind::KernelKind;
use super::layout::{COPIES, Descriptor, IN, ON_HOST, OUT, REDUCE, RINGS, SCALED, TILE_BITS};
use super::ring::{MOST_OPERANDS, Ring, Work};
use crate::device::cuda::objects::GpuMemory;
use crate::device::{Arithmetic, Device, Finish, Job, Operand, Submitted};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{Arena, Piece};
use std::collections::VecDeque;
use std::sync::Arc;

/// The block size of CUDA's allocator. Shared allocations are whole blocks, because another process opens a
/// whole block.
const BLOCK: usize = 2 << 20;
/// Bytes of a tile. The CTAs that share a job have about equal numbers of tiles, at least 8 each
/// (`kLeastTiles`).
const TILE: usize = 4 << 10;
/// The largest number of tiles of a job.
const MOST_TILES: usize = (1 << TILE_BITS) - 1;

/// A job that waits for bounce slots.
struct StarvedJob {
    into: Piece,
    dtype: DType,
    arithmetic: Arithmetic,
    operands: Vec<Operand>,
    finish: Finish,
    ticket: u64,
}

impl StarvedJob {
    fn new(job: &Job<'_>, ticket: u64) -> Self {
        let Job { into, dtype, arithmetic, operands, finish, .. } = *job;
        Self { into, dtype, arithmetic, operands: operands.to_vec(), finish, ticket }
    }

    fn job(&self) -> Job<'_> {
        let Self { into, dtype, arithmetic, ref operands, finish, .. } = *self;
        Job { dtype, arithmetic, into, operands, finish, streaming: false }
    }
}

/// A GPU that reduces and copies.
pub struct Cuda {
    /// Dropped before the memory below.
    addresses: AddressMap,
    rings: [Ring; RINGS],
    /// By ring, jobs that wait for bounce slots, in the order of submission.
    starved: [VecDeque<StarvedJob>; RINGS],
    engine: Arc<GpuEngine>,
    landing: Arc<GpuMemory>,
    arena: Arc<Arena>,
}

impl Cuda {
    /// The device of an engine, which has only one. Pins the host memory, and allocates GPU memory for every
    /// slot of the pool: the landing memory that peers read and write. It ends with `further` bytes for other
    /// uses.
    ///
    /// # Errors
    /// `System` if the GPU has too little memory, or this rank's pool cannot be pinned.
    pub(crate) fn new(engine: &Arc<GpuEngine>, host: &HostSide<'_>, further: usize) -> Result<Self> {
        let (slots, slot) = host.slots;
        let landing = GpuMemory::new(&engine.gpu, (slots * slot + further).next_multiple_of(BLOCK));
        let landing = landing.map_err(|error| {
            let names = "FLEXRING_SLOTS and FLEXRING_GPU_SUBCHUNK";
            error.context(format!("a GPU needs {slots} slots of {slot} bytes, set by {names}"))
        })?;
        // SAFETY: the device holds the arena, and the executor holds the neighbours' arenas for longer than
        // the device lives.
        let addresses = unsafe { AddressMap::new(&engine.gpu, host)? };
        let words = engine.control.words();
        Ok(Self {
            addresses,
            rings: std::array::from_fn(|number| Ring::new(words, number)),
            starved: std::array::from_fn(|_| VecDeque::new()),
            engine: Arc::clone(engine),
            landing: Arc::new(landing),
            arena: Arc::clone(host.arena),
        })
    }

    /// GPU memory that peers read and write: one part for every slot of the pool, in order, then padding,
    /// then the bytes for other uses.
    pub(crate) fn landing(&self) -> &Arc<GpuMemory> {
        &self.landing
    }

    /// Starts a job of this ring. `false` if it must wait for bounce slots.
    fn start(&mut self, ring: usize, job: &Job<'_>, ticket: u64) -> Result<bool> {
        let copies = is_copy(job);
        self.check_kernel(job, copies)?;
        let Some(into) = self.addresses.address(job.into) else {
            let message = format!("{} bytes of host memory are not pinned for the GPU", job.into.len());
            return Err(Error::internal(message));
        };
        let mut work = self.rings[ring].work();
        for operand in job.operands {
            // SAFETY: as for every job, the operand is valid until the job is reported.
            let place = unsafe { self.addresses.operand(operand.piece)? };
            let at = match place {
                OperandPlace::At(at) => at,
                OperandPlace::Bounced(at, slot) => {
                    work.slots.push(slot);
                    at
                }
                OperandPlace::Busy => {
                    self.addresses.free(work.slots.drain(..));
                    return Ok(false);
                }
            };
            work.operands.push(if operand.factor.is_some() { at | SCALED } else { at });
        }
        work.descriptor = descriptor(job, copies, into);
        work.ticket = ticket;
        self.rings[ring].submit(self.engine.control.words(), work);
        Ok(true)
    }

    /// Refuses a job that the running kernel cannot do.
    fn check_kernel(&self, job: &Job<'_>, copies: bool) -> Result<()> {
        let running = self.engine.control.running();
        let wanted = KernelKind::Reduce(job.dtype);
        if running == 0 {
            return Err(Error::internal("a job was submitted for a GPU that runs no kernel"));
        }
        if !copies && running != wanted.code() {
            let message = format!("a job needs the kernel {wanted:?}, but another one runs");
            return Err(Error::internal(message));
        }
        if job.operands.len() > MOST_OPERANDS {
            let message =
                format!("a reduction has {} operands; a GPU takes {MOST_OPERANDS}", job.operands.len());
            return Err(Error::unsupported(message));
        }
        // Two factors in one job do not occur: only this rank's own operand is scaled.
        let mut factors = job.operands.iter().filter_map(|operand| operand.factor);
        let first = factors.next();
        if factors.any(|factor| Some(factor) != first) {
            return Err(Error::internal("the operands of a job have different factors"));
        }
        Ok(())
    }

    /// Starts jobs that waited for bounce slots.
    fn start_starved(&mut self) -> Result<()> {
        for ring in 0..RINGS {
            while let Some(starved) = self.starved[ring].pop_front() {
                if !self.start(ring, &starved.job(), starved.ticket)? {
                    self.starved[ring].push_front(starved);
                    break;
                }
            }
        }
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.rings.iter().all(Ring::is_empty) && self.starved.iter().all(VecDeque::is_empty)
    }

    fn check(&self) -> Result<()> {
        if self.engine.control.is_aborted() {
            return Err(Error::aborted("the GPU's work was aborted"));
        }
        Ok(())
    }
}

/// Whether a job only copies bytes.
fn is_copy(job: &Job<'_>) -> bool {
    matches!(job.operands, [only] if only.factor.is_none())
        && matches!(job.finish, Finish::Keep | Finish::Divide(0 | 1))
}

/// The ring of a job.
fn ring_of(job: &Job<'_>) -> usize {
    let from_host = job.operands.iter().any(|operand| operand.piece.is_host());
    match (job.into.is_host(), from_host) {
        (true, false) => OUT,
        (false, true) if is_copy(job) => IN,
        _ => REDUCE,
    }
}

/// The descriptor of a job, without its operands.
fn descriptor(job: &Job<'_>, copies: bool, into: u64) -> Descriptor {
    let size = if copies { 1 } else { job.dtype.size() };
    let on_host = job.into.is_host() || job.operands.iter().any(|operand| operand.piece.is_host());
    let tile = TILE.max(job.into.len().div_ceil(MOST_TILES).next_multiple_of(16));
    Descriptor {
        into,
        count: (job.into.len() / size) as u64,
        factor: job.operands.iter().find_map(|operand| operand.factor).unwrap_or(1.0),
        divide: match job.finish {
            Finish::Keep => 0,
            Finish::Divide(ranks) => ranks,
        },
        tile: (tile / size) as u32,
        tiles: job.into.len().div_ceil(tile).max(1) as u32,
        flags: if copies { COPIES } else { 0 } | if on_host { ON_HOST } else { 0 },
        operation: job.arithmetic as u32,
        ..Descriptor::default()
    }
}

impl Device for Cuda {
    fn submit(&mut self, job: &Job<'_>, ticket: u64) -> Result<Submitted> {
        if job.into.is_empty() {
            return Ok(Submitted::Done);
        }
        self.check()?;
        let ring = ring_of(job);
        // Behind jobs that wait, so that jobs are reported in order.
        if !self.starved[ring].is_empty() || !self.start(ring, job, ticket)? {
            self.starved[ring].push_back(StarvedJob::new(job, ticket));
        }
        Ok(Submitted::InFlight)
    }

    fn poll(&mut self, done: &mut dyn FnMut(u64)) -> Result<()> {
        self.check()?;
        let Self { rings, addresses, engine, .. } = self;
        let words = engine.control.words();
        for ring in rings {
            ring.poll(words, &mut |work: &Work| {
                addresses.free(work.slots.iter().copied());
                done(work.ticket);
            });
        }
        self.start_starved()
    }

    fn abort(&mut self) {
        let control = &self.engine.control;
        control.abort();
        control.wait_ended();
        self.rings.iter_mut().for_each(Ring::clear);
        self.starved.iter_mut().for_each(VecDeque::clear);
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if !self.is_idle() {
            self.abort();
        }
        if self.engine.control.is_stuck() {
            // The kernel may still access them.
            self.addresses.leak();
            std::mem::forget((Arc::clone(&self.landing), Arc::clone(&self.arena)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;

    fn host(len: usize) -> Piece {
        // SAFETY: nothing accesses it.
        unsafe { Piece::new(NonNull::dangling(), len) }
    }

    fn gpu(len: usize) -> Piece {
        // SAFETY: as above.
        unsafe { Piece::on_gpu(NonNull::dangling(), len, 0) }
    }

    fn job(into: Piece, operands: &[Operand], finish: Finish) -> Job<'_> {
        Job { dtype: DType::F32, arithmetic: Arithmetic::Sum, into, operands, finish, streaming: false }
    }

    #[test]
    fn rings_follow_from_the_direction_of_the_data() {
        let plain = |piece| Operand { piece, factor: None };
        let scaled = |piece| Operand { piece, factor: Some(2.0) };
        let keep = Finish::Keep;
        assert_eq!(ring_of(&job(host(64), &[plain(gpu(64))], keep)), OUT);
        assert_eq!(ring_of(&job(host(64), &[plain(gpu(64)), plain(gpu(64))], keep)), OUT);
        assert_eq!(ring_of(&job(gpu(64), &[plain(host(64))], keep)), IN);
        assert_eq!(ring_of(&job(gpu(64), &[scaled(host(64))], keep)), REDUCE);
        assert_eq!(ring_of(&job(gpu(64), &[plain(host(64))], Finish::Divide(3))), REDUCE);
        assert_eq!(ring_of(&job(gpu(64), &[plain(gpu(64)), plain(host(64))], keep)), REDUCE);
        assert_eq!(ring_of(&job(host(64), &[plain(gpu(64)), plain(host(64))], keep)), REDUCE);
        assert_eq!(ring_of(&job(gpu(64), &[plain(gpu(64))], keep)), REDUCE);
    }

    #[test]
    fn tiles_cover_the_destination() {
        let operands = [Operand { piece: gpu(200 << 10), factor: Some(0.5) }];
        let sum = descriptor(&job(gpu(200 << 10), &operands, Finish::Divide(4)), false, 77);
        assert_eq!((sum.into, sum.count, sum.factor, sum.divide), (77, 50 << 10, 0.5, 4));
        assert_eq!((sum.tile, sum.tiles, sum.flags), (1 << 10, 50, 0));

        let operands = [Operand { piece: host((32 << 10) + 1), factor: None }];
        let copy = descriptor(&job(gpu((32 << 10) + 1), &operands, Finish::Keep), true, 0);
        assert_eq!(
            (copy.count, copy.tile, copy.tiles, copy.flags),
            ((32 << 10) + 1, 4 << 10, 9, COPIES | ON_HOST)
        );
    }

    #[test]
    fn huge_jobs_have_longer_tiles() {
        let len = 3 << 40;
        let operands = [Operand { piece: gpu(len), factor: None }];
        let copy = descriptor(&job(gpu(len), &operands, Finish::Keep), true, 0);
        assert!((copy.tiles as usize) <= MOST_TILES && copy.tile.is_multiple_of(16));
        assert!(copy.tiles as usize * copy.tile as usize >= len);
    }
}
