//! Reading the kernel's small files and directories.
//!
//! Owns the treatment of missing and unreadable files: they are `None`, or empty.

use std::path::Path;
use std::str::FromStr;

/// The trimmed contents of a file; `None` if it cannot be read or is empty.
pub(super) fn text(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let text = text.trim_matches(|c: char| c.is_whitespace() || c == '\0');
    (!text.is_empty()).then(|| text.to_owned())
}

/// The contents of a file as a decimal number.
pub(super) fn number<T: FromStr>(file: &Path) -> Option<T> {
    text(file)?.parse().ok()
}

/// The last component of a symbolic link's target.
pub(super) fn target(link: &Path) -> Option<String> {
    let target = std::fs::read_link(link).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// The names in a directory, in natural order; none if it does not exist.
pub(super) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = entries.flatten().map(name).collect();
    names.sort_by_cached_key(|name| natural_key(name));
    names
}

/// A sort key for natural order, in which `mlx5_2` comes before `mlx5_10`.
pub(super) fn natural_key(name: &str) -> Vec<(String, u64)> {
    let mut parts = vec![(String::new(), 0_u64)];
    let mut in_number = false;
    for c in name.chars() {
        match (c.to_digit(10), parts.last_mut()) {
            (Some(digit), Some((_, number))) => {
                *number = number.saturating_mul(10).saturating_add(digit.into());
                in_number = true;
            }
            (None, Some((letters, _))) if !in_number => letters.push(c),
            _ => {
                parts.push((c.to_string(), 0));
                in_number = false;
            }
        }
    }
    parts
}
