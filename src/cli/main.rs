//! The `flexring` command.
//!
//! Owns the subcommands and the exit codes: 0 if all is well, 1 if something failed or was wrong, 2 if flags or
//! settings cannot be used. Each subcommand is a module of its own and a user of the library like any other.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command talks to its user")]

mod doctor;
mod env;
mod flags;
mod output;
mod perf;
mod plan;

use clap::{Parser, Subcommand};
use flexring::{Error, ErrorKind};
use std::process::ExitCode;

/// An all-reduce engine for clusters that are not symmetric
#[derive(Parser)]
#[command(disable_help_subcommand = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,

    /// Print the version, and where the GPU kernels come from
    #[arg(short = 'V', long, exclusive = true)]
    version: bool,
}

#[derive(Subcommand)]
enum Command {
    Perf(Box<perf::Options>),
    Plan(Box<plan::Options>),
    Doctor(doctor::Options),
    Env(env::Options),
}

/// What an error begins with on standard error.
const ERROR: &str = "error: ";

/// Why a subcommand did not succeed.
#[derive(Debug)]
enum Failure {
    /// Flags or settings that cannot be used.
    Usage(String),
    /// Something that went wrong.
    Failed(String),
    /// The same, but everything has been said.
    Told,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error.kind() {
            ErrorKind::InvalidSetting => Self::Usage(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Some(Command::Perf(options)) => perf::run(&options),
        Some(Command::Plan(options)) => plan::run(&options),
        Some(Command::Doctor(options)) => doctor::run(&options),
        Some(Command::Env(options)) => env::run(&options),
        None => output::print(&format!("flexring {}{}", env!("CARGO_PKG_VERSION"), env::kernels_line())),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(words)) => {
            eprintln!("{ERROR}{words}");
            ExitCode::from(2)
        }
        Err(Failure::Failed(words)) => {
            eprintln!("{ERROR}{words}");
            ExitCode::FAILURE
        }
        Err(Failure::Told) => ExitCode::FAILURE,
    }
}
