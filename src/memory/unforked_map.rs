//! Memory that this library registers with devices for its own use.
//!
//! Owns its mapping. A forked child does not have it: before Linux 5.12, a page that both had would be copied
//! at the next write, and devices would go on using the page of the child.

use crate::error::{Error, Result};
use memmap2::{Advice, MmapMut};

/// Maps `len` zeroed bytes, at least one page, that forked children do not have.
///
/// # Errors
/// `System` if there is not enough memory.
pub(crate) fn map_unforked(len: usize) -> Result<MmapMut> {
    let failed = |cause| Error::io(format_args!("cannot map {len} bytes for devices"), cause);
    let map = MmapMut::map_anon(len.max(1)).map_err(failed)?;
    map.advise(Advice::DontFork).map_err(failed)?;
    Ok(map)
}

/// Whether the page at `address` is mapped, and forked children do not have it.
#[cfg(test)]
pub(crate) fn is_unforked(address: u64) -> bool {
    mapping_flags(address).is_some_and(|flags| flags.iter().any(|flag| flag == "dc"))
}

/// The flags of the mapping that contains the page at `address`, as `/proc/self/smaps` lists them. `None` if
/// nothing is mapped there.
#[cfg(test)]
pub(crate) fn mapping_flags(address: u64) -> Option<Vec<String>> {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("the kernel lists mappings");
    let mut contains = false;
    for line in maps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let number = |text: &str| u64::from_str_radix(text, 16);
        if let Some((Ok(start), Ok(end))) = range.map(|(start, end)| (number(start), number(end))) {
            contains = (start..end).contains(&address);
        } else if contains && let Some(flags) = line.strip_prefix("VmFlags:") {
            return Some(flags.split_whitespace().map(str::to_owned).collect());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_children_do_not_have_the_mapping() {
        let map = map_unforked(10_000).expect("memory");
        let start = map.as_ptr() as u64;
        assert!(is_unforked(start) && is_unforked(start + 9_999));
        let usual = MmapMut::map_anon(10_000).expect("memory");
        assert!(mapping_flags(usual.as_ptr() as u64).is_some() && !is_unforked(usual.as_ptr() as u64));
        assert_eq!(mapping_flags(0), None);
    }
}
