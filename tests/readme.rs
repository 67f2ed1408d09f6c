//! The README tells the truth: its table of settings is the one that `flexring env --markdown` prints.

use std::process::Command;

#[test]
fn the_table_of_settings_is_current() {
    let readme = include_str!("../README.md");
    let (_, rest) = readme.split_once("<!-- settings -->\n").expect("the table begins");
    let (table, _) = rest.split_once("<!-- /settings -->").expect("the table ends");
    let output = Command::new(env!("CARGO_BIN_EXE_flexring"))
        .args(["env", "--markdown"])
        .env_clear()
        .output()
        .expect("the command can be started");
    let printed = String::from_utf8(output.stdout).expect("it prints text");
    assert_eq!(table.trim(), printed.trim(), "paste what `flexring env --markdown` prints into README.md");
}
