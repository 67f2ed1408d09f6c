//! Maximum flow between two vertices of a directed network (Dinic 1970).
//!
//! Owns the residual capacities.

/// More than any flow, and small enough that a few can be added.
pub(super) const UNLIMITED: i64 = i64::MAX / 8;

/// A network whose capacities can be changed between flows.
#[derive(Clone, Debug)]
pub(super) struct FlowNetwork {
    /// By vertex, its arcs. The arc against arc `a` is `a ^ 1`.
    arcs_of: Vec<Vec<u32>>,
    to: Vec<u32>,
    capacity: Vec<i64>,
    /// By vertex, the distance from the source.
    level: Vec<u32>,
    /// By vertex, the first of its arcs that may lead on.
    next: Vec<u32>,
}

/// The level of vertices that cannot be reached.
const NONE: u32 = u32::MAX;

impl FlowNetwork {
    pub(super) fn new(vertices: usize) -> Self {
        Self {
            arcs_of: vec![Vec::new(); vertices],
            to: Vec::new(),
            capacity: Vec::new(),
            level: vec![NONE; vertices],
            next: vec![0; vertices],
        }
    }

    /// Adds an arc with these capacities there and back. Returns its number.
    pub(super) fn add(&mut self, from: usize, to: usize, capacity: [i64; 2]) -> usize {
        let arc = self.to.len();
        self.arcs_of[from].push(arc as u32);
        self.arcs_of[to].push(arc as u32 + 1);
        self.to.extend([to as u32, from as u32]);
        self.capacity.extend(capacity);
        arc
    }

    /// Sets the capacities of an arc there and back.
    pub(super) fn set(&mut self, arc: usize, capacity: [i64; 2]) {
        self.capacity[arc..arc + 2].copy_from_slice(&capacity);
    }

    /// What is left of an arc's capacity after a flow.
    pub(super) fn left(&self, arc: usize) -> i64 {
        self.capacity[arc]
    }

    /// Sends as much as possible, at most `limit`. The capacities are what is left of them afterwards.
    pub(super) fn send(&mut self, source: usize, sink: usize, limit: i64) -> i64 {
        let mut total = 0;
        while total < limit && self.find_levels(source, Some(sink)) {
            total += self.block(source, sink, limit - total);
        }
        total
    }

    /// After a maximum flow: the vertices on the source's side of a minimum cut.
    pub(super) fn source_side(&mut self, source: usize) -> Vec<bool> {
        self.find_levels(source, None);
        self.level.iter().map(|level| *level != NONE).collect()
    }

    /// Finds the distances from the source, up to that of the sink. Whether the sink can be reached.
    fn find_levels(&mut self, source: usize, sink: Option<usize>) -> bool {
        self.level.fill(NONE);
        self.next.fill(0);
        self.level[source] = 0;
        let mut queue = vec![source];
        let mut done = 0;
        while let Some(at) = queue.get(done).copied() {
            done += 1;
            for arc in &self.arcs_of[at] {
                let to = self.to[*arc as usize] as usize;
                if self.capacity[*arc as usize] > 0 && self.level[to] == NONE {
                    self.level[to] = self.level[at] + 1;
                    if Some(to) == sink {
                        return true;
                    }
                    queue.push(to);
                }
            }
        }
        false
    }

    /// Sends along shortest paths until none is left.
    fn block(&mut self, source: usize, sink: usize, limit: i64) -> i64 {
        let (mut total, mut path, mut at) = (0, Vec::<u32>::new(), source);
        loop {
            if at == sink {
                let left = path.iter().map(|arc| self.capacity[*arc as usize]).min().unwrap_or(0);
                let sent = left.min(limit - total);
                total += sent;
                for arc in &path {
                    self.capacity[*arc as usize] -= sent;
                    self.capacity[*arc as usize ^ 1] += sent;
                }
                let full = path.iter().position(|arc| self.capacity[*arc as usize] == 0);
                let Some(full) = full.filter(|_| total < limit) else { return total };
                at = self.to[path[full] as usize ^ 1] as usize;
                path.truncate(full);
            }
            let leads_on = |arc: u32| {
                let to = self.to[arc as usize] as usize;
                self.capacity[arc as usize] > 0 && self.level[to] == self.level[at] + 1
            };
            let arcs = &self.arcs_of[at];
            let found = (self.next[at] as usize..arcs.len()).find(|place| leads_on(arcs[*place]));
            self.next[at] = found.unwrap_or(arcs.len()) as u32;
            if let Some(place) = found {
                path.push(arcs[place]);
                at = self.to[arcs[place] as usize] as usize;
            } else {
                let Some(arc) = path.pop() else { return total };
                at = self.to[arc as usize ^ 1] as usize;
                self.next[at] += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    #[test]
    fn the_flow_is_the_least_cut() {
        for seed in 0..300 {
            let mut random = Rng::with_seed(seed);
            let vertices = random.usize(2..8);
            let mut network = FlowNetwork::new(vertices);
            let mut arcs = Vec::new();
            for _ in 0..random.usize(..20) {
                let (from, to) = (random.usize(..vertices), random.usize(..vertices));
                let capacity = [random.i64(0..9), random.i64(0..4)];
                if from != to {
                    network.add(from, to, capacity);
                    arcs.extend([(from, to, capacity[0]), (to, from, capacity[1])]);
                }
            }
            let cut = |side: &dyn Fn(usize) -> bool| -> i64 {
                arcs.iter().filter(|(from, to, _)| side(*from) && !side(*to)).map(|arc| arc.2).sum()
            };
            let sides = (0..1_usize << vertices).filter(|set| set & 1 == 1 && set & 2 == 0);
            let least = sides.map(|set| cut(&|vertex| set >> vertex & 1 == 1)).min().expect("some cut");
            let limit = random.i64(0..40);
            let sent = network.clone().send(0, 1, limit);
            assert_eq!(sent, least.min(limit), "seed {seed}");
            assert_eq!(network.send(0, 1, UNLIMITED), least, "seed {seed}");
            let side = network.source_side(0);
            assert!(side[0] && !side[1] && cut(&|vertex| side[vertex]) == least, "seed {seed}");
        }
    }
}
