//! Files that settings and commands name.
//!
//! Owns how they are opened: a wrong name must not hang the process, fill its memory, or change what is no
//! file of the user.

use crate::config::Size;
use crate::descriptor;
use rustix::fs::{FileType, Mode, OFlags, fstat, ftruncate};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
/// Those of the system; `InvalidInput` for a pipe, a device, a socket or a folder.
pub fn open(path: &Path) -> io::Result<File> {
    // Opening a pipe would wait for its writer.
    regular(descriptor::file(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY, Mode::empty())?)
}

/// The bytes of a regular file, which may have at most `longest`.
///
/// # Errors
/// As for [`open`]; `FileTooLarge` for a longer file.
pub fn read(path: &Path, longest: Size) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(longest.0 as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > longest.0 {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it is longer than {longest}")));
    }
    Ok(bytes)
}

/// Opens a regular file for writing, which is empty then. It is created if there is none.
///
/// # Errors
/// As for [`open`]; also for a symbolic link, by which another user could choose the file.
pub fn create(path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = descriptor::file(path, flags, Mode::from_raw_mode(0o666)).map_err(|cause| match cause {
        rustix::io::Errno::LOOP => refused("a symbolic link"),
        // A pipe that no process reads.
        rustix::io::Errno::NXIO => refused("a pipe, a device or a socket"),
        cause => cause.into(),
    })?;
    let file = regular(file)?;
    // Only now: a device would be reset.
    ftruncate(&file, 0)?;
    Ok(file)
}

/// The open file, if it is a regular one. Asked of the open file, which cannot be exchanged between check and
/// use.
fn regular(file: OwnedFd) -> io::Result<File> {
    match FileType::from_raw_mode(fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(file.into()),
        FileType::Directory => Err(refused("a folder")),
        FileType::Fifo => Err(refused("a pipe")),
        FileType::Socket => Err(refused("a socket")),
        _ => Err(refused("a device")),
    }
}

fn refused(kind: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("it is {kind} and no regular file"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, mknodat};
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_no_regular_file_is_refused_at_once_and_not_changed() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        std::fs::write(at("file"), "contents").expect("a file");
        symlink(at("file"), at("link")).expect("a link");
        symlink(at("missing"), at("dangling")).expect("a link");
        let kept_open = descriptor::file(at("pipe"), OFlags::RDWR, Mode::empty()).expect("a pipe");
        let cases = [
            (at("pipe"), "a pipe", "a pipe"),
            (folder.path().to_owned(), "a folder", "Is a directory"),
            ("/dev/zero".into(), "a device", "a device"),
            (at("dangling"), "No such file", "a symbolic link"),
        ];
        for (path, reading, writing) in &cases {
            let message = open(path).expect_err("refused").to_string();
            assert!(message.contains(reading), "{}: {message}", path.display());
            let message = create(path).expect_err("refused").to_string();
            assert!(message.contains(writing), "{}: {message}", path.display());
        }
        drop(kept_open);
        let message = create(&at("pipe")).expect_err("no reader").to_string();
        assert!(message.contains("a pipe"), "{message}");
        assert!(create(&at("link")).is_err(), "a link of a user may lead to any file");
        assert_eq!(read(&at("link"), Size(8)).expect("links can be read"), b"contents");
        assert!(read(&at("file"), Size(7)).expect_err("longer").to_string().contains("longer than 7"));
        drop(create(&at("file")).expect("a file"));
        drop(create(&at("new")).expect("a file"));
        assert!(read(&at("file"), Size(0)).expect("it is empty").is_empty());
        assert!(at("new").is_file() && !at("missing").exists());
    }
}
