//! Profiles as TOML files.
//!
//! Owns the format, and the checks of what a file says.

use super::cluster::{ClusterIdentity, ClusterNode};
use super::profile::{
    LONGEST_CHOICE, LONGEST_FILE, LinkClass, MAX_LATENCY, MAX_RATE, MOST_CHOICES, MeasuredChoice,
    MeasuredNode, MeasuredUplink, TuningProfile,
};
use crate::source_file::{Lines, SourceFile};
use crate::topology::MAX_BURST;
use flexring_core::config::{Algorithm, Lowering, Size};
use flexring_core::error::Result;
use flexring_core::rank::Rank;
use serde::de::{Deserializer, Visitor};
use std::fmt;
use toml::Spanned;
use toml::value::Datetime;

/// The format that this version reads and writes.
const FORMAT: u64 = 1;

/// Most classes of links: one for each switch, and one within nodes.
const MOST_CLASSES: usize = 4096;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileToml {
    format: Spanned<BoundedNumber<1, { u32::MAX as u64 }>>,
    date: Spanned<Datetime>,
    fingerprint: Spanned<String>,
    transport: Spanned<String>,
    switches: Spanned<String>,
    slots: BoundedNumber<2, 65536>,
    sockets_per_link: BoundedNumber<1, 16>,
    node: Vec<Spanned<NodeEntry>>,
    #[serde(default)]
    switch: Vec<Spanned<SwitchEntry>>,
    #[serde(default)]
    class: Vec<Spanned<ClassEntry>>,
    #[serde(default)]
    choice: Vec<Spanned<ChoiceEntry>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeEntry {
    host: Spanned<String>,
    ranks: Vec<BoundedNumber<0, { (1 << 16) - 1 }>>,
    up_bytes_per_s: Option<BoundedNumber<1, MAX_RATE>>,
    down_bytes_per_s: Option<BoundedNumber<1, MAX_RATE>>,
    latency_ns: Option<BoundedNumber<0, MAX_LATENCY>>,
    burst_bytes: Option<BoundedNumber<0, MAX_BURST>>,
    copy_bytes_per_s: BoundedNumber<1, MAX_RATE>,
    reduce_bytes_per_s: BoundedNumber<1, MAX_RATE>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct SwitchEntry {
    up_bytes_per_s: BoundedNumber<1, MAX_RATE>,
    down_bytes_per_s: BoundedNumber<1, MAX_RATE>,
    latency_ns: BoundedNumber<0, MAX_LATENCY>,
    burst_bytes: Option<BoundedNumber<0, MAX_BURST>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassEntry {
    name: Spanned<String>,
    pairs: BoundedNumber<1, { u32::MAX as u64 }>,
    latency_ns: BoundedNumber<0, MAX_LATENCY>,
    slowest_bytes_per_s: BoundedNumber<1, MAX_RATE>,
    fastest_bytes_per_s: BoundedNumber<1, MAX_RATE>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ChoiceEntry {
    up_to_bytes: Option<BoundedNumber<1, LONGEST_CHOICE>>,
    algorithm: Spanned<String>,
    lowering: Spanned<String>,
    subchunk_bytes: BoundedNumber<4096, { 64 << 20 }>,
}

/// A whole number from `LEAST` to `MOST`.
#[derive(Clone, Copy)]
struct BoundedNumber<const LEAST: u64, const MOST: u64>(u64);

impl<'de, const LEAST: u64, const MOST: u64> serde::Deserialize<'de> for BoundedNumber<LEAST, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct NumberVisitor<const LEAST: u64, const MOST: u64>;
        impl<const LEAST: u64, const MOST: u64> Visitor<'_> for NumberVisitor<LEAST, MOST> {
            type Value = BoundedNumber<LEAST, MOST>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number from {LEAST} to {MOST}")
            }

            fn visit_i64<E: serde::de::Error>(self, number: i64) -> std::result::Result<Self::Value, E> {
                let unsigned = u64::try_from(number).ok().filter(|number| (LEAST..=MOST).contains(number));
                let unexpected = serde::de::Unexpected::Signed(number);
                unsigned.map(BoundedNumber).ok_or_else(|| E::invalid_value(unexpected, &self))
            }
        }
        deserializer.deserialize_any(NumberVisitor)
    }
}

/// Reads the profile in the file `name`, whose contents are `text`.
///
/// # Errors
/// `InvalidSetting` with file, line, cause and fix.
pub fn parse(name: &str, text: &str) -> Result<TuningProfile> {
    let file = SourceFile { name };
    if text.len() > LONGEST_FILE {
        let message = format!(
            "it is longer than {}, the most of a tuning profile: `flexring tune` writes one",
            Size(LONGEST_FILE)
        );
        return Err(file.refuse_all(message));
    }
    let lines = Lines::of(text);
    let read: ProfileToml = file.parse_toml(text, &lines)?;
    let format = read.format.get_ref().0;
    if format != FORMAT {
        let message = format!(
            "the format is {format}, but this version of flexring reads {FORMAT}: run `flexring tune` again"
        );
        return Err(file.refuse(lines.of_value(&read.format), message));
    }
    let (mut nodes, mut measured) = (Vec::new(), Vec::new());
    for entry in &read.node {
        let (node, rates) =
            node(entry.get_ref()).map_err(|message| file.refuse(lines.of_value(entry), message))?;
        nodes.push(node);
        measured.push(rates);
    }
    check_ranks(&nodes).map_err(|message| file.refuse_all(message))?;
    for text in [&read.transport, &read.switches, &read.fingerprint] {
        check_text(text.get_ref()).map_err(|message| file.refuse(lines.of_value(text), message))?;
    }
    let cluster = ClusterIdentity {
        transport: read.transport.into_inner(),
        switches: read.switches.into_inner(),
        nodes,
    };
    let computed = cluster.fingerprint();
    if *read.fingerprint.get_ref() != computed {
        let message = format!(
            "the fingerprint {} is not that of this cluster, {computed}: the file was changed, run `flexring tune` again",
            read.fingerprint.get_ref()
        );
        return Err(file.refuse(lines.of_value(&read.fingerprint), message));
    }
    let below = cluster.switches_below_root();
    if let Some(entry) = read.switch.first().filter(|_| read.switch.len() != below) {
        let message = format!(
            "expected one switch entry for each switch below the root, which is {below}, found {}: run `flexring tune` again",
            read.switch.len()
        );
        return Err(file.refuse(lines.of_value(entry), message));
    }
    let switches = read.switch.iter().map(|entry| {
        let SwitchEntry { up_bytes_per_s, down_bytes_per_s, latency_ns, burst_bytes } = entry.get_ref();
        MeasuredUplink {
            up: up_bytes_per_s.0,
            down: down_bytes_per_s.0,
            latency: latency_ns.0,
            burst: burst_bytes.map(|burst| burst.0),
        }
    });
    if let Some(entry) = read.class.get(MOST_CLASSES) {
        return Err(file
            .refuse(lines.of_value(entry), format!("there are more than {MOST_CLASSES} classes of links")));
    }
    let mut classes = Vec::new();
    for entry in &read.class {
        let ClassEntry { name, pairs, latency_ns, slowest_bytes_per_s, fastest_bytes_per_s } =
            entry.get_ref();
        check_text(name.get_ref()).map_err(|message| file.refuse(lines.of_value(name), message))?;
        classes.push(LinkClass {
            name: name.get_ref().clone(),
            pairs: pairs.0 as usize,
            latency: latency_ns.0,
            slowest: slowest_bytes_per_s.0,
            fastest: fastest_bytes_per_s.0,
        });
    }
    let mut choices: Vec<MeasuredChoice> = Vec::new();
    for (number, entry) in read.choice.iter().enumerate() {
        let is_last = number + 1 == read.choice.len();
        let choice = choice(entry.get_ref(), is_last, choices.last());
        choices.push(choice.map_err(|message| file.refuse(lines.of_value(entry), message))?);
    }
    if let Some(entry) = read.choice.get(MOST_CHOICES) {
        return Err(file.refuse(lines.of_value(entry), format!("there are more than {MOST_CHOICES} choices")));
    }
    Ok(TuningProfile {
        date: read.date.get_ref().to_string(),
        cluster,
        nodes: measured,
        switches: switches.collect(),
        classes,
        slots: read.slots.0 as usize,
        sockets_per_link: read.sockets_per_link.0 as usize,
        choices,
    })
}

fn node(entry: &NodeEntry) -> std::result::Result<(ClusterNode, MeasuredNode), String> {
    check_text(entry.host.get_ref())?;
    let ranks: Vec<Rank> = entry.ranks.iter().map(|rank| rank.0 as Rank).collect();
    if ranks.is_empty() || !ranks.is_sorted_by(|one, other| one < other) {
        return Err("a node has at least one rank, and its ranks ascend".to_owned());
    }
    let burst = entry.burst_bytes.map(|burst| burst.0);
    let uplink = match (entry.up_bytes_per_s, entry.down_bytes_per_s, entry.latency_ns) {
        (Some(up), Some(down), Some(latency)) => {
            Some(MeasuredUplink { up: up.0, down: down.0, latency: latency.0, burst })
        }
        (None, None, None) if burst.is_none() => None,
        _ => {
            let message = "up_bytes_per_s, down_bytes_per_s and latency_ns belong together: give all three, and optionally burst_bytes, or none";
            return Err(message.to_owned());
        }
    };
    let measured =
        MeasuredNode { uplink, copy: entry.copy_bytes_per_s.0, reduce: entry.reduce_bytes_per_s.0 };
    Ok((ClusterNode { host: entry.host.get_ref().clone(), ranks }, measured))
}

/// Checks that each rank from 0 is on one node.
fn check_ranks(nodes: &[ClusterNode]) -> std::result::Result<(), String> {
    let mut ranks: Vec<Rank> = nodes.iter().flat_map(|node| &node.ranks).copied().collect();
    ranks.sort_unstable();
    match ranks.iter().enumerate().find(|(number, rank)| *number != **rank) {
        Some((number, rank)) if number < *rank => Err(format!("rank {number} is on no node")),
        Some((_, rank)) => Err(format!("rank {rank} is on two nodes")),
        None if ranks.is_empty() => Err("it has no nodes".to_owned()),
        None => Ok(()),
    }
}

/// Refuses control characters, which output and fingerprints must not contain.
fn check_text(text: &str) -> std::result::Result<(), String> {
    let control = text.chars().any(char::is_control);
    if control { Err(format!("{text:?} contains a control character")) } else { Ok(()) }
}

fn choice(
    entry: &ChoiceEntry,
    is_last: bool,
    before: Option<&MeasuredChoice>,
) -> std::result::Result<MeasuredChoice, String> {
    let name = entry.algorithm.get_ref();
    let algorithm = Algorithm::parse(name).ok_or_else(|| {
        let names = Algorithm::ALL.iter().map(|algorithm| algorithm.name());
        format!("{name:?} is not an algorithm: expected one of {}", list(names))
    })?;
    let name = entry.lowering.get_ref();
    let lowering = Lowering::parse(name).ok_or_else(|| {
        let names = Lowering::ALL.iter().map(|lowering| lowering.name());
        format!("{name:?} is not a lowering: expected one of {}", list(names))
    })?;
    if algorithm == Algorithm::Auto && lowering != Lowering::Auto {
        return Err(format!("{name:?} is no lowering of the algorithm auto: expected auto"));
    }
    let subchunk = entry.subchunk_bytes.0;
    if !subchunk.is_multiple_of(4096) {
        return Err(format!("subchunk_bytes is {subchunk}: expected a multiple of 4096"));
    }
    let up_to = entry.up_to_bytes.map(|bytes| bytes.0);
    let least = before.and_then(|before| before.up_to).unwrap_or(0);
    match up_to {
        None if !is_last => return Err("only the last choice has no up_to_bytes".to_owned()),
        Some(_) if is_last => {
            return Err("the last choice has up_to_bytes: leave it out, for all longer vectors".to_owned());
        }
        Some(bytes) if bytes <= least => {
            return Err(format!(
                "up_to_bytes is {bytes}, but the choice before it has {least}: expected ascending lengths"
            ));
        }
        _ => {}
    }
    Ok(MeasuredChoice { up_to, algorithm, lowering, subchunk: Size(subchunk as usize) })
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

/// The text of a file that [`parse`] reads as `profile`.
#[must_use]
pub fn write(profile: &TuningProfile) -> String {
    let TuningProfile { date, cluster, nodes, switches, classes, slots, sockets_per_link, choices } = profile;
    let mut text = format!(
        "# Written by `flexring tune`. FLEXRING_TUNING=FILE loads it. Rates are bytes per second.\n\
         format = {FORMAT}\ndate = {date}\nfingerprint = {}\ntransport = {}\nswitches = {}\n\
         slots = {slots}\nsockets_per_link = {sockets_per_link}\n",
        quoted(&cluster.fingerprint()),
        quoted(&cluster.transport),
        quoted(&cluster.switches),
    );
    for (node, measured) in cluster.nodes.iter().zip(nodes) {
        text += &format!("\n[[node]]\nhost = {}\nranks = {:?}\n", quoted(&node.host), node.ranks);
        if let Some(uplink) = measured.uplink {
            text += &uplink_fields(uplink);
        }
        let MeasuredNode { copy, reduce, .. } = measured;
        text += &format!("copy_bytes_per_s = {copy}\nreduce_bytes_per_s = {reduce}\n");
    }
    for uplink in switches {
        text += &format!("\n[[switch]]\n{}", uplink_fields(*uplink));
    }
    for LinkClass { name, pairs, latency, slowest, fastest } in classes {
        text += &format!(
            "\n[[class]]\nname = {}\npairs = {pairs}\nlatency_ns = {latency}\nslowest_bytes_per_s = {slowest}\n\
             fastest_bytes_per_s = {fastest}\n",
            quoted(name)
        );
    }
    for MeasuredChoice { up_to, algorithm, lowering, subchunk } in choices {
        text += "\n[[choice]]\n";
        if let Some(bytes) = up_to {
            text += &format!("up_to_bytes = {bytes}\n");
        }
        text += &format!(
            "algorithm = {}\nlowering = {}\nsubchunk_bytes = {}\n",
            quoted(algorithm.name()),
            quoted(lowering.name()),
            subchunk.0
        );
    }
    text
}

fn uplink_fields(MeasuredUplink { up, down, latency, burst }: MeasuredUplink) -> String {
    let burst = burst.map_or_else(String::new, |burst| format!("burst_bytes = {burst}\n"));
    format!("up_bytes_per_s = {up}\ndown_bytes_per_s = {down}\nlatency_ns = {latency}\n{burst}")
}

/// A basic string of TOML. Control characters, which names of switches may contain and [`parse`] refuses,
/// become question marks.
fn quoted(text: &str) -> String {
    let text = text.replace(char::is_control, "?");
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../../../tests/data/tuning.toml");

    #[test]
    fn what_is_written_can_be_read() {
        let profile = parse("f", EXAMPLE).expect("a profile");
        assert_eq!(profile.date, "2026-11-23T07:30:00Z");
        assert_eq!(profile.cluster.world(), 4);
        assert_eq!(write(&profile), EXAMPLE);
        let mut named = profile.clone();
        named.cluster.nodes[0].host = "a \"b\" \\ \u{e9}".to_owned();
        assert_eq!(parse("f", &write(&named)).expect("a profile"), named);
        named.classes[1].name = "rack\n\u{7f}[[class]]\t1".to_owned();
        let read = parse("f", &write(&named)).expect("a profile");
        assert_eq!(read.classes[1].name, "rack??[[class]]?1");
        let mut nested = profile.clone();
        nested.cluster.switches = "((0 1) 2)".to_owned();
        assert_eq!(parse("f", &write(&nested)).expect("a profile"), nested);
        let uplink = MeasuredUplink { up: 1, down: 2, latency: 3, burst: Some(4) };
        nested.switches = vec![uplink];
        assert_eq!(parse("f", &write(&nested)).expect("a profile"), nested);
        nested.switches = vec![uplink; 2];
        let error = parse("f", &write(&nested)).expect_err("one switch too many");
        assert!(error.message().contains("switch below the root, which is 1, found 2: run"), "{error}");
    }

    #[test]
    fn errors_name_file_line_cause_and_fix() {
        let changed = |from: &str, to: &str| {
            assert!(EXAMPLE.contains(from), "{from}");
            EXAMPLE.replacen(from, to, 1)
        };
        let cases = [
            (
                changed("slots = 128", "slots = nan"),
                "f:7: invalid type: floating point `NaN`, expected a whole number from 2 to",
            ),
            (changed("slots = 128", "slotz = 128"), "f:7: unknown field `slotz`, expected one of `format`, "),
            (
                changed("copy_bytes_per_s = 9000000000", "copy_bytes_per_s = -9"),
                "invalid value: integer `-9`, expected a whole number from 1 to 1000000000000000",
            ),
            (
                changed("latency_ns = 20000", "latency_ns = inf"),
                "invalid type: floating point `inf`, expected a whole number",
            ),
            (
                changed("up_to_bytes = 65536", "up_to_bytes = 0"),
                "expected a whole number from 1 to 1125899906842624",
            ),
            (
                changed("up_to_bytes = 65536", "up_to_bytes = 1152921504606846976"),
                "expected a whole number from 1 to",
            ),
            (changed("up_to_bytes = 65536\n", ""), "only the last choice has no up_to_bytes"),
            (changed("subchunk_bytes = 131072", "subchunk_bytes = 5000"), "expected a multiple of 4096"),
            (changed("\"weighted\"", "\"heavy\""), "\"heavy\" is not an algorithm: expected one of auto, "),
            (changed("\"direct\"", "\"straight\""), "\"straight\" is not a lowering: expected one of auto, "),
            (
                changed("format = 1", "format = 2"),
                "f:2: the format is 2, but this version of flexring reads 1: run",
            ),
            (changed("ranks = [2]", "ranks = [1]"), "f: rank 1 is on two nodes"),
            (changed("ranks = [2]", "ranks = [7]"), "f: rank 2 is on no node"),
            (changed("ranks = [2]", "ranks = []"), "a node has at least one rank"),
            (changed("host = \"b\"", "host = \"d\""), "f:4: the fingerprint "),
            (changed("latency_ns = 20000\n", ""), "belong together: give all three"),
            (
                changed("latency_ns = 20000\n", "latency_ns = 20000\nburst_bytes = -1\n"),
                "expected a whole number from 0 to 1099511627776",
            ),
            (changed("date = 2026", "date = 202"), "f:3: "),
        ];
        for (text, words) in cases {
            let error = parse("f", &text).expect_err(words);
            assert!(error.message().contains(words), "{error} does not contain {words}");
            assert!(error.message().starts_with("f:"), "{error}");
        }
        let long = " ".repeat(LONGEST_FILE + 1);
        assert!(parse("f", &long).expect_err("too long").message().starts_with("f: it is longer than 2M"));
    }
}
