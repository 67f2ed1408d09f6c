//! The colors of ranks.
//!
//! Owns the palette: the colors of Okabe and Ito, which people with color blindness can distinguish. The
//! darkest blue and the black are brighter here, so that black text is legible on all of them, and the yellow
//! is darker, so that it is visible on white. Must not know what is painted in a color.

use flexring_plan::Rank;

/// Red, green, blue.
type Color = [u8; 3];

const BASE: [Color; 8] = [
    [0x56, 0xB4, 0xE9],
    [0xE6, 0x9F, 0x00],
    [0x1F, 0xA8, 0x7C],
    [0xCC, 0x79, 0xA7],
    [0xEE, 0xDA, 0x34],
    [0xE0, 0x70, 0x30],
    [0x5B, 0x8F, 0xD0],
    [0xA0, 0xA0, 0xA0],
];

/// The color of a rank: the eight base colors, then lighter shades, then darker shades, repeated every 24
/// ranks.
pub(super) fn color(rank: Rank) -> String {
    let base = BASE[rank % BASE.len()];
    let shade = |towards: u8, weight: f64| {
        base.map(|part| (f64::from(part) * (1.0 - weight) + f64::from(towards) * weight).round() as u8)
    };
    let [red, green, blue] = match rank / BASE.len() % 3 {
        0 => base,
        1 => shade(255, 0.45),
        _ => shade(0, 0.22),
    };
    format!("#{red:02X}{green:02X}{blue:02X}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_first_24_ranks_have_different_colors() {
        assert_eq!((0..24).map(color).collect::<BTreeSet<_>>().len(), 24);
        assert_eq!((color(0), color(24)), ("#56B4E9".to_owned(), "#56B4E9".to_owned()));
    }
}
