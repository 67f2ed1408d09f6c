//! A list of entries for each step of a program, all in one allocation.
//!
//! Owns the flat form.

/// By step, a list.
#[derive(Clone, Debug)]
pub(super) struct StepLists<T> {
    /// By step, the end of its list in `entries`.
    ends: Vec<u32>,
    entries: Vec<T>,
}

impl<T> Default for StepLists<T> {
    fn default() -> Self {
        Self { ends: Vec::new(), entries: Vec::new() }
    }
}

impl<T> StepLists<T> {
    /// Empty lists for this number of steps.
    pub(super) fn without_entries(steps: usize) -> Self {
        Self { ends: vec![0; steps], entries: Vec::new() }
    }

    /// Adds an entry to the list of the next step.
    pub(super) fn push(&mut self, entry: T) {
        self.entries.push(entry);
    }

    /// The list of the next step is complete.
    pub(super) fn end_step(&mut self) {
        self.ends.push(self.entries.len() as u32);
    }

    /// Gives back the memory for further entries. Call it when all lists are complete.
    pub(super) fn shrink_to_fit(&mut self) {
        self.ends.shrink_to_fit();
        self.entries.shrink_to_fit();
    }

    pub(super) fn get(&self, step: u32) -> &[T] {
        &self.entries[self.start(step)..self.ends[step as usize] as usize]
    }

    fn start(&self, step: u32) -> usize {
        step.checked_sub(1).map_or(0, |before| self.ends[before as usize] as usize)
    }

    /// Removes the entries of a step.
    #[cfg(test)]
    pub(super) fn clear_step(&mut self, step: u32) {
        let range = self.start(step)..self.ends[step as usize] as usize;
        let removed = range.len() as u32;
        self.entries.drain(range);
        self.ends[step as usize..].iter_mut().for_each(|end| *end -= removed);
    }

    /// By step, the steps whose lists name it, in rising order. `named` is the step that an entry names.
    pub(super) fn reversed(&self, named: impl Fn(&T) -> u32) -> StepLists<u32> {
        let mut ends = vec![0; self.ends.len()];
        for entry in &self.entries {
            ends[named(entry) as usize] += 1;
        }
        let mut next = Vec::with_capacity(ends.len());
        let mut total = 0;
        for end in &mut ends {
            next.push(total);
            total += *end;
            *end = total;
        }
        let mut entries = vec![0; self.entries.len()];
        for step in 0..self.ends.len() as u32 {
            for entry in self.get(step) {
                let place = &mut next[named(entry) as usize];
                entries[*place as usize] = step;
                *place += 1;
            }
        }
        StepLists { ends, entries }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reversed_lists_name_the_steps_that_named_a_step() {
        let mut lists = StepLists::default();
        for list in [&[][..], &[0], &[0, 1], &[], &[1, 3]] {
            list.iter().for_each(|on| lists.push(*on));
            lists.end_step();
        }
        let dependents = |lists: &StepLists<u32>| -> Vec<Vec<u32>> {
            let reversed = lists.reversed(|on| *on);
            (0..5).map(|step| reversed.get(step).to_vec()).collect()
        };
        assert_eq!(dependents(&lists), [vec![1, 2], vec![2, 4], vec![], vec![4], vec![]]);
        lists.clear_step(2);
        assert_eq!(dependents(&lists), [vec![1], vec![4], vec![], vec![4], vec![]]);
    }
}
