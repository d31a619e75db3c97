//! The `kvasir` program: parse, run, say what went wrong.

use clap::{CommandFactory as _, Parser as _};
use kvasir_cli::args::{BenchCommand, Cli, Command};
use kvasir_cli::{bench, chat, demo, generate, local, model, version};
use std::error::Error;
use std::process::ExitCode;

// Requests allocate much and small; the system's allocator takes a fifth of a router's time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            error.downcast_ref::<generate::GenerateError>().map_or(ExitCode::FAILURE, |error| error.exit_code().into())
        }
    }
}

fn run(cli: &Cli) -> Result<(), Box<dyn Error>> {
    kvasir_telemetry::init_log(&cli.log, kvasir_telemetry::LogFormat::Text)?;
    let cache = cli.model_cache();
    let state = cli.home().join(".local/state/kvasir");
    match &cli.command {
        Command::Version => version::print(),
        Command::Completions { shell } => clap_complete::generate(*shell, &mut Cli::command(), "kvasir", &mut std::io::stdout()),
        Command::Model(command) => model::run(cli, command)?,
        Command::Chat(args) => tokio::runtime::Runtime::new()?.block_on(chat::run(args))?,
        Command::Generate(args) => {
            let summary = tokio::runtime::Runtime::new()?.block_on(generate::run(args, &mut std::io::stdout()))?;
            eprintln!("{summary}");
        }
        Command::Local(args) => tokio::runtime::Runtime::new()?.block_on(local::run(args, &cache, &state))?,
        Command::Demo(args) => tokio::runtime::Runtime::new()?.block_on(demo::run(args, &cache, &state))?,
        Command::Bench(BenchCommand::Prefix(args)) => {
            tokio::runtime::Runtime::new()?.block_on(bench::prefix(args, &cache, &state))?;
        }
        Command::Bench(BenchCommand::Router(args)) => tokio::runtime::Runtime::new()?.block_on(bench::router(args, &cache))?,
    }
    Ok(())
}
