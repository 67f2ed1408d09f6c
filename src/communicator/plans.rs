//! Which program executes a call.
//!
//! Owns the plans of a communicator, and the programs that were lowered from them. Must not know how programs
//! run.

use super::checked_call::CheckedCall;
use crate::call::Collective;
use crate::config::{Algorithm, Config, Lowering};
use crate::description;
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::executor::{CallPath, Executor};
use crate::plan::lowering::{Plan, ProgramSpec};
use crate::plan::planner::{self, Details};
use crate::plan::selection::{self, AlgorithmSelection, ShortPlan};
use crate::plan::topology::Topology;
use crate::plan::tuning::{TunedPlan, TuningProfile};
use crate::plan::verifier::VerifiedPlan;
use crate::rank::Rank;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Debug builds verify plans for at most this many ranks, because every rank verifies the programs of all
/// ranks.
const MAX_VERIFIED_RANKS: usize = 16;

/// The plans of a communicator, and the programs that calls have needed so far.
pub(super) struct Plans {
    rank: Rank,
    main: Arc<Plan>,
    /// The plans for shorter vectors, in ascending order of their longest vectors.
    sized: Vec<SizedPlan>,
    /// See [`digest`](Self::digest).
    digest: u64,
    /// Most bytes that a rank may receive if every rank reduces a vector itself.
    direct_limit: usize,
    /// Largest vector, in bytes, that every rank reduces itself.
    small: usize,
    /// Bytes of a sub-chunk of calls that use the main plan.
    subchunk: usize,
    /// Longest block of an all-to-all, in bytes, that goes by node.
    longest_by_node: usize,
    reproducible: bool,
    installed: HashMap<ProgramKey, Installed>,
    /// The chosen algorithm, and why it was chosen.
    selection: AlgorithmSelection,
}

/// The plans that a communicator can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum PlanKind {
    /// For long vectors, whose time depends on bandwidth.
    Main,
    /// For short vectors, whose time depends on the number of messages.
    Short(ShortPlan),
    /// The choice with this number of a tuning profile.
    Tuned(usize),
}

/// The plan of vectors up to a length.
struct SizedPlan {
    kind: PlanKind,
    /// Longest vector in bytes.
    longest: usize,
    subchunk: usize,
    plan: Arc<Plan>,
}

impl PlanKind {
    /// The plan by which every rank can reduce a vector itself.
    const DIRECT: Self = Self::Short(ShortPlan::Direct);
}

/// Identifies a program.
type ProgramKey = (PlanKind, ProgramSpec);

/// How a call is executed.
#[derive(Clone, Copy)]
pub(super) struct Installed {
    pub path: CallPath,
    /// The digest by which ranks check that they run the same program: equal on all ranks that do.
    pub digest: u64,
    /// Longest sub-chunk in bytes.
    pub subchunk: usize,
}

impl Plans {
    /// Makes the plans for `topology` according to the settings of the user, and to the tuning profile if there is one.
    pub(super) fn new(
        config: &Config,
        topology: &Topology,
        rank: Rank,
        profile: Option<&TuningProfile>,
    ) -> Result<Self> {
        let mut tuned = profile.map_or(Ok(Vec::new()), |profile| profile.plans(config, topology))?;
        let longest_vectors = tuned.pop();
        let is_tuned = longest_vectors.is_some();
        let mut subchunk = config.subchunk.0;
        let (main, selection) = match (&config.plan_file, longest_vectors, profile) {
            (None, Some(TunedPlan { choice, plan }), Some(profile)) => {
                subchunk = choice.subchunk.0;
                let reason = format!("measured on {}: FLEXRING_TUNING", profile.date);
                (Arc::new(plan), AlgorithmSelection { algorithm: choice.algorithm, reason })
            }
            (Some(path), ..) => (
                from_file(path, config, topology)?,
                AlgorithmSelection {
                    algorithm: Algorithm::Auto,
                    reason: format!("FLEXRING_PLAN_FILE={path} was given"),
                },
            ),
            (None, ..) => {
                let details = Details::of(config);
                let selection = selection::select_algorithm(config.algo, topology, &details);
                let schedule = planner::plan(selection.algorithm, topology, &details)?;
                (Arc::new(Plan::on(schedule, topology, config.lowering)), selection)
            }
        };
        // Tests verify the planners. Debug builds, where speed does not matter, verify each plan, too.
        if cfg!(debug_assertions) && topology.world() <= MAX_VERIFIED_RANKS {
            VerifiedPlan::new(Plan::clone(&main))?;
            tuned.iter().try_for_each(|tuned| VerifiedPlan::new(tuned.plan.clone()).map(drop))?;
        }
        // Profiles have no choices for vectors of which only the number of messages counts.
        let most = if is_tuned { config.small.0 } else { usize::MAX };
        let short = |(kind, longest): (ShortPlan, usize)| SizedPlan {
            kind: PlanKind::Short(kind),
            longest: longest.min(most),
            subchunk,
            plan: Arc::new(Plan::on(kind.schedule(topology), topology, Lowering::Direct)),
        };
        let mut sized: Vec<SizedPlan> =
            selection::short_plans(config, topology).into_iter().map(short).collect();
        sized.dedup_by_key(|sized| sized.longest);
        sized.extend(tuned.into_iter().enumerate().map(|(number, tuned)| SizedPlan {
            kind: PlanKind::Tuned(number),
            longest: tuned.choice.up_to.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX),
            subchunk: tuned.choice.subchunk.0,
            plan: Arc::new(tuned.plan),
        }));
        Ok(Self {
            rank,
            digest: digest_of(&main, &sized, subchunk),
            main,
            sized,
            direct_limit: config.direct.0,
            small: config.small.0,
            subchunk,
            longest_by_node: selection::longest_block_by_node(config, topology),
            reproducible: config.reproducible.0,
            installed: HashMap::new(),
            selection,
        })
    }

    /// The schedule and why it was chosen, as a clause.
    pub(super) fn summary(&self) -> String {
        format!("schedule {} ({})", self.main.schedule().name(), self.selection.reason)
    }

    /// Equal on all ranks that have the same plans and sub-chunk size.
    pub(super) fn digest(&self) -> u64 {
        self.digest
    }

    /// The programs of all-reduces without a factor.
    fn usual_programs(&self) -> Vec<ProgramKey> {
        let mut programs = vec![(PlanKind::Main, true, false), (PlanKind::Main, false, false)];
        for SizedPlan { kind, .. } in &self.sized {
            programs.push((*kind, false, false));
            match kind {
                PlanKind::Tuned(_) => programs.push((*kind, true, false)),
                kind if *kind == PlanKind::DIRECT => programs.push((*kind, false, true)),
                _ => {}
            }
        }
        let reproducible = self.reproducible;
        let key = |(kind, by_wave, one_shot)| {
            (kind, ProgramSpec { by_wave, reproducible, one_shot, ..ProgramSpec::ALL_REDUCE })
        };
        programs.into_iter().map(key).collect()
    }

    /// Installs the programs of all-reduces without a factor, so that the first call is as fast as later ones.
    pub(super) fn prepare(&mut self, executor: &mut Executor) -> Result<()> {
        self.usual_programs().into_iter().try_for_each(|key| self.install(key, executor).map(drop))
    }

    /// The ranks that this rank exchanges messages with in all-reduces without a factor. What other calls need besides, such as the link
    /// from the root of a broadcast to the ranks that none of these plans connects it with, is linked when it is needed.
    pub(super) fn usual_peers(&self) -> BTreeSet<Rank> {
        let program = |(kind, spec)| self.plan(kind).program(self.rank, spec);
        let programs = self.usual_programs().into_iter().map(program);
        programs.flat_map(|program| program.peers().collect::<Vec<_>>()).collect()
    }

    /// Uses another plan for all later calls. The first call of each kind installs its program.
    pub(super) fn replace(&mut self, plan: &VerifiedPlan, executor: &mut Executor) {
        self.main = Arc::clone(plan.plan());
        self.sized.clear();
        self.digest = digest_of(&self.main, &self.sized, self.subchunk);
        self.installed.clear();
        executor.uninstall_all();
    }

    /// How `checked` is executed. The first call of its kind installs the program.
    pub(super) fn path(&mut self, checked: &CheckedCall, executor: &mut Executor) -> Result<Installed> {
        // A barrier is an all-reduce without elements.
        let collective = if checked.collective == Collective::Barrier {
            Collective::AllReduce
        } else {
            checked.collective
        };
        let straight = collective.is_straight();
        let bytes = checked.count as usize * checked.dtype.size();
        let sized = self.sized.iter().find(|sized| bytes <= sized.longest);
        // What goes straight depends on no plan, and the ranks of an all-to-all have different counts.
        let sized = sized.filter(|_| !straight);
        let (kind, subchunk, plan) = sized.map_or((PlanKind::Main, self.subchunk, &self.main), |sized| {
            (sized.kind, sized.subchunk, &sized.plan)
        });
        // In a one-shot all-reduce a rank receives every other rank's vector, so the limit must hold for
        // their total length.
        let received = bytes.saturating_mul(self.main.schedule().world() - 1);
        let small = bytes <= self.small.min(self.subchunk) && received <= self.direct_limit;
        let prescale = matches!(checked.op, ReduceOp::PreMulSum(_));
        let one_shot = kind == PlanKind::DIRECT && small && collective == Collective::AllReduce && !prescale;
        // The lengths of blocks that differ are known to two ranks each, so their ranks cannot choose alike. Vectors on a GPU would need
        // scratch memory there.
        let by_node = collective == Collective::AllToAll
            && (1..=self.longest_by_node).contains(&(bytes / self.main.schedule().world()))
            && !checked.on_gpu
            && self.main.knows_nodes();
        let spec = ProgramSpec {
            collective,
            root: checked.root,
            prescale,
            reproducible: self.reproducible && collective.reduces(),
            by_wave: !one_shot && !straight && plan.moves_in_waves(bytes as u64, subchunk),
            one_shot,
            by_node,
        };
        match self.installed.get(&(kind, spec)) {
            Some(installed) => Ok(*installed),
            None => self.install((kind, spec), executor),
        }
    }

    fn plan(&self, kind: PlanKind) -> &Plan {
        self.sized(kind).map_or(&self.main, |sized| &sized.plan)
    }

    fn sized(&self, kind: PlanKind) -> Option<&SizedPlan> {
        self.sized.iter().find(|sized| sized.kind == kind)
    }

    fn install(&mut self, key: ProgramKey, executor: &mut Executor) -> Result<Installed> {
        let (kind, spec) = key;
        let program = Arc::new(self.plan(kind).program(self.rank, spec));
        // Hash the two digests instead of combining them by XOR: each depends on the plan's digest, which
        // would cancel out.
        let both = u128::from(self.digest()) << 64 | u128::from(program.digest);
        let digest = xxh3_64(&both.to_le_bytes());
        let subchunk = self.sized(kind).map_or(self.subchunk, |sized| sized.subchunk);
        let installed = Installed { digest, path: executor.install(program)?, subchunk };
        self.installed.insert(key, installed);
        Ok(installed)
    }
}

fn digest_of(main: &Plan, sized: &[SizedPlan], subchunk: usize) -> u64 {
    let combine = |digest: u64, sized: &SizedPlan| {
        let bounds = [sized.longest as u64, sized.subchunk as u64];
        let bounds = bounds.iter().fold(0, |digest: u64, bound| xxh3_64(&(digest ^ bound).to_le_bytes()));
        (digest ^ sized.plan.digest() ^ bounds).rotate_left(1)
    };
    main.digest() ^ sized.iter().fold(0, combine) ^ xxh3_64(&(subchunk as u64).to_le_bytes())
}

/// Reads a plan and verifies it.
fn from_file(path: &str, config: &Config, topology: &Topology) -> Result<Arc<Plan>> {
    let refuse = |message: String| Error::invalid_setting(format!("FLEXRING_PLAN_FILE={path}: {message}"));
    let schedule = description::plan(path)?;
    let (planned, world) = (schedule.world(), topology.world());
    if planned != world {
        return Err(refuse(format!("the plan is for {planned} ranks, but there are {world}")));
    }
    let verified = VerifiedPlan::for_all(Plan::on(schedule, topology, config.lowering));
    verified.map(|verified| Arc::clone(verified.plan())).map_err(|error| refuse(error.message().to_owned()))
}
