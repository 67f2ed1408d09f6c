//! Calculates the papers' examples with the cost model and the simulator, and prints both as JSON for
//! `report.py`.
//!
//!     cargo bench --bench papers [-- RANKS]
//!
//! All-reduces of more than RANKS ranks (2,048) are calculated but not simulated.
//!
//! Must not know what the papers measured: that is in `data.toml`.

mod abci;
mod flexreduce;
mod pfn;
mod simulation;
mod yuan;

use serde_json::json;

/// The most ranks of a simulation, unless the command line has a number.
const MOST_RANKS: usize = 2048;

fn main() {
    // Cargo adds a flag of its own.
    let most = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(MOST_RANKS);
    let results = json!({
        "ueno_yokota": abci::results(most),
        "flexreduce": flexreduce::results(),
        "yuan": yuan::results(),
        "pfn": pfn::results(),
    });
    println!("{results:#}");
}
