//! For flexring's own crates: what the command, the C library, tests and benchmarks use and programs do not.
//! Any version may change it.
//!
//! Owns nothing. The modules are named as those that define the items.

/// Calls as the C ABI makes them, with the hidden methods of [`Communicator`](crate::Communicator).
pub mod calls {
    pub use crate::communicator::{
        CallOutcome, CallValidator, CheckedCall, NO_RECV_FROM_ANY, abort_unfinished,
    };
}

/// This process's identity, and unique ids.
pub mod bootstrap {
    pub use crate::bootstrap::{
        Coordinator, Interface, JobAddress, LocalCoordinator, RankActivity, RankReport, RendezvousPoint,
        SubworldStatus, WorldStatus, check_secret, choose_address, host_name, identity, is_alone, job,
        list_interfaces, local_coordinators, local_rank, world_status,
    };
}

/// Files that describe clusters and plans.
pub mod description {
    pub use crate::description::{check_topology, machine, plan, topology, tuning_profile};
}

/// Devices that add and copy.
pub mod device {
    pub use crate::device::relay_link::relay_bytes;
    pub use crate::device::{Arithmetic, CallerStream, Device, Finish, Job, Operand, Submitted, host};

    /// NVIDIA GPUs.
    #[cfg(feature = "cuda")]
    pub mod cuda {
        pub use crate::device::cuda::{GpuBuffer, gpu_count, gpu_info, image};
    }
}

/// Running programs.
pub mod executor {
    pub use crate::executor::{BoundCall, CallPath, Executor, ExecutorParts, PeerMessage};
}

/// Memory of the host.
pub mod memory {
    pub use crate::memory::{
        Arena, MemorySpace, NeighbourSlots, Piece, Sharing, memfd_failure, shared_memory_room,
    };
}

/// Links to other ranks.
pub mod transport {
    pub use crate::transport::{
        AnyTransport, Event, Events, InPlaceTransport, PostedTransport, Transport, local,
    };

    /// Memory that the ranks of a node share.
    pub mod shm {
        pub use crate::transport::shm::{ArenaLayout, Mailbox, NodeMemory, Region, RegionOfRank, Shm};
    }

    /// Connections between nodes.
    pub mod tcp {
        pub use crate::transport::tcp::{LinkOptions, Listener, Tcp};
    }

    /// RDMA devices.
    pub mod verbs {
        #[cfg(feature = "verbs")]
        pub use crate::transport::verbs::probe;
        pub use crate::transport::verbs::{gpu, inventory, port_selection};
    }
}
