//! Byte counts as text.

use flexring_core::config::Size;

/// A byte count rounded for reading: `128K`, `9.1M`.
pub fn rounded(bytes: u64) -> String {
    let exact = Size(usize::try_from(bytes).unwrap_or(usize::MAX)).to_string();
    match bytes {
        _ if exact.len() <= 4 => exact,
        0..0x10_0000 => format!("{:.1}K", bytes as f64 / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1}M", bytes as f64 / 1024.0 / 1024.0),
        _ => format!("{:.1}G", bytes as f64 / 1024.0 / 1024.0 / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::rounded;

    #[test]
    fn byte_sizes_have_one_decimal_if_they_are_not_short() {
        for (bytes, expected) in [
            (64 << 10, "64K"),
            (9_568_256, "9.1M"),
            (1500, "1500"),
            (15_000, "14.6K"),
            (5 << 30, "5G"),
            (0, "0"),
        ] {
            assert_eq!(rounded(bytes), expected);
        }
    }
}
