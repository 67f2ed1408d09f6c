//! Bootstrap: who am I, how do the ranks meet, are they still alive.
//!
//! Owns the control connections: every rank holds one to a [`Coordinator`], which is a thread of rank 0's process or
//! of the one that made a [`UniqueId`]. Finished it the ranks meet, exchange cards, say that they live and learn
//! of each other's failures. Must not know links, schedules or data: a [`Call`](crate::call::Call) is all it
//! hears of the work.
//!
//! What decides (`rendezvous`, `watch`) does no I/O; what does I/O (`service`, `control connection`, `meeting`) decides
//! nothing.

mod call_state;
mod connect;
mod control_connection;
mod coordinator;
mod failure_detector;
mod framed_stream;
mod heartbeat;
mod interfaces;
mod launcher;
mod node;
mod process;
mod protocol;
mod rendezvous;
mod server;
mod unique_id;

#[cfg(test)]
mod tests;

pub use call_state::{CallState, CallStateCell};
pub use control_connection::ControlConnection;
pub use coordinator::{Coordinator, create_unique_id};
pub use interfaces::{Interface, choose, list};
pub use launcher::{Identity, RendezvousPoint, identity, is_alone, local_rank};
pub use node::{host_name, node_name};
pub use unique_id::UniqueId;
