//! The identity of a cluster: which ranks are on which hosts, below which switches, and what links the nodes.
//!
//! Owns its fingerprint, its tree and the words for a difference.

use crate::topology::{Topology, TopologyBuilder, Uplink, VertexId, VertexKind};
use flexring_core::error::{Error, Result};
use flexring_core::rank::{Rank, RankList};
use twox_hash::XxHash3_64;

/// Longest name of a host, in characters; longer ones are cut.
const LONGEST_NAME: usize = 255;

/// Where a profile was measured, or where a job runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterIdentity {
    /// What links ranks of different nodes: `tcp` or `verbs`; `memory` if all ranks share memory.
    pub transport: String,
    /// The tree of switches, as numbers of nodes in nested parentheses: `((0 1) (2))`.
    pub switches: String,
    /// In tree order.
    pub nodes: Vec<ClusterNode>,
}

/// A node of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterNode {
    /// The name of its host.
    pub host: String,
    /// Its ranks, in ascending order.
    pub ranks: Vec<Rank>,
}

impl ClusterIdentity {
    /// The identity of a job. `hosts` are the names of the ranks' hosts, by rank.
    #[must_use]
    pub fn new(topology: &Topology, hosts: &[impl AsRef<str>], transport: &str) -> Self {
        let mut nodes = vec![ClusterNode { host: String::new(), ranks: Vec::new() }; topology.nodes()];
        for (rank, host) in hosts.iter().enumerate().take(topology.world()) {
            let node = &mut nodes[topology.node_of(rank)];
            if node.ranks.is_empty() {
                let printable = |letter: char| if letter.is_control() { '?' } else { letter };
                node.host = host.as_ref().chars().take(LONGEST_NAME).map(printable).collect();
            }
            node.ranks.push(rank);
        }
        Self { transport: transport.to_owned(), switches: switches(topology), nodes }
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.nodes.iter().map(|node| node.ranks.len()).sum()
    }

    /// Number of switches below the root.
    #[must_use]
    pub fn switches_below_root(&self) -> usize {
        self.switches.matches('(').count().saturating_sub(1)
    }

    /// The tree of the cluster, whose links have the default bandwidths and latencies.
    ///
    /// # Errors
    /// `InvalidSetting` if `switches` is not the tree of these nodes.
    pub fn topology(&self) -> Result<Topology> {
        let refuse = || {
            let (switches, nodes) = (&self.switches, counted(self.nodes.len(), "node"));
            Error::invalid_setting(format!(
                "the switches {switches:?} are not a tree of {nodes}, such as (0 1 2)"
            ))
        };
        let mut builder = TopologyBuilder::new("switch");
        let (mut open, mut next, mut racks) = (Vec::new(), 0, 0);
        for word in self.switches.replace('(', " ( ").replace(')', " ) ").split_whitespace() {
            match (word, open.last().copied()) {
                // The root is the only vertex without a parent.
                ("(", None) if next == 0 && racks == 0 => open.push(0),
                ("(", Some(parent)) => {
                    racks += 1;
                    open.push(builder.switch(parent, &format!("switch {racks}"), Uplink::NODE_DEFAULT));
                }
                (")", Some(_)) => drop(open.pop()),
                (word, Some(parent)) if word == next.to_string() => {
                    let node = self.nodes.get(next).ok_or_else(refuse)?;
                    let vertex = builder.node(parent, &node.host, Uplink::NODE_DEFAULT);
                    for rank in &node.ranks {
                        builder.rank(vertex, *rank, Uplink::RANK_DEFAULT);
                    }
                    next += 1;
                }
                _ => return Err(refuse()),
            }
        }
        if !open.is_empty() || next < self.nodes.len() {
            return Err(refuse());
        }
        builder.finish()
    }

    /// Sixteen hexadecimal digits that are equal for equal clusters.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        let mut text = format!("{}\n{}\n", self.transport, self.switches);
        for node in &self.nodes {
            text += &format!("{}\n{:?}\n", node.host, node.ranks);
        }
        format!("{:016x}", XxHash3_64::oneshot(text.as_bytes()))
    }

    /// The first difference to the cluster of a job, as a clause; `None` if there is none. Does not compare
    /// transports, which [`transport_difference`](Self::transport_difference) does.
    #[must_use]
    pub fn difference(&self, job: &Self) -> Option<String> {
        let (ours, theirs) = (self.world(), job.world());
        if ours != theirs {
            return Some(format!("it is for {}, but the job has {theirs}", counted(ours, "rank")));
        }
        let (ours, theirs) = (self.nodes.len(), job.nodes.len());
        if ours != theirs {
            return Some(format!("it is for {}, but the job has {theirs}", counted(ours, "node")));
        }
        for (number, (node, other)) in self.nodes.iter().zip(&job.nodes).enumerate() {
            if node.host != other.host {
                return Some(format!(
                    "its node {number} is {}, but node {number} of the job is {}",
                    node.host, other.host
                ));
            }
            if node.ranks != other.ranks {
                return Some(format!(
                    "its node {number}, {}, has {}, but in the job it has {}",
                    node.host,
                    RankList::new(&node.ranks),
                    RankList::new(&other.ranks)
                ));
            }
        }
        (self.switches != job.switches).then(|| {
            format!(
                "its switches connect the nodes as {}, those of the job as {}",
                self.switches, job.switches
            )
        })
    }

    /// The difference between the transports, as a clause; `None` if there is none.
    #[must_use]
    pub fn transport_difference(&self, transport: &str) -> Option<String> {
        (self.transport != transport)
            .then(|| format!("it was measured over {}, but the job uses {transport}", self.transport))
    }
}

fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// The tree of switches, with numbers of nodes.
fn switches(topology: &Topology) -> String {
    let vertices = topology.vertices();
    let number = |node: VertexId| {
        vertices[node].children.first().map_or(0, |leaf| match vertices[*leaf].kind {
            VertexKind::Rank(rank) => topology.node_of(rank),
            _ => 0,
        })
    };
    // Children come after their parents.
    let mut texts = vec![String::new(); vertices.len()];
    for (id, vertex) in vertices.iter().enumerate().rev() {
        texts[id] = match vertex.kind {
            VertexKind::Rank(_) => continue,
            VertexKind::Node => number(id).to_string(),
            VertexKind::Switch => {
                let below: Vec<String> =
                    vertex.children.iter().map(|child| std::mem::take(&mut texts[*child])).collect();
                format!("({})", below.join(" "))
            }
        };
    }
    std::mem::take(&mut texts[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology_file::parse_short;

    fn cluster(topology: &str, hosts: &[&str]) -> ClusterIdentity {
        let topology = parse_short(topology).expect("a short form").expect("valid");
        ClusterIdentity::new(&topology, hosts, "tcp")
    }

    #[test]
    fn the_fingerprint_depends_on_hosts_ranks_switches_and_transport() {
        let first = cluster("2+1+1", &["a", "a", "b", "c"]);
        assert_eq!(first.switches, "(0 1 2)");
        assert_eq!(first.fingerprint(), cluster("2+1+1", &["a", "a", "b", "c"]).fingerprint());
        let others = [
            (cluster("2+1+1", &["a", "a", "b", "d"]), "its node 2 is c, but node 2 of the job is d"),
            (
                cluster("1+2+1", &["a", "b", "b", "c"]),
                "its node 0, a, has ranks 0 and 1, but in the job it has rank 0",
            ),
            (cluster("2+2", &["a", "a", "b", "b"]), "it is for 3 nodes, but the job has 2"),
            (cluster("2+1", &["a", "a", "b"]), "it is for 4 ranks, but the job has 3"),
            (
                cluster("(2+1)+1", &["a", "a", "b", "c"]),
                "its switches connect the nodes as (0 1 2), those of the job as ((0 1) 2)",
            ),
        ];
        for (other, difference) in others {
            assert_ne!(first.fingerprint(), other.fingerprint());
            assert_eq!(first.difference(&other).as_deref(), Some(difference));
        }
        assert_eq!(first.difference(&first), None);
        let verbs = ClusterIdentity { transport: "verbs".to_owned(), ..first.clone() };
        assert_ne!(first.fingerprint(), verbs.fingerprint());
        let difference = first.transport_difference("verbs").expect("they differ");
        assert_eq!(difference, "it was measured over tcp, but the job uses verbs");
    }

    #[test]
    fn the_tree_of_a_cluster_is_that_of_its_job() {
        for (short, hosts) in [
            ("2+1+1", &["a", "a", "b", "c"][..]),
            ("(2+1)+1", &["a", "a", "b", "c"]),
            ("((1+1)+(1+1))+1", &["a", "b", "c", "d", "e"]),
            ("3", &["a", "a", "a"]),
        ] {
            let first = cluster(short, hosts);
            let again = ClusterIdentity::new(&first.topology().expect("a tree"), hosts, "tcp");
            assert_eq!(first, again, "{short}");
        }
        let mut broken = cluster("2+1+1", &["a", "a", "b", "c"]);
        for switches in [
            "",
            "()",
            "(0 1)",
            "(0 2 1)",
            "(0 1 2",
            "(0 1 2))",
            "(0 1) (2)",
            "0 1 2",
            "(0 1 2 3)",
            "(0 x 1 2)",
        ] {
            broken.switches = switches.to_owned();
            let error = broken.topology().expect_err(switches);
            assert!(
                error.message().contains("are not a tree of 3 nodes, such as (0 1 2)"),
                "{switches}: {error}"
            );
        }
    }
}
