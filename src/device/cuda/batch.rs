//! What one launch is told: `kernels/batch.h`, in Rust.
//!
//! Owns the layout, and how much fits. Must not know what is done with the pieces.

use super::driver::Address;
use super::objects::address;
use crate::memory::Piece;

const TASKS: usize = 16;
const OPERANDS: usize = 128;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Operand {
    at: Address,
    factor: f64,
    scaled: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Task {
    into: Address,
    count: u64,
    first: u32,
    operands: u32,
    divide: u32,
    reserved: u32,
}

/// The argument of a kernel.
#[repr(C)]
pub(super) struct Argument {
    tasks: [Task; TASKS],
    operands: [Operand; OPERANDS],
}

const _: () = assert!(size_of::<Argument>() == 16 * 32 + 128 * 24, "as batch.h says");

/// A few tasks, each with its operands.
pub(super) struct Batch {
    argument: Argument,
    tasks: usize,
    operands: usize,
    longest: usize,
}

/// A task of a batch, to which operands are added in their order of addition.
pub(super) struct Growing<'a>(&'a mut Batch);

impl Default for Batch {
    fn default() -> Self {
        let argument = Argument { tasks: [Task::default(); TASKS], operands: [Operand::default(); OPERANDS] };
        Self { argument, tasks: 0, operands: 0, longest: 0 }
    }
}

impl Batch {
    /// Operands of all its tasks at most.
    pub(super) const OPERANDS: usize = OPERANDS;

    /// Whether a task with this many operands fits.
    pub(super) fn has_room(&self, operands: usize) -> bool {
        self.tasks < TASKS && self.operands + operands <= OPERANDS
    }

    /// Begins a task that writes `count` elements, divided by so many ranks; not at all if that is 0.
    ///
    /// # Panics
    /// If there are too many.
    pub(super) fn task(&mut self, into: Piece, count: u64, divide: u32) -> Growing<'_> {
        let first = self.operands as u32;
        let into_address = address(into);
        self.argument.tasks[self.tasks] =
            Task { into: into_address, count, first, operands: 0, divide, reserved: 0 };
        self.tasks += 1;
        self.longest = self.longest.max(into.len());
        Growing(self)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tasks == 0
    }

    pub(super) fn tasks(&self) -> usize {
        self.tasks
    }

    /// Bytes that its longest task writes.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    pub(super) fn argument(&self) -> &Argument {
        &self.argument
    }

    pub(super) fn clear(&mut self) {
        (self.tasks, self.operands, self.longest) = (0, 0, 0);
    }
}

impl Growing<'_> {
    /// # Panics
    /// If there are too many.
    pub(super) fn operand(&mut self, at: Piece, factor: Option<f64>) {
        let batch = &mut *self.0;
        batch.argument.operands[batch.operands] =
            Operand { at: address(at), factor: factor.unwrap_or(1.0), scaled: u64::from(factor.is_some()) };
        batch.operands += 1;
        batch.argument.tasks[batch.tasks - 1].operands += 1;
    }
}
