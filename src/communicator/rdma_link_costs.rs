//! What RDMA links cost a rank of a large world, by calculation: the table in docs/rdma.md.

use super::plans::{Plans, no_times};
use crate::config::Config;
use crate::plan::topology::Topology;
use crate::rank::Rank;
use crate::transport::verbs::{LinkResources, VerbsOptions};
use flexring_testkit::effort::cases;

/// Most links that one of these ranks makes with the communicator to ranks of other nodes, of some ranks.
fn most_planned(nodes: usize, ranks_of_node: usize) -> usize {
    let world = nodes * ranks_of_node;
    let names: Vec<String> = (0..world).map(|rank| (rank / ranks_of_node).to_string()).collect();
    let topology = Topology::from_names(&names);
    let planned = |rank: Rank| {
        let plans = Plans::new(&Config::default(), &topology, rank, None, &mut no_times)
            .expect("a plan for every topology");
        let peers = plans.usual_peers();
        assert!(!peers.contains(&rank));
        peers.into_iter().filter(|peer| peer / ranks_of_node != rank / ranks_of_node).count()
    };
    [0, ranks_of_node - 1, world / 2, world - 1].into_iter().map(planned).max().unwrap_or(0)
}

/// A row of the table.
fn row(nodes: usize, ranks_of_node: usize, rails: usize) -> String {
    let planned = most_planned(nodes, ranks_of_node);
    let all = (nodes - 1) * ranks_of_node;
    let pairs: Vec<(usize, usize)> = (0..rails).map(|rail| (rail, rail)).collect();
    let of_link = LinkResources::of_link(&pairs, VerbsOptions::new(&Config::default()).link_shape);
    let cost = |links: usize| {
        let resources = of_link.times(links);
        let (qps, bytes) = (resources.qps.iter().sum::<usize>(), 2 * resources.control_bytes);
        format!("{links} | {qps} | {:.1} MiB", bytes as f64 / f64::from(1 << 20))
    };
    format!(
        "| {} | {nodes} x {ranks_of_node} | {rails} | {} | {} |",
        nodes * ranks_of_node,
        cost(planned),
        cost(all)
    )
}

#[test]
fn the_documentation_has_the_cost_of_links_in_large_worlds() {
    let mut rows = vec![row(128, 8, 1), row(1024, 1, 4)];
    // Plans for the larger worlds take 20 s.
    if cases(10) >= 100 {
        rows.extend([row(2048, 8, 1), row(16384, 1, 4)]);
    }
    let documentation = include_str!("../../docs/rdma.md");
    for row in &rows {
        assert!(documentation.contains(row), "docs/rdma.md lacks these rows:\n{}", rows.join("\n"));
    }
}
