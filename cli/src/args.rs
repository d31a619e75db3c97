//! Flags and environment of `kvasir`, parsed once.

use clap::{Args, Parser, Subcommand};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Serve large language models with exact, measured prefix caching.
#[derive(Parser, Debug)]
#[command(name = "kvasir", version, about, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,

    /// What to log, for example `info,kvasir=debug`.
    #[arg(long, global = true, env = "KVASIR_LOG", default_value = "warn")]
    pub log: String,

    /// Folder of fetched models.
    #[arg(long, global = true, env = "KVASIR_CACHE", value_name = "DIR")]
    pub cache: Option<PathBuf>,

    /// Home folder, for the default places of caches and state.
    #[arg(long, global = true, env = "HOME", hide = true)]
    pub home: Option<PathBuf>,
}

/// What `kvasir` can do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run a router and workers in this process, on loopback, until Ctrl-C.
    Local(LocalArgs),
    /// Talk to a served model in the terminal.
    Chat(ChatArgs),
    /// Continue one text over gRPC, print it and what it cost, and end: 0 answered, 1 refused or failed, 2 wrong arguments, 3 no way there, 4 too
    /// late.
    Generate(GenerateArgs),
    /// Fetch, list and inspect models.
    #[command(subcommand)]
    Model(ModelCommand),
    /// Start a local fleet, run the main job on a shared system prompt, print what happened.
    Demo(DemoArgs),
    /// Measure.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Print version, commit and instruction sets.
    Version,
    /// Print a completion script for a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

/// `kvasir local`
#[derive(Args, Debug, Clone)]
pub struct LocalArgs {
    /// Known model name (`kvasir model list`), path of a .gguf file, or model folder.
    #[arg(long, default_value = "smollm2", value_name = "NAME|PATH")]
    pub model: String,

    /// Name that clients use; the model's own name by default.
    #[arg(long, value_name = "NAME")]
    pub served_name: Option<String>,

    /// Workers; they share one weight mapping and one compute pool.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: u32,

    /// OpenAI-compatible HTTP door.
    #[arg(long, default_value = "127.0.0.1:8080", env = "KVASIR_HTTP", value_name = "ADDR")]
    pub http: SocketAddr,

    /// gRPC door.
    #[arg(long, default_value = "127.0.0.1:8081", env = "KVASIR_GRPC", value_name = "ADDR")]
    pub grpc: SocketAddr,

    /// Tenants with their keys; without it there is one open tenant `default`.
    #[arg(long, env = "KVASIR_TENANTS", value_name = "FILE")]
    pub tenants: Option<PathBuf>,

    /// Send traces to this OTLP/gRPC collector, for example http://localhost:4317.
    #[arg(long, env = "KVASIR_OTLP", value_name = "URL")]
    pub otlp: Option<String>,

    /// Compute threads; one per core by default.
    #[arg(long, env = "KVASIR_THREADS", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: Option<u16>,

    /// KV pool of each worker in MiB.
    #[arg(long, default_value_t = 1024, env = "KVASIR_KV_MIB", value_name = "MIB")]
    pub kv_mib: u64,

    /// Tokens per KV block.
    #[arg(long, default_value_t = 16, value_parser = block_size)]
    pub block_size: u32,

    /// Folder of the pool secret; ~/.local/state/kvasir by default.
    #[arg(long, env = "KVASIR_STATE", value_name = "DIR")]
    pub state: Option<PathBuf>,
}

/// `kvasir chat`
#[derive(Args, Debug)]
pub struct ChatArgs {
    /// Where the door is.
    #[arg(long, default_value = "http://127.0.0.1:8080", env = "KVASIR_URL")]
    pub url: String,

    /// Model; the only served one by default.
    #[arg(long)]
    pub model: Option<String>,

    /// API key.
    #[arg(long, env = "KVASIR_API_KEY", hide_env_values = true)]
    pub key: Option<String>,

    /// System prompt.
    #[arg(long)]
    pub system: Option<String>,

    /// Most tokens per answer.
    #[arg(long, default_value_t = 512)]
    pub max_tokens: u32,

    /// 0 is greedy.
    #[arg(long, default_value_t = 0.7)]
    pub temperature: f32,

    /// Ask once and end.
    pub prompt: Option<String>,
}

/// `kvasir generate`
#[derive(Args, Debug, Clone)]
pub struct GenerateArgs {
    /// Where the gRPC door is.
    #[arg(long, default_value = "http://127.0.0.1:8081", env = "KVASIR_GRPC_URL")]
    pub url: String,

    /// Model; the only served one by default.
    #[arg(long)]
    pub model: Option<String>,

    /// API key; of several lines the first counts.
    #[arg(long, env = "KVASIR_API_KEY", hide_env_values = true)]
    pub key: Option<String>,

    /// Most tokens of output.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,

    /// Tokens of output before an end token may be chosen.
    #[arg(long, default_value_t = 0)]
    pub min_tokens: u32,

    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,

    /// Equal seeds give equal output; random if absent.
    #[arg(long)]
    pub seed: Option<i64>,

    /// Longest time for all of it.
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout_seconds: u64,

    /// Text to continue.
    pub prompt: String,
}

/// `kvasir model`
#[derive(Subcommand, Debug)]
pub enum ModelCommand {
    /// Fetch a known model into the cache and check its SHA-256.
    Pull {
        /// Known name.
        name: String,
    },
    /// Known models, and which of them are in the cache.
    List,
    /// Configuration, tensors and digests of a model.
    Inspect {
        /// Known name, path of a .gguf file, or model folder.
        model: String,
    },
}

/// `kvasir demo`
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// Model of the demo.
    #[arg(long, default_value = "smollm2", value_name = "NAME|PATH")]
    pub model: String,

    /// Workers of the fleet.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub workers: u32,
}

/// `kvasir bench`
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// TTFT warm against cold on a shared prefix, and the cost of hashing and lookup.
    Prefix(BenchArgs),
    /// CPU per request, throughput and latency of the router beside smg and vllm-router, in front of engines without work.
    Router(RouterBenchArgs),
}

/// Options of every benchmark.
#[derive(Args, Debug, Clone)]
pub struct BenchArgs {
    /// Fewer repetitions.
    #[arg(long)]
    pub quick: bool,

    /// Write the rows as JSON to this file.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `kvasir bench router`
#[derive(Args, Debug, Clone)]
pub struct RouterBenchArgs {
    /// Options of every benchmark.
    #[command(flatten)]
    pub common: BenchArgs,

    /// Program `smg` (PyPI).
    #[arg(long, env = "KVASIR_BENCH_SMG", value_name = "PATH")]
    pub smg: PathBuf,

    /// Program `vllm-router` (PyPI).
    #[arg(long, env = "KVASIR_BENCH_VLLM_ROUTER", value_name = "PATH")]
    pub vllm_router: PathBuf,

    /// Folder of kvasir-router and kvasir-mock-worker; this program's own by default.
    #[arg(long, value_name = "DIR")]
    pub binaries: Option<PathBuf>,
}

/// Block sizes that the CPU kernels take.
fn block_size(text: &str) -> Result<u32, String> {
    const SIZES: [u32; 5] = [16, 32, 64, 128, 256];
    let size = text.parse().ok().filter(|size| SIZES.contains(size));
    size.ok_or_else(|| format!("a block has 16, 32, 64, 128 or 256 tokens, not `{text}`"))
}

// === impl Cli ===

impl Cli {
    /// The folder of fetched models.
    pub fn model_cache(&self) -> PathBuf {
        self.cache.clone().unwrap_or_else(|| self.home().join(".cache/kvasir/models"))
    }

    /// The home folder, or the current one where none is set.
    pub fn home(&self) -> PathBuf {
        self.home.clone().unwrap_or_else(|| PathBuf::from("."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(args: &[&str]) -> String {
        Cli::try_parse_from(args).expect_err("a refusal").to_string()
    }

    #[test]
    fn impossible_sizes_are_refused_with_what_is_possible() {
        assert!(refusal(&["kvasir", "local", "--threads", "0"]).contains("1..=512"));
        assert!(refusal(&["kvasir", "local", "--block-size", "17"]).contains("16, 32, 64, 128 or 256"));
        assert!(refusal(&["kvasir", "local", "--workers", "0"]).contains("1..=64"));
    }

    #[test]
    fn generate_asks_for_something_within_a_bound() {
        let given = ["kvasir", "generate"];
        assert!(refusal(&given).contains("<PROMPT>"));
        assert!(refusal(&[&given[..], &["--max-tokens", "0", "x"]].concat()).contains("1.."));
        assert!(refusal(&[&given[..], &["--timeout-seconds", "0", "x"]].concat()).contains("1..=86400"));
    }

    #[test]
    fn the_default_model_is_the_embedded_one_on_one_worker() {
        let cli = Cli::try_parse_from(["kvasir", "local"]).expect("defaults");
        let Command::Local(args) = cli.command else { panic!("not local") };
        assert_eq!((args.model.as_str(), args.workers, args.block_size), ("smollm2", 1, 16));
        assert_eq!(args.http.to_string(), "127.0.0.1:8080");
    }
}
