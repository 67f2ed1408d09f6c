//! Which program executes a call.
//!
//! Owns the plans of a communicator, and the programs that were lowered from them.

use super::checked_call::CheckedCall;
use crate::call::Collective;
use crate::config::{Algorithm, Config};
use crate::description;
use crate::error::{Error, Result};
use crate::executor::{Executor, ProgramNumber};
use crate::plan::call_layout::{CallFacts, CallLayout};
use crate::plan::choice::{Simulate, Trial};
use crate::plan::device_program::DeviceProgram;
use crate::plan::link_shares::{self, SentByRank, sent_to_peers};
use crate::plan::lowering::{Movement, Plan, ProgramSpec};
use crate::plan::program::Program;
use crate::plan::scratch_layout;
use crate::plan::selection::{AlgorithmSelection, ShortPlan};
use crate::plan::sized_plans::{self, SizedPlan};
use crate::plan::thresholds;
use crate::plan::topology::Topology;
use crate::plan::traffic::Traffic;
use crate::plan::tuning::TuningProfile;
use crate::plan::verifier::VerifiedPlan;
use crate::rank::Rank;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// Times are predicted for at most this many ranks, because every rank counts what the programs of all ranks
/// send.
const MOST_PREDICTED_RANKS: usize = 256;

/// Debug builds verify plans for at most this many ranks, because every rank verifies the programs of all
/// ranks.
const MAX_VERIFIED_RANKS: usize = 16;

/// The plans of a communicator, and the programs that calls have needed so far.
pub(super) struct Plans {
    rank: Rank,
    /// The plans without the choices of a tuning profile, then those with them, if there are any. Each part
    /// is in ascending order of the longest vectors, and its last plan has no limit.
    all: Vec<SizedPlan>,
    /// Number of plans without the choices of a profile.
    untuned: usize,
    /// The first plans of vectors on the host, once they are not in use any more because links have changed.
    first: Option<Vec<SizedPlan>>,
    /// See [`digest`](Self::digest) and [`kernel_digest`](Self::kernel_digest).
    digest: u64,
    kernel_digest: u64,
    /// Longest vector, in bytes, that every rank reduces itself.
    one_shot_limit: usize,
    /// Longest block of an all-to-all, in bytes, that goes by node.
    longest_by_node: usize,
    reproducible: bool,
    /// Bytes of a slot of the pool.
    slot_bytes: usize,
    /// Whether all ranks are on one node and share memory.
    one_node: bool,
    /// A call finds its program by few comparisons; hashing the key would take several times as long.
    lowered: BTreeMap<ProgramKey, LoweredProgram>,
    /// The chosen algorithm, and why it was chosen.
    selection: AlgorithmSelection,
    /// Whether the user has chosen none of them.
    are_automatic: bool,
}

/// Identifies a program: the position of its plan, and the variant.
type ProgramKey = (usize, ProgramSpec);

/// A program of this rank.
struct LoweredProgram {
    program: Arc<Program>,
    /// See [`Installed::digest`].
    digest: u64,
    /// Where the executor has it; `None` until it does.
    number: Option<ProgramNumber>,
}

/// Identifies a list of items: the digest of the plans, the program, the elements of the vector and their
/// length, and whether input and output share memory.
pub(super) type ListKey = (u64, ProgramKey, u64, usize, bool);

/// Items into which a long vector is divided at least, so that all CTAs have some; and the shortest
/// sub-chunk. Chosen by calculation.
const LEAST_ITEMS: usize = 64;
const SHORTEST_ITEM: usize = 4 << 10;

/// How a call is executed by a program.
#[derive(Clone, Copy)]
pub(super) struct Installed {
    pub number: ProgramNumber,
    /// The digest by which ranks check that they run the same program: equal on all ranks that do.
    pub digest: u64,
    /// What the layout of the call depends on.
    pub facts: CallFacts,
    /// Bytes of scratch memory that the call needs.
    pub scratch_bytes: usize,
}

impl Plans {
    /// Makes the plans for `topology` according to the settings of the user, and to the tuning profile if
    /// there is one. Where times decide, `simulate` is called. Vectors that are exchanged in one hop and
    /// those on GPUs do not use the choices of a profile: these were measured with longer vectors on the
    /// host.
    pub(super) fn new(
        config: &Config,
        topology: &Topology,
        rank: Rank,
        profile: Option<&TuningProfile>,
        simulate: &mut Simulate<'_>,
    ) -> Result<Self> {
        let measured = profile.map(|profile| profile.topology(topology));
        let measured = measured.as_ref().unwrap_or(topology);
        let choices = profile.map_or(Ok(Vec::new()), |profile| profile.plans(config, measured))?;
        // With choices, what has none is planned as without a profile. Otherwise the profile is its links.
        let (mut all, mut selection) =
            untuned(config, if choices.is_empty() { measured } else { topology }, simulate)?;
        let untuned = all.len();
        if let (Some(last), Some(profile)) = (choices.last(), profile) {
            if last.choice.algorithm != Algorithm::Auto {
                selection.algorithm = last.choice.algorithm;
            }
            selection.reason = format!("measured on {}: FLEXRING_TUNING", profile.date);
            let tuned = sized_plans::tuned(&all, choices, config);
            all.extend(tuned);
        }
        verify(&all)?;
        let one_node = topology.nodes() == 1 && config.transport.shares_memory();
        Ok(Self {
            rank,
            digest: digest_of(&all, one_node),
            kernel_digest: digest_of(&all[..untuned], one_node),
            all,
            untuned,
            first: None,
            one_shot_limit: thresholds::longest_one_shot(config, topology.world()),
            longest_by_node: thresholds::longest_block_by_node(config, topology),
            reproducible: config.reproducible.0,
            slot_bytes: config.subchunk.0,
            one_node,
            lowered: BTreeMap::new(),
            selection,
            are_automatic: config.chooses_no_plan(),
        })
    }

    /// The positions of the plan for a vector of this length, and of the plan for vectors of any length. What
    /// goes `straight` depends on no plan, and the ranks of an all-to-all have different counts, and vectors
    /// on the host or on a GPU, so they all take the latter.
    fn positions_for(&self, bytes: usize, straight: bool, on_gpu: bool) -> (usize, usize) {
        let positions = self.positions(on_gpu && !straight);
        let last = positions.end - 1;
        // The rank in the middle of a star keeps whole sums, also in a reduce-scatter, for which GPUs have no
        // memory to spare.
        let needs_memory = |sized: &SizedPlan| on_gpu && sized.short == Some(ShortPlan::Star);
        let fits = |at: &usize| !straight && bytes <= self.all[*at].longest && !needs_memory(&self.all[*at]);
        (positions.clone().find(fits).unwrap_or(last), last)
    }

    /// The positions of the plans of vectors on the host, or on a GPU.
    fn positions(&self, on_gpu: bool) -> Range<usize> {
        let is_tuned = self.all.len() > self.untuned;
        if is_tuned && !on_gpu { self.untuned..self.all.len() } else { 0..self.untuned }
    }

    /// The plan of long vectors on the host.
    fn main(&self) -> &SizedPlan {
        &self.all[self.all.len() - 1]
    }

    /// The schedule and why it was chosen, as a clause.
    pub(super) fn summary(&self) -> String {
        format!("schedule {} ({})", self.main().plan.schedule().name(), self.selection.reason)
    }

    /// Equal on all ranks that have the same plans and sub-chunk size.
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }

    /// Equal on all ranks that have the same plans of vectors on GPUs. [`adopt`](Self::adopt) leaves it.
    #[cfg(feature = "cuda")]
    pub(super) fn kernel_digest(&self) -> u64 {
        self.kernel_digest
    }

    /// The programs of all-reduces without a factor. With a tuning profile, those of vectors on GPUs are made
    /// when they are needed.
    fn usual_programs(&self) -> Vec<ProgramKey> {
        let mut programs = Vec::new();
        let usual = ProgramSpec { reproducible: self.reproducible, ..ProgramSpec::ALL_REDUCE };
        for at in self.positions(false).rev() {
            let sized = &self.all[at];
            if sized.plan.moves_in_waves(sized.longest as u64, sized.subchunk) {
                programs.push((at, ProgramSpec { movement: Movement::Waves, ..usual }));
            }
            programs.push((at, usual));
            if sized.is_direct() {
                programs.push((at, ProgramSpec { movement: Movement::OneShot, ..usual }));
            }
        }
        programs
    }

    /// Sets the bytes of a slot, which a tuning profile may have changed.
    pub(super) fn set_slot_bytes(&mut self, bytes: usize) {
        self.slot_bytes = bytes;
    }

    /// Installs the programs of all-reduces without a factor, so that the first call is as fast as later
    /// ones.
    pub(super) fn prepare(&mut self, executor: &mut Executor) -> Result<()> {
        self.usual_programs().into_iter().try_for_each(|key| self.install(key, executor).map(drop))
    }

    /// The ranks that this rank exchanges messages with in all-reduces without a factor. What other calls
    /// need besides, such as the link from the root of a broadcast to the ranks that none of these plans
    /// connects it with, is linked when it is needed.
    pub(super) fn usual_peers(&self) -> BTreeSet<Rank> {
        let program = |(at, spec): ProgramKey| self.all[at].plan.program(self.rank, spec);
        let programs = self.usual_programs().into_iter().map(program);
        programs.flat_map(|program| program.peers().collect::<Vec<_>>()).collect()
    }

    /// By rank, the bytes that the link to it may have in flight, by what the ranks of this `node` send in
    /// all-reduces of long vectors. `mean` is that of the node's links.
    pub(super) fn bytes_in_flight(&self, mean: usize, topology: &Topology, node: &[Rank]) -> Vec<usize> {
        let sent = |rank: Rank| {
            let sent = sent_to_peers(&self.main().plan.program(rank, ProgramSpec::ALL_REDUCE));
            let to = |peer: Rank| (peer, sent.get(&peer).copied().unwrap_or(0.0));
            SentByRank { rank, to: (0..topology.world()).map(to).collect() }
        };
        let sent: Vec<SentByRank> = node.iter().map(|rank| sent(*rank)).collect();
        let place = node.iter().position(|rank| *rank == self.rank).expect("a rank is on its node");
        link_shares::bytes_in_flight(mean, topology, &sent).swap_remove(place)
    }

    /// Uses another plan for all later calls. The first call of each kind installs its program.
    pub(super) fn replace(&mut self, plan: &VerifiedPlan, executor: &mut Executor) {
        let (plan, variant) = (Arc::clone(plan.plan()), String::new());
        self.all = vec![SizedPlan { short: None, variant, plan, ..self.main().clone() }];
        self.untuned = 1;
        self.first = None;
        self.are_automatic = false;
        self.digest = digest_of(&self.all, self.one_node);
        self.kernel_digest = self.digest;
        self.lowered.clear();
        executor.uninstall_all();
    }

    /// Plans of vectors on the host for `topology`, whose links have changed; the first ones for `None`.
    ///
    /// # Errors
    /// `InvalidSetting` if a planner does not support the topology.
    pub(super) fn for_links(&self, config: &Config, topology: Option<&Topology>) -> Result<Vec<SizedPlan>> {
        let Some(topology) = topology else {
            return Ok(self.first.clone().unwrap_or_else(|| self.all[self.positions(false)].to_vec()));
        };
        // Ranks cannot tell each other times now.
        let (mut plans, _) = untuned(config, topology, &mut no_times)?;
        plans.iter_mut().for_each(|sized| sized.subchunk = self.main().subchunk);
        verify(&plans)?;
        Ok(plans)
    }

    /// Uses other plans for vectors on the host from now on. Those of vectors on GPUs stay: calls on GPUs are
    /// prepared before they run.
    ///
    /// # Errors
    /// Those of [`prepare`](Self::prepare).
    pub(super) fn adopt(&mut self, plans: Vec<SizedPlan>, executor: &mut Executor) -> Result<()> {
        let first = self.all[self.positions(false)].to_vec();
        self.first.get_or_insert(first);
        self.all.truncate(self.untuned);
        self.all.extend(plans);
        self.digest = digest_of(&self.all, self.one_node);
        self.lowered.clear();
        executor.uninstall_all();
        self.prepare(executor)
    }

    /// Whether the user has chosen no plan, so that calls may run without one.
    #[cfg(feature = "cuda")]
    pub(super) fn are_automatic(&self) -> bool {
        self.are_automatic
    }

    /// The algorithm of long vectors on the host.
    pub(super) fn algorithm(&self) -> &str {
        self.main().plan.schedule().name()
    }

    /// What the plan of long vectors on the host sends over each link; `None` if there are too many ranks.
    pub(super) fn traffic(&self, topology: &Topology) -> Option<Traffic> {
        let is_small = topology.world() <= MOST_PREDICTED_RANKS;
        is_small.then(|| Traffic::of(&self.main().plan, topology, ProgramSpec::ALL_REDUCE))
    }

    /// How `checked` is executed by a program. The first call of its kind installs it.
    pub(super) fn program(&mut self, checked: &CheckedCall, executor: &mut Executor) -> Result<Installed> {
        let key = self.key_of(checked);
        let facts = self.facts(checked, self.all[key.0].subchunk);
        let (number, LoweredProgram { program, digest, .. }) = self.install(key, executor)?;
        let scratch_bytes = scratch_layout::scratch_bytes(program, &facts);
        Ok(Installed { number, digest: *digest, facts, scratch_bytes })
    }

    /// The list by which a kernel runs `checked`, in messages of at most `longest` bytes, and how to make it.
    #[cfg(feature = "cuda")]
    pub(super) fn list_key(&self, checked: &CheckedCall, longest: usize) -> ListKey {
        let (at, spec) = self.key_of(checked);
        let bytes = checked.whole_bytes();
        let longest = Self::item_bytes(bytes, longest);
        let in_waves =
            !spec.collective.is_straight() && self.all[at].plan.moves_in_waves(bytes as u64, longest);
        let key = (at, ProgramSpec { movement: Movement::through_levels(in_waves), ..spec });
        (self.kernel_digest, key, checked.count, checked.dtype.size(), checked.in_place)
    }

    /// Makes the list with this key, of items with at most `most_places`.
    ///
    /// # Errors
    /// `Internal` if the program cannot be a list; `Unsupported` if it would round 16-bit sums in between.
    #[cfg(feature = "cuda")]
    pub(super) fn list(
        &mut self,
        key: ListKey,
        checked: &CheckedCall,
        longest: usize,
        most_places: usize,
    ) -> Result<DeviceProgram> {
        let longest = Self::item_bytes(checked.whole_bytes(), longest);
        let facts = CallFacts { slot_bytes: longest, ..self.facts(checked, longest) };
        let program = &self.lowered(key.1).program;
        let layout = CallLayout::of_program(&facts, program)?;
        let list = DeviceProgram::new(program, &layout, most_places)?;
        let list = list.ok_or_else(|| Error::internal("kernels cannot run this plan: please report this"))?;
        if list.splits_sums && checked.dtype.is_float() && checked.dtype.size() < 4 {
            return Err(Error::unsupported(format!(
                "a kernel adds {} vectors at most, and a sum of more {} would be rounded in between: use FLEXRING_ALGO=tree",
                most_places - 1,
                checked.dtype.name()
            )));
        }
        Ok(list)
    }

    /// Bytes of a sub-chunk of a vector of this many.
    #[cfg(feature = "cuda")]
    fn item_bytes(bytes: usize, longest: usize) -> usize {
        (bytes / LEAST_ITEMS).next_power_of_two().clamp(SHORTEST_ITEM, longest)
    }

    /// What the layout of `checked` depends on, with sub-chunks of at most `subchunk` bytes.
    fn facts(&self, checked: &CheckedCall, subchunk: usize) -> CallFacts {
        CallFacts {
            collective: checked.collective,
            count: checked.count,
            element_bytes: checked.dtype.size(),
            world: self.main().plan.schedule().world(),
            in_place: checked.in_place,
            output_bytes: checked.output.len(),
            slot_bytes: self.slot_bytes.min(subchunk),
        }
    }

    /// The program that executes `checked`.
    fn key_of(&self, checked: &CheckedCall) -> ProgramKey {
        // A barrier is an all-reduce without elements.
        let collective = if checked.collective == Collective::Barrier {
            Collective::AllReduce
        } else {
            checked.collective
        };
        let straight = collective.is_straight();
        let bytes = checked.whole_bytes();
        let (at, last) = self.positions_for(bytes, straight, checked.on_gpu);
        let sized = &self.all[at];
        let main = &self.all[last].plan;
        let prescale = checked.prescales();
        let is_plain_sum = collective == Collective::AllReduce && !prescale;
        // The vector is one message, and no message is longer than a sub-chunk.
        let is_one_shot =
            sized.is_direct() && bytes <= self.one_shot_limit.min(sized.subchunk) && is_plain_sum;
        // The lengths of blocks that differ are known to two ranks each, so their ranks cannot choose alike.
        // Vectors on a GPU would need scratch memory there.
        let goes_by_node = collective == Collective::AllToAll
            && (1..=self.longest_by_node).contains(&(bytes / main.schedule().world()))
            && !checked.on_gpu
            && main.knows_nodes();
        let movement = if is_one_shot {
            Movement::OneShot
        } else if goes_by_node {
            Movement::ByNode
        } else {
            Movement::through_levels(!straight && sized.plan.moves_in_waves(bytes as u64, sized.subchunk))
        };
        let spec = ProgramSpec {
            collective,
            root: checked.root,
            prescale,
            reproducible: self.reproducible && collective.reduces(),
            movement,
        };
        (at, spec)
    }

    /// The program of this rank. The first call lowers it.
    fn lowered(&mut self, key: ProgramKey) -> &mut LoweredProgram {
        let Self { all, lowered, rank, digest, .. } = self;
        lowered.entry(key).or_insert_with_key(|(at, spec)| {
            let program = Arc::new(all[*at].plan.program(*rank, *spec));
            // Hash the two digests instead of combining them by XOR: each depends on the plan's digest, which
            // would cancel out.
            let both = u128::from(*digest) << 64 | u128::from(program.digest);
            LoweredProgram { program, digest: XxHash3_64::oneshot(&both.to_le_bytes()), number: None }
        })
    }

    /// A program, and where it is installed. The first call installs it.
    fn install(
        &mut self,
        key: ProgramKey,
        executor: &mut Executor,
    ) -> Result<(ProgramNumber, &LoweredProgram)> {
        let lowered = self.lowered(key);
        let number = match lowered.number {
            Some(number) => number,
            None => *lowered.number.insert(executor.install(Arc::clone(&lowered.program))?),
        };
        Ok((number, lowered))
    }
}

/// For ranks that simulate nothing: calculated times decide.
pub(super) fn no_times(_: &Topology, trials: &[Trial]) -> Result<Vec<Option<u64>>> {
    Ok(vec![None; trials.len()])
}

/// Tests verify the planners. Debug builds, where speed does not matter, verify each plan, too.
fn verify(plans: &[SizedPlan]) -> Result<()> {
    let needs_proof = |sized: &&SizedPlan| {
        cfg!(debug_assertions) && sized.short.is_none() && sized.plan.schedule().world() <= MAX_VERIFIED_RANKS
    };
    let mut plans = plans.iter().filter(needs_proof).map(|sized| Plan::clone(&sized.plan));
    plans.try_for_each(|plan| VerifiedPlan::new(plan).map(drop))
}

/// The plans for `topology` without the choices of a profile, in ascending order of the longest vectors. The
/// last one has no limit.
fn untuned(
    config: &Config,
    topology: &Topology,
    simulate: &mut Simulate<'_>,
) -> Result<(Vec<SizedPlan>, AlgorithmSelection)> {
    let Some(path) = &config.plan_file else { return sized_plans::selected(config, topology, simulate) };
    let selection = AlgorithmSelection {
        algorithm: Algorithm::Auto,
        reason: format!("FLEXRING_PLAN_FILE={path} was given"),
    };
    Ok((sized_plans::untuned(config, topology, from_file(path, config, topology)?), selection))
}

/// A number that differs between ranks that would cut a call at different places.
fn digest_of(plans: &[SizedPlan], one_node: bool) -> u64 {
    let combine = |digest: u64, sized: &SizedPlan| {
        let bounds = [sized.longest as u64, sized.subchunk as u64];
        let bounds =
            bounds.iter().fold(0, |digest: u64, bound| XxHash3_64::oneshot(&(digest ^ bound).to_le_bytes()));
        (digest ^ sized.plan.digest() ^ bounds).rotate_left(1)
    };
    plans.iter().fold(u64::from(one_node), combine)
}

/// Reads a plan and verifies it.
fn from_file(path: &str, config: &Config, topology: &Topology) -> Result<Arc<Plan>> {
    let refuse = |message: String| Error::invalid_setting(format!("FLEXRING_PLAN_FILE={path}: {message}"));
    let schedule = description::plan(path).map_err(|error| error.context("FLEXRING_PLAN_FILE"))?;
    let (planned, world) = (schedule.world(), topology.world());
    if planned != world {
        return Err(refuse(format!("the plan is for {planned} ranks, but there are {world}")));
    }
    if let Some(helper) = schedule.helpers().first() {
        return Err(refuse(format!(
            "rank {helper} contributes nothing in this plan, but a communicator sums the vectors of all its ranks: \
             `flexring plan --verify` proves such a plan and `flexring simulate` times it"
        )));
    }
    let verified = VerifiedPlan::for_all(Plan::on(schedule, topology, config.lowering));
    verified.map(|verified| Arc::clone(verified.plan())).map_err(|error| refuse(error.message().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tuning::parse;

    const SMALL: usize = 4 << 10;
    const K: usize = 1 << 10;

    /// Plans on four ranks on three nodes, with the choices ring up to 64 KiB and weighted for longer
    /// vectors.
    fn plans(names: &[&str], change: impl FnOnce(&mut TuningProfile)) -> Plans {
        let mut profile = parse("f", include_str!("../../tests/data/tuning.toml")).expect("a profile");
        change(&mut profile);
        let topology = Topology::from_names(names);
        Plans::new(&Config::default(), &topology, 0, Some(&profile), &mut no_times).expect("plans")
    }

    /// Algorithm, longest vector and sub-chunk of the plans of vectors on the host, or on a GPU.
    fn shown(plans: &Plans, on_gpu: bool) -> Vec<(&str, usize, usize)> {
        let plans = plans.all[plans.positions(on_gpu)].iter();
        plans.map(|sized| (sized.plan.schedule().name(), sized.longest, sized.subchunk)).collect()
    }

    const MIXED: [&str; 4] = ["a", "a", "b", "c"];

    #[test]
    fn short_vectors_keep_their_plans_also_where_some_ranks_share_memory() {
        let tuned =
            [("flexreduce", SMALL, 128 * K), ("ring", 64 * K, 128 * K), ("weighted", usize::MAX, 256 * K)];
        assert_eq!(shown(&plans(&MIXED, |_| {}), false), tuned);
        let apart = plans(&["a", "b", "c", "d"], |_| {});
        let names: Vec<_> = shown(&apart, false);
        assert_eq!((names[0].1, names[1]), (SMALL, tuned[1]));
        assert!(apart.all[apart.untuned].is_direct());
    }

    #[test]
    fn vectors_on_gpus_use_no_choice_that_was_measured_on_the_host() {
        assert_eq!(shown(&plans(&MIXED, |_| {}), true), [("flexreduce", usize::MAX, 128 * K)]);
        let linked = plans(&MIXED, |profile| profile.choices.clear());
        assert_eq!(shown(&linked, true), shown(&linked, false));
        // Without choices a profile is its links: those of node c are slow.
        assert_eq!(shown(&linked, true)[0].0, "weighted");
    }

    #[test]
    fn all_to_alls_use_one_plan_wherever_their_vectors_are() {
        let plans = plans(&MIXED, |_| {});
        let used = |on_gpu| [0, SMALL, 1 << 30].map(|bytes| plans.positions_for(bytes, true, on_gpu));
        assert_eq!(used(false), used(true));
        assert_eq!(used(false)[0], used(false)[2]);
    }

    #[test]
    fn a_choice_of_auto_is_the_plans_without_a_profile() {
        let auto = |profile: &mut TuningProfile| profile.choices[0].algorithm = Algorithm::Auto;
        let mixed = plans(&MIXED, auto);
        let expected = [
            ("flexreduce", SMALL, 128 * K),
            ("flexreduce", 64 * K, 128 * K),
            ("weighted", usize::MAX, 256 * K),
        ];
        assert_eq!(shown(&mixed, false), expected);
        let all = plans(&["a", "b", "c", "d"], |profile| {
            profile.choices.remove(0);
            profile.choices[0].algorithm = Algorithm::Auto;
        });
        let of = |on_gpu| shown(&all, on_gpu).into_iter().map(|(name, ..)| name).collect::<Vec<_>>();
        assert_eq!(of(false), of(true));
        assert_eq!(shown(&all, false).last().map(|last| last.1), Some(usize::MAX));
    }
}
