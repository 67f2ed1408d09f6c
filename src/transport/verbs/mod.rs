//! Verbs: RDMA devices, which of their ports a rank uses, and what connects them to a peer's.
//!
//! What needs no library of the devices is compiled always, so that `flexring doctor` can tell about any machine.
//! Must not know schedules, nor how ranks find each other.
//!
//! | file | owns |
//! |---|---|
//! | `survey` | what RDMA devices there are, as the kernel's files tell |
//! | `select` | which of their ports become rails, why the others do not, and which rails of two ranks are connected |

pub mod select;
pub mod survey;
