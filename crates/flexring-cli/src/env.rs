//! `flexring env`: prints the settings, their current values and the origin of each value.
//!
//! Owns the layout of the table, the Markdown and the JSON. Must not know any particular setting: `config`
//! defines them.

use crate::error::{CommandError, ERROR_PREFIX};
use crate::output;
use crate::settings::warn_about_unknown_settings;
use clap::Args;
use flexring_core::config::{Config, Origin, SettingRow, environment};

/// Print all settings with their values and the origin of each value, and where the GPU kernels come from
#[derive(Args, Debug)]
pub struct EnvOptions {
    /// Print the table of docs/settings.md
    #[arg(long, conflicts_with = "json")]
    markdown: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(options: &EnvOptions) -> Result<(), CommandError> {
    let text = if options.markdown {
        markdown(&Config::default().table(|_| None))
    } else {
        warn_about_unknown_settings();
        let (config, unusable) = Config::read_partly(environment);
        if !unusable.is_empty() {
            let errors: Vec<String> = unusable.iter().map(|(_, error)| error.to_string()).collect();
            return Err(CommandError::Usage(errors.join(&format!("\n{ERROR_PREFIX}"))));
        }
        let rows = config.table(|name| config.given.contains(name).then(|| "set".to_owned()));
        if options.json { json(&rows)? } else { table(&rows) + &kernels_line() }
    };
    output::print(&text)
}

/// Where the GPU kernels come from; `None` in a build without CUDA.
pub fn kernels() -> Option<String> {
    #[cfg(feature = "cuda")]
    return Some(flexring::internal::device::cuda::image::origin());
    #[cfg(not(feature = "cuda"))]
    None
}

/// The output line that says where the GPU kernels come from.
pub fn kernels_line() -> String {
    format!("\nGPU kernels: {}\n", kernels().unwrap_or_else(|| "none: this build has no CUDA".to_owned()))
}

/// Aligned columns for a terminal: a line for each setting, followed by its description.
fn table(rows: &[SettingRow]) -> String {
    let cells: Vec<[&str; 4]> =
        rows.iter().map(|row| [row.name, &row.value, origin(row), &row.expected]).collect();
    let head = ["setting", "value", "origin", "takes"];
    let width = |column: usize| {
        let lines = cells.iter().chain([&head]);
        lines.map(|cells| cells[column].chars().count()).max().unwrap_or(0)
    };
    let widths = [width(0), width(1), width(2)];
    let line = |cells: &[&str; 4]| {
        let [name, value, origin, takes] = cells;
        format!("{name:0$}  {value:1$}  {origin:2$}  {takes}\n", widths[0], widths[1], widths[2])
    };
    let mut text = line(&head);
    for (row, cells) in rows.iter().zip(&cells) {
        text += &line(cells);
        text += &format!("    {}\n", row.description);
    }
    text
}

/// The table of docs/settings.md: defaults only, because values depend on the environment.
fn markdown(rows: &[SettingRow]) -> String {
    let mut text = "| setting | default | takes | what it does |\n|---|---|---|---|\n".to_owned();
    for row in rows {
        let description = linked(row.description);
        text += &format!("| `{}` | {} | {} | {description} |\n", row.name, row.default, row.expected);
    }
    text
}

/// The text with links in place of paths such as `docs/rdma.md`, as seen from that folder.
fn linked(text: &str) -> String {
    let mut parts = text.split("docs/");
    let mut linked = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (name, rest) = part.split_once(".md").unwrap_or((part, ""));
        linked += &format!("[{name}.md]({name}.md){rest}");
    }
    linked
}

fn json(rows: &[SettingRow]) -> Result<String, CommandError> {
    let rows: Vec<_> = rows
        .iter()
        .map(|row| {
            serde_json::json!({
                "name": row.name, "value": row.value, "origin": origin(row), "default": row.default,
                "takes": row.expected, "sentence": row.description,
            })
        })
        .collect();
    output::json(&rows)
}

fn origin(row: &SettingRow) -> &'static str {
    match row.origin {
        Origin::Default => "default",
        Origin::Environment => "environment",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_in_the_table_the_markdown_and_the_json() {
        let rows = Config::default().table(|name| (name == "FLEXRING_ALGO").then(|| "auto".to_owned()));
        let text = table(&rows);
        assert_eq!(text.lines().count(), 1 + 2 * rows.len());
        assert!(
            text.contains("\nFLEXRING_ALGO              ")
                && text.contains("  environment  auto, ring, rabenseifner, ")
        );
        assert_eq!(markdown(&rows).lines().count(), 2 + rows.len());
        assert_eq!(json(&rows).map(|text| text.matches("\"sentence\"").count()).ok(), Some(rows.len()));
    }
}
