//! What people describe: topologies and plans, read from where they are.
//!
//! Owns the reading of files for the plan wing, which reads none. Must not know the formats, nor who asks.

use crate::error::{Error, Result};
use crate::plan::schedule::Schedule;
use crate::plan::topology::Topology;
use crate::plan::{plan_file, topology_file};

/// The topology that `text` describes in the short form, or that the file of this name does. `hosts` are the
/// names of the ranks' hosts, by rank, where there are ranks.
///
/// # Errors
/// `InvalidSetting`, naming the file or quoting the text.
pub fn topology(text: &str, hosts: Option<&[String]>) -> Result<Topology> {
    if let Some(topology) = topology_file::parse_short(text) {
        return topology;
    }
    let contents = std::fs::read_to_string(text).map_err(|cause| {
        let words = format!(
            "the topology {text} is no short form such as 2+3, and as a file it cannot be read: {cause}"
        );
        Error::invalid_setting(words)
    })?;
    topology_file::parse(text, &contents, hosts)
}

/// The schedule that the file of this name has.
///
/// # Errors
/// `InvalidSetting`, naming the file.
pub fn plan(path: &str) -> Result<Schedule> {
    let text = std::fs::read_to_string(path)
        .map_err(|cause| Error::invalid_setting(format!("the plan {path} cannot be read: {cause}")))?;
    plan_file::parse(path, &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_a_short_form_or_a_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("cluster.toml");
        let name = path.to_str().expect("a name in Unicode");
        std::fs::write(&path, "[[node]]\nname = \"a\"\nranks = [0, 1]\n").expect("a file");
        assert_eq!(topology("2+3", None).expect("a short form").world(), 5);
        assert_eq!(topology(name, None).expect("a file").world(), 2);
        let words = |text: &str| topology(text, None).expect_err(text).message().to_owned();
        assert!(words("2+x").contains("\"2+x\", at character 3"), "{}", words("2+x"));
        assert!(words("two+three").starts_with("the topology two+three is no short form such as 2+3, and "));
        std::fs::write(&path, "node = 3").expect("a file");
        assert!(words(name).starts_with(&format!("{name}:1: ")), "{}", words(name));
    }

    #[test]
    fn a_plan_that_is_not_there_is_named() {
        let error = plan("/nowhere/plan.json").expect_err("nothing is there");
        assert!(error.message().starts_with("the plan /nowhere/plan.json cannot be read: "), "{error}");
    }
}
