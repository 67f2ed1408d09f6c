//! The parameter server: a subset of the ranks owns the whole vector.

use crate::Rank;
use crate::fraction::Span;
use crate::schedule::{Group, ParticipantSet, Schedule};
use crate::topology::Topology;
use flexring_core::error::{Error, Result};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Parameter servers (BytePS, as Kun Yuan describes it in "On the Time Complexity of Common All-Reduce
/// Methods", 2019) on the ranks `servers`. They own equal parts of the vector, and contribute like all
/// others. If `servers` is empty, the first rank of each node is a server.
///
/// # Errors
/// `InvalidSetting` if a server is not a rank of the world, or is named twice.
pub fn plan(topology: &Topology, servers: &[Rank]) -> Result<Schedule> {
    let world = topology.world();
    let order = topology.ranks_in_tree_order();
    let mut seen = BTreeSet::new();
    for server in servers {
        let wrong = match seen.insert(*server) {
            _ if *server >= world => format!("server {server} is not a rank: there are {world}, from 0"),
            false => format!("server {server} is named twice"),
            true => continue,
        };
        return Err(Error::invalid_setting(wrong));
    }
    let mut first_of_node: Vec<Rank> = order.clone();
    first_of_node.dedup_by_key(|rank| topology.node_of(*rank));
    let servers = if servers.is_empty() { &first_of_node } else { servers };
    let set = ParticipantSet::all(order.clone());
    let group = |(part, server): (usize, &Rank)| {
        let place = order.iter().position(|rank| rank == server).unwrap_or(0);
        Group {
            span: Span::part(part, servers.len()),
            set: Arc::clone(&set),
            first: (place + 1) % world,
            root: *server,
        }
    };
    let groups: Vec<Group> = servers.iter().enumerate().map(group).collect();
    Ok(Schedule::new("parameter-server", world, vec![groups]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_must_be_distinct_ranks() {
        let topology = Topology::from_names(&["a", "a", "b"]);
        let roots = |servers: &[Rank]| -> Vec<Rank> {
            let schedule = plan(&topology, servers).expect("valid servers");
            schedule.levels()[0].groups().iter().map(|group| group.root).collect()
        };
        assert_eq!(roots(&[]), [0, 2]);
        assert_eq!(roots(&[1]), [1]);
        let message = |servers: &[Rank]| plan(&topology, servers).expect_err("bad").message().to_owned();
        assert_eq!(message(&[0, 3]), "server 3 is not a rank: there are 3, from 0");
        assert_eq!(message(&[1, 1]), "server 1 is named twice");
    }
}
