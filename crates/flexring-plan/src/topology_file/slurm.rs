//! The format of Slurm's `topology.conf`, as its tree plugin reads it.
//!
//! Owns the format. Must not know ranks: the file has names of nodes, which host names are matched with.
//!
//! `LinkSpeed`, whose unit Slurm leaves open, is the bandwidth of a switch's uplink in Gbit/s. Several trees
//! are joined at one more switch, because all ranks of a world must reach each other.

use super::draft::{Draft, DraftId, DraftVertex};
use super::limits::MAX_RANKS;
use super::{hostlist, units};
use crate::source_file::SourceFile;
use flexring_core::error::Result;
use std::collections::HashMap;

/// Whether `text` is this format and not TOML: a line sets `SwitchName`.
pub(super) fn is_recognized(text: &str) -> bool {
    sets(text, "SwitchName")
}

/// Whether `text` is a file of Slurm's block plugin, which has no switches.
pub(super) fn is_of_blocks(text: &str) -> bool {
    sets(text, "BlockName")
}

/// Whether a line begins with `wanted` and an equals sign.
fn sets(text: &str, wanted: &str) -> bool {
    text.lines().any(|line| {
        let line = line.trim_start();
        let rest = line.get(..wanted.len()).filter(|key| key.eq_ignore_ascii_case(wanted));
        rest.is_some_and(|key| line[key.len()..].trim_start().starts_with('='))
    })
}

/// A line: a switch and the names of its children.
struct Line<'a> {
    number: usize,
    name: &'a str,
    nodes: Vec<String>,
    switches: Vec<String>,
    bandwidth: Option<u64>,
}

/// Parses the file.
pub(super) fn read(file: SourceFile, text: &str) -> Result<Draft> {
    let mut budget = MAX_RANKS;
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or(line).trim();
        // Errors print parts of the line.
        if line.contains(|character: char| character.is_control() && !character.is_whitespace()) {
            return Err(file.refuse(number, "there is a control character: expected a line without any"));
        }
        if !line.is_empty() {
            lines
                .push(Line::read(number, line, &mut budget).map_err(|message| file.refuse(number, message))?);
        }
    }
    let mut draft = Draft::default();
    let mut switches: HashMap<&str, DraftId> = HashMap::new();
    let mut nodes: HashMap<&str, usize> = HashMap::new();
    for line in &lines {
        let mut switch = DraftVertex::switch(line.name, line.number);
        switch.bandwidth = line.bandwidth;
        let id = draft.add(switch);
        if let Some(other) = switches.insert(line.name, id) {
            let message =
                format!("switch {} was in line {}: expected it once", line.name, draft.vertices[other].line);
            return Err(file.refuse(line.number, message));
        }
        for name in &line.nodes {
            if let Some(other) = nodes.insert(name, line.number) {
                let message = format!("node {name} is in line {other} already: expected it at one switch");
                return Err(file.refuse(line.number, message));
            }
            let node = draft.add(DraftVertex::node(name, line.number, None));
            draft.attach(node, id);
        }
    }
    if nodes.is_empty() {
        return Err(file.refuse_all("there are no nodes: expected Nodes= in some line"));
    }
    for line in &lines {
        for name in &line.switches {
            let id = *switches.get(name.as_str()).ok_or_else(|| {
                file.refuse(
                    line.number,
                    format!("there is no switch {name}: expected SwitchName={name} in some line"),
                )
            })?;
            if let Some(other) = draft.parent(id) {
                let other = &draft.vertices[other].name;
                let message =
                    format!("switch {name} is below {other} and below {}: expected a tree", line.name);
                return Err(file.refuse(line.number, message));
            }
            draft.attach(id, switches[line.name]);
        }
    }
    let tops: Vec<DraftId> = draft.roots().collect();
    if tops.len() > 1 {
        let joint = draft.add(DraftVertex::switch("switch", 0));
        for top in tops {
            draft.attach(top, joint);
        }
    }
    Ok(draft)
}

impl<'a> Line<'a> {
    fn read(number: usize, text: &'a str, budget: &mut usize) -> std::result::Result<Self, String> {
        let mut name = None;
        let mut line = Self { number, name: "", nodes: Vec::new(), switches: Vec::new(), bandwidth: None };
        let mut seen = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let (key, value, rest_of_line) = setting(rest)?;
            rest = rest_of_line;
            match key.to_ascii_lowercase().as_str() {
                "switchname" => name = Some(value),
                "nodes" => line.nodes = hostlist::expand(value, budget)?,
                "switches" => line.switches = hostlist::expand(value, budget)?,
                "linkspeed" => line.bandwidth = Some(speed(value)?),
                _ => {
                    let known = "SwitchName, Switches, Nodes or LinkSpeed, of Slurm's tree plugin";
                    return Err(format!("{key:?} is unknown: expected {known}"));
                }
            }
            if seen.iter().any(|other: &&str| other.eq_ignore_ascii_case(key)) {
                return Err(format!("{key:?} is given twice: expected it once in a line"));
            }
            seen.push(key);
        }
        line.name = name.ok_or("the switch has no name: expected SwitchName= in every line")?;
        if line.name.contains(['[', ']', ',']) {
            return Err(format!("{:?} is a list: expected the name of one switch", line.name));
        }
        if !line.nodes.is_empty() && !line.switches.is_empty() {
            return Err(format!("{} has Nodes and Switches: expected one of them", line.name));
        }
        Ok(line)
    }
}

/// The first key, its value and the rest of the line. Neither `text` nor the rest starts with a space.
fn setting(text: &str) -> std::result::Result<(&str, &str, &str), String> {
    let word = |text: &str| text.find(|c: char| c.is_whitespace() || c == '=').unwrap_or(text.len());
    let (key, rest) = text.split_at(word(text));
    let value = rest.trim_start().strip_prefix('=').map(str::trim_start);
    let value = value.filter(|_| !key.is_empty()).ok_or_else(|| {
        let found = text.split_whitespace().next().unwrap_or(text);
        format!("expected KEY=VALUE, found {found:?}")
    })?;
    let (value, rest_of_line) = match value.strip_prefix('"') {
        Some(inner) => {
            inner.split_once('"').ok_or_else(|| format!("the value of {key} has no closing quote"))?
        }
        None => value.split_at(value.find(char::is_whitespace).unwrap_or(value.len())),
    };
    match value.is_empty() {
        true => Err(format!("{key} is empty: expected {key}=VALUE")),
        false => Ok((key, value, rest_of_line.trim_start())),
    }
}

fn speed(text: &str) -> std::result::Result<u64, String> {
    const GBIT: u64 = 1_000_000_000;
    let speed =
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().unwrap_or(u64::MAX));
    let speed = speed.ok_or_else(|| format!("LinkSpeed={text}: expected a whole number of Gbit/s"))?;
    units::within(speed.saturating_mul(GBIT)).map_err(|message| format!("LinkSpeed={text} is {message}"))
}

#[cfg(test)]
mod tests {
    use super::super::super::topology::{Topology, Uplink};
    use super::super::parse;

    fn read(text: &str, hosts: Option<&[&str]>) -> std::result::Result<Topology, String> {
        let hosts: Option<Vec<String>> =
            hosts.map(|hosts| hosts.iter().map(|host| (*host).to_owned()).collect());
        parse("topology.conf", text, hosts.as_deref()).map_err(|error| error.message().to_owned())
    }

    const TREE: &str = "\
        # Slurm's example, with more to it
        SwitchName=s0 Nodes=dev[0-5,8] LinkSpeed=100   # to the right\n\
        switchname = s1   NODES=\"dev[09-10]\"\r\n\
        \n\
        SWITCHNAME=s2 Switches=s[0-1] LinkSpeed=7\n";

    #[test]
    fn without_hosts_each_node_has_one_rank() {
        let topology = read(TREE, None).expect("a tree");
        assert_eq!((topology.world(), topology.nodes()), (9, 9));
        let vertices = topology.vertices();
        let names: Vec<&str> = vertices
            .iter()
            .map(|vertex| vertex.name.as_str())
            .filter(|name| !name.starts_with("rank"))
            .collect();
        assert_eq!(
            names,
            ["s2", "s0", "s1", "dev0", "dev1", "dev2", "dev3", "dev4", "dev5", "dev8", "dev09", "dev10"]
        );
        assert_eq!(vertices[1].uplink.bandwidth, 100_000_000_000);
        assert_eq!(vertices[2].uplink.bandwidth, 2 * Uplink::NODE_DEFAULT.bandwidth);
        assert_eq!(vertices[3].uplink, Uplink::NODE_DEFAULT);
        assert_eq!(topology.ranks_in_tree_order(), (0..9).collect::<Vec<_>>());
    }

    #[test]
    fn nodes_without_ranks_are_removed() {
        let hosts = ["dev10.cluster", "dev0", "dev10.cluster", "dev5"];
        let topology = read(TREE, Some(&hosts)).expect("a tree");
        assert_eq!((topology.world(), topology.nodes()), (4, 3));
        assert_eq!(topology.ranks_in_tree_order(), [1, 3, 0, 2]);
        assert_eq!(
            read(TREE, Some(&["dev0", "dev7"])),
            Err("topology.conf: rank 1 is on dev7, but no node has that name: the nodes are dev0 to dev10"
                .to_owned())
        );
    }

    #[test]
    fn several_trees_are_joined_and_children_keep_their_order() {
        let topology =
            read("SwitchName=b Nodes=n1\nSwitchName=a Nodes=n0 LinkSpeed=1", None).expect("two trees");
        let names: Vec<&str> = topology.vertices().iter().map(|vertex| vertex.name.as_str()).collect();
        assert_eq!(names, ["switch", "b", "a", "n1", "rank 0", "n0", "rank 1"]);
        assert_eq!(topology.vertices()[2].uplink.bandwidth, 1_000_000_000);
        let text = "SwitchName=top Switches=b,a\nSwitchName=a Nodes=n0\nSwitchName=b Nodes=n1";
        assert_eq!(read(text, Some(&["n0", "n1"])).expect("a tree").ranks_in_tree_order(), [1, 0]);
    }

    #[test]
    fn errors_name_the_line() {
        let names = "expected SwitchName, Switches, Nodes or LinkSpeed, of Slurm's tree plugin";
        for (text, line, message) in [
            ("Nodes=b", ":2", "the switch has no name: expected SwitchName= in every line"),
            ("\nSwitchName=a Nodes=b", ":3", "switch a was in line 1: expected it once"),
            ("SwitchName=b Nodes=n[3-5]", ":2", "node n3 is in line 1 already: expected it at one switch"),
            ("SwitchName=b Nodes=x,x", ":2", "node x is in line 2 already: expected it at one switch"),
            ("SwitchName=b Switches=c", ":2", "there is no switch c: expected SwitchName=c in some line"),
            (
                "SwitchName=b Switches=a\nSwitchName=c Switches=a",
                ":3",
                "switch a is below b and below c: expected a tree",
            ),
            ("SwitchName=b Switches=a,a", ":2", "switch a is below b and below b: expected a tree"),
            (
                "SwitchName=b Switches=c\nSwitchName=c Switches=b",
                ":2",
                "switches form a cycle: b below c below b; expected a tree",
            ),
            ("SwitchName=b Switches=b", ":2", "switches form a cycle: b below b; expected a tree"),
            ("SwitchName=b Switches=a Nodes=x", ":2", "b has Nodes and Switches: expected one of them"),
            ("SwitchName=b[0-1] Nodes=x", ":2", "\"b[0-1]\" is a list: expected the name of one switch"),
            ("BlockName=b Nodes=x", ":2", &format!("\"BlockName\" is unknown: {names}")),
            ("SwitchName=b Nodes=x nodes=y", ":2", "\"nodes\" is given twice: expected it once in a line"),
            ("SwitchName=b Nodes=x, y", ":2", "\"x,\" has an empty name: expected names between commas"),
            ("SwitchName=b Nodes=x y", ":2", "expected KEY=VALUE, found \"y\""),
            ("SwitchName=b =x", ":2", "expected KEY=VALUE, found \"=x\""),
            ("SwitchName=b Nodes=", ":2", "Nodes is empty: expected Nodes=VALUE"),
            ("SwitchName=b Nodes=\"x", ":2", "the value of Nodes has no closing quote"),
            ("SwitchName=b Nodes=x[", ":2", "\"x[\" has no closing ]: expected pairs of [ and ]"),
            (
                "SwitchName=b Nodes=x[1-999999]",
                ":2",
                "\"x[1-999999]\" is too many names: expected at most 1000000 in the file",
            ),
            ("SwitchName=b LinkSpeed=1G", ":2", "LinkSpeed=1G: expected a whole number of Gbit/s"),
            ("SwitchName=b LinkSpeed=0", ":2", "LinkSpeed=0 is too low: expected at least 1 bit/s"),
            (
                "SwitchName=b LinkSpeed=99999999999999999999999",
                ":2",
                "LinkSpeed=99999999999999999999999 is too high: expected at most 1000T",
            ),
        ] {
            let text = format!("SwitchName=a Nodes=n[1-3]\n{text}");
            assert_eq!(read(&text, None), Err(format!("topology.conf{line}: {message}")));
        }
        assert_eq!(
            read("SwitchName=a", None),
            Err("topology.conf: there are no nodes: expected Nodes= in some line".to_owned())
        );
    }
}
