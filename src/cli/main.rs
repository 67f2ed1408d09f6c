//! The `flexring` command.

fn main() {}
