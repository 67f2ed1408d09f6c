//! Settings as the subcommands check them.
//!
//! Owns how the value of a flag that overrides a setting is validated (as the setting itself), and the
//! warning about unknown variables.

use flexring_core::config::Config;

/// An error message that says which values the setting of this name accepts.
pub fn expected(name: &str) -> String {
    let table = Config::default().table(|_| None);
    let row = table.iter().find(|row| row.name == name);
    row.map_or_else(String::new, |row| format!("expected {}", row.expected))
}

/// Returns `text` if it is a valid value of the setting `name`.
///
/// # Errors
/// The message of [`expected`] if it is not.
pub fn checked(name: &str, text: &str) -> Result<String, String> {
    if text.is_empty() {
        // For a variable that would mean that it is unset.
        return Err(expected(name));
    }
    let read = Config::read(|asked| (asked == name).then(|| text.to_owned()));
    read.map(|_| text.to_owned()).map_err(|_| expected(name))
}

/// Prints a warning for each environment variable that looks like a setting but is not one.
pub fn warn_about_unknown_settings() {
    Config::warnings().iter().for_each(|sentence| eprintln!("warning: {sentence}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flag_values_are_validated_as_the_setting_is() {
        assert_eq!(checked("FLEXRING_DIMENSIONS", "4x2"), Ok("4x2".to_owned()));
        let message = checked("FLEXRING_DIMENSIONS", "4*2").expect_err("not dimensions");
        assert_eq!(message, "expected whole numbers from 1 joined by x, such as 4x2");
        assert_eq!(checked("FLEXRING_DIMENSIONS", ""), Err(message));
        assert!(
            checked("FLEXRING_ALGO", "rign").expect_err("not an algorithm").contains("parameter-server or")
        );
    }
}
