//! Kernel launch parameters. Their layout must match `kernels/batch.h`.
//!
//! Owns that layout and how tasks fill it. Must not know jobs, GPUs or how kernels are launched.

use std::num::NonZeroU32;

/// The largest number of tasks in a launch.
pub const TASKS: usize = 16;

/// The largest number of operands of all tasks in a launch together.
pub const OPERANDS: usize = 128;

/// The largest number of threads in a block.
pub const MAX_THREADS: u32 = 512;

/// One input of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct KernelOperand {
    at: u64,
    factor: f64,
    scaled: u64,
}

impl KernelOperand {
    /// The elements at `at`, an address on the GPU, each multiplied with `factor` if it is given.
    #[must_use]
    pub fn new(at: u64, factor: Option<f64>) -> Self {
        Self { at, factor: factor.unwrap_or(1.0), scaled: factor.is_some().into() }
    }
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct KernelTask {
    into: u64,
    count: u64,
    first: u32,
    operands: u32,
    divide: u32,
    reserved: u32,
}

/// The parameter of every kernel.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct Batch {
    tasks: [KernelTask; TASKS],
    operands: [KernelOperand; OPERANDS],
}

// kernels/batch.h asserts the same sizes.
const _: () = assert!(size_of::<KernelTask>() == 32 && size_of::<KernelOperand>() == 24);
const _: () = assert!(size_of::<Batch>() == TASKS * 32 + OPERANDS * 24 && align_of::<Batch>() == 8);

/// Builds a batch by adding tasks.
#[derive(Clone, Debug)]
pub struct BatchBuilder {
    batch: Batch,
    tasks: usize,
    operands: usize,
}

impl Default for BatchBuilder {
    fn default() -> Self {
        let batch =
            Batch { tasks: [KernelTask::default(); TASKS], operands: [KernelOperand::default(); OPERANDS] };
        Self { batch, tasks: 0, operands: 0 }
    }
}

impl BatchBuilder {
    /// Whether one more task with `operands` operands fits.
    #[must_use]
    pub fn has_room(&self, operands: usize) -> bool {
        self.tasks < TASKS && operands <= OPERANDS - self.operands
    }

    /// Adds a task: the reduction of `operands`, at least one, in their order, divided by `divide`, into `count` elements
    /// (bytes, for a copy) at `into`. `false`, and nothing added, if it does not fit.
    pub fn push(
        &mut self,
        into: u64,
        count: u64,
        operands: impl ExactSizeIterator<Item = KernelOperand>,
        divide: Option<NonZeroU32>,
    ) -> bool {
        let count_of_operands = operands.len();
        assert!(count_of_operands > 0, "a task needs an operand");
        if !self.has_room(count_of_operands) {
            return false;
        }
        self.batch.tasks[self.tasks] = KernelTask {
            into,
            count,
            first: self.operands as u32,
            operands: count_of_operands as u32,
            divide: divide.map_or(0, NonZeroU32::get),
            reserved: 0,
        };
        for (place, operand) in self.batch.operands[self.operands..].iter_mut().zip(operands) {
            *place = operand;
        }
        self.tasks += 1;
        self.operands += count_of_operands;
        true
    }

    /// The number of tasks: the grid's y dimension.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// The parameters to pass to the kernel.
    #[must_use]
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Removes all tasks.
    pub fn clear(&mut self) {
        (self.tasks, self.operands) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operands(count: usize) -> impl ExactSizeIterator<Item = KernelOperand> {
        (0..count).map(|nth| KernelOperand::new(nth as u64, None))
    }

    #[test]
    fn tasks_are_added_while_there_is_room() {
        let mut builder = BatchBuilder::default();
        for task in 0..TASKS {
            assert!(builder.push(task as u64, 1, operands(8), None));
        }
        assert!(!builder.has_room(0) && !builder.push(0, 1, operands(1), None));
        assert_eq!(builder.tasks(), TASKS);
        assert_eq!(builder.batch().tasks[15].first, 120);

        builder.clear();
        assert!(!builder.push(0, 1, operands(129), None));
        assert!(builder.push(7, 5, operands(127), NonZeroU32::new(3)));
        assert!(!builder.push(0, 1, operands(2), None));
        assert!(builder.push(9, 1, std::iter::once(KernelOperand::new(5, Some(0.5))), None));
        let batch = builder.batch();
        let task = batch.tasks[0];
        assert_eq!((task.into, task.count, task.operands, task.divide), (7, 5, 127, 3));
        assert_eq!(batch.operands[127], KernelOperand { at: 5, factor: 0.5, scaled: 1 });
    }

    #[test]
    fn the_limits_match_kernels_batch_h() {
        let header = include_str!("../../../kernels/batch.h");
        for (name, number) in
            [("kTasks", TASKS), ("kOperands", OPERANDS), ("kMaxThreads", MAX_THREADS as usize)]
        {
            assert!(header.contains(&format!("constexpr int {name} = {number};")), "{name}");
        }
    }
}
