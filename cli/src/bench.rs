//! `kvasir bench`: figures with their floor, measured in one run, as ratios.
//!
//! Owns the shape of a report. Timing decides no test: a bench prints and, where a floor is stated, says whether it holds.

mod prefix;
mod router;

pub use prefix::prefix;
pub use router::{RouterBenchError, router};

use crate::args::BenchArgs;
use crate::client::ClientError;
use crate::local::LocalError;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::PathBuf;

/// Why a bench failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The fleet did not start.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// A request failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The router bench.
    #[error(transparent)]
    Router(#[from] RouterBenchError),
    /// The report could not be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The report could not be made.
    #[error("{0}")]
    Report(String),
}

/// One figure of a report.
#[derive(Clone, Debug)]
pub struct Row {
    /// What was measured.
    pub name: &'static str,
    /// Unit of `ours` and `peer`.
    pub unit: &'static str,
    /// Our figure.
    pub ours: f64,
    /// What it is compared with in the same run.
    pub peer: f64,
    /// Name of that.
    pub peer_name: &'static str,
    /// Must hold; none where the budgets name only an aim.
    pub floor: Option<f64>,
    /// Pursued.
    pub aim: f64,
    /// Whether `ratio` (or the figure itself) is better when lower.
    pub lower_is_better: bool,
}

/// What was measured on which machine.
pub struct Report {
    name: &'static str,
    conditions: Value,
    rows: Vec<Row>,
    detail: Map<String, Value>,
}

// === impl Row ===

impl Row {
    /// Ours against the peer; the figure itself where there is no peer.
    pub fn ratio(&self) -> f64 {
        if self.peer == 0.0 { self.ours } else { self.ours / self.peer }
    }

    fn holds(&self) -> bool {
        self.floor.is_none_or(|floor| if self.lower_is_better { self.ratio() <= floor } else { self.ratio() >= floor })
    }

    fn floor_text(&self) -> String {
        self.floor.map_or_else(|| "-".to_owned(), |floor| floor.to_string())
    }

    fn verdict(&self) -> &'static str {
        match self.floor {
            None => "no floor",
            Some(_) if self.holds() => "holds",
            Some(_) => "BELOW",
        }
    }
}

// === impl Report ===

impl Report {
    /// An empty report under stated conditions.
    pub fn new(name: &'static str, conditions: Value) -> Self {
        Self { name, conditions, rows: Vec::new(), detail: Map::new() }
    }

    /// Adds a figure.
    pub fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Adds figures that only the JSON shows.
    pub fn detail(&mut self, detail: Map<String, Value>) {
        self.detail = detail;
    }

    /// Prints the table and writes JSON where asked.
    pub fn finish(&self, args: &BenchArgs) -> Result<(), BenchError> {
        println!("\n{}", serde_json::to_string_pretty(&self.conditions).unwrap_or_default());
        println!("\n{:<28} {:>12} {:>12} {:>10} {:>8} {:>8}  floor", "row", "ours", "peer", "ratio", "floor", "aim");
        for row in &self.rows {
            println!(
                "{:<28} {:>12.3} {:>12.3} {:>10.4} {:>8} {:>8}  {}",
                format!("{} [{}]", row.name, row.unit),
                row.ours,
                row.peer,
                row.ratio(),
                row.floor_text(),
                row.aim,
                row.verdict(),
            );
        }
        let Some(path) = &args.json else { return Ok(()) };
        let text = serde_json::to_string_pretty(&self.json()).map_err(|error| BenchError::Report(error.to_string()))?;
        fs::write(path, text + "\n").map_err(|source| BenchError::Write { path: path.clone(), source })
    }

    fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "name": row.name, "unit": row.unit, "ours": row.ours, "peer": row.peer, "peer_name": row.peer_name,
                    "ratio": row.ratio(), "floor": row.floor, "aim": row.aim,
                    "better": if row.lower_is_better { "lower" } else { "higher" }, "holds": row.holds(),
                })
            })
            .collect();
        json!({
            "bench": self.name, "machine": crate::version::machine(), "commit": crate::version::COMMIT, "conditions": self.conditions, "rows": rows,
            "detail": self.detail,
        })
    }
}

/// The middle value.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
