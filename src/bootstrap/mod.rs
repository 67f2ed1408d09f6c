//! Bootstrap: this process's identity, the rendezvous of the ranks, and failure detection.
//!
//! Owns the control connections: every rank holds one to a [`Coordinator`], a thread of rank 0's process or
//! of the process that created a [`UniqueId`]. Over it the ranks rendezvous, exchange addresses, send
//! heartbeats and learn of each other's failures. Must not know links, schedules or data: a
//! [`Call`](crate::call::Call) is all that it sees of the work.
//!
//! | what | files; those in italics decide and do no I/O |
//! |---|---|
//! | who this process is | `launcher`, `node`, `process`, `interfaces` |
//! | unique ids | `unique_id`, `encrypted_id`, `pending_ids` |
//! | reaching the coordinator | `coordinator_target`, `connect`, `join_attempt`, `coordinator_handover`, `failed_rendezvous` |
//! | a rank's connection | `control_connection`, `control_state`, `control_thread`, `world_client`, `call_state`, `process_exit` |
//! | the coordinator | `coordinator`, `coordinator_ports`, `listen`, `listening_process`, `connections`, `server`, `phase` |
//! | its decisions | *`rendezvous`*, *`failure_detector`*, *`coordinator_worlds`*, *`subworlds`*, *`heartbeat`* |
//! | messages | `protocol`, `framed_stream`, *`frame_decoder`*, *`handshake`*, `secret`, `node_secret` |
//! | further communicators, messages of ranks | `open_subworld`, `peer_messages`, `peer_message_queue` |
//! | `flexring status` | `status_socket`, `status_request`, `world_status`, `job_address` |
//! | after a failure | `shrink`: the ranks that are left agree on a new world |

mod call_state;
mod connect;
mod connections;
mod control_connection;
mod control_state;
mod control_thread;
mod coordinator;
mod coordinator_handover;
mod coordinator_ports;
mod coordinator_target;
mod coordinator_worlds;
mod encrypted_id;
mod failed_rendezvous;
mod failure_detector;
mod frame_decoder;
mod framed_stream;
mod handshake;
mod heartbeat;
mod interfaces;
mod job_address;
mod join_attempt;
mod launcher;
mod listen;
mod listening_process;
mod node;
mod node_secret;
mod open_subworld;
mod peer_message_queue;
mod peer_messages;
mod pending_ids;
mod phase;
mod process;
mod process_exit;
mod protocol;
mod rendezvous;
mod secret;
mod server;
mod shrink;
mod status_request;
mod status_socket;
mod subworlds;
mod unique_id;
mod world_client;
mod world_status;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

pub use call_state::CallState;
pub(crate) use call_state::departed_before_call;
pub use control_connection::{Abort, ControlConnection};
pub use coordinator::{Coordinator, create_unique_id};
pub use framed_stream::ControlRoute;
pub use interfaces::{
    Interface, choose_address, choose_addresses, default_sources, list_interfaces, route_source,
};
pub use job_address::{JobAddress, job};
pub use launcher::{Identity, RendezvousPoint, identity, is_alone, local_rank};
pub use node::{host_name, node_name};
pub use peer_messages::PeerMessages;
pub use secret::{JobSecret, check_secret};
pub use shrink::{AgreedWorld, CallsMade, ShrinkListener, ShrinkService, ShrinkServiceParams, excluded_by};
pub use status_request::world_status;
pub use status_socket::{LocalCoordinator, local_coordinators};
pub use unique_id::UniqueId;
pub use world_status::{ROWS_IN_ERROR, RankActivity, RankReport, SubworldStatus, WorldStatus};
