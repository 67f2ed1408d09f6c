//! Text that another process sent, made safe for errors, logs and terminals.
//!
//! Owns which characters such text keeps and how long it is. Decoding makes it safe, so that no text from a
//! connection can be formatted as it came.

use serde::de::{Deserializer, Visitor};
use std::fmt;
use std::ops::Deref;

/// Most bytes of text in one line.
const LONGEST_LINE: usize = 1 << 10;
/// Most bytes of text in several lines: the error of a time-out has a table.
const LONGEST_LINES: usize = 16 << 10;
/// Stands for each character that is left out. No longer than any of them, so that text does not grow.
const LEFT_OUT: char = '?';
const CUT: &str = "...";

/// One line of text of another process, without control characters and of at most 1 KiB.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(transparent)]
pub struct PeerText(String);

impl Deref for PeerText {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PeerText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl From<&str> for PeerText {
    fn from(text: &str) -> Self {
        Self(safe(text, LONGEST_LINE, false))
    }
}

impl From<PeerText> for String {
    fn from(text: PeerText) -> Self {
        text.0
    }
}

impl<'de> serde::Deserialize<'de> for PeerText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        one_line(deserializer).map(Self)
    }
}

/// Decodes one line of text, for fields that are not a [`PeerText`].
///
/// # Errors
/// Those of the decoder.
pub fn one_line<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    deserializer.deserialize_str(SafeText { longest: LONGEST_LINE, keeps_lines: false })
}

/// Decodes text of several lines.
///
/// # Errors
/// Those of the decoder.
pub fn lines<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    deserializer.deserialize_str(SafeText { longest: LONGEST_LINES, keeps_lines: true })
}

/// Decodes text without a copy of all of it.
struct SafeText {
    longest: usize,
    keeps_lines: bool,
}

impl Visitor<'_> for SafeText {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text")
    }

    fn visit_str<E>(self, text: &str) -> Result<String, E> {
        Ok(safe(text, self.longest, self.keeps_lines))
    }
}

/// The text without the characters that a terminal or a log may obey, cut to `longest` bytes.
fn safe(text: &str, longest: usize, keeps_lines: bool) -> String {
    let end = match text.len() <= longest {
        true => text.len(),
        false => (0..=longest - CUT.len()).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0),
    };
    let kept = &text[..end];
    let line = |character: char| keeps_lines && character == '\n';
    let safe = kept.chars().map(|character| match character {
        character if is_obeyed(character) && !line(character) => LEFT_OUT,
        character => character,
    });
    let mut safe: String = safe.collect();
    if kept.len() < text.len() {
        safe.push_str(CUT);
    }
    safe
}

/// Whether a terminal may obey a character instead of showing it: control characters, line separators, and
/// marks that change the direction of text.
fn is_obeyed(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn text_of_peers_keeps_no_escape_sequences_and_no_lines() {
        let hostile = "host\u{1b}[31m\r\nERROR: all is lost\u{9b}2J\u{202e}\0";
        let bytes = postcard::to_stdvec(hostile).expect("short");
        let text: PeerText = postcard::from_bytes(&bytes).expect("text");
        assert_eq!(&*text, "host?[31m??ERROR: all is lost?2J??");
        assert_eq!(text, PeerText::from(hostile));
        assert_eq!(&*PeerText::from("h\u{f6}st-1.example"), "h\u{f6}st-1.example");
    }

    #[test]
    fn text_of_peers_has_a_longest_length() {
        for text in ["x".repeat(10 << 20), "\u{1f980}".repeat(1 << 20)] {
            let bytes = postcard::to_stdvec(&text).expect("bytes");
            let line: PeerText = postcard::from_bytes(&bytes).expect("text");
            assert!(line.len() <= LONGEST_LINE && line.ends_with(CUT), "{} bytes", line.len());
        }
    }

    #[test]
    fn errors_of_peers_keep_their_lines_only() {
        let sent = Error::aborted(format!("rank 0: a table\nof lines\u{1b}[2J{}", "x".repeat(1 << 20)));
        let bytes = postcard::to_stdvec(&sent).expect("bytes");
        let received: Error = postcard::from_bytes(&bytes).expect("an error");
        assert!(received.message().starts_with("rank 0: a table\nof lines?[2Jxxx"), "{received}");
        assert!(received.message().len() <= LONGEST_LINES);
    }
}
