//! The progress bar, drawn on terminals only.
//!
//! Owns the redraw rate, which is low enough not to affect the measurement.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fs::File;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// The shortest time between two redraws.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

/// A progress bar, or nothing where standard error is not a terminal.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    drawn: Instant,
    done: u64,
}

impl Progress {
    /// A bar of `steps` steps on the standard error of this process, or of the process `lender`.
    pub fn new(steps: u64, lender: Option<i32>) -> Self {
        let target = match lender {
            Some(pid) => borrowed(pid),
            None => std::io::stderr().is_terminal().then(ProgressDrawTarget::stderr),
        };
        Self::on(steps, target)
    }

    /// A progress that draws nothing.
    pub fn hidden() -> Self {
        Self::on(0, None)
    }

    fn on(steps: u64, target: Option<ProgressDrawTarget>) -> Self {
        let bar = target.map(|target| {
            let style = ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}");
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::with_draw_target(Some(steps), target).with_style(style)
        });
        Self { bar, drawn: Instant::now(), done: 0 }
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
        if let Some(bar) = self.bar.as_ref().filter(|_| now.duration_since(self.drawn) >= REDRAW_INTERVAL) {
            bar.set_position(self.done);
            bar.set_message(message());
            self.drawn = now;
        }
    }

    /// Runs `act` with the bar cleared, so that its output does not mix with the bar.
    pub fn suspend<R>(&self, act: impl FnOnce() -> R) -> R {
        match &self.bar {
            Some(bar) => bar.suspend(act),
            None => act(),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A draw target on the standard error of another process; `None` if that is not a terminal.
fn borrowed(pid: i32) -> Option<ProgressDrawTarget> {
    let open = || File::options().read(true).write(true).open(format!("/proc/{pid}/fd/2"));
    let (input, output) = open().and_then(|input| Ok((input, open()?))).ok()?;
    output.is_terminal().then(|| ProgressDrawTarget::term(console::Term::read_write_pair(input, output), 10))
}
