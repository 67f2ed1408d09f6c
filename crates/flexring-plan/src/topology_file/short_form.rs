//! The short form: `2+3`, `(2@1G+3)@10G+4`, `4x8x4`.
//!
//! Owns its grammar.
//!
//! ```text
//! text    = sum | product
//! sum     = part { "+" part }
//! part    = count [ "@" nics ] | "(" sum ")" [ "@" bandwidth ]
//! product = count [ "@" nics ] "x" factor { "x" factor }
//! factor  = count [ "@" bandwidth ]
//! nics    = [ count "*" ] bandwidth
//! ```
//!
//! The product `4x8x4` is a symmetric tree: 4 ranks on a node, 8 nodes at a switch, 4 switches at the root.
//! The bandwidth after a factor is that of the uplink of each node or switch that has this many branches.
//! `8@4*100G` is a node with four NICs, which its ranks divide.

use super::super::topology::{Nics, Topology};
use super::draft::{Draft, DraftId, DraftKind, DraftVertex};
use super::limits::{MAX_DEPTH, MAX_NICS, MAX_RANKS};
use super::units;
use crate::source_file::SourceFile;
use flexring_core::error::{Error, Result};

/// Whether `text` is meant as the short form, even if it is malformed. Names of files contain a directory or
/// an extension, or start with another character.
pub(super) fn is_recognized(text: &str) -> bool {
    let text = text.trim();
    let ending = text.rsplit_once('.').map_or("", |(_, ending)| ending);
    let is_ending = ending.len() > 2 && ending.bytes().all(|byte| byte.is_ascii_lowercase());
    text.starts_with(|c: char| c.is_ascii_digit() || "()+@".contains(c))
        && !text.contains(['/', '\\'])
        && (!is_ending || ending.ends_with("bit"))
}

/// Parses the short form.
pub(super) fn read(text: &str) -> Result<Topology> {
    let mut parser = Parser { text, at: 0, draft: Draft::default(), open: Vec::new(), world: 0, nodes: 0 };
    let is_product = text.contains(['x', 'X']) && !text.contains(['+', '(', ')']);
    match if is_product { parser.product() } else { parser.sum() } {
        // The grammar allows trees only, so this cannot fail and the name is never shown.
        Ok(()) => parser.draft.finish(SourceFile { name: text }),
        Err(message) => {
            let place = text[..parser.at].chars().count() + 1;
            let message = format!("the topology {}, at character {place}: {message}", quoted(text));
            Err(Error::invalid_setting(message))
        }
    }
}

/// The text in quotes, cut after 60 characters.
fn quoted(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}...", &text[..end]),
        None => format!("{text:?}"),
    }
}

struct Parser<'a> {
    text: &'a str,
    /// Byte offset of the next character; after an error, of its position.
    at: usize,
    draft: Draft,
    /// The switches that are open at `at`, the innermost last, each with the offset of its parenthesis.
    open: Vec<(DraftId, usize)>,
    world: usize,
    nodes: usize,
}

impl Parser<'_> {
    /// Parses the whole text. Not recursive, so deep nesting cannot overflow the stack.
    fn sum(&mut self) -> std::result::Result<(), String> {
        let top = self.draft.add(DraftVertex::switch("switch", 0));
        self.open.push((top, 0));
        loop {
            if self.peek() == Some('(') {
                self.open_switch()?;
                continue;
            }
            self.node()?;
            while self.peek() == Some(')') {
                self.close_switch()?;
            }
            match self.peek() {
                Some('+') => self.at += 1,
                None if self.open.len() == 1 => return Ok(()),
                None => {
                    self.at = self.open[self.open.len() - 1].1;
                    return Err("expected a ) for this (".to_owned());
                }
                _ => return Err(self.expected(if self.open.len() > 1 { "+, @ or )" } else { "+ or @" })),
            }
        }
    }

    /// Parses a product, and adds its tree from the root down.
    fn product(&mut self) -> std::result::Result<(), String> {
        let mut factors = Vec::new();
        loop {
            let count = self.count()?;
            self.world = self.world.max(1) * count;
            factors.push((count, self.optional_bandwidth(factors.is_empty())?));
            match self.peek() {
                Some('x' | 'X') => self.at += 1,
                None if factors.last().is_some_and(|(_, bandwidth)| bandwidth.is_some()) => {
                    return Err(
                        "expected no bandwidth after the last number: the root has no uplink".to_owned()
                    );
                }
                None => break,
                _ => return Err(self.expected("x or @")),
            }
            if factors.len() > MAX_DEPTH {
                return Err(format!("expected at most {MAX_DEPTH} nested switches"));
            }
        }
        let widths = factors[1..].iter().rev().scan(1, |width, (count, _)| {
            *width *= count;
            Some(*width)
        });
        if widths.sum::<usize>() > 2 * MAX_RANKS {
            return Err(format!("expected at most {} nodes and switches", 2 * MAX_RANKS));
        }
        let top = self.draft.add(DraftVertex::switch("switch", 0));
        let (mut parents, mut first_rank) = (vec![top], 0);
        for level in (0..factors.len() - 1).rev() {
            let (branches, (count, bandwidth)) = (factors[level + 1].0, factors[level]);
            let mut below = Vec::with_capacity(parents.len() * branches);
            for parent in parents {
                for _ in 0..branches {
                    let vertex = if level == 0 {
                        let ranks = (first_rank..first_rank + count).map(|rank| (rank, 0)).collect();
                        first_rank += count;
                        self.nodes += 1;
                        DraftVertex::node(&format!("node {}", self.nodes - 1), 0, Some(ranks))
                    } else {
                        DraftVertex::switch(&format!("switch {}", self.draft.vertices.len()), 0)
                    };
                    let id = self.draft.add(vertex);
                    self.set_uplink(id, bandwidth);
                    self.draft.attach(id, parent);
                    below.push(id);
                }
            }
            parents = below;
        }
        Ok(())
    }

    fn open_switch(&mut self) -> std::result::Result<(), String> {
        if self.open.len() > MAX_DEPTH {
            return Err(format!("expected at most {MAX_DEPTH} nested switches"));
        }
        let name = format!("switch {}", self.draft.vertices.len() - self.nodes);
        let id = self.draft.add(DraftVertex::switch(&name, 0));
        self.draft.attach(id, self.innermost());
        self.open.push((id, self.at));
        self.at += 1;
        Ok(())
    }

    fn close_switch(&mut self) -> std::result::Result<(), String> {
        if self.open.len() == 1 {
            return Err("there is no ( for this )".to_owned());
        }
        let id = self.innermost();
        self.open.pop();
        self.at += 1;
        self.bandwidth(id)
    }

    fn node(&mut self) -> std::result::Result<(), String> {
        let (count, digits) = self.number("a number of ranks or (")?;
        if count == 0 {
            return Err("expected at least one rank on a node".to_owned());
        }
        if count > MAX_RANKS - self.world {
            return Err(format!("expected at most {MAX_RANKS} ranks in all"));
        }
        let ranks = (self.world..self.world + count).map(|rank| (rank, 0)).collect();
        let id = self.draft.add(DraftVertex::node(&format!("node {}", self.nodes), 0, Some(ranks)));
        self.draft.attach(id, self.innermost());
        self.world += count;
        self.nodes += 1;
        self.at += digits;
        self.bandwidth(id)
    }

    /// Parses a factor's count. The product of all is limited.
    fn count(&mut self) -> std::result::Result<usize, String> {
        let (count, digits) = self.number("a number")?;
        if count == 0 {
            return Err("expected a number from 1".to_owned());
        }
        if count > MAX_RANKS / self.world.max(1) {
            return Err(format!("expected at most {MAX_RANKS} ranks in all"));
        }
        self.at += digits;
        Ok(count)
    }

    /// The number at the next character and its length. One that does not fit an integer exceeds every limit.
    fn number(&mut self, what: &str) -> std::result::Result<(usize, usize), String> {
        self.peek();
        let rest = &self.text[self.at..];
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        if digits == 0 {
            return Err(self.expected(what));
        }
        Ok((rest[..digits].parse().unwrap_or(usize::MAX), digits))
    }

    /// Parses the bandwidth of an uplink, if there is one.
    fn bandwidth(&mut self, id: DraftId) -> std::result::Result<(), String> {
        let is_node = matches!(self.draft.vertices[id].kind, DraftKind::Node { .. });
        let uplink = self.optional_bandwidth(is_node)?;
        self.set_uplink(id, uplink);
        Ok(())
    }

    /// Sets the number of NICs and the bandwidth of each, if they are given.
    fn set_uplink(&mut self, id: DraftId, uplink: Option<(u32, u64)>) {
        let vertex = &mut self.draft.vertices[id];
        vertex.bandwidth = uplink.map(|(_, bandwidth)| bandwidth);
        vertex.nics = Nics { count: uplink.map_or(1, |(count, _)| count), striped: false };
    }

    /// Parses the bandwidth of an uplink, and the number of NICs with this bandwidth if the uplink is that of
    /// a node.
    fn optional_bandwidth(&mut self, is_node: bool) -> std::result::Result<Option<(u32, u64)>, String> {
        if self.peek() != Some('@') {
            return Ok(None);
        }
        self.at += 1;
        self.peek();
        let rest = &self.text[self.at..];
        let end = rest.find(['+', '@', '(', ')', 'x', 'X']).unwrap_or(rest.len());
        let (count, each) = match rest[..end].split_once('*') {
            None => (1, &rest[..end]),
            Some(_) if !is_node => {
                return Err("expected a bandwidth without *: only nodes have several NICs".to_owned());
            }
            Some((count, each)) => {
                let valid = count.trim().parse().ok().filter(|count| (1..=MAX_NICS).contains(count));
                let expected =
                    || format!("{:?} is not a number of NICs: expected 1 to {MAX_NICS}", count.trim());
                (valid.ok_or_else(expected)?, each)
            }
        };
        let bandwidth = units::bandwidth(each.trim())?;
        self.at += end;
        Ok(Some((count, bandwidth)))
    }

    fn innermost(&self) -> DraftId {
        self.open[self.open.len() - 1].0
    }

    /// Skips spaces and returns the next character.
    fn peek(&mut self) -> Option<char> {
        self.at = self.text.len() - self.text[self.at..].trim_start().len();
        self.text[self.at..].chars().next()
    }

    fn expected(&mut self, what: &str) -> String {
        match self.peek() {
            Some(c) => format!("expected {what}, found {c:?}"),
            None => format!("expected {what}, found the end"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::topology::{Uplink, VertexKind};
    use super::super::parse_short;
    use super::*;
    use flexring_core::error::ErrorKind;

    fn right(text: &str) -> Topology {
        parse_short(text).expect("short form").unwrap_or_else(|error| panic!("{error}"))
    }

    /// Name, parent and bandwidth of each node and each switch but the root.
    fn links(topology: &Topology) -> Vec<(&str, &str, u64)> {
        let vertices = topology.vertices();
        let inner = vertices.iter().filter(|vertex| !matches!(vertex.kind, VertexKind::Rank(_)));
        inner
            .filter_map(|vertex| {
                Some((vertex.name.as_str(), vertices[vertex.parent?].name.as_str(), vertex.uplink.bandwidth))
            })
            .collect()
    }

    const G: u64 = 1_000_000_000;

    #[test]
    fn a_sum_lists_nodes_at_one_switch() {
        let topology = right("2+3");
        assert_eq!((topology.world(), topology.nodes()), (5, 2));
        assert_eq!((0..5).map(|rank| topology.node_of(rank)).collect::<Vec<_>>(), [0, 0, 1, 1, 1]);
        let width = Uplink::NODE_DEFAULT.bandwidth;
        assert_eq!(links(&topology), [("node 0", "switch", width), ("node 1", "switch", width)]);
        assert_eq!(topology.vertices()[topology.leaf(4)].uplink, Uplink::RANK_DEFAULT);
        assert_eq!((right("8").world(), right("8").nodes()), (8, 1));
        assert_eq!(right("1000000").world(), MAX_RANKS);
    }

    #[test]
    fn a_bandwidth_belongs_to_the_uplink() {
        let topology = right("1@1G + 1@1gbit+ 1 @ 500M ");
        let widths: Vec<u64> = links(&topology).iter().map(|link| link.2).collect();
        assert_eq!(widths, [G, G, G / 2]);
    }

    #[test]
    fn parentheses_make_switches() {
        let topology = right("(2+3)@10G+(4)");
        let width = Uplink::NODE_DEFAULT.bandwidth;
        assert_eq!(
            links(&topology),
            [
                ("switch 1", "switch", 10 * G),
                ("switch 2", "switch", width),
                ("node 0", "switch 1", width),
                ("node 1", "switch 1", width),
                ("node 2", "switch 2", width),
            ]
        );
        let topology = right("1@2G+((2@1G+3)+4@3G)+5");
        assert_eq!(topology.ranks_in_tree_order(), (0..15).collect::<Vec<_>>());
        assert_eq!(topology.node_of(14), 4);
        let link_of = |name: &str| *links(&topology).iter().find(|link| link.0 == name).expect("there");
        assert_eq!(link_of("switch 2"), ("switch 2", "switch 1", 11 * G));
        assert_eq!(link_of("switch 1"), ("switch 1", "switch", 14 * G));
        assert_eq!(right("((2)+(2))+((2)+(2))").dimensions().expect("symmetric"), [2, 2, 2]);
    }

    #[test]
    fn a_product_is_a_symmetric_tree() {
        let topology = right("4x8x2");
        assert_eq!((topology.world(), topology.nodes()), (64, 16));
        assert_eq!(topology.dimensions().expect("symmetric"), [4, 8, 2]);
        assert_eq!(topology.ranks_in_tree_order(), (0..64).collect::<Vec<_>>());
        let topology = right("1@1G x 2@3G x 2");
        let widths: Vec<u64> = links(&topology).iter().map(|link| link.2).collect();
        assert_eq!(widths, [3 * G, 3 * G, G, G, G, G]);
        assert_eq!(right("1x1000000").nodes(), MAX_RANKS);
        assert!(read(&format!("1{}", "x1".repeat(MAX_DEPTH + 1))).is_err());
    }

    #[test]
    fn a_node_may_have_several_nics() {
        let topology = right("2@4*100G + (3@2*10G)@40G");
        let widths: Vec<u64> = links(&topology).iter().map(|link| link.2).collect();
        assert_eq!(widths, [400 * G, 40 * G, 20 * G]);
        let nodes = topology.node_vertices();
        assert_eq!(nodes.iter().map(|node| topology.uplink_parts(*node)).collect::<Vec<_>>(), [2, 2]);
        assert_eq!(topology.part_bandwidth(nodes[0], 1), 200 * G);
        // A switch without a bandwidth has that of all NICs below it.
        assert_eq!(links(&right("8@8*50G x 4 x 2"))[0].2, 1600 * G);
    }

    #[test]
    fn nesting_is_limited() {
        let nested = |depth: usize| format!("{}1{}", "(".repeat(depth), ")".repeat(depth));
        assert_eq!(right(&nested(MAX_DEPTH)).world(), 1);
        let error = read(&nested(MAX_DEPTH + 1)).expect_err("too deep");
        let quote = "(".repeat(60);
        assert_eq!(
            error.message(),
            format!("the topology {quote:?}..., at character 65: expected at most 64 nested switches")
        );
        assert!(read(&"(".repeat(1 << 20)).is_err());
    }

    #[test]
    fn names_of_files_are_not_the_short_form() {
        for text in
            ["", " ", "cluster.toml", "/etc/2+3", "./8", "2+3.toml", "8nodes.conf", "auto", "-1", "x2+3"]
        {
            assert!(parse_short(text).is_none(), "{text}");
        }
    }

    #[test]
    fn errors_quote_the_text_and_name_the_position() {
        for (text, at, message) in [
            ("2+x", 3, "expected a number of ranks or (, found 'x'"),
            ("2+", 3, "expected a number of ranks or (, found the end"),
            ("+2", 1, "expected a number of ranks or (, found '+'"),
            ("()", 2, "expected a number of ranks or (, found ')'"),
            ("2+-3", 3, "expected a number of ranks or (, found '-'"),
            ("2 3", 3, "expected + or @, found '3'"),
            ("2(3)", 2, "expected + or @, found '('"),
            ("(2x)", 3, "expected +, @ or ), found 'x'"),
            ("1+(2+(3)", 3, "expected a ) for this ("),
            ("2+3)", 4, "there is no ( for this )"),
            ("2+0", 3, "expected at least one rank on a node"),
            ("1+1000000", 3, "expected at most 1000000 ranks in all"),
            ("99999999999999999999999", 1, "expected at most 1000000 ranks in all"),
            ("1@+1", 3, "\"\" is not a bandwidth: expected bit/s such as 500M, 1G or 2.5G"),
            ("1@1G@2G", 5, "expected + or @, found '@'"),
            ("2x", 3, "expected a number, found the end"),
            ("2xx3", 3, "expected a number, found 'x'"),
            ("2x0", 3, "expected a number from 1"),
            ("2x3y", 4, "expected x or @, found 'y'"),
            ("1000x1001", 6, "expected at most 1000000 ranks in all"),
            ("2x3@1G", 7, "expected no bandwidth after the last number: the root has no uplink"),
            ("2@1Gx3@fast", 8, "\"fast\" is not a bandwidth: expected bit/s such as 500M, 1G or 2.5G"),
            ("1@ 10GB+1", 4, "\"10GB\" is not a bandwidth: expected bit/s such as 500M, 1G or 2.5G"),
            ("1@0*1G", 3, "\"0\" is not a number of NICs: expected 1 to 64"),
            ("1@2*", 3, "\"\" is not a bandwidth: expected bit/s such as 500M, 1G or 2.5G"),
            ("(1)@2*1G", 5, "expected a bandwidth without *: only nodes have several NICs"),
            ("2x3@2*1Gx4", 5, "expected a bandwidth without *: only nodes have several NICs"),
            ("(1)@0", 5, "\"0\" is too low: expected at least 1 bit/s"),
            ("(1)@9999T+1", 5, "\"9999T\" is too high: expected at most 1000T"),
            ("2+é", 3, "expected a number of ranks or (, found 'é'"),
            ("2\u{2003}+\u{2003}é", 5, "expected a number of ranks or (, found 'é'"),
        ] {
            let error = parse_short(text).expect("short form").expect_err(text);
            assert_eq!(error.kind(), ErrorKind::InvalidSetting);
            assert_eq!(error.message(), format!("the topology {text:?}, at character {at}: {message}"));
        }
    }
}
