//! Shrink: the ranks that are left agree on a new world, without the coordinator of the old one, which may be
//! dead.
//!
//! Owns [`ShrinkService`], which serves a rank that has peers, and [`ShrinkListener`], by which others find
//! it.
//!
//! | file | owns |
//! |---|---|
//! | `service`, `listener`, `request` | the handles, and what programs and the thread exchange |
//! | `thread`, `ports`, `ports_shared` | the thread and its sockets |
//! | `unidentified`, `session`, `frame`, `message` | connections whose rank is unknown; authentication; what travels |
//! | `served_rank` | the I/O of one rank |
//! | `agreement` | decides, without I/O |
//! | `notices` | messages on connections of their own |
//!
//! The lowest rank that is left is the **leader**. Every other rank looks for it from rank 0 upwards: a
//! refused connection means that the process is gone, and the answer that the rank is gone that it has freed
//! its communicator; no answer within 1.5 s means that it is stopped or unreachable; any other rank answers,
//! even if its program has not called shrink yet. The leader waits until every rank has called, is excluded,
//! is gone or is silent. Then it creates a unique id and sends it to the members, which join a world by it as
//! usual.
//!
//! # One thread and one set of sockets
//! The communicators of a process share a `thread` and its sockets (`ports`). A connection begins with an
//! opening that names the rank that it is for, by a public number that is derived from the key of the
//! communicator. `unidentified` has the connections until then. A rank can be looked for as soon as its
//! address is known, which is before it is served: while this process joins any communicator, a connection
//! with an unknown number waits for it. Otherwise the answer is that the rank is gone, as also for ranks that
//! were served and have left.
//!
//! That answer carries no authentication code, because the key is gone with the communicator. It means the
//! same as a refused connection and is no easier to forge: it repeats the random number of the opening, so it
//! comes from the process that has the port, or from one that reads and changes the packets in between.
//!
//! # No rank is in two new worlds
//! A rank joins one world at a time, and gives a world up only by closing its control connection. A world
//! comes about only if every member joins it and takes part in its last exchange. So of two worlds that share
//! a rank, one fails on all its members, which then agree again. The decisions of two leaders need not be
//! compared for that.
//!
//! A leader that gives a world up sends its members that it is cancelled, and a member that is offered a
//! world which it has given up sends its leader the same: an end that is not connected to the coordinator
//! would otherwise wait for its time-out. The message may arrive before the world, on another connection, so
//! its id is kept.
//!
//! # No two new worlds without a common rank
//! - Before a leader decides without a rank that accepts connections but is silent, it sends a notice to that
//!   rank. While the network works, the notice waits in the kernel of that rank's host, even if the process
//!   is stopped, and ends its shrink when it continues. The leader decides only when the notice is sent, if
//!   need be on a connection of its own (`notices`), or given up after a second. Then the leader reads its
//!   own connections once more. Of two leaders that do this, at least one finds the other's notice or
//!   request.
//! - If ranks are unreachable, a leader decides only if more ranks have come than do not answer. If the
//!   numbers are equal, the side with the lowest rank decides. Two sides of a broken network cannot both
//!   satisfy this. A program that is sure that ranks are gone excludes them by name.
//! - After a new world came about, its members keep the service of the old one. A rank that comes late is
//!   refused by them or receives no answer, but never mistakes them for dead.
//!
//! # Ranks that are left out by name
//! A rank whose program excludes others answers their calls of shrink with that, during its own call and
//! after it. A rank that gets this from its leader, or as a leader from all others, has been left out and
//! fails; from some of them, the lists differ, and all fail. The answer does not concern later calls of
//! shrink, for which the ranks must have made another call of the communicator together, such as a barrier: a
//! rank may then be a member again. Communicators that have failed make no such call.
//!
//! # Limits
//! Apart from ranks that exclude each other by name, two worlds without a common rank can come about in two
//! cases:
//! - The network breaks during a shrink, between the leader and ranks that it is connected to. Such ranks are
//!   silent, not unreachable: they do not count against the majority, and the notice does not reach them.
//! - A firewall refuses the connections between nodes instead of dropping their packets. Each side then takes
//!   the processes of the other side for gone.

mod agreement;
mod frame;
mod listener;
mod message;
mod notices;
mod ports;
mod ports_shared;
mod request;
mod served_rank;
mod service;
mod session;
mod thread;
mod unidentified;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;

pub use listener::ShrinkListener;
pub use message::{CallsMade, excluded_by};
pub use request::AgreedWorld;
pub use service::{ShrinkService, ShrinkServiceParams};
