//! How a setting's text becomes its value, and how the accepted values are described.
//!
//! Owns the types of values that are not a choice among words, and the bounds of values.

use std::borrow::Cow;
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

/// A type that a setting's value can have.
pub(super) trait SettingValue: Sized {
    /// The accepted values, as a phrase that completes "expected ..." in an error message.
    fn expected() -> Cow<'static, str>;
    fn parse(text: &str) -> Option<Self>;
    /// The value as a user would write it; `unset` if it is absent.
    fn show(&self) -> String;
}

/// The values of type `T` that a setting accepts.
pub(super) trait ValueCheck<T> {
    fn admits(&self, value: &T) -> bool;
    /// The accepted values, as a phrase.
    fn expected(&self) -> Cow<'static, str>;
}

/// Accepts all values of the type.
pub(super) struct AnyValue;

impl<T: SettingValue> ValueCheck<T> for AnyValue {
    fn admits(&self, _: &T) -> bool {
        true
    }
    fn expected(&self) -> Cow<'static, str> {
        T::expected()
    }
}

/// Accepts the numbers in the range.
impl ValueCheck<usize> for RangeInclusive<usize> {
    fn admits(&self, value: &usize) -> bool {
        self.contains(value)
    }
    fn expected(&self) -> Cow<'static, str> {
        let (first, last) = (self.start(), self.end());
        match last - first {
            1 => format!("{first} or {last}").into(),
            _ => format!("a whole number from {first} to {last}").into(),
        }
    }
}

/// Accepts the numbers in the range, and an unset setting.
impl ValueCheck<Option<usize>> for RangeInclusive<usize> {
    fn admits(&self, value: &Option<usize>) -> bool {
        value.as_ref().is_none_or(|value| self.contains(value))
    }
    fn expected(&self) -> Cow<'static, str> {
        ValueCheck::<usize>::expected(self)
    }
}

/// Accepts the multiples of `multiple_of` from `least` to `most`.
pub(super) struct SizeRange {
    pub least: Size,
    pub most: Size,
    pub multiple_of: Size,
    /// These sizes, as a phrase.
    pub expected: &'static str,
}

impl ValueCheck<Size> for SizeRange {
    fn admits(&self, size: &Size) -> bool {
        (self.least..=self.most).contains(size) && size.0.is_multiple_of(self.multiple_of.0)
    }
    fn expected(&self) -> Cow<'static, str> {
        self.expected.into()
    }
}

/// A number of bytes. The suffixes `K`, `M` and `G` are binary: 1K is 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub usize);

impl Size {
    /// Parses `4096`, `512K`, `1M` or `2G`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let (digits, shift) = match text.char_indices().last()? {
            (at, 'k' | 'K') => (&text[..at], 10),
            (at, 'm' | 'M') => (&text[..at], 20),
            (at, 'g' | 'G') => (&text[..at], 30),
            _ => (text, 0),
        };
        let number: usize = digits.parse().ok()?;
        number.checked_mul(1 << shift).map(Self)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n > 0 && n % (1 << 30) == 0 => write!(f, "{}G", n >> 30),
            n if n > 0 && n % (1 << 20) == 0 => write!(f, "{}M", n >> 20),
            n if n > 0 && n % (1 << 10) == 0 => write!(f, "{}K", n >> 10),
            n => write!(f, "{n}"),
        }
    }
}

impl SettingValue for Size {
    fn expected() -> Cow<'static, str> {
        "a number of bytes such as 4096, 512K or 1M".into()
    }
    fn parse(text: &str) -> Option<Self> {
        Self::parse(text)
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

impl SettingValue for usize {
    fn expected() -> Cow<'static, str> {
        "a whole number".into()
    }
    fn parse(text: &str) -> Option<Self> {
        text.trim().parse().ok()
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

impl SettingValue for Option<usize> {
    fn expected() -> Cow<'static, str> {
        "a whole number".into()
    }
    fn parse(text: &str) -> Option<Self> {
        text.trim().parse().ok().map(Some)
    }
    fn show(&self) -> String {
        self.map_or_else(|| "unset".to_owned(), |value| value.to_string())
    }
}

impl SettingValue for Option<u16> {
    fn expected() -> Cow<'static, str> {
        "a port number from 1 to 65535".into()
    }
    fn parse(text: &str) -> Option<Self> {
        text.trim().parse().ok().filter(|port| *port != 0).map(Some)
    }
    fn show(&self) -> String {
        self.map_or_else(|| "unset".to_owned(), |value| value.to_string())
    }
}

/// The ports at which this process may listen where the peers learn the port from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListeningPorts {
    /// Lowest port, at least 1.
    pub first: u16,
    /// Highest port, at least `first`.
    pub last: u16,
}

#[doc(hidden)]
impl ListeningPorts {
    /// All of them, from one that follows from `number` on.
    pub fn starting_at(self, number: u16) -> impl Iterator<Item = u16> {
        let begin = self.first + number % (self.last - self.first).saturating_add(1);
        (begin..=self.last).chain(self.first..begin)
    }
}

impl fmt::Display for ListeningPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl SettingValue for Option<ListeningPorts> {
    fn expected() -> Cow<'static, str> {
        "two port numbers from 1 to 65535 joined by -, the lower one first, such as 20000-20999".into()
    }
    fn parse(text: &str) -> Option<Self> {
        let (first, last) = text.split_once('-')?;
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (1..=last).contains(&first).then_some(Some(ListeningPorts { first, last }))
    }
    fn show(&self) -> String {
        self.map_or_else(|| "unset".to_owned(), |ports| ports.to_string())
    }
}

/// Whether something is enabled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch(pub bool);

impl SettingValue for Switch {
    fn expected() -> Cow<'static, str> {
        "0 or 1".into()
    }
    fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "0" => Some(Self(false)),
            "1" => Some(Self(true)),
            _ => None,
        }
    }
    fn show(&self) -> String {
        u8::from(self.0).to_string()
    }
}

/// The dimensions of a grid of ranks, the one of the nearest ranks first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dimensions(pub Vec<usize>);

impl SettingValue for Option<Dimensions> {
    fn expected() -> Cow<'static, str> {
        "whole numbers from 1 joined by x, such as 4x2".into()
    }
    fn parse(text: &str) -> Option<Self> {
        let numbers = text.trim().split(['x', 'X']).map(|part| part.trim().parse().ok().filter(|n| *n > 0));
        numbers.collect::<Option<Vec<usize>>>().map(|numbers| Some(Dimensions(numbers)))
    }
    fn show(&self) -> String {
        let joined =
            |numbers: &Dimensions| numbers.0.iter().map(ToString::to_string).collect::<Vec<_>>().join("x");
        self.as_ref().map_or_else(|| "unset".to_owned(), joined)
    }
}

/// The ranks that are parameter servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Servers(pub Vec<usize>);

impl SettingValue for Option<Servers> {
    fn expected() -> Cow<'static, str> {
        "ranks joined by commas, such as 0,4".into()
    }
    fn parse(text: &str) -> Option<Self> {
        let ranks = text.trim().split(',').map(|part| part.trim().parse().ok());
        ranks.collect::<Option<Vec<usize>>>().map(|ranks| Some(Servers(ranks)))
    }
    fn show(&self) -> String {
        let joined = |ranks: &Servers| ranks.0.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        self.as_ref().map_or_else(|| "unset".to_owned(), joined)
    }
}

impl SettingValue for Option<String> {
    fn expected() -> Cow<'static, str> {
        "non-empty text".into()
    }
    fn parse(text: &str) -> Option<Self> {
        (!text.trim().is_empty()).then(|| Some(text.trim().to_owned()))
    }
    fn show(&self) -> String {
        self.clone().unwrap_or_else(|| "unset".to_owned())
    }
}

/// A duration is a number of milliseconds in the environment.
impl SettingValue for Duration {
    fn expected() -> Cow<'static, str> {
        "a number of milliseconds, at least 1".into()
    }
    fn parse(text: &str) -> Option<Self> {
        text.trim().parse().ok().filter(|ms| *ms > 0).map(Self::from_millis)
    }
    fn show(&self) -> String {
        self.as_millis().to_string()
    }
}
