//! Which of the candidates `FLEXRING_ALGO=auto` uses for vectors of a length on several nodes, by their
//! times.
//!
//! Owns the comparison with the plan for the shape of the topology ([`selection`](super::selection)), and
//! which times it needs. Must not know how programs are run or simulated, nor which settings ask for a
//! choice.
//!
//! Each candidate has a calculated time for all lengths. That is right within a few percent where links are
//! alike, and within a factor of two where they differ. So plans are also simulated at some lengths: one
//! length after the other, those that may be the fastest by what is known so far. The ranks of a job divide
//! these trials, and tell each other the times.

use super::calculation::{CalculatedTime, Calculator};
use super::candidates::{CandidatePlan, candidates, with_variant};
use super::lowering::Plan;
use super::schedule::Group;
use super::selection::{AlgorithmSelection, ShortPlan, uneven_links};
use super::sized_plan::SizedPlan;
use super::thresholds::MOST_SIMULATED;
use super::topology::Topology;
use flexring_core::config::{Algorithm, Config};
use flexring_core::error::Result;
use std::cell::OnceCell;
use std::sync::Arc;

/// Lengths in bytes at which plans are simulated, round by round; with how many times as long as the fastest
/// by prediction a plan may take, to be simulated; and with the part of the time that is left for it. A
/// prediction is the calculated time in the first round, and then the last simulated time, grown as
/// calculated. Many ranks simulate the lengths of a round at once, so few rounds take less time: one for each
/// length took 1.4 times as long with 25 to 64 ranks, and found fewer of the fastest plans in that time.
const ROUNDS: [(&[u64], f64, f64); 4] = [
    (&[64 << 10, 256 << 10, 1 << 20], 2.2, 0.4),
    (&[8 << 10, 4 << 20, 16 << 20], 2.0, 0.5),
    (&[64 << 20], 1.1, 0.8),
    // Plans that seemed to be slow before longer vectors were simulated.
    (&[8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20], 1.02, 1.0),
];

/// Both of these where calculated times are right within a few percent: nodes at one switch, with links that
/// are alike.
const WITHIN_ALIKE: f64 = 1.1;

/// A plan that was simulated at some length is chosen at another without a simulation if all others take more
/// than this many times as long.
const RIVALS: f64 = 2.0;

/// How often times are simulated at the lengths at which one plan follows another, up to this many bytes, and
/// unless they were at a length that differs by at most this part.
const REFINEMENTS: usize = 8;
const LONGEST_CROSSING: u64 = 64 << 20;
const NEAR: u64 = 64;

/// Beyond this length in bytes a longer vector takes as much longer as its busiest link.
const STEADY: u64 = 16 << 20;

/// The busiest link of a plan is busy all the time if, between its longest simulated vectors, the time for
/// each byte is at most this many times that of the link, and the whole time at most `FILLED` times.
const STEADILY: f64 = 1.005;
const FILLED: f64 = 1.05;

/// How many times as long as predicted a plan may take, for each doubling of its longest simulated vector.
const DOUBT: f64 = 1.05;

/// About how many nanoseconds of processor time a rank may simulate for, and the part of them that may be
/// left for the lengths at which one plan follows another.
const MOST_NANOSECONDS: u64 = 60_000_000;
const MOST_REFINING: u64 = 40_000_000;

/// Nanoseconds of processor time that a simulation takes for each message of its programs, and for each
/// sub-chunk that is sent. Fitted to simulations of random trees on a busy Xeon.
const PROGRAM_NANOSECONDS: u64 = 4_500;
const SUBCHUNK_NANOSECONDS: u64 = 1_400;

/// Ranks of symmetric trees share most programs, whose simulation takes this part of that time or less.
const SHARED_PROGRAMS: u64 = 4;

/// A simulated plan replaces another at the lengths at which it takes less than this part of its time. 1.02
/// times as long is as good.
const FASTER_SIMULATED: f64 = 0.981;

/// The length at which one plan follows another is not rounded where the first takes less than this part of
/// the other's time.
const MUCH_FASTER: f64 = 0.95;

/// A plan replaces the one for the shape of the topology if its calculated time is less than this part of the
/// least time of the other at some length. It is then used for all lengths at which it is faster.
const CLEARLY_FASTER: f64 = 0.85;

/// As [`CLEARLY_FASTER`], for a plan whose calculated time [is exact](CalculatedTime::is_exact).
const FASTER: f64 = 0.95;

/// Bytes of the longest vectors for which times are calculated. The fastest plan is the same for longer ones.
const LONGEST_CALCULATED: u64 = 1 << 30;

/// A plan and a length whose time is to be simulated.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The plan.
    pub plan: Arc<Plan>,
    /// Bytes of the vector.
    pub bytes: u64,
    /// About how long the simulation takes in nanoseconds of processor time.
    pub cost: u64,
    /// The plan among those of the choice.
    at: usize,
}

/// By trial, the rank that simulates it, so that all ranks take about equally long.
#[must_use]
pub fn share_out(trials: &[Trial], world: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..trials.len()).collect();
    order.sort_by_key(|trial| std::cmp::Reverse(trials[*trial].cost));
    let (mut load, mut ranks) = (vec![0; world], vec![0; trials.len()]);
    for trial in order {
        let least = (0..world).min_by_key(|rank| load[*rank]).unwrap_or(0);
        load[least] += trials[trial].cost;
        ranks[trial] = least;
    }
    ranks
}

/// Simulates plans on a topology: the picoseconds of each trial; `None` where there is no time.
pub type Simulate<'a> = dyn FnMut(&Topology, &[Trial]) -> Result<Vec<Option<u64>>> + 'a;

/// A plan with its times.
struct TimedPlan {
    plan: SizedPlan,
    algorithm: Algorithm,
    /// Whether the programs of most ranks are alike.
    shares_programs: bool,
    calculated: CalculatedTime,
    /// By group, its messages in each direction and their length as a part of the vector, once they are
    /// needed.
    hops: OnceCell<Vec<(u64, f64)>>,
    /// Simulated times in seconds, by length in bytes in ascending order.
    simulated: Vec<(u64, f64)>,
    /// Lengths for which it was simulated, or could not be.
    tried: Vec<u64>,
}

impl TimedPlan {
    fn calculated(&self, bytes: u64) -> f64 {
        self.calculated.seconds(bytes, self.plan.subchunk)
    }

    /// Seconds of the busiest link or rank, which no simulation is shorter than.
    fn busiest(&self, bytes: u64) -> f64 {
        self.calculated.busiest * bytes as f64
    }

    /// Seconds of a vector that is longer than all simulated ones, if the busiest link was busy all the time
    /// at the end of these.
    fn steady(&self, bytes: u64) -> Option<f64> {
        let [.., (shorter, least), (longest, time)] = self.simulated[..] else { return None };
        let per_byte = (time - least) / (longest - shorter) as f64;
        let is_steady = bytes > longest
            && per_byte <= STEADILY * self.calculated.busiest
            && time <= FILLED * self.busiest(longest);
        is_steady.then(|| time + per_byte.max(self.calculated.busiest) * (bytes - longest) as f64)
    }

    /// Whether a simulation says no more about this length.
    fn is_certain(&self, bytes: u64) -> bool {
        self.tried.contains(&bytes) || self.steady(bytes).is_some()
    }

    /// Seconds by what was simulated, grown as calculated; `None` if nothing was.
    fn predicted(&self, bytes: u64) -> Option<f64> {
        let next = self.simulated.partition_point(|(length, _)| *length < bytes);
        let before = next.checked_sub(1).map(|at| self.simulated[at]);
        let (length, time) = match (before, self.simulated.get(next)) {
            (Some((length, time)), Some((longer, next))) => {
                let part = (bytes - length) as f64 / (longer - length) as f64;
                // Where times fall, they jump, at a length that is not known: vectors begin to move in waves.
                let is_jump = next < &time && bytes < *longer;
                return Some(if is_jump { time } else { time + part * (next - time) });
            }
            (before, next) => before.or(next.copied())?,
        };
        if let Some(steady) = self.steady(bytes) {
            return Some(steady);
        }
        let calculated = [bytes, length].map(|bytes| self.calculated(bytes));
        Some(match bytes > length && length >= STEADY {
            true => time + (calculated[0] - calculated[1]).max(0.0),
            false => time * calculated[0] / calculated[1],
        })
    }

    /// Seconds that it probably takes at most, by what was simulated; `None` if nothing was.
    fn seconds(&self, bytes: u64) -> Option<f64> {
        let mut seconds = self.predicted(bytes)?;
        if self.steady(bytes).is_some() {
            return Some(seconds);
        }
        let (mut longest, time) = *self.simulated.last()?;
        // Where links differ, times may go on to grow as they did before instead.
        if let [.., (shorter, least), _] = self.simulated[..]
            && bytes > longest
        {
            let per_byte = (time - least) / (longest - shorter) as f64;
            seconds = seconds.max(time + per_byte * (bytes - longest) as f64);
        }
        while longest < bytes {
            longest = longest.saturating_mul(2);
            seconds *= DOUBT;
        }
        Some(seconds)
    }

    /// About how long a simulation takes in nanoseconds of processor time.
    fn cost(&self, bytes: u64) -> u64 {
        let (mut messages, mut subchunks) = (0, 0);
        for (hops, extent) in self.hops.get_or_init(|| hops(&self.plan.plan)) {
            messages += 2 * hops;
            let length = extent * bytes as f64 / self.plan.subchunk as f64;
            subchunks += 2 * hops * (length.ceil() as u64).max(1);
        }
        let alone = messages * PROGRAM_NANOSECONDS + subchunks * SUBCHUNK_NANOSECONDS;
        if self.shares_programs { alone / SHARED_PROGRAMS } else { alone }
    }
}

/// All plans of a topology between which lengths choose.
pub(super) struct Choice {
    /// Those of vectors that are so short that only the number of messages counts.
    kept: Vec<SizedPlan>,
    /// The plans for the shape of the topology, of which the last is for all lengths, then the others.
    timed: Vec<TimedPlan>,
    /// Number of plans for the shape of the topology.
    usual: usize,
    reason: String,
}

impl Choice {
    /// The choice between the `untuned` plans and all candidates.
    pub(super) fn new(
        config: &Config,
        topology: &Topology,
        untuned: Vec<SizedPlan>,
        selection: AlgorithmSelection,
    ) -> Self {
        let calculator = Calculator::new(topology);
        let subchunk = config.subchunk.0;
        let is_symmetric = topology.dimensions().is_ok();
        let timed = |algorithm, plan: SizedPlan| TimedPlan {
            shares_programs: is_symmetric && matches!(algorithm, Algorithm::Ring | Algorithm::Hierarchical),
            calculated: calculator.time(&plan.plan),
            hops: OnceCell::new(),
            simulated: Vec::new(),
            tried: Vec::new(),
            algorithm,
            plan,
        };
        let candidates = candidates(topology);
        let is_candidate = |plan: &Plan| candidates.iter().any(|other| other.plan.digest() == plan.digest());
        let (mut kept, mut all) = (Vec::new(), Vec::new());
        for sized in untuned {
            let tiny = sized.longest.min(config.small.0);
            if sized.short.is_some_and(|short| short != ShortPlan::Halving) && tiny > 0 {
                kept.push(SizedPlan { longest: tiny, ..sized.clone() });
            }
            if sized.longest == usize::MAX || (sized.longest > tiny && !is_candidate(&sized.plan)) {
                all.push(timed(selection.algorithm, sized));
            }
        }
        kept.dedup_by_key(|sized: &mut SizedPlan| sized.longest);
        let usual = all.len();
        let main = all[usual - 1].plan.plan.digest();
        for CandidatePlan { algorithm, variant, plan } in candidates {
            if plan.digest() != main {
                let plan = Arc::new(plan);
                let sized = SizedPlan { short: None, variant, longest: usize::MAX, subchunk, plan };
                all.push(timed(algorithm, sized));
            }
        }
        Self { kept, timed: all, usual, reason: selection.reason }
    }

    /// Simulates the plans that may be the fastest at some length.
    pub(super) fn simulate(&mut self, topology: &Topology, simulate: &mut Simulate<'_>) -> Result<()> {
        let world = topology.world();
        let alike = topology.levels().len() <= 2 && uneven_links(topology).is_none();
        // With one rank on each node, calculated times are those of the simulator.
        if world > MOST_SIMULATED || (alike && topology.nodes() == world) {
            return Ok(());
        }
        let mut left = MOST_NANOSECONDS;
        for (lengths, within, part) in ROUNDS {
            let within = match alike {
                true => (within.min(WITHIN_ALIKE), WITHIN_ALIKE),
                false => (within, RIVALS),
            };
            let mut left_here = (part * left as f64) as u64;
            left -= left_here;
            // Until the one that seems to be the fastest was simulated: some take longer than predicted.
            loop {
                let trials = self.trials(lengths, within, world, left_here);
                // With one plan there is nothing to compare.
                let is_known = self.timed.iter().any(|timed| !timed.simulated.is_empty());
                if trials.is_empty() || (trials.len() == 1 && !is_known) {
                    break;
                }
                self.note(&trials, simulate(topology, &trials)?);
                left_here -= busiest(&trials, world);
            }
            left += left_here;
        }
        // Where the plan changes, both take about equally long.
        left = left.min(MOST_REFINING);
        for _ in 0..REFINEMENTS {
            let trials = self.affordable(self.crossings(), world, left);
            if trials.is_empty() {
                break;
            }
            self.note(&trials, simulate(topology, &trials)?);
            left -= busiest(&trials, world);
        }
        Ok(())
    }

    /// Notes simulated times.
    fn note(&mut self, trials: &[Trial], times: Vec<Option<u64>>) {
        for (trial, time) in trials.iter().zip(times) {
            let timed = &mut self.timed[trial.at];
            timed.tried.push(trial.bytes);
            if let Some(time) = time {
                timed.simulated.push((trial.bytes, time as f64 * 1e-12));
                timed.simulated.sort_by_key(|(bytes, _)| *bytes);
            }
        }
    }

    /// The lengths at which one plan follows another, and those halfway from there to others at which one of
    /// them was simulated, with both plans, as far as these were simulated at other lengths only.
    fn crossings(&self) -> Vec<(u64, usize)> {
        let choices = self.choices();
        let around = choices.windows(2).flat_map(|pair| {
            let [(longer, _), (shorter, longest)] = [pair[0], pair[1]];
            let tried = || [longer, shorter].into_iter().flat_map(|at| self.timed[at].tried.iter().copied());
            let below = tried().filter(|length| *length <= longest).max().unwrap_or(longest);
            let above = tried().filter(|length| *length > longest).min().unwrap_or(longest);
            let between = [u64::midpoint(below, longest), u64::midpoint(longest, above)];
            let between = between.into_iter().filter(|length| *length != longest);
            std::iter::once(longest)
                .chain(between)
                .map(|length| {
                    let length = (length / 4 * 4).max(4);
                    [(length + 4, longer), (length, shorter)]
                })
                .collect::<Vec<_>>()
        });
        let is_open = |(bytes, at): &(u64, usize)| {
            let timed = &self.timed[*at];
            let is_near = |length: &u64| length.abs_diff(*bytes) <= bytes / NEAR;
            !timed.simulated.is_empty()
                && !timed.tried.iter().any(is_near)
                && *bytes <= (timed.plan.longest as u64).min(LONGEST_CROSSING)
        };
        around.flatten().filter(is_open).collect()
    }

    /// Trials of these lengths and plans, the first ones first, that take no rank longer than `most`
    /// nanoseconds.
    fn affordable(&self, wanted: Vec<(u64, usize)>, world: usize, most: u64) -> Vec<Trial> {
        let mut trials = Vec::new();
        for (bytes, at) in wanted {
            let timed = &self.timed[at];
            trials.push(Trial { plan: Arc::clone(&timed.plan.plan), bytes, cost: timed.cost(bytes), at });
            if busiest(&trials, world) > most {
                trials.pop();
            }
        }
        trials
    }

    /// The plans that may be the fastest at some of the lengths: those that take at most `within` times as
    /// long as the one that is predicted to be, whose busiest link alone does not take as long as another
    /// plan, and whose times are not certain. None of a length if the one that is predicted to be the fastest
    /// was simulated at another length and no other takes at most `rivals` times as long, or may win if its
    /// time is certain. As many as can be simulated so
    /// that no rank takes longer than `most` nanoseconds, the fastest by prediction first.
    fn trials(&self, lengths: &[u64], (within, rivals): (f64, f64), world: usize, most: u64) -> Vec<Trial> {
        let mut wanted: Vec<(f64, u64, usize)> = Vec::new();
        for bytes in lengths.iter().copied() {
            let prediction = |timed: &TimedPlan| match bytes <= timed.plan.longest as u64 {
                true => timed.predicted(bytes).unwrap_or_else(|| timed.calculated(bytes)),
                false => f64::INFINITY,
            };
            let predicted: Vec<f64> = self.timed.iter().map(prediction).collect();
            let shortest = predicted.iter().copied().fold(f64::INFINITY, f64::min);
            let at_most = self.timed.iter().filter(|timed| bytes <= timed.plan.longest as u64);
            let at_most = at_most.filter_map(|timed| timed.seconds(bytes)).fold(f64::INFINITY, f64::min);
            let may_win = |(_, (ratio, timed)): &(usize, (f64, &TimedPlan))| {
                *ratio <= 1.0 || timed.busiest(bytes) < FASTER_SIMULATED * at_most
            };
            let ratios = || predicted.iter().map(|time| time / shortest).zip(&self.timed).enumerate();
            let mut first = ratios().filter(|(_, (ratio, _))| *ratio <= 1.0).map(|(_, (_, timed))| timed);
            let is_certain = first.clone().all(|timed| timed.is_certain(bytes));
            let rivals = ratios().filter(|(_, (ratio, _))| *ratio <= rivals);
            let rivals = rivals.filter(|rival| !is_certain || may_win(rival)).count();
            if rivals < 2 && first.all(|timed| !timed.simulated.is_empty()) {
                continue;
            }
            let near = ratios().filter(|(_, (ratio, timed))| *ratio <= within && !timed.is_certain(bytes));
            let near = near.filter(may_win);
            wanted.extend(near.map(|(at, (ratio, _))| (ratio, bytes, at)));
        }
        wanted.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.2.cmp(&other.2)));
        self.affordable(wanted.into_iter().map(|(_, bytes, at)| (bytes, at)).collect(), world, most)
    }

    /// From long vectors to short ones, the place of each plan and its longest vector.
    fn choices(&self) -> Vec<(usize, u64)> {
        let main = self.usual - 1;
        let shortest = self.kept.last().map_or(0, |sized| sized.longest as u64);
        let is_simulated = self.timed.iter().any(|timed| !timed.simulated.is_empty());
        // A rank that sends whole vectors needs a core that keeps up with the link.
        let sends_whole =
            |at: usize| matches!(self.timed[at].algorithm, Algorithm::LocalMaster | Algorithm::Tree);
        let cost = |at: usize, bytes: u64| {
            let calculated =
                || self.timed[at].calculated(bytes) / if sends_whole(at) { CLEARLY_FASTER } else { 1.0 };
            self.timed[at].seconds(bytes).unwrap_or_else(calculated)
        };
        let least = |at: usize, bytes: u64| {
            let timed = &self.timed[at];
            let calculated = || timed.calculated.least_seconds(bytes, timed.plan.subchunk);
            timed.seconds(bytes).unwrap_or_else(calculated)
        };
        let usable = |at: usize, bytes: u64| {
            let timed = &self.timed[at];
            bytes <= timed.plan.longest as u64 && (!is_simulated || !timed.simulated.is_empty())
        };
        // From long vectors to short ones: the longest vector of each choice, in descending order.
        let mut choices: Vec<(usize, u64)> = vec![(main, u64::MAX)];
        let mut bytes = LONGEST_CALCULATED;
        while bytes > shortest {
            let all = (0..self.timed.len()).filter(|at| usable(*at, bytes));
            let best = all.min_by(|one, other| cost(*one, bytes).total_cmp(&cost(*other, bytes)));
            let Some(best) = best else { break };
            let timed = &self.timed[best];
            let part = match timed.calculated.is_exact(bytes, timed.plan.subchunk) {
                _ if is_simulated => FASTER_SIMULATED,
                true => FASTER,
                false => CLEARLY_FASTER,
            };
            let is_close = |at: usize| usable(at, bytes) && cost(best, bytes) >= part * least(at, bytes);
            let current = choices[choices.len() - 1].0;
            if !is_close(current) {
                // The plan for the shape of the topology and this length, if it is as good.
                let usual = (0..=main).find(|at| usable(*at, bytes)).filter(|at| is_close(*at));
                let next = usual.unwrap_or(best);
                let by = if is_simulated { FASTER_SIMULATED } else { 1.0 };
                // Without a simulation, the time is somewhere between the two.
                let probable = |bytes| f64::midpoint(least(current, bytes), cost(current, bytes));
                let takes_less = |bytes, part: f64| {
                    usable(next, bytes)
                        && (!usable(current, bytes) || cost(next, bytes) < part * probable(bytes))
                };
                let is_faster = |bytes| takes_less(bytes, by);
                let most = choices[choices.len() - 1].1;
                let mut length = bytes;
                while length < most.min(LONGEST_CALCULATED) && is_faster(2 * length) {
                    length *= 2;
                }
                let longest = if length >= most.min(LONGEST_CALCULATED) {
                    choices.pop();
                    most
                } else {
                    crossing(length, 2 * length, is_faster, |bytes| takes_less(bytes, MUCH_FASTER)).min(most)
                };
                choices.push((next, longest));
            }
            bytes /= 2;
        }
        choices
    }

    /// The plans in ascending order of the longest vectors, and the reason for the last one.
    pub(super) fn decide(self) -> (Vec<SizedPlan>, AlgorithmSelection) {
        let main = self.usual - 1;
        let choices = self.choices();
        let mut plans = self.kept;
        let usual = self.timed[main].algorithm;
        let mut selection = AlgorithmSelection { algorithm: usual, reason: self.reason };
        for (at, longest) in choices.into_iter().rev() {
            let longest = usize::try_from(longest).unwrap_or(usize::MAX);
            let TimedPlan { plan, algorithm, .. } = &self.timed[at];
            if at > main && longest == usize::MAX {
                selection = AlgorithmSelection {
                    algorithm: *algorithm,
                    reason: format!(
                        "{} is faster than {} for long vectors, as calculated or simulated",
                        with_variant(algorithm.name(), &plan.variant),
                        usual.name()
                    ),
                };
            }
            plans.push(SizedPlan { longest: longest.min(plan.longest), ..plan.clone() });
        }
        (plans, selection)
    }
}

/// By group, its messages in the reduction and their length as a part of the vector.
fn hops(plan: &Plan) -> Vec<(u64, f64)> {
    let groups = plan.schedule().levels().iter().flat_map(|level| level.groups());
    let hops = |group: &Group| group.len() - usize::from(group.place_of(group.root).is_some());
    groups.filter(|group| group.moves()).map(|group| (hops(group) as u64, group.span.extent())).collect()
}

/// Nanoseconds of the rank that simulates longest.
fn busiest(trials: &[Trial], world: usize) -> u64 {
    let mut load = vec![0; world];
    trials.iter().zip(share_out(trials, world)).for_each(|(trial, rank)| load[rank] += trial.cost);
    load.into_iter().max().unwrap_or(0)
}

/// The longest length from `low` on, a power of two, for which `holds`, less than `high`, for which it need
/// not. It is rounded to a number that is easy to read, at most 2 % less, unless `matters` for that.
fn crossing(mut low: u64, mut high: u64, holds: impl Fn(u64) -> bool, matters: impl Fn(u64) -> bool) -> u64 {
    let grain = (low / 64).max(1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle) { low = middle } else { high = middle }
    }
    let rounded = low / grain * grain;
    if matters(rounded + 1) { low } else { rounded }
}
