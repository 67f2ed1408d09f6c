//! Reads topologies and plans from files.
//!
//! Owns the file access for `plan`, which does no I/O. Must not know the formats.

use crate::error::{Error, Result};
use crate::plan::schedule::Schedule;
use crate::plan::topology::Topology;
use crate::plan::{plan_file, topology_file};

/// The topology that `text` describes in the short form, or that the file with this name describes. `hosts` are the host
/// names of the ranks, by rank, inside a job.
///
/// # Errors
/// `InvalidSetting`, naming the file or quoting the text.
pub fn topology(text: &str, hosts: Option<&[String]>) -> Result<Topology> {
    if let Some(topology) = topology_file::parse_short(text) {
        return topology;
    }
    let contents = std::fs::read_to_string(text).map_err(|cause| {
        let message = format!(
            "the topology {text} is not a short form such as 2+3, and cannot be read as a file: {cause}"
        );
        Error::invalid_setting(message).with_source(cause)
    })?;
    topology_file::parse(text, &contents, hosts)
}

/// The schedule in the plan file with this name.
///
/// # Errors
/// `InvalidSetting`, naming the file.
pub fn plan(path: &str) -> Result<Schedule> {
    let text = std::fs::read_to_string(path).map_err(|cause| {
        Error::invalid_setting(format!("the plan {path} cannot be read: {cause}")).with_source(cause)
    })?;
    plan_file::parse(path, &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topology_is_a_short_form_or_a_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("cluster.toml");
        let name = path.to_str().expect("a name in Unicode");
        std::fs::write(&path, "[[node]]\nname = \"a\"\nranks = [0, 1]\n").expect("a file");
        assert_eq!(topology("2+3", None).expect("a short form").world(), 5);
        assert_eq!(topology(name, None).expect("a file").world(), 2);
        let message = |text: &str| topology(text, None).expect_err(text).message().to_owned();
        assert!(message("2+x").contains("\"2+x\", at character 3"), "{}", message("2+x"));
        assert!(
            message("two+three").starts_with("the topology two+three is not a short form such as 2+3, and ")
        );
        std::fs::write(&path, "node = 3").expect("a file");
        assert!(message(name).starts_with(&format!("{name}:1: ")), "{}", message(name));
    }

    #[test]
    fn a_missing_plan_file_is_named() {
        let error = plan("/nowhere/plan.json").expect_err("nothing is there");
        assert!(error.message().starts_with("the plan /nowhere/plan.json cannot be read: "), "{error}");
    }
}
