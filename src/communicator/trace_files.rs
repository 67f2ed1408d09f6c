//! The timelines of a communicator's ranks: which file each writes, and how their clocks are aligned.
//!
//! Owns the names of files among the communicators of a process, and the exchange of messages that measures
//! clocks of other machines.

use super::Communicator;
use crate::bootstrap::{ControlConnection, host_name};
use crate::config::Config;
use crate::error::Result;
use crate::process::PerProcess;
use crate::rank::Rank;
use crate::trace::{ClockAlignment, ClockSample, Recorder, Trace, TraceOrigin, TracePath, clock_name, now};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Messages to another machine and back that measure its clock. The fastest counts.
const ROUND_TRIPS: usize = 32;

/// By value of `FLEXRING_TRACE`, the key of the first communicator of this process with it, whose files have
/// no label.
static FIRST: PerProcess<Mutex<BTreeMap<String, Vec<u8>>>> = PerProcess::new();

/// The files of one communicator.
pub(super) struct TraceFiles {
    setting: String,
    /// Spans that each rank keeps.
    bound: usize,
    /// Distinguishes its files from those of other communicators.
    label: String,
}

impl TraceFiles {
    /// The timeline that the settings ask for, if they do. `key` is equal on all ranks of the communicator,
    /// and different for other communicators.
    pub(super) fn of(config: &Config, is_derived: bool, key: &[u8]) -> Option<Self> {
        let setting = config.trace.clone()?;
        let mut first = FIRST.get().lock().unwrap_or_else(PoisonError::into_inner);
        // Several ranks of a communicator may be threads of this process.
        let is_first = !is_derived && first.entry(setting.clone()).or_insert_with(|| key.to_vec()) == key;
        let label = match is_first {
            true => String::new(),
            false => key.iter().take(4).map(|byte| format!("{byte:02x}")).collect(),
        };
        Some(Self { setting, bound: config.trace_events, label })
    }

    /// What records the calls of a rank; nothing without a timeline.
    ///
    /// # Errors
    /// `InvalidSetting` if the file cannot be created.
    pub(super) fn trace(timeline: Option<&Self>, rank: Rank, world: usize) -> Result<Trace> {
        let Some(Self { setting, bound, label }) = timeline else { return Ok(Trace::default()) };
        let origin = TraceOrigin {
            rank,
            world,
            host: host_name(),
            pid: std::process::id(),
            communicator: label.clone(),
        };
        let path = TracePath::new(setting, label, rank);
        Recorder::new(path, origin, *bound).map(|recorder| Trace::new(Some(recorder)))
    }
}

/// Aligns the clock of this rank's timeline with that of rank 0. All ranks of a communicator with a timeline
/// do so, before its first call. Ranks with rank 0's clock need nothing. Of the ranks that share another
/// clock, the first measures it with rank 0.
///
/// # Errors
/// As for [`Communicator::group`].
pub(super) fn align(comm: &Communicator, connection: &ControlConnection) -> Result<()> {
    let names = connection.all_gather("clocks", clock_name().as_bytes())?;
    let leader = |rank: Rank| {
        // Without a name nothing is known about a clock.
        let first = names.iter().position(|name| !name.is_empty() && *name == names[rank]);
        first.unwrap_or(rank)
    };
    let me = comm.rank();
    let leaders: Vec<Rank> = (1..names.len()).filter(|rank| leader(*rank) == *rank).collect();
    if leaders.is_empty() {
        return Ok(());
    }
    let mut alignments = Vec::new();
    for other in leaders {
        if me == 0 {
            alignments.push((other, measure(comm, other)?));
        } else if me == other {
            answer(comm)?;
        }
    }
    let alignments = connection.gather_values("clock offsets", &alignments)?.swap_remove(0);
    let mine = alignments.iter().find(|(other, _)| *other == leader(me));
    let alignment = mine.map_or_else(ClockAlignment::default, |(_, alignment)| *alignment);
    comm.runner.lock_state().executor.align_trace(alignment);
    Ok(())
}

/// Measures the clock of another rank, on rank 0.
fn measure(comm: &Communicator, other: Rank) -> Result<ClockAlignment> {
    let mut samples = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let (sent, mut remote) = (now(), [0u64]);
        comm.send(&[sent], other)?;
        comm.recv(&mut remote, other)?;
        samples.push(ClockSample { sent, remote: remote[0], received: now() });
    }
    Ok(ClockAlignment::of_samples(&samples))
}

/// Lets rank 0 measure this rank's clock.
fn answer(comm: &Communicator) -> Result<()> {
    for _ in 0..ROUND_TRIPS {
        comm.recv(&mut [0u64], 0)?;
        comm.send(&[now()], 0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_communicator_of_a_process_has_files_without_a_label() {
        let config = |text: &str| Config { trace: Some(text.to_owned()), ..Config::default() };
        let label = |text, is_derived, key: &[u8]| {
            TraceFiles::of(&config(text), is_derived, key).map(|timeline| timeline.label)
        };
        let (one, other) = ([1, 2, 3, 4, 5], [0x1f, 0, 0xa2, 3, 4]);
        assert_eq!(label("first", false, &one).as_deref(), Some(""));
        assert_eq!(label("first", false, &other).as_deref(), Some("1f00a203"));
        assert_eq!(
            label("first", false, &one).as_deref(),
            Some(""),
            "another rank of the first communicator"
        );
        assert_eq!(label("second", true, &one).as_deref(), Some("01020304"));
        assert!(TraceFiles::of(&Config::default(), false, &[]).is_none());
    }

    #[test]
    fn messages_measure_the_offset_of_a_clock() {
        let comms: [Communicator; 2] =
            Communicator::local(2).expect("two ranks").try_into().expect("two ranks");
        let [first, second] = comms;
        let alignment = std::thread::scope(|scope| {
            let answering = scope.spawn(|| answer(&second));
            let alignment = measure(&first, 1).expect("answers");
            answering.join().expect("no panic").expect("questions");
            alignment
        });
        // Both have one clock, so the error must cover the offset.
        assert!(alignment.offset_ns.unsigned_abs() <= alignment.error_ns, "{alignment:?}");
    }
}
