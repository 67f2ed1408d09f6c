//! Runs the `flexring` command in the root of the repository, in an environment that contains given variables
//! only.
//!
//! Owns starting the process.

use crate::programs::root;
use std::process::Command;

/// Runs the command with `arguments`, separated by white space, and `variables` as its whole environment.
/// Returns the exit code, standard output and standard error.
pub fn run(arguments: &str, variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_flexring"))
        .args(arguments.split_whitespace())
        .current_dir(root())
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .expect("the command can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}
