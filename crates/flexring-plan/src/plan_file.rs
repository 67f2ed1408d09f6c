//! The plan file: a schedule as JSON, written and parsed.
//!
//! Owns the format. Must not know where the text comes from, or whether the schedule is correct, which the
//! verifier checks.
//!
//! ```json
//! { "name": "flexreduce", "world": 5,
//!   "levels": [ { "groups": [
//!     { "span": { "start": "0", "end": "1/2" }, "participants": [0, 1], "root": 0 } ] } ] }
//! ```
//!
//! The ends of spans are fractions of the vector as strings, or element numbers if the plan has a `count`.
//! `"helpers": [4]` names ranks that contribute nothing and get no result.

use super::Rank;
use super::fraction::{Fraction, Span};
use super::schedule::{Group, Schedule};
use flexring_core::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Limits what a file can make the parser allocate; far above the size of any cluster.
const MOST_RANKS: usize = 1 << 20;
/// Largest number of levels times ranks, because each level has tables with an entry for each rank. It allows
/// 32 levels for a million ranks.
const MOST_TABLE_ENTRIES: usize = 1 << 25;
/// Bytes of these tables, at most.
#[cfg(test)]
pub(super) const LONGEST_TABLES: usize = 12 * MOST_TABLE_ENTRIES;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlanFile {
    name: String,
    world: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    helpers: BTreeSet<Rank>,
    levels: Vec<LevelFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LevelFile {
    groups: Vec<GroupFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupFile {
    span: SpanFile,
    /// In the order of addition.
    participants: Vec<Rank>,
    root: Rank,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SpanFile {
    start: Point,
    end: Point,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Point {
    Element(u64),
    Fraction(String),
}

impl Point {
    fn read(&self, count: Option<u64>) -> std::result::Result<Fraction, String> {
        match (self, count) {
            (Self::Fraction(text), _) => Fraction::parse(text).ok_or_else(|| {
                format!("\"{text}\" is not a fraction from 0 to 1: expected one such as \"2/3\"")
            }),
            (Self::Element(at), Some(count)) if *at <= count && count > 0 => Ok(Fraction::new(*at, count)),
            (Self::Element(at), Some(count)) => {
                Err(format!("element {at} is outside the plan: expected 0 to its count, {count}"))
            }
            (Self::Element(at), None) => Err(format!(
                "{at} is an element number, but the plan has no \"count\": add it, or use a fraction"
            )),
        }
    }
}

/// The schedule as JSON. Spans are fractions, or with a `count` elements of a vector of that length.
#[must_use]
pub fn write(schedule: &Schedule, count: Option<u64>) -> String {
    let point = |fraction: Fraction| match count {
        Some(count) => Point::Element(fraction.element(count, 1)),
        None => Point::Fraction(fraction.to_string()),
    };
    let group = |group: &Group| GroupFile {
        span: SpanFile { start: point(group.span.start), end: point(group.span.end) },
        participants: group.participants().collect(),
        root: group.root,
    };
    let levels = schedule.levels().iter();
    let file = PlanFile {
        name: schedule.name().to_owned(),
        world: schedule.world(),
        count,
        helpers: schedule.helpers().clone(),
        levels: levels
            .map(|level| LevelFile { groups: level.groups().iter().map(group).collect() })
            .collect(),
    };
    serde_json::to_string_pretty(&file).expect("numbers and strings have a JSON form")
}

/// Parses the schedule in `text`. `name` is the file's name, for errors.
///
/// # Errors
/// `InvalidSetting` with the file, the line if the JSON is malformed, and what was expected.
pub fn parse(name: &str, text: &str) -> Result<Schedule> {
    let refuse = |message: String| Err(Error::invalid_setting(format!("{name}: {message}")));
    let file: PlanFile = match serde_json::from_str(text) {
        Ok(file) => file,
        Err(wrong) => {
            let message = wrong.to_string();
            let cause = message.split(" at line ").next().unwrap_or(&message);
            let message = format!("{name}:{}: {cause}", wrong.line());
            return Err(Error::invalid_setting(message));
        }
    };
    let world = file.world;
    if world == 0 || world > MOST_RANKS {
        return refuse(format!("a plan is for 1 to {MOST_RANKS} ranks, not for {world}"));
    }
    // The name is printed.
    if file.name.contains(char::is_control) {
        return refuse(format!(
            "the name {:?} has a control character: expected a name without any",
            file.name
        ));
    }
    if file.levels.len().saturating_mul(world) > MOST_TABLE_ENTRIES {
        let most = MOST_TABLE_ENTRIES / world;
        return refuse(format!(
            "a plan for {world} ranks has at most {most} levels, not {}",
            file.levels.len()
        ));
    }
    if let Some(outside) = file.helpers.last().filter(|rank| **rank >= world) {
        return refuse(format!("rank {outside} is a helper, but not in a world of {world}"));
    }
    if file.helpers.len() == world {
        return refuse("all ranks are helpers: expected at least one that contributes".to_owned());
    }
    let mut levels = Vec::new();
    for (number, level) in file.levels.into_iter().enumerate() {
        let mut groups = Vec::new();
        for (index, group) in level.groups.into_iter().enumerate() {
            match read_group(&group, world, file.count) {
                Ok(group) => groups.extend(group),
                Err(message) => return refuse(format!("level {number}, group {index}: {message}")),
            }
        }
        levels.push(groups);
    }
    Ok(Schedule::new(&file.name, world, levels).with_helpers(file.helpers))
}

/// Checks a group; `None` if its span has no elements in this count.
fn read_group(
    group: &GroupFile,
    world: usize,
    count: Option<u64>,
) -> std::result::Result<Option<Group>, String> {
    let span = Span { start: group.span.start.read(count)?, end: group.span.end.read(count)? };
    if span.start > span.end || (span.is_empty() && count.is_none()) {
        return Err(format!("the span {span} does not end after its start"));
    }
    if group.participants.is_empty() {
        return Err("it has no participants".to_owned());
    }
    let mut seen = BTreeSet::new();
    for rank in &group.participants {
        if !seen.insert(*rank) {
            return Err(format!("rank {rank} takes part twice"));
        }
    }
    if let Some(outside) = seen.into_iter().chain([group.root]).find(|rank| *rank >= world) {
        return Err(format!("rank {outside} is not in a world of {world}"));
    }
    Ok((!span.is_empty()).then(|| Group::of(span, group.participants.clone(), group.root)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::{flexreduce, ring};
    use crate::topology::Topology;

    #[test]
    fn empty_levels_for_many_ranks_are_refused() {
        let levels = vec![r#"{"groups":[]}"#; 33].join(",");
        let error = parse("f", &format!(r#"{{"name":"x","world":1048576,"levels":[{levels}]}}"#));
        let message = error.expect_err("8 MiB of tables for each level").message().to_owned();
        assert_eq!(message, "f: a plan for 1048576 ranks has at most 32 levels, not 33");
    }

    #[test]
    fn parsing_a_written_schedule_restores_it() {
        let topology = Topology::from_names(&["a", "a", "b", "b", "b"]);
        let helpers = ring::plan(&topology).with_helpers([1, 4].into());
        for schedule in [flexreduce::plan(&topology).expect("small"), ring::plan(&topology), helpers] {
            let text = write(&schedule, None);
            let back = parse("plan.json", &text).expect("a written plan can be parsed");
            assert_eq!(write(&back, None), text);
            let elements = write(&schedule, Some(60));
            let back = parse("plan.json", &elements).expect("a written plan can be parsed");
            assert_eq!(write(&back, Some(60)), elements);
            assert_eq!(write(&back, None), text);
        }
    }

    #[test]
    fn errors_in_plan_files_name_place_and_cause() {
        let message = |text: &str| parse("p.json", text).expect_err(text).message().to_owned();
        let plan = |groups: &str| format!(r#"{{"name":"x","world":2,"levels":[{{"groups":[{groups}]}}]}}"#);
        let group = |start: &str, end: &str, ranks: &str, root: u32| {
            plan(&format!(
                r#"{{"span":{{"start":{start},"end":{end}}},"participants":[{ranks}],"root":{root}}}"#
            ))
        };
        assert_eq!(message("{\n\"name\": 3}"), "p.json:2: invalid type: integer `3`, expected a string");
        assert_eq!(
            message(r#"{"name":"x","world":0,"levels":[]}"#),
            "p.json: a plan is for 1 to 1048576 ranks, not for 0"
        );
        let at = "p.json: level 0, group 0: ";
        for (helpers, wrong) in [
            ("2", "rank 2 is a helper, but not in a world of 2"),
            ("0,1", "all ranks are helpers: expected at least one that contributes"),
        ] {
            let text = format!(r#"{{"name":"x","world":2,"helpers":[{helpers}],"levels":[]}}"#);
            assert_eq!(message(&text), format!("p.json: {wrong}"));
        }
        assert_eq!(message(&group("\"0\"", "\"1\"", "0,2", 0)), format!("{at}rank 2 is not in a world of 2"));
        assert_eq!(message(&group("\"0\"", "\"1\"", "0,1", 7)), format!("{at}rank 7 is not in a world of 2"));
        assert_eq!(message(&group("\"0\"", "\"1\"", "0,0", 0)), format!("{at}rank 0 takes part twice"));
        assert_eq!(message(&group("\"0\"", "\"1\"", "", 0)), format!("{at}it has no participants"));
        assert_eq!(
            message(&group("\"1\"", "\"0\"", "0", 0)),
            format!("{at}the span [1, 0) does not end after its start")
        );
        assert_eq!(
            message(&group("\"0\"", "\"3/2\"", "0", 0)),
            format!("{at}\"3/2\" is not a fraction from 0 to 1: expected one such as \"2/3\"")
        );
        assert_eq!(
            message(&group("0", "5", "0", 0)),
            format!("{at}0 is an element number, but the plan has no \"count\": add it, or use a fraction")
        );
    }
}
