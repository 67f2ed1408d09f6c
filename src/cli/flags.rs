//! Flags that stand for settings.
//!
//! Owns how a flag's text is checked: as the setting would be, in the words of the flag. Must not know which
//! command takes the flag.

use flexring::config::Config;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_what_the_setting_takes() {
        assert_eq!(checked("FLEXRING_DIMENSIONS", "4x2"), Ok("4x2".to_owned()));
        let words = checked("FLEXRING_DIMENSIONS", "4*2").expect_err("no dimensions");
        assert_eq!(words, "expected whole numbers from 1 joined by x, such as 4x2");
        assert!(checked("FLEXRING_ALGO", "rign").expect_err("no algorithm").contains("local-master or"));
    }
}
