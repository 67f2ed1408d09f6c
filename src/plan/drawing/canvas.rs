//! SVG as text.
//!
//! Owns the elements and their spelling. Must not know what they show.

use std::fmt::Write;

/// Fonts that are where people read.
const FONTS: &str = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif";

/// Which end of a text is at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// How a text looks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Font {
    pub(super) size: f64,
    pub(super) bold: bool,
    pub(super) color: &'static str,
    pub(super) anchor: Anchor,
    /// Whether what is behind the letters is kept away from them.
    pub(super) halo: bool,
}

impl Font {
    /// Roughly how wide a text is: fonts differ, so a little too much.
    pub(super) fn width(self, text: &str) -> f64 {
        let units: f64 = text.chars().map(units).sum();
        units * self.size * if self.bold { 1.08 } else { 1.0 }
    }

    /// The text in lines of at most this width, as far as its words are not longer.
    pub(super) fn lines(self, text: &str, width: f64) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for word in text.split_whitespace() {
            match lines.last_mut() {
                Some(line) if self.width(line) + self.width(word) + self.size * 0.3 <= width => {
                    line.push(' ');
                    line.push_str(word);
                }
                _ => lines.push(word.to_owned()),
            }
        }
        lines
    }

    /// The text, or as much of it as fits.
    pub(super) fn cut(self, text: &str, width: f64) -> String {
        if self.width(text) <= width {
            return text.to_owned();
        }
        let mut cut: String = text.to_owned();
        while cut.pop().is_some() && self.width(&cut) + self.size > width {}
        format!("{}…", cut.trim_end())
    }
}

fn units(c: char) -> f64 {
    match c {
        'i' | 'j' | 'l' | 'I' | '.' | ',' | ':' | '\'' | '|' => 0.32,
        ' ' | '/' | '(' | ')' | '[' | ']' | 'f' | 't' | 'r' => 0.4,
        'm' | 'w' | 'M' | 'W' | '%' | '@' => 0.95,
        c if c.is_ascii_uppercase() => 0.7,
        c if c.is_ascii() => 0.62,
        _ => 1.0,
    }
}

/// A drawing in the making.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    body: String,
}

impl Canvas {
    /// A rectangle with `style`, further attributes.
    pub(super) fn rect(&mut self, [x, y, width, height]: [f64; 4], style: &str) {
        let [x, y, width, height] = [x, y, width, height].map(number);
        self.line(format_args!("<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" {style}/>"));
    }

    /// A path along these commands.
    pub(super) fn path(&mut self, commands: &str, style: &str) {
        self.line(format_args!("<path d=\"{commands}\" {style}/>"));
    }

    /// A text on the line at `y`.
    pub(super) fn text(&mut self, x: f64, y: f64, font: Font, text: &str) {
        self.spin_text(x, y, 0.0, font, text);
    }

    /// A text turned around its place.
    pub(super) fn spin_text(&mut self, x: f64, y: f64, degrees: f64, font: Font, text: &str) {
        let anchor = match font.anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let weight = if font.bold { " font-weight=\"600\"" } else { "" };
        let [x, y] = [x, y].map(number);
        let halo = if font.halo {
            " paint-order=\"stroke\" stroke=\"#FFFFFF\" stroke-width=\"3.5\" stroke-opacity=\"0.72\" stroke-linejoin=\"round\""
        } else {
            ""
        };
        let turn =
            if degrees == 0.0 { String::new() } else { format!(" transform=\"rotate({degrees} {x} {y})\"") };
        let (size, color, text) = (number(font.size), font.color, escaped(text));
        self.line(format_args!(
            "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" fill=\"{color}\"{anchor}{weight}{halo}{turn}>{text}</text>"
        ));
    }

    /// What `draw` draws, to be shown by [`Canvas::show`].
    pub(super) fn define(&mut self, name: &str, draw: impl FnOnce(&mut Self)) {
        self.line(format_args!("<defs><g id=\"{name}\">"));
        draw(self);
        self.line(format_args!("</g></defs>"));
    }

    /// Shows what was defined, with its origin at this place.
    pub(super) fn show(&mut self, name: &str, x: f64, y: f64) {
        let [x, y] = [x, y].map(number);
        self.line(format_args!("<use href=\"#{name}\" x=\"{x}\" y=\"{y}\"/>"));
    }

    /// Puts another drawing on top.
    pub(super) fn append(&mut self, other: Self) {
        self.body.push_str(&other.body);
    }

    /// Something with a spelling of its own.
    pub(super) fn raw(&mut self, element: &str) {
        self.line(format_args!("{element}"));
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a text cannot fail.
        let _ = writeln!(self.body, "{text}");
    }

    /// The whole file, with what is read out to people who do not see it.
    pub(super) fn finish(self, width: f64, height: f64, title: &str, description: &str) -> String {
        let [width, height] = [width, height].map(|length| number(length.ceil()));
        let (title, description) = (escaped(title), escaped(description));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\" font-family=\"{FONTS}\">\n<title>{title}</title>\n\
             <desc>{description}</desc>\n{}</svg>\n",
            self.body
        )
    }
}

/// A length with at most two places.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// Text that cannot be taken for markup. Characters that XML does not know are left out.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            '\t' | '\n' | '\r' => escaped.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {}
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    const FONT: Font = Font { size: 10.0, bold: false, color: "#000", anchor: Anchor::Start, halo: false };

    #[test]
    fn no_name_breaks_the_markup() {
        let mut canvas = Canvas::default();
        canvas.text(0.0, 1.25, FONT, "<a & \"b\">\u{1}\n");
        let text = canvas.finish(10.0, 10.0, "a<b", "c&d");
        assert!(text.contains(">&lt;a &amp; &quot;b&quot;&gt; </text>"), "{text}");
        assert!(text.contains("<title>a&lt;b</title>") && text.contains("c&amp;d"), "{text}");
    }

    #[test]
    fn texts_are_broken_between_words_and_cut_where_they_do_not_fit() {
        let lines = FONT.lines("each node divides the vector", 80.0);
        assert!(lines.len() > 1 && lines.iter().all(|line| FONT.width(line) <= 80.0), "{lines:?}");
        assert_eq!(lines.join(" "), "each node divides the vector");
        let cut = FONT.cut("a-very-long-host-name", 60.0);
        assert!(cut.ends_with('…') && FONT.width(&cut) <= 60.0, "{cut}");
        assert_eq!(FONT.cut("a", 60.0), "a");
    }

    #[test]
    fn lengths_are_short() {
        assert_eq!([1.0, 0.5, 1.0 / 3.0, -0.001].map(number), ["1", "0.5", "0.33", "0"]);
    }
}
