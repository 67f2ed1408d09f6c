//! A value for every point of the vector, kept as few segments as the history needs.

use super::fraction::{Fraction, Span};
use std::collections::BTreeMap;

/// A map from the points of the vector to values. Starts as one segment and splits where spans ask it to.
#[derive(Clone, Debug)]
pub(super) struct SpanMap<V> {
    /// Each segment reaches from its key to the next key; the last one reaches to 1.
    segments: BTreeMap<Fraction, V>,
}

impl<V: Clone> SpanMap<V> {
    /// The same value everywhere.
    pub(super) fn uniform(value: V) -> Self {
        Self { segments: BTreeMap::from([(Fraction::ZERO, value)]) }
    }

    fn split(&mut self, at: Fraction) {
        if at == Fraction::ONE || self.segments.contains_key(&at) {
            return;
        }
        let before = self.segments.range(..at).next_back().map(|(_, value)| value.clone());
        self.segments.insert(at, before.expect("the first segment starts at zero"));
    }

    /// The segments that make up `span` exactly, splitting those that reach beyond it.
    pub(super) fn over(&mut self, span: Span) -> impl Iterator<Item = &mut V> {
        self.split(span.start);
        self.split(span.end);
        self.segments.range_mut(span.start..span.end).map(|(_, value)| value)
    }

    /// Those parts of `span` whose value is `wanted`, in order, neighbours joined.
    pub(super) fn parts_where(&mut self, span: Span, wanted: impl Fn(&V) -> bool) -> Vec<Span> {
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
    fn splits_where_it_is_asked_to_and_nowhere_else() {
        let mut map = SpanMap::uniform(0);
        map.over(Span::part(1, 3)).for_each(|value| *value = 1);
        map.over(Span::part(0, 2)).for_each(|value| *value += 10);
        assert_eq!(map.over(Span::WHOLE).map(|value| *value).collect::<Vec<_>>(), [10, 11, 1, 0]);
        assert_eq!(map.parts_where(Span::WHOLE, |value| *value % 10 == 1), [Span::part(1, 3)]);
    }
}
