//! What drawings share: the frame with a title, and legends of colors.
//!
//! Owns their places. Must not know what is drawn.

use super::canvas::Canvas;
use super::geometry::{MARGIN, NOTE, SUBTITLE, TITLE};

/// Paints the frame of a drawing, with a title and a line below it, cut to fit.
pub(super) fn frame(canvas: &mut Canvas, [width, height]: [f64; 2], title: &str, subtitle: &str) {
    let room = width - 2.0 * MARGIN;
    canvas.rect([0.5, 0.5, width - 1.0, height - 1.0], "rx=\"10\" fill=\"#FFFFFF\" stroke=\"#CBD2D9\"");
    canvas.text(MARGIN, 36.0, TITLE, &TITLE.cut(title, room));
    canvas.text(MARGIN, 56.0, SUBTITLE, &SUBTITLE.cut(subtitle, room));
}

/// Paints what each color means, in a row below the subtitle.
pub(super) fn legend<'a>(canvas: &mut Canvas, colors: impl IntoIterator<Item = (&'a str, &'a str)>) {
    let mut x = MARGIN;
    for (color, words) in colors {
        canvas.rect([x, 71.0, 10.0, 10.0], &format!("fill=\"{color}\""));
        canvas.text(x + 15.0, 80.0, NOTE, words);
        x += 15.0 + NOTE.width(words) + 18.0;
    }
}
