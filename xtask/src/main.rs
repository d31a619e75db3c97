//! Thin entry points: each verb prepares what it needs and runs one command. No logic of the product lives here.

#![allow(clippy::disallowed_methods, reason = "a build tool reads the build environment")]

mod stages;
mod tools;
mod verbs;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Verbs of the Kvasir workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Build, fetch the default model once, start a local fleet, run the main job on it, and print what happened.
    Demo,
    /// Every test, with seconds per stage; exits non-zero at the first failing stage.
    Test {
        /// Start from empty caches (CARGO_HOME, GOCACHE, tools, models), to prove that a new machine passes.
        #[arg(long)]
        cold: bool,
        /// Run only the stages whose name contains this text.
        #[arg(long)]
        only: Option<String>,
    },
    /// The product on a real Kubernetes that this machine starts itself (root on Linux), with seconds per stage.
    E2e {
        /// Run only the tests whose name contains this text, such as `cluster::played`.
        #[arg(long)]
        only: Option<String>,
    },
    /// Benchmarks: ratios measured side by side in one run, in the `release` profile.
    Bench {
        /// `prefix` (TTFT warm against cold, hashing), `router` (against smg and vllm-router on a mock fleet), `candle` (prefill beside stock
        /// candle) or `numerics` (the distance of a real llama.cpp from the reference, for the gate).
        what: String,
        /// Fewer repetitions.
        #[arg(long)]
        quick: bool,
        /// Write the rows as JSON to this file.
        #[arg(long)]
        json: Option<String>,
    },
    /// Long loops: the same properties as in `test`, with far more operations.
    Soak {
        /// Multiplies the operations of each fuzz and simulation.
        #[arg(long, default_value_t = 20)]
        factor: u32,
    },
}

fn main() -> ExitCode {
    let result = match Args::parse().verb {
        Verb::Demo => verbs::demo(),
        Verb::Test { cold, only } => verbs::test(cold, only.as_deref()),
        Verb::E2e { only } => verbs::e2e(only.as_deref()),
        Verb::Bench { what, quick, json } => verbs::bench(&what, quick, json.as_deref()),
        Verb::Soak { factor } => verbs::soak(factor),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}
