//! Reads topologies, plans, tuning profiles and descriptions of machines from files.
//!
//! Owns the file access for `plan`, which does no I/O, and the longest files.

use crate::config::Size;
use crate::error::{Error, Result};
use crate::named_file;
use crate::plan::schedule::Schedule;
use crate::plan::topology::Topology;
use crate::plan::{plan_file, topology_file, tuning};
use std::io;
use std::path::Path;

/// Longest topology. A million nodes take less than half of it.
const LONGEST_TOPOLOGY: Size = Size(64 << 20);

/// Longest plan. A ring of 3,000 ranks takes about half of it.
const LONGEST_PLAN: Size = Size(512 << 20);

/// Longest description of a machine. One with 8 GPUs and 16 RDMA ports takes less than 1 MiB.
const LONGEST_MACHINE: Size = Size(64 << 20);

/// The text of the file at `path`, which may have at most `longest` bytes.
fn text_of(path: impl AsRef<Path>, longest: Size) -> io::Result<String> {
    let bytes = named_file::read(path.as_ref(), longest)?;
    String::from_utf8(bytes).map_err(|cause| io::Error::new(io::ErrorKind::InvalidData, cause))
}

/// The topology that `text` describes in the short form, or that the file with this name describes. `hosts`
/// are the host names of the ranks, by rank, inside a job.
///
/// # Errors
/// `InvalidSetting`, naming the file or quoting the text.
pub fn topology(text: &str, hosts: Option<&[String]>) -> Result<Topology> {
    if let Some(topology) = topology_file::parse_short(text) {
        return topology;
    }
    topology_file::parse(text, &topology_text(text)?, hosts)
}

/// The contents of the file that `text` names, as it is no short form.
fn topology_text(text: &str) -> Result<String> {
    text_of(text, LONGEST_TOPOLOGY).map_err(|cause| {
        let message = format!(
            "the topology {text} is not a short form such as 2+3, and cannot be read as a file: {cause}"
        );
        Error::invalid_setting(message).with_source(cause)
    })
}

/// Checks what `text` describes as far as that needs no host names.
///
/// # Errors
/// As for [`topology`].
pub fn check_topology(text: &str) -> Result<()> {
    match topology_file::parse_short(text) {
        Some(topology) => topology.map(drop),
        None => topology_file::check(text, &topology_text(text)?),
    }
}

/// The schedule in the plan file with this name.
///
/// # Errors
/// `InvalidSetting`, naming the file.
pub fn plan(path: &str) -> Result<Schedule> {
    let text = text_of(path, LONGEST_PLAN).map_err(|cause| {
        Error::invalid_setting(format!("the plan {path} cannot be read: {cause}")).with_source(cause)
    })?;
    plan_file::parse(path, &text)
}

/// The text of the tuning profile with this name.
///
/// # Errors
/// `InvalidSetting`, naming the file.
pub fn tuning_profile(path: &str) -> Result<String> {
    text_of(path, Size(tuning::LONGEST_FILE)).map_err(|cause| {
        let message = format!(
            "FLEXRING_TUNING={path} cannot be read on the node of rank 0: {cause}: `flexring tune -o FILE` writes a tuning profile"
        );
        Error::invalid_setting(message).with_source(cause)
    })
}

/// The text of the file with this name that describes a machine.
///
/// # Errors
/// Those of the system; `InvalidInput` for what is no regular file, `FileTooLarge` for a long one.
pub fn machine(path: &Path) -> io::Result<String> {
    text_of(path, LONGEST_MACHINE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

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
    fn devices_pipes_and_long_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        for (path, kind) in [("/dev/zero", "device"), (pipe.to_str().expect("a name in Unicode"), "pipe")] {
            let refused = |error: Error| {
                assert!(error.message().contains(&format!("it is a {kind} and no regular file")), "{error}");
            };
            refused(topology(path, None).expect_err("no file"));
            refused(plan(path).expect_err("no file"));
            refused(tuning_profile(path).expect_err("no file"));
            refused(Error::io("machine", machine(path.as_ref()).expect_err("no file")));
        }
        let long = folder.path().join("long");
        std::fs::write(&long, vec![b' '; tuning::LONGEST_FILE + 1]).expect("a file");
        let error = tuning_profile(long.to_str().expect("a name in Unicode")).expect_err("it is long");
        assert!(error.message().contains("it is longer than 2M"), "{error}");
    }

    #[test]
    fn a_missing_plan_file_is_named() {
        let error = plan("/nowhere/plan.json").expect_err("nothing is there");
        assert!(error.message().starts_with("the plan /nowhere/plan.json cannot be read: "), "{error}");
    }
}
