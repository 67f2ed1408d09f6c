//! The `flexring` command.
//!
//! Owns the list of subcommands and the exit codes: 0 on success, 1 if something failed or a result was
//! wrong, 2 if flags or settings cannot be used. Each subcommand is a module that uses the library's public
//! API only.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command prints its results and errors")]
#![allow(clippy::disallowed_methods, reason = "Rust opens the standard descriptors of its programs")]

mod doctor;
mod env;
mod error;
mod generate;
mod local_ranks;
mod output;
mod output_file;
mod perf;
mod plan;
mod settings;
mod simulate;
mod status;
mod trace;
mod tune;

use clap::{CommandFactory, Parser, Subcommand};
use error::{CommandError, ERROR_PREFIX};
use std::process::ExitCode;

/// An all-reduce engine for clusters that are not symmetric
#[derive(Parser)]
#[command(name = "flexring", disable_help_subcommand = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,

    /// Print the version, and where the GPU kernels come from
    #[arg(short = 'V', long, exclusive = true)]
    version: bool,
}

#[derive(Subcommand)]
enum Command {
    Perf(Box<perf::PerfOptions>),
    Plan(Box<plan::PlanOptions>),
    Simulate(Box<simulate::SimulateOptions>),
    Doctor(doctor::DoctorOptions),
    Env(env::EnvOptions),
    Status(status::StatusOptions),
    Trace(trace::TraceOptions),
    Tune(tune::TuneOptions),
    #[command(hide = true)]
    Generate(generate::GenerateOptions),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Some(Command::Perf(options)) => perf::run(&options),
        Some(Command::Plan(options)) => plan::run(&options),
        Some(Command::Simulate(options)) => simulate::run(&options),
        Some(Command::Doctor(options)) => doctor::run(&options),
        Some(Command::Env(options)) => env::run(&options),
        Some(Command::Status(options)) => status::run(&options),
        Some(Command::Trace(options)) => trace::run(&options),
        Some(Command::Tune(options)) => tune::run(&options),
        Some(Command::Generate(options)) => generate::run(&options, Cli::command()),
        None => output::print(&format!("flexring {}{}", env!("CARGO_PKG_VERSION"), env::kernels_line())),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(CommandError::Usage(message)) => {
            eprintln!("{ERROR_PREFIX}{message}");
            ExitCode::from(2)
        }
        Err(CommandError::Failed(message)) => {
            eprintln!("{ERROR_PREFIX}{message}");
            ExitCode::FAILURE
        }
        Err(CommandError::Reported) => ExitCode::FAILURE,
    }
}
