//! Which program serves a call.
//!
//! Owns the plans of a communicator and the programs that were made of them. Must not know what runs them.

use super::checked_call::CheckedCall;
use crate::call::Collective;
use crate::config::{Algorithm, Config, Lowering};
use crate::description;
use crate::dtype::ReduceOp;
use crate::error::{Error, ErrorKind, Result};
use crate::executor::{Executor, Path};
use crate::plan::lowering::{Plan, ProgramSpec};
use crate::plan::planner::{self, Details};
use crate::plan::selection::{self, AlgorithmSelection};
use crate::plan::topology::Topology;
use crate::plan::verifier::VerifiedPlan;
use crate::rank::Rank;
use std::collections::HashMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// The plans of a communicator, and its programs so far.
pub(super) struct Plans {
    rank: Rank,
    /// For vectors whose bytes take the time.
    main: Arc<Plan>,
    /// For vectors whose messages take the time, if there is another plan for them.
    direct: Option<Arc<Plan>>,
    /// Bytes up to which a vector is one of those.
    direct_limit: usize,
    /// Bytes up to which every rank reduces a vector itself.
    small: usize,
    subchunk: usize,
    reproducible: bool,
    installed: HashMap<Key, Installed>,
    /// What was chosen and why.
    selection: AlgorithmSelection,
}

/// Debug builds prove plans for at most this many ranks: every rank proves all ranks' programs.
const PROVED: usize = 16;

/// Which program: whether the plan is the direct one, and what it is for.
type Key = (bool, ProgramSpec);

#[derive(Clone, Copy)]
struct Installed {
    path: Path,
    digest: u64,
}

impl Plans {
    /// Plans for `topology` as the settings ask for.
    pub(super) fn new(config: &Config, topology: &Topology, rank: Rank) -> Result<Self> {
        let (main, selection) = match &config.plan_file {
            Some(path) => (
                from_file(path, config, topology)?,
                AlgorithmSelection {
                    algorithm: Algorithm::Auto,
                    reason: format!("FLEXRING_PLAN_FILE={path} was given"),
                },
            ),
            None => {
                let details = Details::of(config);
                let selection = selection::select_algorithm(config.algo, topology, &details);
                let schedule = planner::plan(selection.algorithm, topology, &details)?;
                (Arc::new(Plan::on(schedule, topology, config.lowering)), selection)
            }
        };
        // The planners are proved by tests; where speed does not matter, so is what they plan here.
        if cfg!(debug_assertions) && topology.world() <= PROVED {
            VerifiedPlan::new(Plan::clone(&main))?;
        }
        // Who names an algorithm gets it for all sizes.
        let direct = selection::uses_direct_plan(config, topology)
            .then(|| Arc::new(Plan::on(planner::ring::plan(topology), topology, Lowering::Direct)));
        Ok(Self {
            rank,
            main,
            direct,
            direct_limit: config.direct.0,
            small: config.small.0,
            subchunk: config.subchunk.0,
            reproducible: config.reproducible.0,
            installed: HashMap::new(),
            selection,
        })
    }

    /// What was chosen and why, in a clause.
    pub(super) fn summary(&self) -> String {
        format!("schedule {} ({})", self.main.schedule().name(), self.selection.reason)
    }

    /// Equal on all ranks that will run the same programs.
    pub(super) fn digest(&self) -> u64 {
        let direct = self.direct.as_ref().map_or(0, |plan| plan.digest());
        self.main.digest() ^ direct.rotate_left(1) ^ xxh3_64(&(self.subchunk as u64).to_le_bytes())
    }

    /// Makes the programs of usual calls, so that the first of them is as fast as the others.
    pub(super) fn prepare(&mut self, executor: &mut Executor) -> Result<()> {
        for (direct, by_wave, one_shot) in
            [(false, true, false), (false, false, false), (true, false, false), (true, false, true)]
        {
            if !direct || self.direct.is_some() {
                let reproducible = self.reproducible;
                let spec = ProgramSpec { by_wave, reproducible, one_shot, ..ProgramSpec::ALL_REDUCE };
                self.install((direct, spec), executor)?;
            }
        }
        Ok(())
    }

    /// Uses another plan for everything from now on. The first call of each kind pays for its program.
    pub(super) fn replace(&mut self, plan: &VerifiedPlan, executor: &mut Executor) {
        self.main = Arc::clone(plan.plan());
        self.direct = None;
        self.installed.clear();
        executor.uninstall_all();
    }

    /// How `checked` is done, and the digest by which ranks agree on it. The first call of its kind pays for the
    /// program.
    pub(super) fn path(&mut self, checked: &CheckedCall, executor: &mut Executor) -> Result<(Path, u64)> {
        let bytes = checked.count as usize * checked.dtype.size();
        let direct = bytes <= self.direct_limit && self.direct.is_some();
        // What a rank receives then grows with the world.
        let received = bytes * (self.main.schedule().world() - 1);
        let small = bytes <= self.small.min(self.subchunk) && received <= self.direct_limit;
        let prescale = matches!(checked.op, ReduceOp::PreMulSum(_));
        let one_shot = direct && small && checked.collective == Collective::AllReduce && !prescale;
        let spec = ProgramSpec {
            collective: checked.collective,
            root: checked.root,
            prescale,
            reproducible: self.reproducible && checked.collective.reduces(),
            by_wave: !one_shot && self.plan(direct).longest_shard() * bytes as f64 > self.subchunk as f64,
            one_shot,
        };
        let installed = match self.installed.get(&(direct, spec)) {
            Some(installed) => *installed,
            None => self.install((direct, spec), executor)?,
        };
        Ok((installed.path, installed.digest))
    }

    fn plan(&self, direct: bool) -> &Plan {
        self.direct.as_ref().filter(|_| direct).unwrap_or(&self.main)
    }

    fn install(&mut self, key: Key, executor: &mut Executor) -> Result<Installed> {
        let program = Arc::new(self.plan(key.0).program(self.rank, key.1));
        // Each has the plan's own digest in it, which must not cancel out.
        let both = u128::from(self.digest()) << 64 | u128::from(program.digest);
        let digest = xxh3_64(&both.to_le_bytes());
        let installed = Installed { digest, path: executor.install(program)? };
        self.installed.insert(key, installed);
        Ok(installed)
    }
}

/// Reads a plan and proves it.
fn from_file(path: &str, config: &Config, topology: &Topology) -> Result<Arc<Plan>> {
    let refuse =
        |words: String| Error::new(ErrorKind::InvalidSetting, format!("FLEXRING_PLAN_FILE={path}: {words}"));
    let schedule = description::plan(path)?;
    let (planned, world) = (schedule.world(), topology.world());
    if planned != world {
        return Err(refuse(format!("the plan is for {planned} ranks, but there are {world}")));
    }
    let proven = VerifiedPlan::for_all(Plan::on(schedule, topology, config.lowering));
    proven.map(|proven| Arc::clone(proven.plan())).map_err(|error| refuse(error.message().to_owned()))
}
