//! `flexring generate`: man pages and completions of shells, from the definitions of the subcommands. `make
//! install` runs it.
//!
//! Owns where a system looks for these files.

use crate::error::CommandError;
use clap::{Args, Command};
use clap_complete::Shell;
use flexring::Error;
use std::path::{Path, PathBuf};

/// Where systems look for completions, below their folder `share`.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions"),
    (Shell::Fish, "fish/vendor_completions.d"),
    (Shell::Zsh, "zsh/site-functions"),
];

/// Write man pages and shell completions
#[derive(Args, Debug)]
pub struct GenerateOptions {
    /// The folder below which they are written, such as /usr/local/share
    folder: PathBuf,
}

/// Runs the command. `command` is the whole of `flexring`.
pub fn run(options: &GenerateOptions, command: Command) -> Result<(), CommandError> {
    write(&options.folder, command)
        .map_err(|cause| Error::io(format!("cannot write to {}", options.folder.display()), cause).into())
}

fn write(share: &Path, mut command: Command) -> std::io::Result<()> {
    let folder = |name: &str| {
        let folder = share.join(name);
        std::fs::create_dir_all(&folder).map(|()| folder)
    };
    for (shell, name) in COMPLETIONS {
        clap_complete::generate_to(shell, &mut command, "flexring", folder(name)?)?;
    }
    clap_mangen::generate_to(command, folder("man/man1")?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_subcommand_has_a_man_page_and_every_shell_completes_its_flags() {
        let share = tempfile::tempdir().expect("a folder");
        let options = GenerateOptions { folder: share.path().to_owned() };
        let command = crate::Cli::command();
        run(&options, command.clone()).expect("the files are written");
        let text = |name: &str| std::fs::read_to_string(share.path().join(name)).expect("a file");
        let subcommands = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
        let names = Vec::from_iter(subcommands.map(Command::get_name));
        assert!(names.contains(&"perf"), "{names:?}");
        for name in names {
            assert!(text(&format!("man/man1/flexring-{name}.1")).contains(".SH OPTIONS"), "{name}");
        }
        assert!(text("man/man1/flexring.1").contains("flexring\\-perf(1)"));
        for (file, flag) in [
            ("bash-completion/completions/flexring.bash", "--ranks"),
            ("fish/vendor_completions.d/flexring.fish", "-l ranks"),
            ("zsh/site-functions/_flexring", "--ranks="),
        ] {
            assert!(text(file).contains(flag), "{file}");
        }
        let folder = share.path().join("man/man1/flexring.1");
        let refused = run(&GenerateOptions { folder }, crate::Cli::command()).expect_err("it is a file");
        assert!(matches!(refused, CommandError::Failed(message) if message.contains("cannot write to")));
    }
}
