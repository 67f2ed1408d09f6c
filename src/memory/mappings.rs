//! What the kernel says about the mappings of this process.
//!
//! Owns reading `/proc/self/maps`.

use crate::descriptor;
use crate::error::{Error, Result};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

/// A mapping of this process.
#[derive(Debug)]
pub(super) struct Mapping {
    pub addresses: Range<usize>,
    /// Whether it may be read and written, and changes are not seen by other processes.
    pub is_private_writable: bool,
    /// Device (major and minor number) and inode of the file; inode 0 if there is none.
    pub file: ((u32, u32), u64),
    /// Offset in the file of the first byte.
    pub offset: u64,
    /// The kernel's name for it, such as `[stack]`, or the path of the file.
    pub name: String,
    /// Whether its pages are locked in memory. `false` if no page of the process is, or where the kernel does
    /// not tell.
    pub is_locked: bool,
}

/// The mappings that `range` overlaps, in the order of addresses.
///
/// # Errors
/// `System` if the kernel does not list them, as without `/proc`.
pub(super) fn mappings(range: &Range<usize>) -> Result<Vec<Mapping>> {
    let failed = |cause: io::Error| Error::io("cannot read the mappings of this process", cause);
    // The flags of mappings take far longer to read: 17 ms instead of 0.4 in a process that trains with
    // PyTorch.
    let path = if locks_pages() { "/proc/self/smaps" } else { "/proc/self/maps" };
    let file = descriptor::file(path, OFlags::RDONLY, Mode::empty()).map_err(|cause| failed(cause.into()))?;
    in_list(BufReader::new(File::from(file)), range).map_err(failed)
}

/// The mappings in a list of the kernel's that `range` overlaps.
fn in_list(list: impl BufRead, range: &Range<usize>) -> io::Result<Vec<Mapping>> {
    let mut found: Vec<Mapping> = Vec::new();
    // Paths are bytes, and need not be UTF-8.
    for line in list.split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        if let Some(mapping) = parse(&line) {
            if mapping.addresses.start >= range.end {
                break;
            }
            // The list is read in parts. A mapping that becomes longer between two of them is in both.
            let kept = range.start + 1..=mapping.addresses.start;
            found.retain(|earlier| kept.contains(&earlier.addresses.end));
            found.push(mapping);
        } else if let (Some(flags), Some(last)) = (line.strip_prefix("VmFlags:"), found.last_mut()) {
            last.is_locked = flags.split_whitespace().any(|flag| flag == "lo");
        }
    }
    found.retain(|mapping| mapping.addresses.end > range.start);
    Ok(found)
}

/// Whether a page of this process is locked in memory (`mlock`).
fn locks_pages() -> bool {
    // The name of a thread, which is in this file, need not be UTF-8.
    let Ok(status) = std::fs::read("/proc/self/status") else { return false };
    String::from_utf8_lossy(&status)
        .lines()
        .find_map(|line| line.strip_prefix("VmLck:"))
        .is_some_and(|size| size.trim() != "0 kB")
}

/// A line that begins the description of a mapping.
fn parse(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (access, offset, device, inode) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let (major, minor) = device.split_once(':')?;
    Some(Mapping {
        addresses: usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?,
        is_private_writable: access.starts_with("rw") && access.ends_with('p'),
        file: (
            (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
            inode.parse().ok()?,
        ),
        offset: u64::from_str_radix(offset, 16).ok()?,
        name: fields.next().unwrap_or_default().to_owned(),
        is_locked: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_parsed() {
        let line = "7f30c4e00000-7f30c4e21000 rw-p 00002000 00:1d 81 /dev/shm/a b";
        let mapping = parse(line).expect("a mapping");
        assert_eq!(mapping.addresses, 0x7f30_c4e0_0000..0x7f30_c4e2_1000);
        assert!(mapping.is_private_writable);
        assert_eq!((mapping.file, mapping.offset), (((0, 0x1d), 81), 0x2000));
        assert_eq!(mapping.name, "/dev/shm/a");
        let anonymous = parse("7f30c4e00000-7f30c4e21000 r--p 00000000 00:00 0 ").expect("a mapping");
        assert!(!anonymous.is_private_writable && anonymous.name.is_empty());
        assert!(parse("Rss:                 4 kB").is_none());
        assert!(parse("VmFlags: rd wr mr mw me ac").is_none());
    }

    #[test]
    fn a_mapping_that_becomes_longer_while_the_list_is_read_is_found_once() {
        let list = "1000-3000 rw-p 00000000 00:00 0\n3000-5000 rw-p 00000000 00:00 0\n3000-6000 rw-p 00000000 00:00 0\n";
        let found = in_list(list.as_bytes(), &(0x2000..0x4000)).expect("a list");
        let addresses: Vec<_> = found.into_iter().map(|mapping| mapping.addresses).collect();
        assert_eq!(addresses, [0x1000..0x3000, 0x3000..0x6000]);
    }

    #[test]
    fn only_mappings_in_the_range_are_found() {
        let vector = vec![1u8; 1 << 20];
        let start = vector.as_ptr() as usize;
        let found = mappings(&(start..start + vector.len())).expect("the kernel lists mappings");
        assert_eq!(found.len(), 1);
        assert!(found[0].addresses.contains(&start) && found[0].is_private_writable);
        assert_eq!((found[0].file.1, found[0].is_locked), (0, false));
        assert!(mappings(&(0..4096)).expect("the kernel lists mappings").is_empty());
    }
}
