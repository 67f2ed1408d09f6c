//! The plans, sub-chunks, slots and sockets with which all-reduces are fastest.
//!
//! Owns which of them are compared, and how large a difference counts. Must not know links or devices: the model has them.

use super::session::{TuningSession, median};
use flexring::config::{Algorithm, Config, Lowering, Size};
use flexring::plan::comparison::Comparison;
use flexring::plan::lowering::Plan;
use flexring::plan::planner::{self, Details};
use flexring::plan::selection::{ShortPlan, select_algorithm, short_plans};
use flexring::plan::topology::Topology;
use flexring::plan::tuning::{MeasuredChoice, TuningProfile};
use flexring::plan::verifier::VerifiedPlan;
use flexring::{Communicator, ReduceOp, Result};
use std::time::Instant;

/// Most plans that are measured for a length.
const MOST_PLANS: usize = 5;
/// Plans that the model predicts to be the fastest, and that are measured for that.
const PREDICTED: usize = 3;
/// Marks an unused entry of a list of plans.
const NONE: u8 = u8::MAX;
/// Lengths of sub-chunks that are measured besides the default of 128K.
const SUBCHUNKS: [Size; 3] = [Size(64 << 10), Size(256 << 10), Size(512 << 10)];
/// Numbers of slots that are measured besides the default of 64.
const SLOTS: [usize; 2] = [32, 128];
/// Numbers of TCP connections of a link that are measured besides one.
const SOCKETS: [usize; 2] = [2, 4];
/// Another setting or plan must be faster than the default by this part, in two measurements. Chosen, not measured.
const GAIN: f64 = 0.03;
/// Fewest and most calls of a measurement.
const CALLS: (usize, usize) = (2, 1000);

/// A plan by its algorithm and lowering.
type PlanName = (Algorithm, Lowering);

/// The fastest plan for one length.
#[derive(Clone, Copy, Debug)]
pub struct FastestPlan {
    pub bytes: usize,
    pub algorithm: Algorithm,
    pub lowering: Lowering,
    pub subchunk: Size,
    /// Seconds of a call.
    pub seconds: f64,
    /// Seconds of a call with the plan that auto selects without a profile.
    pub default_seconds: f64,
}

/// What was measured, equal on all ranks.
pub struct MeasuredChoices {
    /// By length, ascending. Lengths that were left out for lack of time are missing.
    pub fastest: Vec<FastestPlan>,
    pub slots: usize,
    pub sockets_per_link: usize,
}

/// Most steps of the progress.
pub fn steps(sizes: usize) -> usize {
    sizes * (MOST_PLANS + SUBCHUNKS.len()) + SLOTS.len() + SOCKETS.len()
}

/// Measures plans for vectors of these lengths in bytes. `profile` has the measured links and rates.
///
/// # Errors
/// Any error of a call, of planning or of joining.
pub fn measure(
    session: &mut TuningSession,
    profile: &TuningProfile,
    sizes: &[usize],
) -> Result<MeasuredChoices> {
    let config = session.config.clone();
    let topology = profile.topology(session.comm.topology());
    let mut fastest = Vec::new();
    for (bytes, names) in sizes.iter().zip(compared(session, profile, &topology, sizes)?) {
        if let Some(best) = fastest_plan(session, &topology, *bytes, &names)? {
            fastest.push(best);
        }
    }
    for subchunk in SUBCHUNKS {
        let other = Config { subchunk, ..config.clone() };
        // A vector that is not longer than a sub-chunk of the default length moves in the same way.
        let longer: Vec<usize> =
            (0..fastest.len()).filter(|at| fastest[*at].bytes > config.subchunk.0.min(subchunk.0)).collect();
        if longer.is_empty() {
            continue;
        }
        let comm = session.communicator(&other)?;
        for at in longer {
            let best = fastest[at];
            let plan = plan_of((best.algorithm, best.lowering), &topology, &config)?;
            if !session.step(|| format!("sub-chunks of {subchunk}"))? {
                continue;
            }
            let seconds = timed(session, &comm, &plan, best.bytes)?;
            let before = Variant { comm: &session.comm, plan: &plan };
            let after = Variant { comm: &comm, plan: &plan };
            if seconds < best.seconds * (1.0 - GAIN) && is_confirmed(session, before, after, best.bytes)? {
                fastest[at] = FastestPlan { subchunk, seconds, ..best };
            }
        }
    }
    let (mut slots, mut sockets_per_link) = (config.slots, config.sockets_per_link);
    let Some(longest) = fastest.last().copied() else {
        return Ok(MeasuredChoices { fastest, slots, sockets_per_link });
    };
    let base = Config { subchunk: longest.subchunk, ..config };
    let try_config = |session: &mut TuningSession, other: Config, what: String| -> Result<bool> {
        if !session.step(|| what)? {
            return Ok(false);
        }
        let comm = session.communicator(&other)?;
        let plan = plan_of((longest.algorithm, longest.lowering), &topology, &other)?;
        let is_faster = timed(session, &comm, &plan, longest.bytes)? < longest.seconds * (1.0 - GAIN);
        if !is_faster {
            return Ok(false);
        }
        let base = session.communicator(&base)?;
        let before = Variant { comm: &base, plan: &plan };
        is_confirmed(session, before, Variant { comm: &comm, plan: &plan }, longest.bytes)
    };
    for number in SLOTS {
        if try_config(session, Config { slots: number, ..base.clone() }, format!("{number} slots"))? {
            slots = number;
            break;
        }
    }
    if profile.cluster.transport == "tcp" {
        for number in SOCKETS {
            let other = Config { slots, sockets_per_link: number, ..base.clone() };
            if try_config(session, other, format!("{number} sockets per link"))? {
                sockets_per_link = number;
                break;
            }
        }
    }
    Ok(MeasuredChoices { fastest, slots, sockets_per_link })
}

/// The choices of a profile: each length's plan is for vectors up to the geometric mean with the next length.
pub fn choices(fastest: &[FastestPlan]) -> Vec<MeasuredChoice> {
    let mut choices: Vec<MeasuredChoice> = Vec::new();
    for (number, best) in fastest.iter().enumerate() {
        let next = fastest.get(number + 1).map(|next| (best.bytes as f64 * next.bytes as f64).sqrt() as u64);
        let FastestPlan { algorithm, lowering, subchunk, .. } = *best;
        let choice = MeasuredChoice { up_to: next, algorithm, lowering, subchunk };
        match choices.last_mut() {
            Some(last) if MeasuredChoice { up_to: next, ..*last } == choice => last.up_to = next,
            _ => choices.push(choice),
        }
    }
    choices
}

/// The plans to measure by length, the default of each length first, equal on all ranks: rank 0 runs the model.
fn compared(
    session: &TuningSession,
    profile: &TuningProfile,
    topology: &Topology,
    sizes: &[usize],
) -> Result<Vec<Vec<PlanName>>> {
    let mut codes = vec![NONE; sizes.len() * MOST_PLANS * 2];
    if session.comm.rank() == 0 {
        for (bytes, codes) in sizes.iter().zip(codes.chunks_mut(2 * MOST_PLANS)) {
            let names = candidates(&session.config, profile, topology, *bytes);
            for ((algorithm, lowering), code) in names.into_iter().zip(codes.chunks_mut(2)) {
                code[0] = Algorithm::ALL.iter().position(|known| *known == algorithm).unwrap_or(0) as u8;
                code[1] = Lowering::ALL.iter().position(|known| *known == lowering).unwrap_or(0) as u8;
            }
        }
    }
    session.comm.broadcast(&mut codes, 0)?;
    let name = |code: &[u8]| {
        let algorithm = Algorithm::ALL.get(usize::from(code[0]))?;
        Some((*algorithm, *Lowering::ALL.get(usize::from(code[1]))?))
    };
    Ok(codes.chunks(2 * MOST_PLANS).map(|codes| codes.chunks(2).map_while(name).collect()).collect())
}

/// The plan that auto selects for this length, then those that the model predicts to be the fastest, without repetitions.
fn candidates(config: &Config, profile: &TuningProfile, topology: &Topology, bytes: usize) -> Vec<PlanName> {
    let details = Details::of(config);
    let short = short_plans(config, topology).into_iter().find(|(_, longest)| bytes <= *longest);
    let default = match short {
        Some((ShortPlan::Direct, _)) => (Algorithm::Ring, Lowering::Direct),
        Some((ShortPlan::Tree, _)) => (Algorithm::Tree, Lowering::Direct),
        Some((ShortPlan::Halving, _)) => (Algorithm::Rabenseifner, Lowering::Direct),
        None => (select_algorithm(Algorithm::Auto, topology, &details).algorithm, Lowering::Auto),
    };
    let parameters = profile.parameters(config);
    let mut predicted: Vec<(f64, PlanName)> = Vec::new();
    for lowering in Lowering::ALL {
        let comparison = Comparison::new(topology, &details, *lowering, bytes as u64, &parameters);
        let times = comparison.candidates.iter().filter_map(|candidate| {
            candidate.algorithms.first().map(|algorithm| (candidate.seconds, (*algorithm, *lowering)))
        });
        predicted.extend(times.take(PREDICTED));
    }
    // Stable, so that of equal times the one with the automatic lowering comes first.
    predicted.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let mut digests = Vec::new();
    let mut names = Vec::new();
    for name in std::iter::once(default).chain(predicted.into_iter().map(|(_, name)| name)) {
        let Ok(schedule) = planner::plan(name.0, topology, &details) else { continue };
        let digest = Plan::on(schedule, topology, name.1).digest();
        if names.len() < MOST_PLANS && !digests.contains(&digest) {
            digests.push(digest);
            names.push(name);
        }
    }
    names
}

fn plan_of((algorithm, lowering): PlanName, topology: &Topology, config: &Config) -> Result<VerifiedPlan> {
    let schedule = planner::plan(algorithm, topology, &Details::of(config))?;
    VerifiedPlan::new(Plan::on(schedule, topology, lowering))
}

/// Measures the plans for one length. The first, the default, stays unless another is faster by [`GAIN`].
fn fastest_plan(
    session: &mut TuningSession,
    topology: &Topology,
    bytes: usize,
    names: &[PlanName],
) -> Result<Option<FastestPlan>> {
    let subchunk = session.config.subchunk;
    let mut best: Option<FastestPlan> = None;
    let mut plans = Vec::new();
    for name in names {
        plans.push(plan_of(*name, topology, &session.config)?);
    }
    for ((algorithm, lowering), plan) in names.iter().copied().zip(&plans) {
        let message = || format!("{} of {}", algorithm.name(), Size(bytes));
        if !session.step(message)? {
            continue;
        }
        let seconds = timed(session, &session.comm, plan, bytes)?;
        let default_seconds = best.map_or(seconds, |best| best.default_seconds);
        let limit = best.map_or(f64::INFINITY, |best| best.seconds.min(default_seconds * (1.0 - GAIN)));
        if seconds < limit {
            best = Some(FastestPlan { bytes, algorithm, lowering, subchunk, seconds, default_seconds });
        }
    }
    let Some(found) = best else { return Ok(None) };
    let at = names.iter().position(|name| *name == (found.algorithm, found.lowering)).unwrap_or(0);
    let [before, after] = [0, at].map(|at| Variant { comm: &session.comm, plan: &plans[at] });
    if at == 0 || is_confirmed(session, before, after, bytes)? {
        return Ok(best);
    }
    let ((algorithm, lowering), seconds) = (names[0], found.default_seconds);
    Ok(Some(FastestPlan { algorithm, lowering, seconds, ..found }))
}

/// What an all-reduce is measured with.
#[derive(Clone, Copy)]
struct Variant<'a> {
    comm: &'a Communicator,
    plan: &'a VerifiedPlan,
}

/// Whether `after` is faster than `before` in a second measurement, too: the first one may have been disturbed by other load.
fn is_confirmed(session: &TuningSession, before: Variant, after: Variant, bytes: usize) -> Result<bool> {
    let [before, after] = [before, after].map(|variant| timed(session, variant.comm, variant.plan, bytes));
    Ok(after? < before? * (1.0 - GAIN))
}

/// The median time of an all-reduce of `bytes` by `plan` on the slowest rank, in seconds.
fn timed(session: &TuningSession, comm: &Communicator, plan: &VerifiedPlan, bytes: usize) -> Result<f64> {
    comm.use_plan(plan)?;
    let mut vector = comm.alloc::<f32>(bytes / size_of::<f32>())?;
    let mut call = || -> Result<f64> {
        let begun = Instant::now();
        comm.all_reduce(&mut vector, ReduceOp::Sum)?;
        Ok(begun.elapsed().as_secs_f64())
    };
    // Pages and programs are made ready by the first call.
    call()?;
    let first = session.largest(call()?)?;
    let (fewest, most) = CALLS;
    let calls = ((session.time.as_secs_f64() / first.max(1e-9)) as usize).clamp(fewest, most);
    let times = (0..calls).map(|_| call()).collect::<Result<Vec<f64>>>()?;
    session.largest(median(times))
}
