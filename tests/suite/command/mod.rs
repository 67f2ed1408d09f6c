//! The `flexring` command, run as its users run it, in an environment without settings.

use std::process::Command;

/// The command with these words and only these variables: its exit code, and what it printed.
pub fn run(words: &str, variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_flexring"))
        .args(words.split_whitespace())
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .expect("the command can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}
