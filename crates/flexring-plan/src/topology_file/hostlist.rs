//! Slurm's lists of names: `n[001-010,12],login`, `rack[0-3]node[0-9]`.
//!
//! Owns their grammar and expansion.

use super::limits::MAX_RANKS;

/// Most bytes of a name. Host names have at most 253.
const MAX_NAME: usize = 255;

/// The names in `text`, from left to right. Subtracts their number from `budget`, which limits all lists of a
/// file together.
pub(super) fn expand(text: &str, budget: &mut usize) -> Result<Vec<String>, String> {
    let mut names = Vec::new();
    for part in split(text)? {
        let parts = name_parts(part)?;
        let count = parts.iter().try_fold(1usize, |count, part| count.checked_mul(part.len()));
        *budget = count
            .and_then(|count| budget.checked_sub(count))
            .ok_or_else(|| format!("{part:?} is too many names: expected at most {MAX_RANKS} in the file"))?;
        let longest: usize = parts.iter().map(NamePart::width).sum();
        if longest > MAX_NAME {
            return Err(format!("{part:?} expands to names of {longest} bytes: expected at most {MAX_NAME}"));
        }
        names.extend((0..count.unwrap_or(0)).map(|index| name(&parts, index)));
    }
    Ok(names)
}

/// Splits at the commas outside brackets.
fn split(text: &str) -> Result<Vec<&str>, String> {
    let mut inside = false;
    for c in text.chars() {
        match c {
            '[' | ']' if inside == (c == '[') => {
                return Err(format!("{text:?} has an unmatched {c}: expected pairs of [ and ], not nested"));
            }
            '[' | ']' => inside = !inside,
            _ => {}
        }
    }
    if inside {
        return Err(format!("{text:?} has no closing ]: expected pairs of [ and ]"));
    }
    let parts: Vec<&str> = text
        .split(|c| {
            match c {
                '[' => inside = true,
                ']' => inside = false,
                _ => {}
            }
            c == ',' && !inside
        })
        .collect();
    match parts.iter().any(|part| part.is_empty()) {
        true => Err(format!("{text:?} has an empty name: expected names between commas")),
        false => Ok(parts),
    }
}

/// A part of a name: fixed text or numbers.
enum NamePart<'a> {
    Text(&'a str),
    Numbers(Vec<NumberRange>),
}

/// Consecutive numbers, padded with zeros to the width of the first.
#[derive(Clone, Copy)]
struct NumberRange {
    first: u64,
    last: u64,
    width: usize,
}

impl NumberRange {
    fn parse(text: &str) -> Option<Self> {
        // Nine digits are more than the names that a file may have, and always fit an integer.
        let number = |text: &str| {
            let fits = (1..=9).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
            fits.then(|| text.parse::<u64>().ok()).flatten()
        };
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        let range = Self { first: number(first)?, last: number(last)?, width: first.len() };
        (range.first <= range.last).then_some(range)
    }

    fn len(self) -> usize {
        (self.last - self.first + 1) as usize
    }
}

impl NamePart<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Text(_) => 1,
            Self::Numbers(ranges) => ranges.iter().map(|range| range.len()).fold(0, usize::saturating_add),
        }
    }

    fn width(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Numbers(ranges) => {
                let width = |range: &NumberRange| range.width.max(range.last.to_string().len());
                ranges.iter().map(width).max().unwrap_or(0)
            }
        }
    }

    fn write(&self, mut index: usize, name: &mut String) {
        match self {
            Self::Text(text) => name.push_str(text),
            Self::Numbers(ranges) => {
                for range in ranges {
                    if index < range.len() {
                        name.push_str(&format!(
                            "{:0width$}",
                            range.first + index as u64,
                            width = range.width
                        ));
                        return;
                    }
                    index -= range.len();
                }
            }
        }
    }
}

fn name_parts(part: &str) -> Result<Vec<NamePart<'_>>, String> {
    let mut parts = Vec::new();
    let mut rest = part;
    while let Some((text, (numbers, behind))) =
        rest.split_once('[').and_then(|(text, inner)| Some((text, inner.split_once(']')?)))
    {
        if !text.is_empty() {
            parts.push(NamePart::Text(text));
        }
        let range = |text: &str| {
            NumberRange::parse(text)
                .ok_or_else(|| format!("{part:?} has {text:?} in brackets: expected numbers such as 0-5,8"))
        };
        parts.push(NamePart::Numbers(numbers.split(',').map(range).collect::<Result<_, _>>()?));
        rest = behind;
    }
    if !rest.is_empty() {
        parts.push(NamePart::Text(rest));
    }
    Ok(parts)
}

/// Name number `index` of those that the parts generate. The rightmost numbers change fastest.
fn name(parts: &[NamePart], mut index: usize) -> String {
    let mut digits: Vec<usize> = parts
        .iter()
        .rev()
        .map(|part| {
            let digit = index % part.len();
            index /= part.len();
            digit
        })
        .collect();
    let mut name = String::new();
    for part in parts {
        part.write(digits.pop().unwrap_or(0), &mut name);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(text: &str) -> Result<Vec<String>, String> {
        expand(text, &mut MAX_RANKS.clone())
    }

    #[test]
    fn lists_expand_as_in_slurm() {
        for (text, expected) in [
            ("dev", "dev"),
            ("a,b.x-ib,a", "a b.x-ib a"),
            ("dev[0-2,8]", "dev0 dev1 dev2 dev8"),
            ("n[8-11]", "n8 n9 n10 n11"),
            ("n[008-010,7]", "n008 n009 n010 n7"),
            ("n[5]-ib,login", "n5-ib login"),
            ("r[0-1]n[1-2]x,z", "r0n1x r0n2x r1n1x r1n2x z"),
            ("[1-2][3,4]", "13 14 23 24"),
            ("a1,b[99-100],c", "a1 b99 b100 c"),
        ] {
            assert_eq!(names(text).expect(text).join(" "), expected);
        }
    }

    #[test]
    fn errors_quote_the_list() {
        let long = "x".repeat(254);
        let wide = format!("\"{long}[8-10]\" expands to names of 256 bytes: expected at most 255");
        let brackets = "expected numbers such as 0-5,8";
        for (text, message) in [
            ("", r#""" has an empty name: expected names between commas"#.to_owned()),
            ("a,,b", r#""a,,b" has an empty name: expected names between commas"#.to_owned()),
            ("a[1,2],", r#""a[1,2]," has an empty name: expected names between commas"#.to_owned()),
            ("a[1", r#""a[1" has no closing ]: expected pairs of [ and ]"#.to_owned()),
            ("a1]", r#""a1]" has an unmatched ]: expected pairs of [ and ], not nested"#.to_owned()),
            ("a[[1]]", r#""a[[1]]" has an unmatched [: expected pairs of [ and ], not nested"#.to_owned()),
            ("a[]", format!(r#""a[]" has "" in brackets: {brackets}"#)),
            ("b,a[1,]", format!(r#""a[1,]" has "" in brackets: {brackets}"#)),
            ("a[3-1]", format!(r#""a[3-1]" has "3-1" in brackets: {brackets}"#)),
            ("a[1-2-3]", format!(r#""a[1-2-3]" has "1-2-3" in brackets: {brackets}"#)),
            ("a[x]", format!(r#""a[x]" has "x" in brackets: {brackets}"#)),
            ("a[000x133]", format!(r#""a[000x133]" has "000x133" in brackets: {brackets}"#)),
            ("a[0-9999999999]", format!(r#""a[0-9999999999]" has "0-9999999999" in brackets: {brackets}"#)),
            (
                "a[0-1000000]",
                r#""a[0-1000000]" is too many names: expected at most 1000000 in the file"#.to_owned(),
            ),
            ("a[0-999999],b", r#""b" is too many names: expected at most 1000000 in the file"#.to_owned()),
            (&format!("{long}[8-10]"), wide),
        ] {
            assert_eq!(names(text), Err(message));
        }
        let product = "[0-99999999]".repeat(20);
        assert!(names(&product).expect_err("absurd").contains("is too many names"));
    }

    #[test]
    fn the_budget_limits_all_lists_of_a_file() {
        let mut budget = 5;
        assert_eq!(expand("a[1-3]", &mut budget).expect("three").len(), 3);
        assert_eq!(budget, 2);
        assert!(expand("a[1-3]", &mut budget).is_err());
    }

    proptest! {
        #[test]
        fn every_combination_occurs_once(first in 0u64..50, count in 1u64..20, others in 1u64..7) {
            let last = first + count - 1;
            let names = names(&format!("r[{first}-{last}]n[0-{}]", others - 1)).expect("a list");
            let expected: Vec<String> =
                (first..=last).flat_map(|r| (0..others).map(move |n| format!("r{r}n{n}"))).collect();
            prop_assert_eq!(names, expected);
        }
    }
}
