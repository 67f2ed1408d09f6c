//! Errors with the name of the parsed file and the line.
//!
//! Owns the layout of these errors, `FILE:LINE: message`, and the lines of a TOML file.

use flexring_core::error::{Error, Result};
use serde::de::DeserializeOwned;
use std::fmt::Display;
use toml::Spanned;

/// The name of the file that is parsed, for errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceFile<'a> {
    pub(crate) name: &'a str,
}

impl SourceFile<'_> {
    /// An error in line `line`, from 1.
    pub(crate) fn refuse(self, line: usize, message: impl Display) -> Error {
        Error::invalid_setting(format!("{}:{line}: {message}", self.name))
    }

    /// An error that no single line causes.
    pub(crate) fn refuse_all(self, message: impl Display) -> Error {
        Error::invalid_setting(format!("{}: {message}", self.name))
    }

    /// Parses a TOML file.
    pub(crate) fn parse_toml<T: DeserializeOwned>(self, text: &str, lines: &Lines) -> Result<T> {
        toml::from_str(text).map_err(|error| {
            let message = error.message().trim().replace('\n', ", ");
            match error.span() {
                Some(span) => self.refuse(lines.at(span.start), message),
                None => self.refuse_all(message),
            }
        })
    }
}

/// The offsets of newlines, to find the line of an offset.
pub(crate) struct Lines(Vec<usize>);

impl Lines {
    pub(crate) fn of(text: &str) -> Self {
        Self(text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect())
    }

    pub(crate) fn at(&self, offset: usize) -> usize {
        self.0.partition_point(|newline| *newline < offset) + 1
    }

    pub(crate) fn of_value<T>(&self, value: &Spanned<T>) -> usize {
        self.at(value.span().start)
    }
}
