//! The progress bar, drawn on terminals only.
//!
//! Owns the redraw rate, which is low enough not to affect the measurement.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// The shortest time between two redraws.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

/// Columns of the bar.
const WIDTH: u64 = 30;

/// A progress bar, or nothing where standard error is not a terminal.
#[derive(Debug)]
pub struct Progress {
    terminal: Option<File>,
    /// What is drawn.
    line: String,
    drawn: Instant,
    done: u64,
    steps: u64,
}

impl Progress {
    /// A bar of `steps` steps on the standard error of this process, or of the process `lender`.
    pub fn new(steps: u64, lender: Option<i32>) -> Self {
        let process = lender.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
        let terminal = File::options().write(true).open(format!("/proc/{process}/fd/2")).ok();
        Self::on(terminal.filter(File::is_terminal), steps)
    }

    /// A progress that draws nothing.
    pub fn hidden() -> Self {
        Self::on(None, 0)
    }

    fn on(terminal: Option<File>, steps: u64) -> Self {
        Self { terminal, line: String::new(), drawn: Instant::now(), done: 0, steps }
    }

    /// Counts one finished step and redraws the bar as [`show`](Self::show) does.
    pub fn step(&mut self, now: Instant, message: impl FnOnce() -> String) {
        self.advance();
        self.show(now, message);
    }

    /// Counts one finished step.
    pub fn advance(&mut self) {
        self.done += 1;
    }

    /// Redraws the bar with this message if [`REDRAW_INTERVAL`] has passed since it was drawn.
    pub fn show(&mut self, now: Instant, message: impl FnOnce() -> String) {
        if self.terminal.is_none() || now.duration_since(self.drawn) < REDRAW_INTERVAL {
            return;
        }
        let steps = self.steps.max(1);
        let done = self.done.min(steps);
        let bar = "█".repeat((done * WIDTH / steps) as usize);
        self.line = format!("{bar:░<30} {:>3}% {}", done * 100 / steps, message());
        self.drawn = now;
        self.draw(&self.line);
    }

    /// Runs `act` with the bar cleared, so that its output does not mix with the bar.
    pub fn suspend<R>(&self, act: impl FnOnce() -> R) -> R {
        self.draw("");
        let result = act();
        self.draw(&self.line);
        result
    }

    /// Replaces what the terminal shows. A line that is too long is cut off, not wrapped.
    fn draw(&self, line: &str) {
        if let Some(mut terminal) = self.terminal.as_ref() {
            let _ = write!(terminal, "\r\x1b[?7l{line}\x1b[K\x1b[?7h");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.draw("");
    }
}
