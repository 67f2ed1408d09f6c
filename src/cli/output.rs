//! What subcommands print that are over at once.
//!
//! Owns the way to standard output, how data becomes JSON there, and how things are counted. Must not know what is
//! printed.

use crate::error::CommandError;
use flexring::{Error, ErrorKind};
use serde::Serialize;
use std::io::Write;

/// Prints a text as it is.
pub fn print(text: &str) -> Result<(), CommandError> {
    let written = std::io::stdout().write_all(text.as_bytes());
    written.map_err(|cause| Error::system("cannot write to standard output", cause).into())
}

/// Data as JSON for people to read.
pub fn json(data: &impl Serialize) -> Result<String, CommandError> {
    let failed = |cause| Error::new(ErrorKind::Internal, format!("cannot write JSON: {cause}"));
    Ok(serde_json::to_string_pretty(data).map_err(failed)? + "\n")
}

/// `1 rank`, `5 ranks`.
pub fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
