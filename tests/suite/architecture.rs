//! ARCHITECTURE.md's ways through the code name files and functions that exist.

use std::collections::BTreeSet;
use std::path::Path;

/// What stands between backticks in the section, in order.
fn spans(text: &str) -> Vec<&str> {
    let section = text.split("\n## ").find(|section| section.starts_with("The ways")).expect("the section");
    section.split('`').skip(1).step_by(2).collect()
}

/// The functions of the section that are not in the file before them, and the files that do not exist.
fn missing(text: &str, read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let (mut file, mut source, mut missing) = ("", String::new(), Vec::new());
    for span in spans(text).into_iter().filter(|span| !span.contains("::")) {
        if span.contains('/') {
            file = span;
            source = read(file).unwrap_or_else(|| {
                missing.push(file.to_owned());
                String::new()
            });
            continue;
        }
        let definition = format!("fn {span}");
        let is_end = |rest: &str| rest.starts_with(['(', '<']);
        let is_there =
            source.match_indices(&definition).any(|(at, _)| is_end(&source[at + definition.len()..]));
        if !is_there {
            missing.push(format!("{file}: {span}"));
        }
    }
    missing
}

#[test]
fn the_ways_name_functions_that_exist() {
    let root = crate::programs::root();
    let read = |file: &str| std::fs::read_to_string(root.join(file)).ok();
    let text = read("ARCHITECTURE.md").expect("ARCHITECTURE.md can be read");
    assert!(spans(&text).len() > 50, "the section is shorter than it was");
    assert_eq!(missing(&text, read), Vec::<String>::new());
}

/// The files of a text in which functions are named, and how many functions these are.
fn named(text: &str) -> (BTreeSet<&str>, usize) {
    let spans = text.split('`').skip(1).step_by(2).filter(|span| !span.contains("::"));
    let (files, functions): (Vec<_>, Vec<_>) = spans.partition(|span| span.contains('/'));
    (files.into_iter().collect(), functions.len())
}

#[test]
fn the_ways_of_a_call_are_short() {
    let text =
        std::fs::read_to_string(crate::programs::root().join("ARCHITECTURE.md")).expect("it can be read");
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
    let text =
        "\n## The ways\n1. `a/b.rs`: `there`, `absent`, *`x::y`*\n2. `a/c.rs`: `there`\n## Next\n`other`";
    let read = |file: &str| (Path::new(file) == Path::new("a/b.rs")).then(|| "fn there() {}".to_owned());
    assert_eq!(missing(text, read), ["a/b.rs: absent", "a/c.rs", "a/c.rs: there"]);
}
