//! docs/settings.md has the table that `flexring env --markdown` prints. `FLEXRING_BLESS=1 cargo test
//! settings_docs` rewrites it.

use crate::command::run;
use crate::programs::root;

const BEGIN: &str = "<!-- settings -->\n";
const END: &str = "<!-- /settings -->";

#[test]
fn the_documented_table_of_settings_is_current() {
    let path = root().join("docs/settings.md");
    let document = std::fs::read_to_string(&path).expect("docs/settings.md can be read");
    let (before, rest) = document.split_once(BEGIN).expect("the table has a begin marker");
    let (_, after) = rest.split_once(END).expect("the table has an end marker");
    let (_, table, _) = run("env --markdown", &[]);
    let expected = format!("{before}{BEGIN}{table}{END}{after}");
    if std::env::var_os("FLEXRING_BLESS").is_some() {
        std::fs::write(&path, &expected).expect("docs/settings.md can be written");
        return;
    }
    assert_eq!(
        document, expected,
        "docs/settings.md is out of date: FLEXRING_BLESS=1 cargo test settings_docs rewrites it"
    );
}
