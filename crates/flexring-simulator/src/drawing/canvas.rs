//! SVG elements as text, and the approximate width of text.
//!
//! Owns the syntax. Must not know what the elements show. (The crate `svg` would replace the tags only: it
//! does not measure text, round numbers or remove characters that XML forbids.)

use std::fmt::Write;

/// Fonts that common systems have.
const FONTS: &str = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif";

/// The point of a text that is at its x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// The style of a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Font {
    pub(super) size: f64,
    pub(super) bold: bool,
    pub(super) color: &'static str,
    pub(super) anchor: Anchor,
    /// Whether letters have a white outline, for texts on top of shapes.
    pub(super) halo: bool,
}

impl Font {
    /// An estimate of the width of a text, on the high side because fonts differ.
    pub(super) fn width(self, text: &str) -> f64 {
        let units: f64 = text.chars().map(units).sum();
        units * self.size * if self.bold { 1.08 } else { 1.0 }
    }

    /// Breaks the text into lines of at most this width. Only words longer than that exceed it.
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

    /// The text, cut to this width with an ellipsis.
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

/// A list of SVG elements.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    body: String,
}

impl Canvas {
    /// Adds a rectangle. `style` is further attributes.
    pub(super) fn rect(&mut self, [x, y, width, height]: [f64; 4], style: &str) {
        let [x, y, width, height] = [x, y, width, height].map(number);
        self.line(format_args!("<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" {style}/>"));
    }

    /// Adds a path. `commands` is its `d` attribute.
    pub(super) fn path(&mut self, commands: &str, style: &str) {
        self.line(format_args!("<path d=\"{commands}\" {style}/>"));
    }

    /// Adds a text with its baseline at `y`.
    pub(super) fn text(&mut self, x: f64, y: f64, font: Font, text: &str) {
        self.rotated_text(x, y, 0.0, font, text);
    }

    /// Adds a text that is rotated around its position.
    pub(super) fn rotated_text(&mut self, x: f64, y: f64, degrees: f64, font: Font, text: &str) {
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

    /// Defines a group of elements for [`Canvas::show`].
    pub(super) fn define(&mut self, name: &str, draw: impl FnOnce(&mut Self)) {
        self.line(format_args!("<defs><g id=\"{name}\">"));
        draw(self);
        self.line(format_args!("</g></defs>"));
    }

    /// Adds a defined group, with its origin at this position.
    pub(super) fn show(&mut self, name: &str, x: f64, y: f64) {
        let [x, y] = [x, y].map(number);
        self.line(format_args!("<use href=\"#{name}\" x=\"{x}\" y=\"{y}\"/>"));
    }

    /// Adds the elements of another canvas.
    pub(super) fn append(&mut self, other: Self) {
        self.body.push_str(&other.body);
    }

    /// Adds an element as text.
    pub(super) fn raw(&mut self, element: &str) {
        self.line(format_args!("{element}"));
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.body, "{text}");
    }

    /// The SVG file. Screen readers use `title` and `description`.
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

/// A number with at most two decimal places.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// Text with markup characters escaped. Characters that XML forbids are removed.
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
    fn markup_in_names_is_escaped() {
        let mut canvas = Canvas::default();
        canvas.text(0.0, 1.25, FONT, "<a & \"b\">\u{1}\n");
        let text = canvas.finish(10.0, 10.0, "a<b", "c&d");
        assert!(text.contains(">&lt;a &amp; &quot;b&quot;&gt; </text>"), "{text}");
        assert!(text.contains("<title>a&lt;b</title>") && text.contains("c&amp;d"), "{text}");
    }

    #[test]
    fn texts_are_broken_between_words_or_cut_to_fit() {
        let lines = FONT.lines("each node divides the vector", 80.0);
        assert!(lines.len() > 1 && lines.iter().all(|line| FONT.width(line) <= 80.0), "{lines:?}");
        assert_eq!(lines.join(" "), "each node divides the vector");
        let cut = FONT.cut("a-very-long-host-name", 60.0);
        assert!(cut.ends_with('…') && FONT.width(&cut) <= 60.0, "{cut}");
        assert_eq!(FONT.cut("a", 60.0), "a");
    }

    #[test]
    fn numbers_have_at_most_two_places() {
        assert_eq!([1.0, 0.5, 1.0 / 3.0, -0.001].map(number), ["1", "0.5", "0.33", "0"]);
    }
}
