//! Parsers for bandwidths and latencies with units.
//!
//! Owns the units and limits. Must not know file formats: errors are clauses, to which the caller adds the
//! position.

/// In bit/s. Above every existing link, and sums of it stay far below the largest integer.
const MAX_BANDWIDTH: u64 = 1_000_000_000_000_000;
/// In nanoseconds: 1000 s.
const MAX_LATENCY: u64 = 1_000_000_000_000;

/// Parses bits per second, such as `500M`, `1G` or `2.5gbit`: decimal units in any case, rounded down to
/// whole bits.
pub(super) fn bandwidth(text: &str) -> Result<u64, String> {
    let bits = scaled(text, |unit| {
        let unit = unit.to_ascii_lowercase();
        Some(match unit.strip_suffix("bit").unwrap_or(&unit) {
            "" => 1,
            "k" => 1_000,
            "m" => 1_000_000,
            "g" => 1_000_000_000,
            "t" => 1_000_000_000_000,
            _ => return None,
        })
    });
    let bits =
        bits.ok_or_else(|| format!("{text:?} is not a bandwidth: expected bit/s such as 500M, 1G or 2.5G"))?;
    within(bits).map_err(|message| format!("{text:?} is {message}"))
}

/// Checks the limits of a bandwidth in bits per second. The error is a clause without a subject.
pub(super) fn within(bits: u64) -> Result<u64, &'static str> {
    match bits {
        0 => Err("too low: expected at least 1 bit/s"),
        1..=MAX_BANDWIDTH => Ok(bits),
        _ => Err("too high: expected at most 1000T"),
    }
}

/// Parses nanoseconds, such as `30us` or `1.5ms`. The unit is required; rounded down.
pub(super) fn latency(text: &str) -> Result<u64, String> {
    let nanoseconds = scaled(text, |unit| {
        Some(match unit {
            "ns" => 1,
            "us" | "µs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            _ => return None,
        })
    });
    match nanoseconds {
        None => Err(format!("{text:?} is not a latency: expected a time such as 800ns, 30us or 1.5ms")),
        Some(0..=MAX_LATENCY) => Ok(nanoseconds.unwrap_or(0)),
        Some(_) => Err(format!("{text:?} is too long: expected at most 1000s")),
    }
}

/// A decimal number times its unit, computed exactly in integers; `None` if malformed.
fn scaled(text: &str, unit: impl Fn(&str) -> Option<u64>) -> Option<u64> {
    const PLACES: usize = 12;
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    let unit = u128::from(unit(rest.trim_start())?);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(fraction) {
        return None;
    }
    // Numbers with too many digits saturate, above every limit. Digits after the twelfth place are less than
    // 1 even with T.
    let whole = u128::from(whole.parse().unwrap_or(u64::MAX));
    let fraction: u128 = format!("{fraction:0<PLACES$}")[..PLACES].parse().ok()?;
    let value = whole * unit + fraction * unit / 10u128.pow(PLACES as u32);
    Some(u64::try_from(value).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidths_have_decimal_units() {
        for (text, bits) in [
            ("1", 1),
            ("500M", 500_000_000),
            ("500mbit", 500_000_000),
            ("2.5G", 2_500_000_000),
            (" 1 gbit ", 1_000_000_000),
            ("0.1k", 100),
            ("64Kbit", 64_000),
            ("007bit", 7),
            ("1.0000000000019T", 1_000_000_000_001),
            ("1000T", MAX_BANDWIDTH),
        ] {
            assert_eq!(bandwidth(text), Ok(bits), "{text}");
        }
        let huge = "9".repeat(100);
        for text in ["", "G", "1.G", ".5G", "1.2.3G", "-1G", "+1G", "1GB", "1Gi", "1e9", "fast", "1G 2", "٣"]
        {
            let message = format!("{text:?} is not a bandwidth: expected bit/s such as 500M, 1G or 2.5G");
            assert_eq!(bandwidth(text), Err(message));
        }
        for text in ["0", "0.0G", "0.5"] {
            let message = format!("{text:?} is too low: expected at least 1 bit/s");
            assert_eq!(bandwidth(text), Err(message));
        }
        for text in ["1001T", huge.as_str()] {
            assert_eq!(bandwidth(text), Err(format!("{text:?} is too high: expected at most 1000T")));
        }
    }

    #[test]
    fn latencies_require_a_unit() {
        for (text, nanoseconds) in [
            ("0ns", 0),
            ("800ns", 800),
            ("30us", 30_000),
            ("2 µs", 2_000),
            ("1.5ms", 1_500_000),
            ("1000s", MAX_LATENCY),
        ] {
            assert_eq!(latency(text), Ok(nanoseconds), "{text}");
        }
        for text in ["", "0", "30", "us", "30 US", "30m", "-1us", "1.us"] {
            let message = format!("{text:?} is not a latency: expected a time such as 800ns, 30us or 1.5ms");
            assert_eq!(latency(text), Err(message));
        }
        assert_eq!(latency("1001s"), Err("\"1001s\" is too long: expected at most 1000s".to_owned()));
    }
}
