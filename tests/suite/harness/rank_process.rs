//! A rank that is a process, and what it prints to standard error.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr};

/// A process that is a rank. Killed when it is dropped.
pub struct RankProcess {
    pub child: Child,
    stderr: BufReader<ChildStderr>,
}

impl RankProcess {
    /// `child` is a process whose standard error is a pipe.
    pub fn new(mut child: Child) -> Self {
        let stderr = BufReader::new(child.stderr.take().expect("standard error"));
        Self { child, stderr }
    }

    /// Waits for a line with this text, and returns it.
    pub fn line_with(&mut self, text: &str) -> String {
        let mut seen = String::new();
        loop {
            let start = seen.len();
            let read = self.stderr.read_line(&mut seen).expect("text");
            assert!(read > 0, "it did not print {text:?} before its end: {seen}");
            if seen[start..].contains(text) {
                return seen.split_off(start);
            }
        }
    }

    /// Waits until the process has ended. Returns whether it succeeded, and the rest of its standard error.
    pub fn wait(mut self) -> (bool, String) {
        let mut stderr = String::new();
        self.stderr.read_to_string(&mut stderr).expect("text");
        (self.child.wait().expect("a child").success(), stderr)
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
