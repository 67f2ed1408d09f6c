//! ARCHITECTURE.md names files, folders and functions that exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What the document calls the sources of these crates.
const CRATES: [(&str, &str); 4] = [
    ("core/", "crates/flexring-core/src/"),
    ("plan/", "crates/flexring-plan/src/"),
    ("simulator/", "crates/flexring-simulator/src/"),
    ("ffi/", "crates/flexring-ffi/src/"),
];

/// Where a path in the document may be, in the repository.
fn places(path: &str) -> [PathBuf; 2] {
    let of_crate =
        CRATES.iter().find_map(|(name, folder)| Some(format!("{folder}{}", path.strip_prefix(name)?)));
    [PathBuf::from(of_crate.as_deref().unwrap_or(path)), Path::new("src").join(path)]
}

/// What stands between backticks, in order: paths, and names of functions without a path. Tests are named in
/// other places.
fn spans(text: &str) -> impl Iterator<Item = &str> {
    let is_test = |span: &str| span.contains("::") && !span.starts_with(char::is_uppercase);
    text.split('`').skip(1).step_by(2).filter(move |span| !is_test(span))
}

fn is_path(span: &str) -> bool {
    span.contains('/') && !span.contains([' ', '*', '='])
}

/// The section on the ways.
fn ways(text: &str) -> &str {
    text.split("\n## ").find(|section| section.starts_with("The ways")).expect("the section")
}

/// Whether `source` defines a function or, with an upper-case letter first, a type, or `Type::function`.
fn defines(source: &str, name: &str) -> bool {
    let (owner, name) = name.rsplit_once("::").unwrap_or(("", name));
    let keywords: &[&str] =
        if name.starts_with(char::is_uppercase) { &["struct", "enum", "trait"] } else { &["fn"] };
    let is_end = |rest: &str| rest.starts_with(['(', '<', ' ']);
    let is_there = |keyword: &&str| {
        let definition = format!("{keyword} {name}");
        source.match_indices(&definition).any(|(at, _)| is_end(&source[at + definition.len()..]))
    };
    keywords.iter().any(is_there) && source.contains(owner)
}

/// The functions of the section that are not in the file before them, and the files that do not exist.
fn missing(section: &str, read: impl Fn(&Path) -> Option<String>) -> Vec<String> {
    let (mut file, mut source, mut missing) = ("", String::new(), Vec::new());
    // What stands before the first step says how to read the steps.
    let steps = section.split_once("\n### ").map_or("", |(_, steps)| steps);
    for span in spans(steps) {
        if is_path(span) {
            file = span;
            source = places(file).iter().find_map(|place| read(place)).unwrap_or_else(|| {
                missing.push(file.to_owned());
                String::new()
            });
        } else if !defines(&source, span) {
            missing.push(format!("{file}: {span}"));
        }
    }
    missing
}

fn document() -> String {
    std::fs::read_to_string(crate::programs::root().join("ARCHITECTURE.md")).expect("it can be read")
}

#[test]
fn the_names_exist() {
    let (root, text) = (crate::programs::root(), document());
    assert!(spans(ways(&text)).count() > 100, "the section is shorter than it was");
    let read = |file: &Path| std::fs::read_to_string(root.join(file)).ok();
    assert_eq!(missing(ways(&text), read), Vec::<String>::new());
    let is_absent = |span: &&str| !places(span).iter().any(|place| root.join(place).exists());
    assert_eq!(spans(&text).filter(|span| is_path(span)).filter(is_absent).collect::<Vec<_>>(), [""; 0]);
}

/// The files of a text in which functions are named, and how many functions these are.
fn named(text: &str) -> (BTreeSet<&str>, usize) {
    let (files, functions): (Vec<_>, Vec<_>) = spans(text).partition(|span| is_path(span));
    (files.into_iter().collect(), functions.len())
}

#[test]
fn the_ways_of_a_call_are_short() {
    let text = document();
    let way =
        |title: &str| text.split("\n### ").find(|way| way.starts_with(title)).expect("a way with this title");
    let long = way("An all-reduce of 1 MiB over TCP");
    let (files, functions) = named(long);
    println!("1 MiB over TCP: {} files, {functions} functions", files.len());
    assert!(files.len() <= 30 && functions <= 60, "{files:?}");
    // Step 5, and those from 8 on, are those of programs.
    let shared = (1..8).filter(|step| *step != 5).map(|step| {
        let after = long.split(&format!("\n{step}. ")).nth(1).expect("a step with this number");
        after.split(&format!("\n{}. ", step + 1)).next().unwrap_or_default()
    });
    let files: BTreeSet<&str> =
        shared.chain([way("8 bytes over shared memory")]).flat_map(|step| named(step).0).collect();
    println!("8 bytes over shared memory: {} files", files.len());
    assert!(files.len() <= 15, "{files:?}");
}

#[test]
fn names_that_do_not_exist_are_found() {
    let section = "The ways: `x`\n### A\n1. `a/b.rs`: `there`, `absent`, *`x::y`*, `A::there`, `B::there`\n2. `a/c.rs`: `A`";
    let read = |file: &Path| (file == Path::new("a/b.rs")).then(|| "impl A { fn there() {} }".to_owned());
    assert_eq!(missing(section, read), ["a/b.rs: absent", "a/b.rs: B::there", "a/c.rs", "a/c.rs: A"]);
    assert_eq!(places("plan/a.rs")[0], Path::new("crates/flexring-plan/src/a.rs"));
}
