//! A map from the points of the vector to values, stored as segments of equal values.
//!
//! Owns the splitting of segments.

use super::fraction::{Fraction, Span};
use std::collections::BTreeMap;

/// A value for each point of the vector. Starts as one segment, which is split at the ends of spans that are
/// accessed.
#[derive(Clone, Debug)]
pub struct SpanMap<V> {
    /// Each segment ends at the next key; the last one ends at 1.
    segments: BTreeMap<Fraction, V>,
}

impl<V: Clone> SpanMap<V> {
    /// A map with one value for all points.
    pub fn uniform(value: V) -> Self {
        Self { segments: BTreeMap::from([(Fraction::ZERO, value)]) }
    }

    fn split(&mut self, at: Fraction) {
        if at == Fraction::ONE || self.segments.contains_key(&at) {
            return;
        }
        let before = self.segments.range(..at).next_back().map(|(_, value)| value.clone());
        self.segments.insert(at, before.expect("the first segment starts at zero"));
    }

    /// The values of the segments that make up `span`. Splits segments that reach beyond it.
    pub fn over(&mut self, span: Span) -> impl Iterator<Item = &mut V> {
        self.split(span.start);
        self.split(span.end);
        self.segments.range_mut(span.start..span.end).map(|(_, value)| value)
    }

    /// The parts of `span` whose value satisfies `wanted`, in order. Adjacent parts are joined.
    pub fn parts_where(&mut self, span: Span, wanted: impl Fn(&V) -> bool) -> Vec<Span> {
        self.split(span.start);
        self.split(span.end);
        let mut parts: Vec<Span> = Vec::new();
        let mut segments = self.segments.range(span.start..span.end).peekable();
        while let Some((&start, value)) = segments.next() {
            let end = segments.peek().map_or(span.end, |(next, _)| **next);
            if !wanted(value) {
                continue;
            }
            match parts.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => parts.push(Span { start, end }),
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_split_only_at_the_ends_of_accessed_spans() {
        let mut map = SpanMap::uniform(0);
        map.over(Span::part(1, 3)).for_each(|value| *value = 1);
        map.over(Span::part(0, 2)).for_each(|value| *value += 10);
        assert_eq!(map.over(Span::WHOLE).map(|value| *value).collect::<Vec<_>>(), [10, 11, 1, 0]);
        assert_eq!(map.parts_where(Span::WHOLE, |value| *value % 10 == 1), [Span::part(1, 3)]);
    }
}
