//! What one launch of a kernel is told: `kernels/batch.h`, byte for byte.
//!
//! Owns that layout and how tasks fill it. Must not know jobs, GPUs or how kernels are launched.

use std::num::NonZeroU32;

/// How many tasks a launch has room for.
pub const TASKS: usize = 16;

/// How many operands all tasks of a launch have together at most.
pub const OPERANDS: usize = 128;

/// How many threads a block has at most.
pub const MOST_THREADS: u32 = 512;

/// One input of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Operand {
    at: u64,
    factor: f64,
    scaled: u64,
}

impl Operand {
    /// The elements at an address as the GPU sees it, each multiplied with `factor` if there is one.
    #[must_use]
    pub fn new(at: u64, factor: Option<f64>) -> Self {
        Self { at, factor: factor.unwrap_or(1.0), scaled: factor.is_some().into() }
    }
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Task {
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
    tasks: [Task; TASKS],
    operands: [Operand; OPERANDS],
}

// What kernels/batch.h asserts.
const _: () = assert!(size_of::<Task>() == 32 && size_of::<Operand>() == 24);
const _: () = assert!(size_of::<Batch>() == TASKS * 32 + OPERANDS * 24 && align_of::<Batch>() == 8);

/// A batch while tasks are added to it.
#[derive(Clone, Debug)]
pub struct Filling {
    batch: Batch,
    tasks: usize,
    operands: usize,
}

impl Default for Filling {
    fn default() -> Self {
        let batch = Batch { tasks: [Task::default(); TASKS], operands: [Operand::default(); OPERANDS] };
        Self { batch, tasks: 0, operands: 0 }
    }
}

impl Filling {
    /// Whether there is room for one more task of so many operands.
    #[must_use]
    pub fn has_room(&self, operands: usize) -> bool {
        self.tasks < TASKS && operands <= OPERANDS - self.operands
    }

    /// Adds a task, if there is room: the reduction of `operands`, of which there is at least one, in their order, divided
    /// by a number of ranks, into `count` elements (bytes, for a copy) at `into`.
    pub fn push(
        &mut self,
        into: u64,
        count: u64,
        operands: impl ExactSizeIterator<Item = Operand>,
        divide: Option<NonZeroU32>,
    ) -> bool {
        let many = operands.len();
        assert!(many > 0, "a task has an operand");
        if !self.has_room(many) {
            return false;
        }
        self.batch.tasks[self.tasks] = Task {
            into,
            count,
            first: self.operands as u32,
            operands: many as u32,
            divide: divide.map_or(0, NonZeroU32::get),
            reserved: 0,
        };
        for (place, operand) in self.batch.operands[self.operands..].iter_mut().zip(operands) {
            *place = operand;
        }
        self.tasks += 1;
        self.operands += many;
        true
    }

    /// How many tasks there are: the grid's y.
    #[must_use]
    pub fn tasks(&self) -> usize {
        self.tasks
    }

    /// What a kernel is given.
    #[must_use]
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Takes all tasks out.
    pub fn clear(&mut self) {
        (self.tasks, self.operands) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operands(many: usize) -> impl ExactSizeIterator<Item = Operand> {
        (0..many).map(|nth| Operand::new(nth as u64, None))
    }

    #[test]
    fn tasks_are_added_while_there_is_room() {
        let mut filling = Filling::default();
        for task in 0..TASKS {
            assert!(filling.push(task as u64, 1, operands(8), None));
        }
        assert!(!filling.has_room(0) && !filling.push(0, 1, operands(1), None));
        assert_eq!(filling.tasks(), TASKS);
        assert_eq!(filling.batch().tasks[15].first, 120);

        filling.clear();
        assert!(!filling.push(0, 1, operands(129), None));
        assert!(filling.push(7, 5, operands(127), NonZeroU32::new(3)));
        assert!(!filling.push(0, 1, operands(2), None));
        assert!(filling.push(9, 1, std::iter::once(Operand::new(5, Some(0.5))), None));
        let batch = filling.batch();
        let task = batch.tasks[0];
        assert_eq!((task.into, task.count, task.operands, task.divide), (7, 5, 127, 3));
        assert_eq!(batch.operands[127], Operand { at: 5, factor: 0.5, scaled: 1 });
    }

    #[test]
    fn the_header_has_the_same_numbers() {
        let header = include_str!("../../../kernels/batch.h");
        for (name, number) in
            [("kTasks", TASKS), ("kOperands", OPERANDS), ("kMostThreads", MOST_THREADS as usize)]
        {
            assert!(header.contains(&format!("constexpr int {name} = {number};")), "{name}");
        }
    }
}
