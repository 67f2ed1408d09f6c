//! Output helpers of the subcommands that print once and end.
//!
//! Owns writing to standard output, the JSON style, units of times, and singular and plural forms.

use crate::error::CommandError;
use flexring::Error;
use serde::Serialize;
use std::io::Write;

/// Writes `text` to standard output, without adding a line break.
///
/// # Errors
/// `CommandError::Failed` if standard output cannot be written.
pub fn print(text: &str) -> Result<(), CommandError> {
    let written = std::io::stdout().write_all(text.as_bytes());
    written.map_err(|cause| Error::io("cannot write to standard output", cause).into())
}

/// Indented JSON with a final line break.
///
/// # Errors
/// `CommandError::Failed` if `data` cannot be represented in JSON.
pub fn json(data: &impl Serialize) -> Result<String, CommandError> {
    let failed = |cause| Error::internal(format!("cannot write JSON: {cause}"));
    Ok(serde_json::to_string_pretty(data).map_err(failed)? + "\n")
}

/// A count with its noun: `1 rank`, `5 ranks`.
pub fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// A time with the unit that fits: s, ms or us.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.2} us", s * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_unit_that_fits() {
        assert_eq!([2.0, 0.0537, 0.000_012].map(duration), ["2.00 s", "53.70 ms", "12.00 us"]);
    }
}
