//! Files that subcommands write as a whole.
//!
//! Owns the draft that replaces the file when it is complete, and the check that it can be written.

use crate::error::CommandError;
use flexring::{Error, Result};
use std::path::{Path, PathBuf};

/// A file that readers find complete at any time, also after a crash of this process: it is written under
/// another name, and renamed.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    /// The path exists and is not a regular file, so it is written directly: a pipe, or a link such as
    /// /dev/stdout, which must not be replaced.
    special: bool,
}

impl OutputFile {
    /// A file at `path`. Does not access it yet.
    pub fn new(path: &Path) -> Self {
        let special = path.symlink_metadata().is_ok_and(|metadata| !metadata.is_file());
        Self { path: path.to_owned(), special }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path is not that of a regular file.
    pub fn is_special(&self) -> bool {
        self.special
    }

    /// Checks that the draft can be created, before there is something to write.
    ///
    /// # Errors
    /// `System` if it cannot, or if the path is a folder.
    pub fn check(&self) -> Result<()> {
        if self.path.is_dir() {
            return Err(Error::system(format!("cannot write {}: it is a folder", self.path.display())));
        }
        if self.special {
            return Ok(());
        }
        let draft = self.draft();
        let created = match std::fs::File::create_new(&draft) {
            // Left by a process that had this number and was killed.
            Err(cause) if cause.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
            created => created.and_then(|_| std::fs::remove_file(&draft)),
        };
        created.map_err(|cause| {
            let path = self.path.display();
            Error::io(format!("cannot create {path}, whose folder must exist and be writable"), cause)
        })
    }

    /// Replaces the file.
    ///
    /// # Errors
    /// `System` if it cannot be written. Leaves no draft then.
    pub fn write(&self, contents: &[u8]) -> Result<()> {
        let failed = |cause| Error::io(format!("cannot write {}", self.path.display()), cause);
        if self.special {
            return std::fs::write(&self.path, contents).map_err(failed);
        }
        let draft = self.draft();
        let renamed = std::fs::write(&draft, contents).and_then(|()| std::fs::rename(&draft, &self.path));
        renamed.map_err(|cause| {
            // There is none if it could not be created.
            let _ = std::fs::remove_file(&draft);
            failed(cause)
        })
    }

    /// A name that no running program of this machine uses.
    fn draft(&self) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(format!(".{}.part", std::process::id()));
        PathBuf::from(name)
    }
}

/// Checks that two flags do not name one file, which would contain one output only. A pipe or a terminal
/// takes both.
///
/// # Errors
/// `Usage` if they do.
pub fn expect_two_files(
    [(one, first), (other, second)]: [(&str, Option<&Path>); 2],
) -> std::result::Result<(), CommandError> {
    let (Some(first), Some(second)) = (first, second) else {
        return Ok(());
    };
    let is_regular = first.metadata().map_or(true, |metadata| metadata.is_file());
    if !is_regular || resolved_path(first) != resolved_path(second) {
        return Ok(());
    }
    let first = first.display();
    Err(CommandError::Usage(format!("{one} and {other} name the same file, {first}: expected two names")))
}

/// The path without links and dots, as far as it exists.
pub fn resolved_path(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let in_folder = || Some(folder.canonicalize().ok()?.join(path.file_name()?));
    path.canonicalize().ok().or_else(in_folder).unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_or_left_as_it_was() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let file = OutputFile::new(&path);
        file.check().expect("it can be written");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
        for contents in ["one", "two"] {
            file.write(contents.as_bytes()).expect("written");
            assert_eq!(std::fs::read_to_string(&path).expect("there"), contents);
        }
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
        let other = folder.path().join("file.part");
        std::fs::write(&other, "a user's").expect("written");
        file.check().and_then(|()| file.write(b"two")).expect("written");
        assert_eq!(std::fs::read_to_string(&other).expect("there"), "a user's");
        let refused = |first: &Path, second: Option<&Path>| {
            let result = expect_two_files([("--one", Some(first)), ("--two", second)]);
            result.is_err_and(|error| {
                matches!(&error, CommandError::Usage(message) if message.starts_with("--one and --two name the same"))
            })
        };
        assert!(refused(&path, Some(&path)));
        assert!(refused(&path, Some(&folder.path().join(".").join("file"))));
        assert!(refused(&folder.path().join("new"), Some(&folder.path().join("./new"))));
        assert!(!refused(&path, None) && !refused(&path, Some(&other)));
        assert!(!refused(Path::new("/dev/null"), Some(Path::new("/dev/null"))));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        OutputFile::new(&link).write(b"three").expect("written");
        assert_eq!(std::fs::read_to_string(&path).expect("there"), "three");
        assert!(link.is_symlink(), "a link is not replaced");
        let error = OutputFile::new(&folder.path().join("no/file")).check().expect_err("no such folder");
        assert!(
            error.message().contains("cannot create ") && error.message().contains("/no/file, "),
            "{error}"
        );
        let error = OutputFile::new(folder.path()).check().expect_err("a folder");
        assert!(error.message().ends_with("it is a folder"), "{error}");
    }
}
