//! Which ranges of an arena are free.

use std::collections::BTreeMap;

/// Free ranges by offset, with their lengths. Adjacent ranges are always merged.
#[derive(Debug, Default)]
pub(super) struct FreeList(BTreeMap<usize, usize>);

impl FreeList {
    /// Allocates `len` bytes at a multiple of `align`: the first fit.
    pub(super) fn alloc(&mut self, len: usize, align: usize) -> Option<usize> {
        let (start, size, at) = self.0.iter().find_map(|(start, size)| {
            let at = start.next_multiple_of(align);
            (at.checked_add(len)? <= start + size).then_some((*start, *size, at))
        })?;
        self.0.remove(&start);
        if at > start {
            self.0.insert(start, at - start);
        }
        if at + len < start + size {
            self.0.insert(at + len, start + size - at - len);
        }
        Some(at)
    }

    /// Frees a range, which [`alloc`](Self::alloc) returned or which is new.
    pub(super) fn free(&mut self, mut start: usize, mut len: usize) {
        let before = self.0.range(..start).next_back().map(|(start, size)| (*start, *size));
        if let Some((before, size)) = before.filter(|(before, size)| before + size == start) {
            self.0.remove(&before);
            (start, len) = (before, size + len);
        }
        if let Some(size) = self.0.remove(&(start + len)) {
            len += size;
        }
        self.0.insert(start, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn allocations_are_disjoint_and_merge_when_freed(sizes in proptest::collection::vec(1usize..9, 1..30)) {
            let mut list = FreeList::default();
            list.free(3, 997);
            let allocated: Vec<(usize, usize)> =
                sizes.iter().map(|len| (list.alloc(*len, 4).expect("free space"), *len)).collect();
            for (index, (start, len)) in allocated.iter().enumerate() {
                prop_assert_eq!(start % 4, 0);
                prop_assert!(allocated[..index].iter().all(|(other, size)| other + size <= *start || start + len <= *other));
            }
            allocated.into_iter().for_each(|(start, len)| list.free(start, len));
            prop_assert_eq!(list.0, BTreeMap::from([(3, 997)]));
        }
    }
}
