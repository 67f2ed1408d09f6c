//! Parsers for descriptions of a cluster: the short form for the command line, flexring's TOML, and the
//! `topology.conf` of Slurm's tree plugin.
//!
//! Owns the formats and their errors. Pure: text in, [`Topology`] out.
//!
//! | module | owns |
//! |---|---|
//! | `short_form` | `(2+3)@10G+4` |
//! | `toml_format` | the TOML |
//! | `slurm`, `hostlist` | `topology.conf` and its lists of names |
//! | `draft` | switches and nodes before they form a tree |
//! | `graph` | links that form no tree |
//! | `hosts` | which rank is on which node |
//! | `units` | bandwidths and latencies |
//! | `limits` | the largest sizes |
//!
//! In all formats, links without a bandwidth or latency have the defaults
//! [`Uplink::NODE_DEFAULT`](super::topology::Uplink::NODE_DEFAULT) and
//! [`Uplink::RANK_DEFAULT`](super::topology::Uplink::RANK_DEFAULT). The uplink of a switch without a
//! bandwidth has the sum of its children's bandwidths, so that a switch is a bottleneck only if the
//! description says so.

mod draft;
mod graph;
mod hostlist;
mod hosts;
mod limits;
mod short_form;
mod slurm;
mod toml_format;
mod units;

use super::source_file::SourceFile;
use super::topology::Topology;
use draft::Draft;
use flexring_core::error::Result;
use std::sync::Arc;

/// The topology that `text` describes in TOML or as Slurm's `topology.conf`; the content decides which.
/// `name` is the file's name, for errors. `hosts` are the host names of the ranks, by rank, for descriptions
/// that name machines. Without them (outside a job), a description without rank numbers gets one rank on each
/// node.
///
/// # Errors
/// `InvalidSetting`, as `FILE:LINE: what is wrong: what was expected`. The line is left out if no single line
/// is wrong.
pub fn parse(name: &str, text: &str, hosts: Option<&[String]>) -> Result<Topology> {
    let file = SourceFile { name };
    let mut draft = read(file, text)?;
    hosts::assign_ranks(file, &mut draft, hosts)?;
    let fabric = graph::fabric(file, &mut draft)?;
    let topology = draft.finish(file)?;
    Ok(match fabric {
        Some(fabric) => topology.with_fabric(Arc::new(fabric)),
        None => topology,
    })
}

/// Checks what [`parse`] checks, except which ranks are on which nodes: that may depend on host names.
///
/// # Errors
/// As for [`parse`].
pub fn check(name: &str, text: &str) -> Result<()> {
    let file = SourceFile { name };
    read(file, text)?.walk(file).map(drop)
}

fn read(file: SourceFile, text: &str) -> Result<Draft> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if slurm::is_recognized(text) {
        return slurm::read(file, text);
    }
    if slurm::is_of_blocks(text) {
        let message = "this is a file of Slurm's block plugin: expected one of its tree plugin, with lines of SwitchName, or TOML";
        return Err(file.refuse_all(message));
    }
    toml_format::read(file, text)
}

/// The topology that `text` describes in the short form; `None` if it is not meant as one, such as a file's
/// name.
///
/// `2+3` is two nodes at one switch, with ranks 0 and 1 on the first and 2 to 4 on the second. Parentheses
/// make a switch: `(2+3)+(4)`. An `@` sets the bandwidth, in bit/s, of the uplink of the node or switch
/// before it: `(1@500M+1@1G)@10G+4`. `8@4*100G` is a node with four NICs of this bandwidth each, which its
/// ranks divide.
///
/// # Errors
/// `InvalidSetting`, quoting the text and the position of the error.
pub fn parse_short(text: &str) -> Option<Result<Topology>> {
    short_form::is_recognized(text).then(|| short_form::read(text))
}

#[cfg(test)]
mod tests {
    use super::limits::MAX_RANKS;
    use super::*;
    use flexring_core::error::ErrorKind;
    use proptest::prelude::*;

    fn hosts(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_content_decides_the_format() {
        let toml = "[[node]]\nname = \"a\"\n[[node]]\nname = \"b\"\n";
        let slurm = "# comment\r\n  switchname = s0 Nodes=a,b\r\n";
        for text in [toml, slurm, &format!("\u{feff}{toml}"), &format!("\u{feff}{slurm}")] {
            let topology = parse("cluster", text, Some(&hosts(&["b", "a", "b"]))).expect(text);
            assert_eq!(topology.ranks_in_tree_order(), [1, 0, 2], "{text}");
        }
        let mixed = "[[node]]\nname = \"a\"\nranks = [0]\n[[node]]\nname = \"b\"\n";
        assert!(check("cluster", mixed).is_ok() && parse("cluster", mixed, None).is_err());
        assert!(check("cluster", "[[node]]\nname = \"a\"\nup = \"b\"").is_err());
        let error = parse("cluster", "BlockName=b1 Nodes=a,b", None).expect_err("no tree");
        assert!(error.message().starts_with("cluster: this is a file of Slurm's block plugin"), "{error}");
        let error = parse("cluster", "[[node]]\nname = \"a\\u001b[31m\"", None).expect_err("not printable");
        assert!(error.message().starts_with("cluster:2: the name \"a\\u{1b}[31m\" has a control"), "{error}");
        let error = parse("cluster", "SwitchName=a\u{1b} Nodes=b", None).expect_err("not printable");
        assert!(error.message().starts_with("cluster:1: there is a control character"), "{error}");
        let error = parse("cluster", "switches are two", None).expect_err("neither");
        assert!(error.message().starts_with("cluster:1: "), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidSetting);
    }

    #[test]
    fn the_example_file_is_valid() {
        let text = include_str!("../../../../examples/topology.toml");
        let topology = parse("examples/topology.toml", text, None).expect("an example");
        assert_eq!((topology.world(), topology.nodes()), (11, 4));
        assert_eq!(topology.ranks_in_tree_order(), (0..11).collect::<Vec<_>>());
        let short = text.split_once("almost the same topology: ").and_then(|(_, rest)| rest.lines().next());
        let short = parse_short(short.expect("short form in the file")).expect("short form").expect("valid");
        assert_eq!(short.levels().len(), topology.levels().len());
        assert!((0..11).all(|rank| short.node_of(rank) == topology.node_of(rank)));
    }

    #[test]
    fn the_example_of_a_graph_is_valid() {
        let text = include_str!("../../../../examples/torus.toml");
        let topology = parse("examples/torus.toml", text, None).expect("an example");
        assert_eq!((topology.world(), topology.nodes()), (6, 6));
        assert_eq!(topology.fabric().expect("a graph").links().len(), 9);
    }

    #[test]
    fn large_texts_are_rejected_quickly() {
        let deep = "[".repeat(1 << 20);
        let long = "a.".repeat(1 << 20);
        for text in [
            format!("switch = {deep}"),
            format!("{long}a = 1"),
            format!("SwitchName=a Nodes={deep}"),
            format!("SwitchName=a Nodes={long}"),
            format!("SwitchName=a Nodes={}", "[0-999999]".repeat(1 << 16)),
            format!("SwitchName=a Nodes={}", "[0-9],".repeat(1 << 18)),
            "SwitchName=a\n".repeat(1 << 18),
        ] {
            assert!(parse("f", &text, None).is_err());
        }
        let hosts: Vec<String> = (0..MAX_RANKS).rev().map(|rank| format!("n{rank:06}.cluster")).collect();
        let text = "SwitchName=a Nodes=n[000000-499999]\nSwitchName=b Nodes=n[500000-999999]";
        assert_eq!(parse("f", text, Some(&hosts)).expect("a million").nodes(), MAX_RANKS);
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(text in any::<String>(), other in "(?s)[-0-9+@().GMkb ,=\\[\\]#\"\n]{0,40}") {
            let hosts = hosts(&["a", "b"]);
            for text in [&text, &other] {
                let _ = parse_short(text);
                for text in [
                    text.clone(),
                    format!("SwitchName=s Nodes={text}"),
                    format!("SwitchName=s0 Nodes=a[{text}],b\nSwitchName=t Switches=s[{text}]"),
                    format!("[[node]]\nname = \"a\"\nranks = [{text}]\nbandwidth = \"{text}\""),
                ] {
                    let _ = parse("f", &text, Some(&hosts));
                    let _ = parse("f", &text, None);
                }
            }
        }

        #[test]
        fn a_sum_in_short_form_lists_nodes(counts in proptest::collection::vec(1usize..9, 1..30)) {
            let text = counts.iter().map(usize::to_string).collect::<Vec<_>>().join("+");
            let topology = parse_short(&text).expect("short form").expect("valid");
            prop_assert_eq!(topology.world(), counts.iter().sum::<usize>());
            prop_assert_eq!(topology.nodes(), counts.len());
            let nodes = counts.iter().enumerate().flat_map(|(node, count)| vec![node; *count]);
            for (rank, node) in nodes.enumerate() {
                prop_assert_eq!(topology.node_of(rank), node);
            }
        }
    }
}
