//! The progress bar, which only a terminal shows.
//!
//! Owns how often it is drawn: so seldom that the measurement does not notice. Must not know what it stands for.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::fs::File;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How often the bar moves.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

/// A bar, or nothing where nobody would see it.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    drawn: Instant,
    done: u64,
}

impl Progress {
    /// A bar of `steps` steps on this process's standard error, or on that of process `lender`.
    pub fn new(steps: u64, lender: Option<i32>) -> Self {
        let target = match lender {
            Some(pid) => borrowed(pid),
            None => std::io::stderr().is_terminal().then(ProgressDrawTarget::stderr),
        };
        Self::on(steps, target)
    }

    /// No bar.
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

    /// One more step is done, at this time, as `message` says.
    pub fn step(&mut self, now: Instant, message: impl FnOnce() -> String) {
        self.done += 1;
        if let Some(bar) = self.bar.as_ref().filter(|_| now.duration_since(self.drawn) >= REDRAW_INTERVAL) {
            bar.set_position(self.done);
            bar.set_message(message());
            self.drawn = now;
        }
    }

    /// Does something with the terminal that the bar must not be in the way of.
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

/// The terminal that another process has as its standard error.
fn borrowed(pid: i32) -> Option<ProgressDrawTarget> {
    let open = || File::options().read(true).write(true).open(format!("/proc/{pid}/fd/2"));
    let (input, output) = open().and_then(|input| Ok((input, open()?))).ok()?;
    output.is_terminal().then(|| ProgressDrawTarget::term(console::Term::read_write_pair(input, output), 10))
}
