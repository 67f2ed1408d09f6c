//! Ticks and labels of axes that show times and sizes.
//!
//! Owns the choice of ticks and units. Must not know positions.

use super::canvas::number;

/// Times that are multiples of 1, 2 or 5 times a power of ten of seconds: about `number` of them from 0 to
/// `end`, with labels.
pub(super) fn time_ticks(end: f64, number: f64) -> Vec<(f64, String)> {
    let least = end.max(1e-12) / number;
    let power = 10f64.powf(least.log10().floor());
    let step = [1.0, 2.0, 5.0].into_iter().map(|digit| digit * power).find(|step| *step >= least * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let ticks = (end / step + 1e-9).floor() as u32;
    (0..=ticks).map(|tick| f64::from(tick) * step).map(|time| (time, time_label(time))).collect()
}

/// The powers of ten around all of these times, with labels.
pub(super) fn decades(times: impl Iterator<Item = f64> + Clone) -> Vec<(f64, String)> {
    let least = times.clone().fold(f64::INFINITY, f64::min);
    // Without any time, the axis begins at a microsecond.
    let least = if least.is_finite() { least.max(1e-12) } else { 1e-6 };
    let most = times.fold(least, f64::max);
    let (first, last) = (least.log10().floor() as i32, most.log10().ceil() as i32);
    (first..=last.max(first + 1)).map(|power| (10f64.powi(power), time_label(10f64.powi(power)))).collect()
}

/// A time with the unit that fits, without digits that are zero.
pub(super) fn time_label(seconds: f64) -> String {
    let units = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")];
    let unit = units.into_iter().find(|(unit, _)| seconds >= 0.9999 * unit);
    let Some((unit, name)) = unit else { return "0".to_owned() };
    format!("{} {name}", number(seconds / unit))
}

/// Bytes with a binary unit, if it divides them.
pub(super) fn size_label(bytes: u64) -> String {
    let units = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];
    let unit = units.into_iter().find(|(_, shift)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    unit.map_or_else(|| bytes.to_string(), |(unit, shift)| format!("{}{unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_with_the_unit_that_fits() {
        let labels = |end| time_ticks(end, 5.0).into_iter().map(|(_, label)| label).collect::<Vec<_>>();
        assert_eq!(labels(0.0095), ["0", "2 ms", "4 ms", "6 ms", "8 ms"]);
        assert_eq!(labels(2.1e-6), ["0", "500 ns", "1 µs", "1.5 µs", "2 µs"]);
        let powers: Vec<String> =
            decades([3e-5, 2e-3].into_iter()).into_iter().map(|(_, label)| label).collect();
        assert_eq!(powers, ["10 µs", "100 µs", "1 ms", "10 ms"]);
        assert_eq!(decades(std::iter::empty()).len(), 2);
        assert_eq!([1 << 20, 3 << 10, 1000, 0].map(size_label), ["1M", "3K", "1000", "0"]);
    }
}
