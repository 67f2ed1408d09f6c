//! The README tells the truth: its table of settings is the one that `flexring env --markdown` prints.

use crate::command::run;

#[test]
fn the_table_of_settings_is_current() {
    let readme = include_str!("../../README.md");
    let (_, rest) = readme.split_once("<!-- settings -->\n").expect("the table begins");
    let (table, _) = rest.split_once("<!-- /settings -->").expect("the table ends");
    let (_, printed, _) = run("env --markdown", &[]);
    assert_eq!(table.trim(), printed.trim(), "paste what `flexring env --markdown` prints into README.md");
}
