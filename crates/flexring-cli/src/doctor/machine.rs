//! Descriptions of machines: the files of `/sys`, `/proc` and `/dev` that the report is made from, of another
//! machine.
//!
//! Owns the format. A description is a folder, or a file with one line for each file and each link, below the
//! root:
//!
//! ```text
//! # a comment
//! sys/class/infiniband/mlx5_0/ports/1/rate = 400 Gb/sec (4X NDR)
//! sys/class/infiniband/mlx5_0/device -> sys/devices/pci0000:15/0000:15:01.0/0000:18:00.0
//! ```

use crate::error::CommandError;
use flexring::internal::description;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Component, Path, PathBuf};

/// A machine as a file tree.
#[derive(Debug)]
pub struct Machine {
    root: PathBuf,
    /// Whether the tree was written for this description, and is removed with it.
    is_own: bool,
}

impl Machine {
    /// The machine that a folder or a file describes.
    pub fn open(path: &Path) -> Result<Self, CommandError> {
        let unreadable = |cause: io::Error| {
            CommandError::Usage(format!("cannot read the machine {}: {cause}", path.display()))
        };
        if path.is_dir() {
            let root = path.canonicalize().map_err(unreadable)?;
            return Self { root, is_own: false }.checked(path);
        }
        let text = description::machine(path).map_err(unreadable)?;
        let unwritable =
            |cause: io::Error| CommandError::Failed(format!("cannot write the machine's files: {cause}"));
        // Removed by its owner also if a line cannot be used.
        let machine = Self { root: new_folder().map_err(unwritable)?, is_own: true };
        for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| is_entry(line)) {
            let refuse = |why: &str| CommandError::Usage(format!("{}:{number}: {why}", path.display()));
            let entry = ListedPath::parse(line)
                .ok_or_else(|| refuse("expected `path = text` or `path -> path`, below the root"))?;
            entry.write(&machine.root).map_err(|cause| refuse(&cause.to_string()))?;
        }
        machine.checked(path)
    }

    /// This machine if it has any of the folders that the report is made from.
    fn checked(self, path: &Path) -> Result<Self, CommandError> {
        if ["sys", "proc", "dev"].iter().any(|folder| self.root.join(folder).is_dir()) {
            return Ok(self);
        }
        let path = path.display();
        Err(CommandError::Usage(format!(
            "{path} describes no machine: expected files below sys, proc or dev"
        )))
    }

    pub fn root(&self) -> &Path {
        &self.root
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.is_own {
            // What is left in a temporary folder harms nothing.
            let _ = fs::remove_dir_all(&self.root);
        }
    }
}

fn is_entry(line: &str) -> bool {
    !line.trim().is_empty() && !line.starts_with('#')
}

/// A new folder for temporary files, which no other user can read.
fn new_folder() -> io::Result<PathBuf> {
    let mut attempts = (0..100).map(|attempt| {
        let name = format!("flexring-machine-{}-{attempt}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&folder).map(|()| folder)
    });
    let is_free = |made: &io::Result<PathBuf>| {
        !made.as_ref().is_err_and(|cause| cause.kind() == io::ErrorKind::AlreadyExists)
    };
    attempts.find(is_free).unwrap_or_else(|| Err(io::ErrorKind::AlreadyExists.into()))
}

/// A line of a description.
enum ListedPath<'a> {
    File { path: &'a Path, text: &'a str },
    Link { path: &'a Path, target: &'a Path },
}

impl<'a> ListedPath<'a> {
    /// `None` if the line has another form, or a path leaves the tree.
    fn parse(line: &'a str) -> Option<Self> {
        let below = |text: &'a str| {
            let path = Path::new(text.trim());
            let stays = path.components().all(|part| matches!(part, Component::Normal(_)));
            (stays && path.components().next().is_some()).then_some(path)
        };
        if let Some((path, target)) = line.split_once(" -> ") {
            return Some(Self::Link { path: below(path)?, target: below(target)? });
        }
        // A file may be empty.
        let (path, text) = line.split_once(" =")?;
        Some(Self::File { path: below(path)?, text: text.trim() })
    }

    fn write(&self, root: &Path) -> io::Result<()> {
        let with_parents = |path: &Path| {
            let path = root.join(path);
            path.parent().map_or(Ok(()), fs::create_dir_all).map(|()| path)
        };
        match self {
            Self::File { path, text } => fs::write(with_parents(path)?, format!("{text}\n")),
            Self::Link { path, target } => {
                fs::create_dir_all(root.join(target))?;
                symlink(root.join(target), with_parents(path)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), text).expect("a file");
        match Machine::open(file.path()) {
            Err(CommandError::Usage(message)) => message,
            other => panic!("{text:?} is {other:?}"),
        }
    }

    #[test]
    fn files_and_links_are_written_and_removed() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), "# x\n\nsys/a/b = 4: ACTIVE\nsys/empty =\nsys/link -> sys/a\n")
            .expect("a file");
        let machine = Machine::open(file.path()).expect("a machine");
        let read = |path: &str| fs::read_to_string(machine.root().join(path)).expect(path);
        assert_eq!(
            [read("sys/a/b"), read("sys/link/b"), read("sys/empty")],
            ["4: ACTIVE\n", "4: ACTIVE\n", "\n"]
        );
        let root = machine.root().to_owned();
        drop(machine);
        assert!(!root.exists());
    }

    #[test]
    fn lines_of_another_form_and_paths_that_leave_the_tree_are_refused() {
        for line in
            ["sys/a", "/etc/x = 1", "../x = 1", "sys/../../x = 1", "sys/a -> /etc", " = 1", "sys/a -> "]
        {
            let message = refusal(&format!("# first\n{line}\n"));
            assert!(message.contains(":2: expected `path = text` or `path -> path`"), "{line:?}: {message}");
        }
        for text in ["", "# nothing", "etc/passwd = x"] {
            assert!(refusal(text).contains("describes no machine"), "{text:?}");
        }
        let missing = Machine::open(Path::new("/nowhere/dgx"));
        assert!(
            matches!(missing, Err(CommandError::Usage(why)) if why.contains("/nowhere/dgx: No such file"))
        );
    }
}
