//! Named stages with their seconds, and the time limit over all of them.

use std::time::{Duration, Instant};

/// The gate ends at 90 minutes; failing here leaves time to print the table.
const TOTAL_MAX: Duration = Duration::from_mins(80);

/// What a stage returns: why it failed, in words.
pub type Outcome = Result<(), String>;

/// Runs stages in order, stops at the first failure, always prints the table.
pub struct Stages<'a> {
    only: Option<&'a str>,
    began: Instant,
    rows: Vec<(&'static str, Duration, &'static str)>,
    failed: Option<String>,
}

impl<'a> Stages<'a> {
    /// No stage has run.
    pub fn new(only: Option<&'a str>) -> Self {
        Self { only, began: Instant::now(), rows: Vec::new(), failed: None }
    }

    /// Runs one stage unless an earlier one failed or it was not asked for.
    pub fn run(&mut self, name: &'static str, stage: impl FnOnce() -> Outcome) -> &mut Self {
        if self.failed.is_some() || self.only.is_some_and(|only| !name.contains(only)) {
            return self;
        }
        println!("== {name}");
        let began = Instant::now();
        let outcome = stage();
        let word = if outcome.is_ok() { "ok" } else { "FAILED" };
        self.rows.push((name, began.elapsed(), word));
        println!("== {name}: {word} in {:.0} s", began.elapsed().as_secs_f64());
        if let Err(message) = outcome {
            self.failed = Some(format!("stage `{name}`: {message}"));
        } else if self.began.elapsed() > TOTAL_MAX {
            self.failed = Some(format!("stage `{name}` ended after {} minutes; the gate allows 90", TOTAL_MAX.as_secs() / 60));
        }
        self
    }

    /// Prints seconds per stage and gives the first failure.
    pub fn finish(&self) -> Outcome {
        println!("\n{:<28}{:>8}  result", "stage", "seconds");
        for (name, time, word) in &self.rows {
            println!("{name:<28}{:>8.0}  {word}", time.as_secs_f64());
        }
        println!("{:<28}{:>8.0}", "total", self.began.elapsed().as_secs_f64());
        self.failed.clone().map_or(Ok(()), Err)
    }
}
