//! The topology of a cluster: a tree of switches and nodes with ranks as leaves. Each vertex has a link to
//! its parent with a bandwidth and a latency. Where links form no tree, the tree says only which ranks are on
//! which nodes, and a [`Fabric`] has the links.
//!
//! Owns the tree and queries on it. Must not know the formats that describe it (see
//! [`topology_file`](super::topology_file)) or the planners.

use super::Rank;
use super::fabric::Fabric;
use flexring_core::error::{Error, Result};
use std::sync::Arc;

/// Index of a vertex. The root is 0, and parents have smaller indices than their children.
pub type VertexId = usize;

/// Number of a link in output, from 1: the vertex whose uplink it is, or its place in the fabric and one
/// more.
pub type TopologyLink = usize;

/// Most bytes that pass over a link at once: 2^40.
pub const MAX_BURST: u64 = 1 << 40;

/// The link from a vertex to its parent. Bandwidth and latency are equal in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uplink {
    /// Bits per second in each direction, at least 1. Planners use ratios only.
    pub bandwidth: u64,
    /// Nanoseconds in one direction.
    pub latency: u64,
    /// Bytes that pass at once after a pause, in each direction, as a shaper with a token bucket lets them.
    /// Used by simulations only.
    pub burst: u64,
}

impl Uplink {
    /// Default of a node's link to its switch: 10 Gbit/s, 30 us.
    pub const NODE_DEFAULT: Self = Self::new(10_000_000_000, 30_000);
    /// Default of a rank's link to its node: 400 Gbit/s, 1 us.
    pub const RANK_DEFAULT: Self = Self::new(400_000_000_000, 1_000);

    /// A link on which nothing passes at once.
    #[must_use]
    pub const fn new(bandwidth: u64, latency: u64) -> Self {
        Self { bandwidth, latency, burst: 0 }
    }

    /// The bandwidth in bytes per second, for estimates.
    #[must_use]
    pub fn bytes_per_second(self) -> f64 {
        self.bandwidth as f64 / 8.0
    }

    /// The [label](bandwidth_label) of the bandwidth.
    #[must_use]
    pub fn bandwidth_label(self) -> String {
        bandwidth_label(self.bandwidth)
    }
}

/// Bits per second with a decimal unit, rounded down to three places: `500M`, `2.5G`.
#[must_use]
pub fn bandwidth_label(bandwidth: u64) -> String {
    let units = [(1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"), (1_000, "K")];
    let (unit, letter) = units.into_iter().find(|(unit, _)| bandwidth >= *unit).unwrap_or((1, ""));
    let thousandths = (bandwidth as u128 * 1_000 / unit as u128) as u64;
    let text = format!("{}.{:03}", thousandths / 1_000, thousandths % 1_000);
    format!("{}{letter}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// The NICs of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nics {
    /// Their number, at least 1. Each has an equal part of the uplink's bandwidth.
    pub count: u32,
    /// Whether each rank uses all of them; otherwise the ranks of the node divide them.
    pub striped: bool,
}

impl Nics {
    /// One NIC, and all vertices that are not nodes.
    pub const ONE: Self = Self { count: 1, striped: false };
}

/// The kind of a vertex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VertexKind {
    /// A switch, whose children are nodes and other switches.
    Switch,
    /// A machine, whose children are ranks.
    Node,
    /// A rank: a leaf of the tree.
    Rank(Rank),
}

/// A vertex of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vertex {
    /// The name in the description, for output.
    pub name: String,
    /// Switch, node or rank.
    pub kind: VertexKind,
    /// The link to the parent, that of all NICs together; meaningless for the root.
    pub uplink: Uplink,
    /// The NICs that the uplink consists of.
    pub nics: Nics,
    /// The parent; `None` for the root.
    pub parent: Option<VertexId>,
    /// The children, in the order of the description.
    pub children: Vec<VertexId>,
}

impl Vertex {
    /// The bandwidth of the uplink, in the notation of the short form: `10G`, or with several NICs `4*100G`.
    #[must_use]
    pub fn bandwidth_label(&self) -> String {
        match self.nics.count {
            0 | 1 => self.uplink.bandwidth_label(),
            count => format!("{count}*{}", bandwidth_label(self.uplink.bandwidth / u64::from(count))),
        }
    }
}

/// A tree of switches and nodes, with every rank of the world on exactly one node.
///
/// ```
/// # use flexring_plan::topology::Topology;
/// let topology = Topology::from_names(&["left", "left", "right"]);
/// assert_eq!((topology.world(), topology.nodes()), (3, 2));
/// assert_eq!(topology.node_of(2), 1);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    vertices: Vec<Vertex>,
    /// By rank.
    leaves: Vec<VertexId>,
    /// By rank, the number of its node in tree order.
    node_of: Vec<usize>,
    nodes: usize,
    /// The links, if they form no tree.
    fabric: Option<Arc<Fabric>>,
}

/// Builds a [`Topology`] from the root down.
#[derive(Clone, Debug)]
pub struct TopologyBuilder {
    vertices: Vec<Vertex>,
}

impl TopologyBuilder {
    /// Starts with the root, a switch.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let root = Vertex {
            name: name.to_owned(),
            kind: VertexKind::Switch,
            uplink: Uplink::NODE_DEFAULT,
            nics: Nics::ONE,
            parent: None,
            children: Vec::new(),
        };
        Self { vertices: vec![root] }
    }

    /// Adds a switch below the switch `parent`.
    pub fn switch(&mut self, parent: VertexId, name: &str, uplink: Uplink) -> VertexId {
        self.add(parent, name.to_owned(), VertexKind::Switch, uplink)
    }

    /// Adds a node below the switch `parent`.
    pub fn node(&mut self, parent: VertexId, name: &str, uplink: Uplink) -> VertexId {
        self.add(parent, name.to_owned(), VertexKind::Node, uplink)
    }

    /// Divides the uplink of `node` among NICs. `striped`: see [`Nics`].
    pub fn set_nics(&mut self, node: VertexId, nics: Nics) {
        self.vertices[node].nics = nics;
    }

    /// Adds a rank to `node`.
    pub fn rank(&mut self, node: VertexId, rank: Rank, uplink: Uplink) -> VertexId {
        self.add(node, format!("rank {rank}"), VertexKind::Rank(rank), uplink)
    }

    fn add(&mut self, parent: VertexId, name: String, kind: VertexKind, uplink: Uplink) -> VertexId {
        let id = self.vertices.len();
        let vertex =
            Vertex { name, kind, uplink, nics: Nics::ONE, parent: Some(parent), children: Vec::new() };
        self.vertices.push(vertex);
        self.vertices[parent].children.push(id);
        id
    }

    /// Checks and returns the tree. Switches and nodes without ranks below them are removed.
    ///
    /// # Errors
    /// `InvalidSetting` if a rank is on two nodes, if there are no ranks, if the ranks are not 0 to n - 1
    /// without a gap, or if a link has a bandwidth of zero.
    pub fn finish(self) -> Result<Topology> {
        let refuse = |message: String| Err(Error::invalid_setting(message));
        if let Some(vertex) = self.vertices.iter().find(|vertex| vertex.uplink.bandwidth == 0) {
            return refuse(format!("the link of {} has a bandwidth of zero", vertex.name));
        }
        let mut used = vec![false; self.vertices.len()];
        let mut leaf_of: Vec<Option<VertexId>> = Vec::new();
        for (id, vertex) in self.vertices.iter().enumerate() {
            let VertexKind::Rank(rank) = vertex.kind else { continue };
            // A rank above the number of leaves implies a gap, which is reported below without allocating for
            // it.
            let place = rank.min(self.vertices.len());
            if leaf_of.len() <= place {
                leaf_of.resize(place + 1, None);
            }
            let on = |leaf: VertexId| match self.vertices[leaf].parent {
                Some(node) => self.vertices[node].name.as_str(),
                None => "nothing",
            };
            if let Some(other) = leaf_of[place].filter(|_| rank == place) {
                return refuse(format!("rank {rank} is named twice: on {} and on {}", on(other), on(id)));
            }
            leaf_of[place] = Some(id);
            let mut at = Some(id);
            while let Some(id) = at.filter(|id| !std::mem::replace(&mut used[*id], true)) {
                at = self.vertices[id].parent;
            }
        }
        if leaf_of.is_empty() {
            return refuse("the topology has no ranks".to_owned());
        }
        let mut leaves = Vec::with_capacity(leaf_of.len());
        for (rank, leaf) in leaf_of.iter().enumerate() {
            let Some(leaf) = leaf else {
                return refuse(format!("the topology leaves out rank {rank}"));
            };
            leaves.push(*leaf);
        }
        Ok(Topology::of(self.vertices, &used, leaves))
    }
}

impl Topology {
    /// Nodes at one switch. `names` are the ranks' node names by rank: ranks with equal names share a node.
    /// Nodes are in the order of their first rank.
    #[must_use]
    pub fn from_names<S: AsRef<str>>(names: &[S]) -> Self {
        let mut builder = TopologyBuilder::new("switch");
        let mut nodes = std::collections::HashMap::new();
        for (rank, name) in names.iter().enumerate() {
            let name = name.as_ref();
            let node = *nodes.entry(name).or_insert_with(|| builder.node(0, name, Uplink::NODE_DEFAULT));
            builder.rank(node, rank, Uplink::RANK_DEFAULT);
        }
        builder.finish().expect("every rank is on one node")
    }

    /// Number of ranks.
    #[must_use]
    pub fn world(&self) -> usize {
        self.leaves.len()
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// The node of `rank`, by its number in tree order.
    #[must_use]
    pub fn node_of(&self, rank: Rank) -> usize {
        self.node_of[rank]
    }

    /// All vertices, the root first and children after their parents.
    #[must_use]
    pub fn vertices(&self) -> &[Vertex] {
        &self.vertices
    }

    /// The leaf of `rank`.
    #[must_use]
    pub fn leaf(&self, rank: Rank) -> VertexId {
        self.leaves[rank]
    }
}

/// What flexring's crates ask of a tree.
#[doc(hidden)]
impl Topology {
    /// Keeps the used vertices and renumbers them.
    fn of(vertices: Vec<Vertex>, used: &[bool], leaves: Vec<VertexId>) -> Self {
        let mut number = vec![0; vertices.len()];
        let mut next = 0;
        for (id, used) in used.iter().enumerate().filter(|(_, used)| **used) {
            number[id] = next;
            next += usize::from(*used);
        }
        let kept: Vec<Vertex> = vertices
            .into_iter()
            .zip(used)
            .filter(|(_, used)| **used)
            .map(|(vertex, _)| Vertex {
                parent: vertex.parent.map(|parent| number[parent]),
                children: vertex
                    .children
                    .iter()
                    .filter(|child| used[**child])
                    .map(|child| number[*child])
                    .collect(),
                ..vertex
            })
            .collect();
        let leaves: Vec<VertexId> = leaves.into_iter().map(|leaf| number[leaf]).collect();
        let mut topology =
            Self { node_of: vec![0; leaves.len()], vertices: kept, leaves, nodes: 0, fabric: None };
        // Nodes are numbered in tree order, so that nodes of one rack have consecutive numbers.
        let mut machine: Option<VertexId> = None;
        for rank in topology.ranks_in_tree_order() {
            let node = topology.vertices[topology.leaves[rank]].parent;
            if machine != node {
                machine = node;
                topology.nodes += 1;
            }
            topology.node_of[rank] = topology.nodes - 1;
        }
        topology
    }

    /// The tree of some of the ranks, in this order: the rank at position i gets number i. Switches and nodes
    /// without ranks are removed.
    ///
    /// # Panics
    /// If `ranks` is empty, or names a rank twice or one that does not exist.
    #[must_use]
    pub fn restricted_to(&self, ranks: &[Rank]) -> Self {
        assert!(!ranks.is_empty(), "a topology has at least one rank");
        let mut vertices = self.vertices.clone();
        let mut used = vec![false; vertices.len()];
        let leaves: Vec<VertexId> = ranks.iter().map(|rank| self.leaves[*rank]).collect();
        for (number, leaf) in leaves.iter().enumerate() {
            assert!(!used[*leaf], "a rank is named twice");
            vertices[*leaf].name = format!("rank {number}");
            vertices[*leaf].kind = VertexKind::Rank(number);
            let mut at = Some(*leaf);
            while let Some(id) = at.filter(|id| !std::mem::replace(&mut used[*id], true)) {
                at = self.vertices[id].parent;
            }
        }
        let fabric = self.fabric.as_ref().map(|fabric| Arc::new(fabric.restricted_to(ranks)));
        Self { fabric, ..Self::of(vertices, &used, leaves) }
    }

    /// This topology with links that form no tree, between as many ranks.
    #[must_use]
    pub fn with_fabric(self, fabric: Arc<Fabric>) -> Self {
        Self { fabric: Some(fabric), ..self }
    }

    /// The links, if they form no tree.
    #[must_use]
    pub fn fabric(&self) -> Option<&Arc<Fabric>> {
        self.fabric.as_ref()
    }

    /// The name of a link, for output.
    #[must_use]
    pub fn link_name(&self, link: TopologyLink) -> &str {
        match &self.fabric {
            Some(fabric) => &fabric.links()[link - 1].name,
            None => &self.vertices[link].name,
        }
    }

    /// The bandwidth of a link, for output; of both directions if they differ.
    #[must_use]
    pub fn link_bandwidth_label(&self, link: TopologyLink) -> String {
        let Some(fabric) = &self.fabric else { return self.vertices[link].bandwidth_label() };
        match fabric.links()[link - 1].bandwidths {
            [there, back] if there == back => bandwidth_label(there),
            [there, back] => format!("{}/{}", bandwidth_label(there), bandwidth_label(back)),
        }
    }

    /// The links between nodes; with a single node, those of its ranks.
    #[must_use]
    pub fn links_between_nodes(&self) -> Vec<TopologyLink> {
        let between = self.nodes > 1;
        match &self.fabric {
            Some(fabric) => {
                let links = (1..).zip(fabric.links());
                links.filter(|(_, link)| link.is_within_node != between).map(|(number, _)| number).collect()
            }
            None => {
                let is_rank = |id: &VertexId| matches!(self.vertices[*id].kind, VertexKind::Rank(_));
                (1..self.vertices.len()).filter(|id| is_rank(id) != between).collect()
            }
        }
    }

    /// Bits per second of a part of a link, in each direction: up and down, or from its first end and back.
    /// The links of a fabric have one part.
    #[must_use]
    pub fn part_bandwidths(&self, link: TopologyLink, part: usize) -> [u64; 2] {
        match &self.fabric {
            Some(fabric) => fabric.links()[link - 1].bandwidths,
            None => [self.part_bandwidth(link, part); 2],
        }
    }

    /// Nanoseconds of the link with the highest latency.
    #[must_use]
    pub fn longest_link_latency(&self) -> u64 {
        let longest = match &self.fabric {
            Some(fabric) => fabric.links().iter().map(|link| link.latency).max(),
            None => self.vertices.iter().skip(1).map(|vertex| vertex.uplink.latency).max(),
        };
        longest.unwrap_or(0)
    }

    /// This tree without the switches at these depths below the root, which has depth 0. What is below them
    /// is below what is above them.
    #[must_use]
    pub fn without_switches(&self, depths: &[usize]) -> Self {
        let mut depth = vec![0; self.vertices.len()];
        let mut kept = vec![true; self.vertices.len()];
        let mut vertices = self.vertices.clone();
        for id in 1..vertices.len() {
            let parent = vertices[id].parent.unwrap_or(0);
            depth[id] = depth[self.vertices[id].parent.unwrap_or(0)] + 1;
            kept[id] = vertices[id].kind != VertexKind::Switch || !depths.contains(&depth[id]);
            if !kept[parent] {
                vertices[id].parent = vertices[parent].parent;
            }
        }
        // The children of a switch that is left out take its place. Those with large numbers are lower in the
        // tree.
        for id in (1..vertices.len()).rev().filter(|id| !kept[*id]) {
            let children = std::mem::take(&mut vertices[id].children);
            let above = &mut vertices[self.vertices[id].parent.unwrap_or(0)].children;
            if let Some(place) = above.iter().position(|child| *child == id) {
                above.splice(place..=place, children);
            }
        }
        Self::of(vertices, &kept, self.leaves.clone())
    }

    /// This tree with more switches: the children of a switch with more than `width` of them are divided into
    /// groups of at most so many, and so are these groups. The links of the new switches take as much as
    /// those below them together.
    ///
    /// # Panics
    /// If `width` is less than 2.
    #[must_use]
    pub fn in_groups(&self, width: usize) -> Self {
        assert!(width > 1, "groups of one are no groups");
        let mut builder = TopologyBuilder::new(&self.vertices[0].name);
        self.add_in_groups(&mut builder, 0, &self.vertices[0].children, width);
        builder.finish().expect("the same ranks")
    }

    /// Adds these children of one vertex below the switch `parent`.
    fn add_in_groups(
        &self,
        builder: &mut TopologyBuilder,
        parent: VertexId,
        children: &[VertexId],
        width: usize,
    ) {
        if children.len() > width {
            // As many groups as fit, of equal lengths but for one.
            let mut groups = children.len().div_ceil(width);
            while groups > width {
                groups = groups.div_ceil(width);
            }
            for group in 0..groups {
                let group = &children[children.len() * group / groups..children.len() * (group + 1) / groups];
                let bandwidth = group
                    .iter()
                    .map(|child| self.vertices[*child].uplink.bandwidth)
                    .fold(0, u64::saturating_add);
                let switch = builder.switch(parent, "group", Uplink::new(bandwidth, 0));
                self.add_in_groups(builder, switch, group, width);
            }
            return;
        }
        for child in children {
            let Vertex { name, kind, uplink, nics, children, .. } = &self.vertices[*child];
            match kind {
                VertexKind::Switch => {
                    let switch = builder.switch(parent, name, *uplink);
                    self.add_in_groups(builder, switch, children, width);
                }
                VertexKind::Node => {
                    let node = builder.node(parent, name, *uplink);
                    builder.set_nics(node, *nics);
                    for leaf in children {
                        let Vertex { kind, uplink, .. } = &self.vertices[*leaf];
                        if let VertexKind::Rank(rank) = kind {
                            builder.rank(node, *rank, *uplink);
                        }
                    }
                }
                VertexKind::Rank(rank) => {
                    builder.rank(parent, *rank, *uplink);
                }
            }
        }
    }

    /// The vertices of the nodes, by number.
    #[must_use]
    pub fn node_vertices(&self) -> Vec<VertexId> {
        let mut vertices: Vec<VertexId> = vec![0; self.nodes];
        for (rank, leaf) in self.leaves.iter().enumerate() {
            vertices[self.node_of[rank]] = self.vertices[*leaf].parent.unwrap_or(0);
        }
        vertices
    }

    /// The ranks of each node, by number, in ascending order.
    #[must_use]
    pub fn ranks_of_nodes(&self) -> Vec<Vec<Rank>> {
        let mut ranks = vec![Vec::new(); self.nodes];
        for (rank, node) in self.node_of.iter().enumerate() {
            ranks[*node].push(rank);
        }
        ranks
    }

    /// This tree with the bandwidth of each node's uplink multiplied by its factor, by number.
    #[must_use]
    pub fn with_scaled_nodes(&self, factors: &[f64]) -> Self {
        let mut scaled = self.clone();
        for (vertex, factor) in self.node_vertices().into_iter().zip(factors) {
            let uplink = &mut scaled.vertices[vertex].uplink;
            uplink.bandwidth = ((uplink.bandwidth as f64 * factor) as u64).max(1);
        }
        scaled
    }

    /// Number of parts of the uplink of a vertex. The ranks of a node use different ones.
    #[must_use]
    pub fn uplink_parts(&self, vertex: VertexId) -> usize {
        let Vertex { nics, children, .. } = &self.vertices[vertex];
        if nics.striped { 1 } else { children.len().clamp(1, nics.count.max(1) as usize) }
    }

    /// Bits per second of a part of the uplink of a vertex, in each direction. The ranks of a node take its
    /// NICs in turn until none is left; if there are fewer NICs than ranks, the others share them.
    #[must_use]
    pub fn part_bandwidth(&self, vertex: VertexId, part: usize) -> u64 {
        let (parts, Vertex { nics, uplink, .. }) = (self.uplink_parts(vertex), &self.vertices[vertex]);
        if parts == 1 {
            return uplink.bandwidth;
        }
        let count = nics.count as usize;
        (u128::from(uplink.bandwidth) * (count - part).div_ceil(parts) as u128 / count as u128).max(1) as u64
    }

    /// Bytes that pass over a part of the uplink of a vertex at once after a pause: as large a part of the
    /// burst as of the bandwidth.
    #[must_use]
    pub fn part_burst(&self, vertex: VertexId, part: usize) -> u64 {
        let Uplink { bandwidth, burst, .. } = self.vertices[vertex].uplink;
        let of_part = u128::from(self.part_bandwidth(vertex, part));
        (u128::from(burst) * of_part / u128::from(bandwidth.max(1))) as u64
    }

    /// The part of its node's uplink that a rank uses.
    #[must_use]
    pub fn uplink_part_of(&self, rank: Rank) -> usize {
        let leaf = self.leaves[rank];
        let node = self.vertices[leaf].parent.unwrap_or(0);
        match self.uplink_parts(node) {
            1 => 0,
            parts => {
                self.vertices[node].children.iter().position(|child| *child == leaf).unwrap_or(0) % parts
            }
        }
    }

    /// The lowest vertex that has both in its subtree; one of the two if it is an ancestor of the other.
    #[must_use]
    pub fn lowest_common_ancestor(&self, mut one: VertexId, mut other: VertexId) -> VertexId {
        // Parents have smaller indices, so the larger index is never an ancestor of the other.
        while one != other {
            let lower = if one > other { &mut one } else { &mut other };
            *lower = self.vertices[*lower].parent.unwrap_or(0);
        }
        one
    }

    /// The vertices whose uplinks lead from one vertex to the other: those that are climbed, and those that
    /// are descended, each from the lowest.
    #[must_use]
    pub fn uplinks_between(&self, from: VertexId, to: VertexId) -> [Vec<VertexId>; 2] {
        let top = self.lowest_common_ancestor(from, to);
        let up = |vertex: &VertexId| self.vertices[*vertex].parent;
        [from, to]
            .map(|low| std::iter::successors(Some(low), up).take_while(|vertex| *vertex != top).collect())
    }

    /// The ranks in depth-first order, so that the ranks of each node, and of each switch, are consecutive.
    #[must_use]
    pub fn ranks_in_tree_order(&self) -> Vec<Rank> {
        let mut ranks = Vec::with_capacity(self.leaves.len());
        let mut stack = vec![0];
        while let Some(id) = stack.pop() {
            let vertex = &self.vertices[id];
            match vertex.kind {
                VertexKind::Rank(rank) => ranks.push(rank),
                _ => stack.extend(vertex.children.iter().rev()),
            }
        }
        ranks
    }

    /// The vertices that have children, level by level from the root.
    #[must_use]
    pub fn levels(&self) -> Vec<Vec<VertexId>> {
        let mut levels = Vec::new();
        let mut level = vec![0];
        while !level.is_empty() {
            let below = level.iter().flat_map(|id: &VertexId| &self.vertices[*id].children).copied();
            let below = below.filter(|id| !self.vertices[*id].children.is_empty()).collect();
            levels.push(std::mem::replace(&mut level, below));
        }
        levels
    }

    /// The fan-outs of a symmetric tree, from the ranks of a node up to the root. Fan-outs of 1 are left out.
    ///
    /// # Errors
    /// `InvalidSetting` if the tree is not symmetric, naming two vertices of one level with different
    /// fan-outs.
    pub fn dimensions(&self) -> Result<Vec<usize>> {
        let mut dimensions = Vec::new();
        for level in self.levels().iter().rev() {
            let fan_out = |id: VertexId| self.vertices[id].children.len();
            let first = level[0];
            let odd = level.iter().copied().find(|id| fan_out(*id) != fan_out(first));
            if let Some(odd) = odd {
                return Err(self.asymmetric(first, odd));
            }
            dimensions.push(fan_out(first));
        }
        let product = dimensions.iter().try_fold(1usize, |product, fan_out| product.checked_mul(*fan_out));
        if product != Some(self.world()) {
            // Some leaf is closer to the root than others.
            let depth = |rank: &Rank| {
                std::iter::successors(Some(self.leaves[*rank]), |id| self.vertices[*id].parent).count()
            };
            let highest = (0..self.world()).min_by_key(depth).unwrap_or(0);
            let message =
                format!("the topology is not symmetric: rank {highest} is closer to the root than others");
            return Err(Error::invalid_setting(message));
        }
        dimensions.retain(|fan_out| *fan_out > 1);
        Ok(dimensions)
    }

    fn asymmetric(&self, one: VertexId, other: VertexId) -> Error {
        let describe = |id: VertexId| {
            let vertex = &self.vertices[id];
            let what = match (vertex.kind, vertex.children.len()) {
                (VertexKind::Node, 1) => "rank",
                (VertexKind::Node, _) => "ranks",
                (_, 1) => "branch",
                _ => "branches",
            };
            format!("{} has {} {what}", vertex.name, vertex.children.len())
        };
        let message = format!("the topology is not symmetric: {} and {}", describe(one), describe(other));
        Error::invalid_setting(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uplinks_of_nodes_are_scaled() {
        let topology = Topology::from_names(&["a", "b", "a", "c"]);
        assert_eq!(topology.ranks_of_nodes(), [vec![0, 2], vec![1], vec![3]]);
        let scaled = topology.with_scaled_nodes(&[1.0, 0.5, 1.0]);
        let bandwidths: Vec<u64> =
            scaled.node_vertices().iter().map(|node| scaled.vertices()[*node].uplink.bandwidth).collect();
        assert_eq!(bandwidths, [10_000_000_000, 5_000_000_000, 10_000_000_000]);
        assert_eq!(scaled.with_scaled_nodes(&[1.0, 2.0, 1.0]), topology);
    }

    /// The tree as a short form, of its ranks.
    fn form(topology: &Topology, vertex: VertexId) -> String {
        let Vertex { kind, children, .. } = &topology.vertices[vertex];
        let inner: Vec<String> = children.iter().map(|child| form(topology, *child)).collect();
        match kind {
            VertexKind::Rank(rank) => rank.to_string(),
            VertexKind::Node => format!("[{}]", inner.join(" ")),
            VertexKind::Switch => format!("({})", inner.join("")),
        }
    }

    #[test]
    fn levels_of_switches_are_left_out_and_added() {
        let mut builder = TopologyBuilder::new("top");
        let mut rank = 0;
        for rack in 0..2 {
            let switch = builder.switch(0, "rack", Uplink::NODE_DEFAULT);
            for node in 0..2 + rack {
                let node = builder.node(switch, "node", Uplink::new(1 + node, 0));
                for _ in 0..2 {
                    builder.rank(node, rank, Uplink::RANK_DEFAULT);
                    rank += 1;
                }
            }
        }
        let topology = builder.finish().expect("complete");
        assert_eq!(form(&topology, 0), "(([0 1][2 3])([4 5][6 7][8 9]))");
        let flat = topology.without_switches(&[1]);
        assert_eq!(form(&flat, 0), "([0 1][2 3][4 5][6 7][8 9])");
        assert_eq!((flat.nodes(), flat.levels().len()), (5, 2));
        assert_eq!(form(&topology.in_groups(2), 0), "(([0 1][2 3])(([4 5])([6 7][8 9])))");
        let groups = flat.in_groups(3);
        assert_eq!(form(&groups, 0), "(([0 1][2 3])([4 5][6 7][8 9]))");
        // Nodes keep their links, and a new switch has as much as they have together.
        let above: Vec<u64> = groups.vertices[0]
            .children
            .iter()
            .map(|group| groups.vertices[*group].uplink.bandwidth)
            .collect();
        assert_eq!(above, [3, 6]);
    }

    #[test]
    fn bandwidth_labels_use_decimal_units() {
        let speed = |bandwidth| Uplink::new(bandwidth, 0).bandwidth_label();
        assert_eq!(
            [1, 64_000, 500_000_000, 2_500_000_000, 10_000_000_000, 1_000_000_000_000].map(speed),
            ["1", "64K", "500M", "2.5G", "10G", "1T"]
        );
    }

    #[test]
    fn ranks_with_equal_names_share_a_node() {
        let topology = Topology::from_names(&["b", "a", "b", "a", "c"]);
        assert_eq!((topology.world(), topology.nodes()), (5, 3));
        assert_eq!(topology.ranks_in_tree_order(), [0, 2, 1, 3, 4]);
        assert_eq!((0..5).map(|rank| topology.node_of(rank)).collect::<Vec<_>>(), [0, 1, 0, 1, 2]);
        assert_eq!(topology.levels().iter().map(Vec::len).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn a_restricted_topology_keeps_the_tree_above_its_ranks() {
        let mut builder = TopologyBuilder::new("top");
        for (rack, nodes) in [("left", 2), ("right", 1)] {
            let switch = builder.switch(0, rack, Uplink::new(7, 3));
            for node in 0..nodes {
                let node = builder.node(switch, &format!("{rack}{node}"), Uplink::NODE_DEFAULT);
                let first =
                    builder.vertices.iter().filter(|it| matches!(it.kind, VertexKind::Rank(_))).count();
                for rank in first..first + 2 {
                    builder.rank(node, rank, Uplink::RANK_DEFAULT);
                }
            }
        }
        let whole = builder.finish().expect("complete");
        // Rank 4 becomes 0, rank 0 becomes 1, rank 1 becomes 2; the node left1 has no rank any more.
        let restricted = whole.restricted_to(&[4, 0, 1]);
        assert_eq!((restricted.world(), restricted.nodes()), (3, 2));
        assert_eq!(restricted.ranks_in_tree_order(), [1, 2, 0]);
        let names: Vec<&str> = restricted.vertices().iter().map(|vertex| vertex.name.as_str()).collect();
        assert!(!names.contains(&"left1") && names.contains(&"right0"), "{names:?}");
        let rack = restricted.vertices().iter().find(|vertex| vertex.name == "right").expect("a rack");
        assert_eq!(rack.uplink, Uplink::new(7, 3));
        assert_eq!(whole.restricted_to(&[0, 1, 2, 3, 4, 5]), whole);
    }

    #[test]
    fn the_lowest_common_ancestor_may_be_one_of_the_two() {
        let topology = Topology::from_names(&["a", "a", "b"]);
        let [one, two, three] = [0, 1, 2].map(|rank| topology.leaf(rank));
        let node = topology.vertices()[one].parent.expect("a node");
        assert_eq!(
            (topology.lowest_common_ancestor(one, two), topology.lowest_common_ancestor(two, three)),
            (node, 0)
        );
        assert_eq!(
            (topology.lowest_common_ancestor(one, one), topology.lowest_common_ancestor(node, two)),
            (one, node)
        );
    }

    #[test]
    fn dimensions_are_those_of_symmetric_trees_only() {
        let dimensions = |names: &[&str]| Topology::from_names(names).dimensions();
        assert_eq!(dimensions(&["a", "a", "a", "b", "b", "b"]).expect("symmetric"), [3, 2]);
        assert_eq!(dimensions(&["a", "b"]).expect("symmetric"), [2]);
        assert!(dimensions(&["a"]).expect("symmetric").is_empty());
        let error = dimensions(&["a", "a", "b", "b", "b"]).expect_err("2 and 3");
        assert_eq!(error.message(), "the topology is not symmetric: a has 2 ranks and b has 3 ranks");
    }

    #[test]
    fn finish_requires_every_rank_exactly_once() {
        let finish = |ranks: &[Rank]| {
            let mut builder = TopologyBuilder::new("top");
            let rack = builder.switch(0, "rack", Uplink::NODE_DEFAULT);
            builder.node(rack, "empty", Uplink::NODE_DEFAULT);
            for rank in ranks {
                let node = builder.node(rack, &format!("n{rank}"), Uplink::NODE_DEFAULT);
                builder.rank(node, *rank, Uplink::RANK_DEFAULT);
            }
            builder.finish().map_err(|error| error.message().to_owned())
        };
        let topology = finish(&[1, 0]).expect("complete");
        assert_eq!((topology.vertices().len(), topology.nodes(), topology.node_of(0)), (6, 2, 1));
        assert_eq!(finish(&[0, 2]), Err("the topology leaves out rank 1".to_owned()));
        assert_eq!(finish(&[0, usize::MAX]), Err("the topology leaves out rank 1".to_owned()));
        assert_eq!(finish(&[0, 0]), Err("rank 0 is named twice: on n0 and on n0".to_owned()));
        assert_eq!(finish(&[]), Err("the topology has no ranks".to_owned()));
        let mut builder = TopologyBuilder::new("top");
        let node = builder.node(0, "slow", Uplink::new(0, 0));
        builder.rank(node, 0, Uplink::RANK_DEFAULT);
        let error = builder.finish().expect_err("no bandwidth");
        assert_eq!(error.message(), "the link of slow has a bandwidth of zero");
    }
}
