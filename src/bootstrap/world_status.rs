//! The state of all ranks of a world, as `flexring status` prints it and as the error of a time-out carries
//! it.
//!
//! Owns the table: its rows, which ranks each rank waits for, its text, and its names in JSON, which
//! docs/debugging.md documents and which do not change.

use super::call_state::CallState;
use super::heartbeat::seconds;
use crate::call::Call;
use crate::error::Error;
use crate::peer_text::{self, PeerText};
use crate::rank::{Rank, RankList};
use std::fmt;
use std::time::Duration;

/// Maximum number of rows in the error of a time-out.
pub const ROWS_IN_ERROR: usize = 32;
/// Maximum number of rows in the status of all worlds of a coordinator, so that it fits a frame. The world
/// that the ranks have joined, and the first further one, may have more.
const ROWS_IN_STATUS: usize = 4096;
/// Ranks that all rows of a table wait for together, at up to 3 bytes each in a frame.
const MOST_WAITED_FOR: usize = 1 << 20;
/// Ranks that a row names once these are used up.
const FEWEST_WAITED_FOR: usize = 8;

/// What a rank does, as far as its coordinator knows.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize, strum::IntoStaticStr,
)]
#[strum(serialize_all = "lowercase")]
pub enum RankActivity {
    /// It has not joined the rendezvous yet.
    #[serde(rename = "absent")]
    Absent,
    /// It has joined and waits for ranks that have not.
    #[serde(rename = "joining")]
    Joining,
    /// It is between calls.
    #[serde(rename = "idle")]
    Idle,
    /// It is in a call.
    #[serde(rename = "in call")]
    #[strum(serialize = "in call")]
    InCall,
    /// It has left without an error.
    #[serde(rename = "left")]
    Left,
    /// It has died or is considered dead.
    #[serde(rename = "lost")]
    Lost,
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: Rank,
    /// Name of its host; empty if unknown.
    #[serde(deserialize_with = "peer_text::one_line")]
    pub host: String,
    /// Its process id on that host; 0 if unknown.
    pub pid: u32,
    /// Sequence number of the call that it is in, or of its last one; 0 before its first.
    pub sequence: u64,
    /// Description of that call, if its coordinator has heard of it while the rank was in it.
    #[serde(deserialize_with = "call_text")]
    pub call: Option<String>,
    /// What it does.
    #[serde(rename = "state")]
    pub activity: RankActivity,
    /// How long it has been in this state, as far as its heartbeats tell. `None` if unknown. In JSON as
    /// seconds.
    #[serde(rename = "seconds", with = "seconds_in_text")]
    pub since: Option<Duration>,
    /// The ranks that it waits for, because they have not made its call; only the first ones if many ranks
    /// wait for many. Empty if it waits for none, or for data.
    pub waits_for: Vec<Rank>,
}

/// The state of all ranks of a world.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct WorldStatus {
    /// One row per rank, in the order of ranks.
    pub ranks: Vec<RankReport>,
    /// Why the world has failed, if it has.
    pub root_cause: Option<Error>,
    /// The worlds that ranks of this one have opened over its control connections.
    #[serde(rename = "communicators")]
    pub further: Vec<SubworldStatus>,
    /// Number of such worlds that `further` leaves out.
    #[serde(rename = "communicators_left_out")]
    pub hidden: usize,
}

/// The state of a world that ranks of another one have opened over its control connections.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SubworldStatus {
    /// One row per rank, in the order of this world's ranks.
    pub ranks: Vec<RankReport>,
    /// Why the world has failed, if it has.
    pub root_cause: Option<Error>,
}

impl fmt::Display for SubworldStatus {
    /// As for the world that it was opened over.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, root_cause) = (self.ranks.clone(), self.root_cause.clone());
        WorldStatus { ranks, root_cause, ..WorldStatus::default() }.fmt(f)
    }
}

impl RankReport {
    /// The row of a rank of which only its process and activity are known.
    pub(crate) fn new(rank: Rank, host: &str, pid: u32, activity: RankActivity) -> Self {
        let host = host.to_owned();
        Self { rank, host, pid, sequence: 0, call: None, activity, since: None, waits_for: Vec::new() }
    }

    /// Adds the call state of an active rank. Its activity must have been `Idle`, `Left` or `Lost`.
    pub(crate) fn with_state(mut self, state: &CallState) -> Self {
        match state {
            CallState::Idle { finished } => self.sequence = *finished,
            CallState::InCall(call) => {
                self.sequence = call.last_collective();
                self.call = Some(call.to_string());
                if !call.is_collective() && call.root != Call::SEVERAL_PEERS {
                    self.waits_for = vec![call.root as Rank];
                }
                if self.activity == RankActivity::Idle {
                    self.activity = RankActivity::InCall;
                }
            }
        }
        self
    }

    /// Whether a rank that is in call `sequence` waits for this one: it has not entered that call.
    fn is_behind(&self, sequence: u64) -> bool {
        self.sequence < sequence
    }

    fn last_call(&self) -> String {
        match &self.call {
            Some(call) => call.clone(),
            None if self.sequence == 0 => "none".to_owned(),
            None => format!("#{}", self.sequence),
        }
    }

    fn cells(&self) -> [String; COLUMNS] {
        let known = |text: String, is_known: bool| if is_known { text } else { "-".to_owned() };
        let activity: &str = self.activity.into();
        let waits = match (self.activity, self.waits_for.is_empty()) {
            (_, false) => RankList::new(&self.waits_for).to_string(),
            (RankActivity::InCall, true) => "data".to_owned(),
            _ => "-".to_owned(),
        };
        [
            self.rank.to_string(),
            known(self.host.clone(), !self.host.is_empty()),
            known(self.pid.to_string(), self.pid != 0),
            self.last_call(),
            activity.to_owned(),
            self.since.map_or_else(|| "-".to_owned(), seconds),
            waits,
        ]
    }
}

/// A time that is a number of seconds in text formats, and a [`Duration`] in the frames of the control
/// connection.
mod seconds_in_text {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::time::Duration;

    pub(super) fn serialize<S: Serializer>(time: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        if to.is_human_readable() {
            return time.as_ref().map(Duration::as_secs_f64).serialize(to);
        }
        time.serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Option<Duration>, D::Error> {
        if !from.is_human_readable() {
            return Option::deserialize(from);
        }
        let seconds = Option::<f64>::deserialize(from)?;
        let time = seconds.map(Duration::try_from_secs_f64).transpose();
        time.map_err(serde::de::Error::custom)
    }
}

/// Decodes the description of a call.
fn call_text<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let text: Option<PeerText> = serde::Deserialize::deserialize(deserializer)?;
    Ok(text.map(|text| text.to_string()))
}

const COLUMNS: usize = 7;
const HEAD: [&str; COLUMNS] = ["rank", "host", "process", "last call", "state", "for", "waits for"];

impl WorldStatus {
    /// The table of these rows, given in the order of ranks. Fills in which ranks each waits for: of many
    /// ranks that wait for many, only the first ones, so that a table of thousands of ranks fits into a
    /// frame.
    pub(crate) fn new(mut ranks: Vec<RankReport>, root_cause: Option<Error>) -> Self {
        let absent: Vec<Rank> =
            ranks.iter().filter(|row| row.activity == RankActivity::Absent).map(|row| row.rank).collect();
        // In a healthy world all ranks are in the same call or next to it, so few lists differ.
        let mut behind: Vec<(u64, Vec<Rank>)> = Vec::new();
        let mut room = MOST_WAITED_FOR;
        let mut taken = |list: &[Rank]| {
            let fits = list.len().min(if list.len() <= room { room } else { FEWEST_WAITED_FOR });
            room = room.saturating_sub(fits);
            list[..fits].to_vec()
        };
        for index in 0..ranks.len() {
            let RankReport { activity, sequence, .. } = ranks[index];
            // The peer of a group of sends and receives.
            if !ranks[index].waits_for.is_empty() {
                continue;
            }
            ranks[index].waits_for = match activity {
                RankActivity::Joining => taken(&absent),
                RankActivity::InCall => match behind.iter().find(|(known, _)| *known == sequence) {
                    Some((_, list)) => taken(list),
                    None => {
                        let list: Vec<Rank> =
                            ranks.iter().filter(|row| row.is_behind(sequence)).map(|row| row.rank).collect();
                        let first = taken(&list);
                        behind.push((sequence, list));
                        first
                    }
                },
                _ => Vec::new(),
            };
        }
        Self { ranks, root_cause, further: Vec::new(), hidden: 0 }
    }

    /// Adds the worlds that were opened over the connections of this one, as many as a status has room for:
    /// first those that have failed, then those in which ranks wait for others.
    pub(crate) fn with_further(mut self, further: impl Iterator<Item = Self>) -> Self {
        let mut further: Vec<Self> = further.collect();
        let waits = |world: &Self| world.ranks.iter().any(|row| !row.waits_for.is_empty());
        further.sort_by_key(|world| (world.root_cause.is_none(), !waits(world)));
        let mut rows = self.ranks.len();
        for Self { ranks, root_cause, .. } in further {
            rows += ranks.len();
            if rows > ROWS_IN_STATUS && !self.further.is_empty() {
                self.hidden += 1;
            } else {
                self.further.push(SubworldStatus { ranks, root_cause });
            }
        }
        self
    }

    /// The table as aligned text, of at most `limit` rows. Ranks in rare states are kept; the last line
    /// counts the others.
    #[must_use]
    pub fn table(&self, limit: usize) -> String {
        let shown = self.interesting(limit);
        let mut lines: Vec<[String; COLUMNS]> = vec![HEAD.map(str::to_owned)];
        lines.extend(shown.iter().map(|index| self.ranks[*index].cells()));
        let mut widths = [0; COLUMNS];
        for line in &lines {
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for line in &lines {
            let mut row = String::new();
            for (cell, width) in line.iter().zip(widths) {
                let padding = width - cell.chars().count() + 2;
                row.push_str(cell);
                row.extend(std::iter::repeat_n(' ', padding));
            }
            text.push_str(row.trim_end());
            text.push('\n');
        }
        if shown.len() < self.ranks.len() {
            text.push_str(&self.elided(&shown));
        }
        text
    }

    /// The indices of at most `limit` rows, in the order of ranks. Rows whose state few ranks share come
    /// first.
    fn interesting(&self, limit: usize) -> Vec<usize> {
        let mut groups: Vec<((RankActivity, u64), Vec<usize>)> = Vec::new();
        for (index, row) in self.ranks.iter().enumerate() {
            let key = (row.activity, row.sequence);
            match groups.iter().position(|(known, _)| *known == key) {
                Some(at) => groups[at].1.push(index),
                None => groups.push((key, vec![index])),
            }
        }
        groups.sort_by_key(|(_, members)| members.len());
        // One row of each state, then the rest of the rarest ones.
        let first = groups.iter().filter_map(|(_, members)| members.first());
        let rest = groups.iter().flat_map(|(_, members)| members.iter().skip(1));
        let mut shown: Vec<usize> = first.chain(rest).copied().take(limit).collect();
        shown.sort_unstable();
        shown
    }

    /// The line that counts the rows that are not `shown`, which are in ascending order.
    fn elided(&self, shown: &[usize]) -> String {
        let mut counts: Vec<((RankActivity, u64), usize)> = Vec::new();
        let hidden = (0..self.ranks.len()).filter(|index| shown.binary_search(index).is_err());
        for row in hidden.map(|index| &self.ranks[index]) {
            let key = (row.activity, row.sequence);
            match counts.iter_mut().find(|(known, _)| *known == key) {
                Some((_, count)) => *count += 1,
                None => counts.push((key, 1)),
            }
        }
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let clause = |((activity, sequence), count): &((RankActivity, u64), usize)| {
            let activity: &str = (*activity).into();
            format!("{count} {activity} #{sequence}")
        };
        let clauses: Vec<String> = counts.iter().take(4).map(clause).collect();
        let (hidden, more) =
            (self.ranks.len() - shown.len(), if counts.len() > 4 { ", and others" } else { "" });
        format!("and {hidden} more ranks: {}{more}\n", clauses.join(", "))
    }
}

impl fmt::Display for WorldStatus {
    /// The root cause, if the world has failed, and the table with all rows.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(error) = &self.root_cause {
            writeln!(f, "this world has failed: {error}")?;
        }
        f.write_str(&self.table(usize::MAX))?;
        let count = self.further.len() + self.hidden;
        for (index, world) in self.further.iter().enumerate() {
            write!(
                f,
                "\ncommunicator {} of {count} that ranks of this one have created:\n{world}",
                index + 1
            )?;
        }
        if self.hidden > 0 {
            writeln!(f, "\nand {} more such communicators", self.hidden)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::call_state::example_call;
    use super::*;

    fn row(rank: Rank, activity: RankActivity, state: &CallState) -> RankReport {
        let row = RankReport::new(rank, "node1", 100 + rank as u32, activity).with_state(state);
        RankReport { since: Some(Duration::from_millis(12_500)), ..row }
    }

    #[test]
    fn ranks_in_a_call_wait_for_those_that_have_not_made_it() {
        let in_call = CallState::InCall(example_call(17));
        let rows = vec![
            row(0, RankActivity::Idle, &in_call),
            row(1, RankActivity::Idle, &CallState::Idle { finished: 17 }),
            row(2, RankActivity::Idle, &CallState::Idle { finished: 16 }),
            row(3, RankActivity::Left, &CallState::Idle { finished: 15 }),
            row(4, RankActivity::Idle, &CallState::InCall(example_call(16))),
        ];
        let status = WorldStatus::new(rows, None);
        assert_eq!(
            status.to_string(),
            "\
rank  host   process  last call                           state    for     waits for
0     node1  100      all_reduce #17 (1024 x float, sum)  in call  12.5 s  ranks 2, 3 and 4
1     node1  101      #17                                 idle     12.5 s  -
2     node1  102      #16                                 idle     12.5 s  -
3     node1  103      #15                                 left     12.5 s  -
4     node1  104      all_reduce #16 (1024 x float, sum)  in call  12.5 s  rank 3
"
        );
    }

    #[test]
    fn the_names_in_json_are_the_documented_ones() {
        let rows = vec![
            row(0, RankActivity::Idle, &CallState::InCall(example_call(17))),
            RankReport { since: None, ..row(1, RankActivity::Idle, &CallState::Idle { finished: 16 }) },
        ];
        let failure = Error::peer_lost("rank 1 died").with_suspect(1);
        let status = WorldStatus::new(rows, Some(failure)).with_further([WorldStatus::default()].into_iter());
        let json = serde_json::to_value(&status).expect("JSON");
        let expected = serde_json::json!({
            "ranks": [
                {
                    "rank": 0, "host": "node1", "pid": 100, "sequence": 17,
                    "call": "all_reduce #17 (1024 x float, sum)", "state": "in call", "seconds": 12.5, "waits_for": [1]
                },
                {
                    "rank": 1, "host": "node1", "pid": 101, "sequence": 16,
                    "call": null, "state": "idle", "seconds": null, "waits_for": []
                },
            ],
            "root_cause": { "kind": "PeerLost", "message": "rank 1 died", "suspect": 1 },
            "communicators": [{ "ranks": [], "root_cause": null }],
            "communicators_left_out": 0,
        });
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_value::<WorldStatus>(json).expect("a status"), status);
        let frame = postcard::to_stdvec(&status).expect("a frame");
        assert_eq!(postcard::from_bytes::<WorldStatus>(&frame).expect("a status"), status);
    }

    #[test]
    fn joined_ranks_wait_for_absent_ones() {
        let rows = vec![
            RankReport::new(0, "node1", 100, RankActivity::Joining),
            RankReport::new(1, "", 0, RankActivity::Absent),
        ];
        let status = WorldStatus::new(rows, Some(Error::aborted("rank 0: enough")));
        let text = status.to_string();
        assert!(text.starts_with("this world has failed: aborted: rank 0: enough\n"), "{text}");
        assert!(text.contains("0     node1  100      none       joining  -    rank 1\n"), "{text}");
        assert!(text.contains("1     -      -        none       absent   -    -\n"), "{text}");
    }

    #[test]
    fn a_status_shows_failed_worlds_first_and_has_a_limit() {
        let status = |count: usize, root_cause| {
            let rows = (0..count).map(|rank| row(rank, RankActivity::Idle, &CallState::Idle { finished: 3 }));
            WorldStatus::new(rows.collect(), root_cause)
        };
        let worlds = (0..1000).map(|at| status(8, (at == 999).then(|| Error::aborted("rank 0: enough"))));
        let status = status(8, None).with_further(worlds);
        assert_eq!(status.further.len() + status.hidden, 1000);
        let shown: usize = status.further.iter().map(|world| world.ranks.len()).sum();
        assert!(shown <= ROWS_IN_STATUS && shown > ROWS_IN_STATUS / 2, "{shown}");
        let text = status.to_string();
        let first = "\ncommunicator 1 of 1000 that ranks of this one have created:\nthis world has failed: aborted: rank 0: enough";
        assert!(text.contains(first), "{text}");
        assert!(text.ends_with(&format!("and {} more such communicators\n", status.hidden)), "{text}");
    }

    #[test]
    fn a_status_of_many_ranks_that_wait_for_many_names_some_of_these() {
        let state = |rank: Rank| match rank {
            0..4000 => CallState::InCall(example_call(17)),
            _ => CallState::Idle { finished: 16 },
        };
        let rows = (0..8000).map(|rank| row(rank, RankActivity::Idle, &state(rank))).collect();
        let status = WorldStatus::new(rows, None);
        assert_eq!(status.ranks[0].waits_for, Vec::from_iter(4000..8000));
        assert_eq!(status.ranks[3999].waits_for, Vec::from_iter(4000..4000 + FEWEST_WAITED_FOR));
        let waited_for: usize = status.ranks.iter().map(|row| row.waits_for.len()).sum();
        assert!(waited_for <= MOST_WAITED_FOR + 4000 * FEWEST_WAITED_FOR, "{waited_for}");
    }

    #[test]
    fn long_tables_keep_the_ranks_in_rare_states() {
        let state = |rank: Rank| match rank {
            70 => CallState::Idle { finished: 16 },
            90 => CallState::InCall(example_call(12)),
            _ => CallState::InCall(example_call(17)),
        };
        let rows = (0..100).map(|rank| row(rank, RankActivity::Idle, &state(rank))).collect();
        let text = WorldStatus::new(rows, None).table(ROWS_IN_ERROR);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + ROWS_IN_ERROR + 1);
        assert!(lines.iter().any(|line| line.starts_with("70 ")), "{text}");
        assert!(lines.iter().any(|line| line.starts_with("90 ")), "{text}");
        assert_eq!(lines.last(), Some(&"and 68 more ranks: 68 in call #17"));
    }
}
