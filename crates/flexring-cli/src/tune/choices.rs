//! The plans, sub-chunks, slots and sockets with which all-reduces are fastest.
//!
//! Owns which of them are compared, and how large a difference counts.

use super::session::{TuningSession, median};
use flexring::{Communicator, ReduceOp, Result};
use flexring_core::config::{Algorithm, Config, Lowering, Size};
use flexring_plan::lowering::Plan;
use flexring_plan::planner::{self, Details};
use flexring_plan::selection::select_algorithm;
use flexring_plan::sized_plans;
use flexring_plan::topology::Topology;
use flexring_plan::tuning::{MeasuredChoice, TuningProfile};
use flexring_plan::verifier::VerifiedPlan;
use flexring_simulator::comparison::Comparison;
use flexring_simulator::simulator::SimulationParameters;
use flexring_simulator::trials::simulate_all;
use std::cell::OnceCell;
use std::time::Instant;

/// Most plans that are measured for a length, besides that without a profile.
const MOST_PLANS: usize = 4;
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
/// Another setting or plan must be faster than the default by this part, in two measurements. Chosen, not
/// measured.
const GAIN: f64 = 0.03;
/// Fewest and most calls of a measurement.
const CALLS: (usize, usize) = (2, 1000);

/// A plan by its algorithm and lowering. The algorithm `auto` is the plan without a profile: planned on the
/// topology of the job, not on the measured one.
type PlanName = (Algorithm, Lowering);

/// The plan without a profile.
const UNTUNED: PlanName = (Algorithm::Auto, Lowering::Auto);

/// The fastest plan for one length.
#[derive(Clone, Copy, Debug)]
pub struct FastestPlan {
    pub bytes: usize,
    pub algorithm: Algorithm,
    pub lowering: Lowering,
    pub subchunk: Size,
    /// Seconds of a call.
    pub seconds: f64,
    /// Seconds of a call without a profile.
    pub untuned_seconds: f64,
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
    sizes * (1 + MOST_PLANS + SUBCHUNKS.len()) + SLOTS.len() + SOCKETS.len()
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
    // Mailboxes use no plan.
    let config = Config { mailbox: Size(0), ..session.config.clone() };
    let topology = profile.topology(session.comm.topology());
    let default = VariantRanks::new(config.clone());
    let mut fastest = Vec::new();
    for (bytes, names) in sizes.iter().zip(compared(session, profile, &topology, sizes)?) {
        if let Some(best) = fastest_plan(session, &topology, &default, *bytes, &names)? {
            fastest.push(best);
        }
    }
    for subchunk in SUBCHUNKS {
        // A vector that is not longer than a sub-chunk of the default length moves in the same way.
        let longer: Vec<usize> =
            (0..fastest.len()).filter(|at| fastest[*at].bytes > config.subchunk.0.min(subchunk.0)).collect();
        if longer.is_empty() {
            continue;
        }
        let other = VariantRanks::new(Config { subchunk, ..config.clone() });
        for at in longer {
            let best = fastest[at];
            if !session.step(|| format!("sub-chunks of {subchunk}"))? {
                continue;
            }
            let plan = plan_of((best.algorithm, best.lowering), &topology, &config)?;
            let (before, after) =
                (default.variant(session, plan.as_ref())?, other.variant(session, plan.as_ref())?);
            let seconds = timed(session, after, best.bytes)?;
            if is_faster(seconds, best.seconds) && confirmed(session, before, after, best.bytes)?.is_some() {
                fastest[at] = FastestPlan { subchunk, seconds, ..best };
            }
        }
    }
    drop(default);
    let Some(longest) = fastest.last().copied() else {
        return Ok(MeasuredChoices {
            fastest,
            slots: config.slots,
            sockets_per_link: config.sockets_per_link,
        });
    };
    let mut best = (Config { subchunk: longest.subchunk, ..config }, longest.seconds);
    let plan = plan_of((longest.algorithm, longest.lowering), &topology, &best.0)?;
    let slots = |config: &Config, slots| Config { slots, ..config.clone() };
    best = fastest_setting(session, best, (plan.as_ref(), longest.bytes), "slots", &SLOTS, slots)?;
    if profile.cluster.transport == "tcp" {
        let sockets = |config: &Config, sockets_per_link| Config { sockets_per_link, ..config.clone() };
        best = fastest_setting(
            session,
            best,
            (plan.as_ref(), longest.bytes),
            "sockets per link",
            &SOCKETS,
            sockets,
        )?;
    }
    Ok(MeasuredChoices { fastest, slots: best.0.slots, sockets_per_link: best.0.sockets_per_link })
}

/// The settings with the number that is fastest, and their seconds. `best` are those so far; each number is
/// compared with their time.
fn fastest_setting(
    session: &mut TuningSession,
    best: (Config, f64),
    (plan, bytes): (Option<&VerifiedPlan>, usize),
    what: &str,
    numbers: &[usize],
    with: impl Fn(&Config, usize) -> Config,
) -> Result<(Config, f64)> {
    let mut times = Vec::new();
    for number in numbers {
        if session.step(|| format!("{number} {what}"))? {
            let ranks = VariantRanks::new(with(&best.0, *number));
            times.push((*number, timed(session, ranks.variant(session, plan)?, bytes)?));
        }
    }
    let Some(number) = fastest_number(best.1, &times) else { return Ok(best) };
    let (before, after) = (VariantRanks::new(best.0.clone()), VariantRanks::new(with(&best.0, number)));
    match confirmed(session, before.variant(session, plan)?, after.variant(session, plan)?, bytes)? {
        Some(seconds) => Ok((with(&best.0, number), seconds)),
        None => Ok(best),
    }
}

/// The number with the shortest of these times, if it is faster than `before`.
fn fastest_number(before: f64, times: &[(usize, f64)]) -> Option<usize> {
    let fastest = times.iter().min_by(|(_, one), (_, other)| one.total_cmp(other));
    fastest.filter(|(_, seconds)| is_faster(*seconds, before)).map(|(number, _)| *number)
}

fn is_faster(seconds: f64, before: f64) -> bool {
    seconds < before * (1.0 - GAIN)
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

/// The plans to measure by length besides that without a profile, equal on all ranks: rank 0 runs the model.
fn compared(
    session: &TuningSession,
    profile: &TuningProfile,
    topology: &Topology,
    sizes: &[usize],
) -> Result<Vec<Vec<PlanName>>> {
    let mut codes = vec![NONE; sizes.len() * MOST_PLANS * 2];
    if session.comm.rank() == 0 {
        for (bytes, codes) in sizes.iter().zip(codes.chunks_mut(2 * MOST_PLANS)) {
            let names = candidates(&session.config, profile, (session.comm.topology(), topology), *bytes);
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

/// The plan that auto selects for this length with the measured links, then those that the model predicts to
/// be the fastest, without repetitions and without the plan of the job.
fn candidates(
    config: &Config,
    profile: &TuningProfile,
    (job, topology): (&Topology, &Topology),
    bytes: usize,
) -> Vec<PlanName> {
    let details = Details::of(config);
    let selected = (select_algorithm(Algorithm::Auto, topology, &details).algorithm, Lowering::Auto);
    let untuned = sized_plans::selected(config, job, &mut |topology, trials| {
        Ok(simulate_all(config, topology, trials))
    })
    .ok()
    .and_then(|(plans, _)| plans.into_iter().find(|sized| bytes <= sized.longest).map(|sized| sized.plan));
    let parameters = SimulationParameters::measured(profile, config);
    let mut predicted: Vec<(f64, PlanName)> = Vec::new();
    for lowering in Lowering::ALL {
        let comparison = Comparison::new(topology, &details, *lowering, bytes as u64, &parameters);
        // A profile names an algorithm and a lowering, but no other tree.
        let named = comparison.candidates.iter().filter(|candidate| candidate.variant.is_empty());
        let times = named.filter_map(|candidate| {
            candidate.algorithms.first().map(|algorithm| (candidate.seconds, (*algorithm, *lowering)))
        });
        predicted.extend(times.take(PREDICTED));
    }
    // Stable, so that of equal times the one with the automatic lowering comes first.
    predicted.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let mut digests: Vec<u64> = untuned.iter().map(|plan| plan.digest()).collect();
    let mut names = Vec::new();
    for name in std::iter::once(selected).chain(predicted.into_iter().map(|(_, name)| name)) {
        let Ok(schedule) = planner::plan(name.0, topology, &details) else { continue };
        let digest = Plan::on(schedule, topology, name.1).digest();
        if names.len() < MOST_PLANS && !digests.contains(&digest) {
            digests.push(digest);
            names.push(name);
        }
    }
    names
}

/// A plan on the measured topology; `None` for the plan without a profile.
fn plan_of(
    (algorithm, lowering): PlanName,
    topology: &Topology,
    config: &Config,
) -> Result<Option<VerifiedPlan>> {
    if algorithm == Algorithm::Auto {
        return Ok(None);
    }
    let schedule = planner::plan(algorithm, topology, &Details::of(config))?;
    VerifiedPlan::new(Plan::on(schedule, topology, lowering)).map(Some)
}

/// Measures the plans for one length, first that without a profile. It stays unless another is faster by
/// [`GAIN`].
fn fastest_plan(
    session: &mut TuningSession,
    topology: &Topology,
    ranks: &VariantRanks,
    bytes: usize,
    names: &[PlanName],
) -> Result<Option<FastestPlan>> {
    let subchunk = ranks.config.subchunk;
    let mut best: Option<(FastestPlan, Option<VerifiedPlan>)> = None;
    for (algorithm, lowering) in std::iter::once(UNTUNED).chain(names.iter().copied()) {
        let message = || format!("{} of {}", algorithm.name(), Size(bytes));
        if !session.step(message)? {
            continue;
        }
        let plan = plan_of((algorithm, lowering), topology, &ranks.config)?;
        let seconds = timed(session, ranks.variant(session, plan.as_ref())?, bytes)?;
        let untuned_seconds = best.as_ref().map_or(seconds, |(best, _)| best.untuned_seconds);
        let is_best = best
            .as_ref()
            .is_none_or(|(best, _)| seconds < best.seconds && is_faster(seconds, untuned_seconds));
        if is_best {
            let found = FastestPlan { bytes, algorithm, lowering, subchunk, seconds, untuned_seconds };
            best = Some((found, plan));
        }
    }
    let Some((found, plan)) = best else { return Ok(None) };
    let (before, after) = (ranks.variant(session, None)?, ranks.variant(session, plan.as_ref())?);
    if plan.is_none() || confirmed(session, before, after, bytes)?.is_some() {
        return Ok(Some(found));
    }
    let (algorithm, lowering) = UNTUNED;
    Ok(Some(FastestPlan { algorithm, lowering, seconds: found.untuned_seconds, ..found }))
}

/// The ranks with some settings. A communicator that has used another plan does not return to its own, so
/// there are up to two.
struct VariantRanks {
    config: Config,
    own_plans: OnceCell<Communicator>,
    given_plans: OnceCell<Communicator>,
}

/// What an all-reduce is measured with.
#[derive(Clone, Copy)]
struct Variant<'a> {
    comm: &'a Communicator,
    /// `None` for the plans of the communicator.
    plan: Option<&'a VerifiedPlan>,
}

impl VariantRanks {
    fn new(config: Config) -> Self {
        Self { config, own_plans: OnceCell::new(), given_plans: OnceCell::new() }
    }

    /// All ranks call this.
    fn variant<'a>(&'a self, session: &TuningSession, plan: Option<&'a VerifiedPlan>) -> Result<Variant<'a>> {
        let cell = if plan.is_some() { &self.given_plans } else { &self.own_plans };
        let comm = match cell.get() {
            Some(comm) => comm,
            None => {
                let comm = session.communicator(&self.config)?;
                cell.get_or_init(|| comm)
            }
        };
        Ok(Variant { comm, plan })
    }
}

/// Measures both again, and returns the seconds of `after` if it is faster than `before`, too: the first
/// measurement may have been disturbed by other load.
fn confirmed(session: &TuningSession, before: Variant, after: Variant, bytes: usize) -> Result<Option<f64>> {
    let [before, after] = [before, after].map(|variant| timed(session, variant, bytes));
    let (before, after) = (before?, after?);
    Ok(is_faster(after, before).then_some(after))
}

/// The median time of an all-reduce of `bytes` until the last rank has the sums, in seconds. Ranks start each
/// call together, as the simulator assumes: otherwise calls overlap where a plan leaves some ranks idle.
fn timed(session: &TuningSession, Variant { comm, plan }: Variant, bytes: usize) -> Result<f64> {
    if let Some(plan) = plan {
        comm.use_plan(plan)?;
    }
    let mut vector = comm.alloc::<f32>(bytes / size_of::<f32>())?;
    let mut call = || -> Result<f64> {
        comm.barrier()?;
        let begun = Instant::now();
        comm.all_reduce(&mut vector, ReduceOp::Sum)?;
        Ok(begun.elapsed().as_secs_f64())
    };
    // Pages and programs are made ready by the first call.
    call()?;
    let first = session.largest(call()?)?;
    let (fewest, most) = CALLS;
    let calls = ((session.time.as_secs_f64() / first.max(1e-9)) as usize).clamp(fewest, most);
    let mut times = (0..calls).map(|_| call()).collect::<Result<Vec<f64>>>()?;
    session.comm.all_reduce(&mut times, ReduceOp::Max)?;
    Ok(median(times))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flexring_plan::topology_file::parse_short;
    use flexring_plan::tuning::parse;

    #[test]
    fn the_fastest_number_is_kept_and_not_the_first_faster_one() {
        assert_eq!(fastest_number(1.0, &[(2, 0.9), (4, 0.8)]), Some(4));
        assert_eq!(fastest_number(1.0, &[(2, 0.8), (4, 0.9)]), Some(2));
        // Numbers are compared with the time of the settings so far.
        assert_eq!(fastest_number(0.5, &[(2, 0.9), (4, 0.8)]), None);
        assert_eq!(fastest_number(1.0, &[(2, 1.0 - GAIN / 2.0)]), None);
        assert_eq!(fastest_number(1.0, &[]), None);
    }

    #[test]
    fn candidates_are_planned_for_measured_links_and_differ_from_the_plan_of_the_job() {
        let profile = parse("f", include_str!("../../../../tests/data/tuning.toml")).expect("a profile");
        let job = parse_short("2+1+1").expect("a short form").expect("valid");
        let measured = profile.topology(&job);
        let config = Config::default();
        // Node c has half the bandwidth: auto would weigh its spans, and the job does not.
        let names = candidates(&config, &profile, (&job, &measured), 64 << 20);
        assert_eq!(names.first(), Some(&(Algorithm::Weighted, Lowering::Auto)));
        assert!(names.len() <= MOST_PLANS);
        let digest = |(algorithm, lowering): PlanName, topology: &Topology| {
            let schedule = planner::plan(algorithm, topology, &Details::of(&config)).expect("a schedule");
            Plan::on(schedule, topology, lowering).digest()
        };
        let own = digest((Algorithm::Flexreduce, Lowering::Auto), &job);
        assert!(names.iter().all(|name| digest(*name, &measured) != own), "{names:?}");
    }
}
