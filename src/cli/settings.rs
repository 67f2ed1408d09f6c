//! Flags that stand for settings.
//!
//! Owns how a flag's text is checked: as the setting would be, in the words of the flag. Must not know which
//! command takes the flag.

use flexring::Error;
use flexring::config::Config;
use std::cmp::Reverse;

/// What a setting takes.
pub fn expected(name: &str) -> String {
    let table = Config::default().table(|_| None);
    let row = table.iter().find(|row| row.name == name);
    row.map_or_else(String::new, |row| format!("expected {}", row.expected))
}

/// The text, if the setting of this name takes it.
pub fn checked(name: &str, text: &str) -> Result<String, String> {
    let read = Config::read(|asked| (asked == name).then(|| text.to_owned()));
    read.map(|_| text.to_owned()).map_err(|_| expected(name))
}

/// Warns of variables that look like settings and are none.
pub fn warn_about_unknown_settings() {
    let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    for stranger in Config::unknown_variables(names) {
        eprintln!("warning: {stranger} is no setting of flexring; did you mean {}?", closest(&stranger));
    }
}

/// The setting whose name is most like this one.
pub fn closest(name: &str) -> &'static str {
    let begins_alike =
        |known: &str| known.chars().zip(name.chars()).take_while(|(one, other)| one == other).count();
    let distance = |known: &&&str| (strsim::damerau_levenshtein(known, name), Reverse(begins_alike(known)));
    Config::NAMES.iter().min_by_key(distance).copied().unwrap_or_default()
}

/// Every setting that cannot be parsed, and why.
pub fn unusable(lookup: impl Fn(&str) -> Option<String>) -> Vec<(&'static str, Error)> {
    let alone = |name: &&'static str| {
        let read = Config::read(|asked| (asked == *name).then(|| lookup(name)).flatten());
        read.err().map(|error| (*name, error))
    };
    Config::NAMES.iter().filter_map(alone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_names_are_near_the_right_ones() {
        assert_eq!(closest("FLEXRING_RNAK"), "FLEXRING_RANK");
        assert_eq!(closest("FLEXRING_SUBCHUNKS"), "FLEXRING_SUBCHUNK");
        assert_eq!(closest("FLEXRING_TIMEOUT"), "FLEXRING_TIMEOUT_MS");
    }

    #[test]
    fn texts_are_what_the_setting_takes() {
        assert_eq!(checked("FLEXRING_DIMENSIONS", "4x2"), Ok("4x2".to_owned()));
        let words = checked("FLEXRING_DIMENSIONS", "4*2").expect_err("no dimensions");
        assert_eq!(words, "expected whole numbers from 1 joined by x, such as 4x2");
        assert!(checked("FLEXRING_ALGO", "rign").expect_err("no algorithm").contains("local-master or"));
    }
}
