//! A list that holds up to two entries without a heap allocation.
//!
//! Owns the representation. Chains have one peer and two operands in each step, so the programs of large
//! worlds need no allocation per step, and reading a step touches one place in memory.

use std::ops::Deref;

/// A list of fixed length, read as a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InlineList<T>(Entries<T>);

/// The entries by their number; `Many` also if there are none.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Entries<T> {
    One([T; 1]),
    Two([T; 2]),
    Many(Box<[T]>),
}

impl<T: Copy> From<&[T]> for InlineList<T> {
    fn from(entries: &[T]) -> Self {
        Self(match *entries {
            [only] => Entries::One([only]),
            [first, second] => Entries::Two([first, second]),
            _ => Entries::Many(entries.into()),
        })
    }
}

impl<T: Copy> From<Vec<T>> for InlineList<T> {
    fn from(entries: Vec<T>) -> Self {
        Self::from(&entries[..])
    }
}

impl<T, const N: usize> From<[T; N]> for InlineList<T>
where
    T: Copy,
{
    fn from(entries: [T; N]) -> Self {
        Self::from(&entries[..])
    }
}

impl<T> Deref for InlineList<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            Entries::One(entries) => entries,
            Entries::Two(entries) => entries,
            Entries::Many(entries) => entries,
        }
    }
}

impl<'a, T> IntoIterator for &'a InlineList<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_any_length_read_as_the_slices_they_come_from() {
        for len in 0..5 {
            let entries: Vec<usize> = (0..len).collect();
            let list = InlineList::from(entries.clone());
            assert_eq!(&list[..], &entries[..]);
            assert_eq!(list.into_iter().sum::<usize>(), entries.iter().sum::<usize>());
            assert_eq!(matches!(list.0, Entries::Many(_)), !(1..=2).contains(&len));
        }
    }
}
