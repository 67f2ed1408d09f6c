//! Errors with the name of the parsed file.
//!
//! Owns the layout of these errors: `FILE:LINE: message`. Must not know the formats.

use crate::error::Error;
use std::fmt::Display;

/// The name of the file that is parsed, for errors.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileContext<'a> {
    pub(super) name: &'a str,
}

impl FileContext<'_> {
    /// An error in line `line`, from 1.
    pub(super) fn refuse(self, line: usize, message: impl Display) -> Error {
        Error::invalid_setting(format!("{}:{line}: {message}", self.name))
    }

    /// An error that no single line causes.
    pub(super) fn refuse_all(self, message: impl Display) -> Error {
        Error::invalid_setting(format!("{}: {message}", self.name))
    }
}
