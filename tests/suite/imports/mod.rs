//! Imports under `src/` follow the layers of ARCHITECTURE.md, the modules of each crate form no cycles, and
//! types have names of their own.
//!
//! The table in ARCHITECTURE.md, section "The layers", is the declaration; this reads it. Set
//! FLEXRING_SOURCE_ROOT to check another checkout.

mod graph;
mod source;

use graph::Graph;
use source::{Import, ModulePath, Source};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Modules of one layer that must not import each other: the first does not import the others.
const WITHIN_LAYER: [(&str, &[&str]); 3] = [
    ("cuda_driver", &["memory", "device", "transport"]),
    ("memory", &["device", "transport"]),
    ("transport", &["device"]),
];

/// Types that share a name because they have the same role in sibling modules.
const SIBLING_TYPES: &[(&str, &str)] = &[
    ("ForbidCalls", "the guard against driver calls, with and without the feature `cuda`"),
    ("GpuState", "of a communicator, with and without the feature `cuda`"),
    ("Link", "a transport's connection to one peer"),
    ("RelayedCall", "of calls on GPUs, with and without the feature `cuda`"),
    ("Sealed", "the private supertrait of a sealed trait"),
];

/// The name of a folder's own file among the files in it.
const FOLDER_FILE: &str = "mod.rs";

fn root() -> PathBuf {
    let root = std::env::var_os("FLEXRING_SOURCE_ROOT");
    root.map_or_else(|| crate::programs::root().to_owned(), PathBuf::from)
}

/// The layer of every top-level module.
fn layers() -> BTreeMap<String, usize> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md can be read");
    let (_, section) = text.split_once("## The layers").expect("ARCHITECTURE.md has a section on layers");
    let section = section.split("\n## ").next().unwrap_or(section);
    let mut layers = BTreeMap::new();
    for line in section.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, layer, modules, ..] = cells[..] else { continue };
        let Ok(layer) = layer.parse() else { continue };
        for module in modules.split('`').skip(1).step_by(2) {
            let other = layers.insert(module.to_owned(), layer);
            assert_eq!(other, None, "ARCHITECTURE.md names two layers for `{module}`");
        }
    }
    assert!(layers.len() > 5, "the table of layers has fewer modules than expected: {layers:?}");
    layers
}

fn place(import: &Import) -> String {
    format!("{}:{}", import.file.display(), import.line)
}

/// The imports that point to a higher layer, or across a layer where [`WITHIN_LAYER`] forbids it, and the
/// modules without a layer. Code for tests follows the layers too.
fn against_the_order(source: &Source, layers: &BTreeMap<String, usize>) -> BTreeSet<String> {
    let forbidden = |import: &Import| {
        // The crate's root only declares and re-exports.
        let (from, to) = (import.from.first()?, import.to.first()?);
        let within =
            WITHIN_LAYER.iter().any(|(module, others)| module == from && others.contains(&to.as_str()));
        (within || layers.get(from)? < layers.get(to)?)
            .then(|| format!("{} imports {} against the order", place(import), import.text))
    };
    let unknown = source.top_level().into_iter().filter(|module| !layers.contains_key(*module));
    let unknown = unknown.map(|module| format!("ARCHITECTURE.md names no layer for `{module}`"));
    source.imports().iter().filter_map(forbidden).chain(unknown).collect()
}

/// A file among the files of its folder: the segments of its module's path, and [`FOLDER_FILE`] for the
/// folder's own.
fn node(source: &Source, path: &ModulePath) -> ModulePath {
    let mut node = path.clone();
    if source.is_folder(path) {
        node.push(FOLDER_FILE.to_owned());
    }
    node
}

/// The cycles among the files and folders of each folder. A folder stands for all files in it, so that a
/// cycle between files of two folders is one between the folders. A folder's own file may re-export what is
/// in the folder.
fn cycles(source: &Source) -> Vec<String> {
    let mut graphs: BTreeMap<ModulePath, Graph> = BTreeMap::new();
    let mut witnesses: BTreeMap<(String, String), String> = BTreeMap::new();
    for import in source.imports().iter().filter(|import| !import.test) {
        let down = import.to.starts_with(&import.from);
        if import.reexport && down {
            continue;
        }
        let (from, to) = (node(source, &import.from), node(source, &import.to));
        let common = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
        let (from, to) = (from[..=common].join("/"), to[..=common].join("/"));
        graphs.entry(import.from[..common].to_vec()).or_default().add(&from, &to);
        witnesses.entry((from, to)).or_insert_with(|| format!("{} imports {}", place(import), import.text));
    }
    let mut cycles = Vec::new();
    for cycle in graphs.values().flat_map(Graph::cycles) {
        let mut text = format!("cycle: {}", cycle.join(" -> "));
        for (at, from) in cycle.iter().enumerate() {
            let to = &cycle[(at + 1) % cycle.len()];
            text += &format!("\n    {}", witnesses[&(from.clone(), to.clone())]);
        }
        cycles.push(text);
    }
    cycles
}

/// Fails with the lines of `violations` and their number.
fn assert_none(violations: &[String], kind: &str) {
    assert!(violations.is_empty(), "{}\n{} {kind}", violations.join("\n"), violations.len());
}

#[test]
fn imports_follow_the_layers() {
    let wrong = against_the_order(&Source::parse(&root()), &layers());
    assert_none(&Vec::from_iter(wrong), "imports against the order of layers");
}

#[test]
fn modules_form_no_cycles() {
    assert_none(&cycles(&Source::parse(&root())), "cycles");
}

#[test]
fn types_of_different_meaning_have_different_names() {
    let source = Source::parse(&root());
    let mut definitions: BTreeMap<&str, BTreeMap<String, usize>> = BTreeMap::new();
    for definition in source.types() {
        let files = definitions.entry(&definition.name).or_default();
        files.entry(definition.file.display().to_string()).or_insert(definition.line);
    }
    definitions.retain(|_, files| files.len() > 1);
    let mut wrong = Vec::new();
    for (sibling, role) in SIBLING_TYPES {
        if definitions.remove(sibling).is_none() {
            wrong.push(format!(
                "`{sibling}` ({role}) is the name of one type only: remove it from SIBLING_TYPES"
            ));
        }
    }
    let places = |files: &BTreeMap<String, usize>| -> Vec<String> {
        files.iter().map(|(file, line)| format!("{file}:{line}")).collect()
    };
    wrong.extend(definitions.iter().map(|(name, files)| format!("{name}: {}", places(files).join(" "))));
    assert_none(&wrong, "names of several types");
}

#[test]
fn imports_are_found_in_use_trees_paths_and_macros_and_through_reexports() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |file: &str, text: &str| {
        let path = folder.path().join("src").join(file);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("the folder is created");
        std::fs::write(path, text).expect("the file is written");
    };
    write(
        "lib.rs",
        "pub mod tree; pub mod path; pub mod called; pub mod tested; mod above; mod target; pub use target::Named;",
    );
    write("target/mod.rs", "mod inner; pub use inner::Named; pub fn call() {}");
    write("target/inner.rs", "pub struct Named;");
    write("tree.rs", "use super::{target::{self as other, Named}, path}; fn f() { other::call() }");
    write("path.rs", "mod block { pub fn f() { crate::target::call() } }");
    write("called.rs", "fn f(x: crate::Named) { println!(\"{}\", crate::target::call()) }");
    write("tested.rs", "#[cfg(test)] mod tests { use crate::tree; }");
    write("../crates/flexring-cli/src/main.rs", "use flexring::Named;");
    write("../crates/flexring-deep/src/lib.rs", "pub mod inner; use crate::inner::Deep;");
    write("../crates/flexring-deep/src/inner.rs", "pub struct Deep;");
    write("above.rs", "use flexring_deep::inner::Deep;");
    let source = Source::parse(folder.path());
    let mut found: Vec<String> = source
        .imports()
        .iter()
        .map(|import| {
            let test = if import.test { " in a test" } else { "" };
            format!("{} -> {}{test}", import.from.join("::"), import.to.join("::"))
        })
        .collect();
    found.sort();
    found.dedup();
    assert_eq!(
        found,
        [
            " -> target::inner",
            "above -> flexring_deep::inner",
            "called -> target",
            "called -> target::inner",
            "flexring_cli -> target::inner",
            "flexring_deep -> flexring_deep::inner",
            "path -> target",
            "target -> target::inner",
            "tested -> tree in a test",
            "tree -> path",
            "tree -> target",
            "tree -> target::inner",
        ]
    );
}
