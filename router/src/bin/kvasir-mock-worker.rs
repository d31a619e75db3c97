//! `kvasir-mock-worker`: simulated workers for benchmarks and trials of the router; prints one address a line, then runs until a signal.

use clap::Parser;
use kvasir_model::ModelFile;
use kvasir_proto::auth::BearerSecret;
use kvasir_router::mock::{MockSettings, MockWorker};
use kvasir_telemetry::{LogFormat, init_log};
use std::error::Error;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Run simulated workers that speak `kvasir.worker.v1`.
#[derive(Parser, Clone, Debug)]
#[command(name = "kvasir-mock-worker", version, about)]
struct Args {
    /// First address; further workers take the next ports, or free ones with port 0.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    listen: SocketAddr,

    /// Number of workers, each with a thread of its own.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: u16,

    /// Name of the model.
    #[arg(long, default_value = "mock", value_name = "NAME")]
    model: String,

    /// Model file or folder whose tokenizer and template the workers announce; without it each byte is a token.
    #[arg(long, value_name = "PATH")]
    text: Option<PathBuf>,

    /// Tokens per block.
    #[arg(long, default_value_t = 16, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=4096))]
    block_size: u32,

    /// Blocks of each worker's cache.
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    blocks: u32,

    /// Microseconds to compute one prompt token.
    #[arg(long, default_value_t = 20, value_name = "US")]
    prefill_token_us: u64,

    /// Microseconds between two output tokens.
    #[arg(long, default_value_t = 500, value_name = "US")]
    decode_token_us: u64,

    /// Output tokens per message.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens_per_message: u32,

    /// File with the bearer secret that callers must show; without it everyone on this machine may call.
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "the mock workers cannot go on");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    init_log("info", LogFormat::Text)?;
    let secret = args.secret_file.as_ref().map(std::fs::read_to_string).transpose()?;
    let secret = secret.as_deref().map(BearerSecret::new).transpose()?;
    let text = args.text.as_deref().map(|path| ModelFile::open(path).and_then(|file| file.artifacts())).transpose()?;
    let mut workers = Vec::new();
    for number in 0..args.workers {
        let port = if args.listen.port() == 0 { 0 } else { args.listen.port() + number };
        let settings = MockSettings {
            uid: format!("mock-{number}"),
            model: args.model.clone(),
            block_size: args.block_size,
            blocks: args.blocks,
            prefill_token: Duration::from_micros(args.prefill_token_us),
            decode_token: Duration::from_micros(args.decode_token_us),
            tokens_per_message: args.tokens_per_message,
            ..MockSettings::default()
        };
        let address = SocketAddr::new(args.listen.ip(), port);
        let worker = match text.clone() {
            Some(text) => MockWorker::start_with(settings, text, address, secret.clone())?,
            None => MockWorker::start(settings, address, secret.clone())?,
        };
        writeln!(std::io::stdout(), "{}", worker.address())?;
        workers.push(worker);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(tokio::signal::ctrl_c())?;
    Ok(())
}
