//! Bootstrap: who am I, how do the ranks meet, are they still alive.
//!
//! Owns the control connections: every rank holds one to a [`Hub`], which is a thread of rank 0's process or
//! of the one that made a [`UniqueId`]. Over it the ranks meet, exchange cards, say that they live and learn
//! of each other's failures. Must not know links, schedules or data: a [`Call`](crate::call::Call) is all it
//! hears of the work.
//!
//! What decides (`assembly`, `watch`) does no I/O; what does I/O (`service`, `lifeline`, `meeting`) decides
//! nothing.

mod assembly;
mod connection;
mod frame;
mod hub;
mod interfaces;
mod launcher;
mod lifeline;
mod meeting;
mod node;
mod roster;
mod service;
mod silence;
mod status;
mod unique_id;
mod watch;

#[cfg(test)]
mod tests;

pub use hub::{Hub, create_unique_id};
pub use interfaces::{Interface, choose, list};
pub use launcher::{Identity, Meeting, identity, is_alone, local_rank};
pub use lifeline::Lifeline;
pub use node::{host_name, node_name};
pub use status::{Standing, Status};
pub use unique_id::UniqueId;
