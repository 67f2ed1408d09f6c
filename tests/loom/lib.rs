//! What the memory model allows for the order of calls, the shared-memory queue, its wake-ups, and the words
//! that GPUs' kernels and the host share.
//!
//! Owns the list of files that are compiled with loom's atomics. They depend on no other part of flexring, so
//! that it need not be compiled again for them. Must not own any code of flexring.

#![cfg(test)]

#[path = "../../src/communicator/call_queue.rs"]
#[allow(dead_code, reason = "the tests use a part of it")]
mod call_queue;
#[path = "../../src/communicator/checked_wait.rs"]
#[allow(dead_code, reason = "the tests use a part of it")]
mod checked_wait;
mod collective_model;
mod gpu_model;
#[path = "../../src/transport/shm/need_wakeup.rs"]
#[allow(dead_code, reason = "the tests use a part of it")]
mod need_wakeup;
#[path = "../../src/transport/shm/spsc_queue.rs"]
#[allow(dead_code, reason = "the tests use a part of it")]
mod spsc_queue;
