//! What a library must respect in a process that is not its own: forks, signals, and the floating-point
//! environment.
//!
//! Owns the detection of forked children, the sockets that they must not keep, those that a killed process
//! must lose at once, and how the library's threads are started and compute, and what runs at the exit.

mod exit;
mod float_environment;
mod fork;
mod per_process;
mod socket_relay;
mod thread;

pub use exit::at_exit;
pub use float_environment::DefaultFloatEnvironment;
pub use fork::{ClosedInChild, CreatorProcess};
pub use per_process::PerProcess;
pub use socket_relay::SocketRelay;
pub use thread::spawn;
