//! Flags and environment of `kvasir-worker`: parsed once, here, into settings. Nothing else reads either.

use crate::service::ServiceLimits;
use crate::start::{KvSize, WorkerSettings};
use clap::{Parser, ValueEnum};
use kvasir_core::{CacheMode, WorkerUid};
use kvasir_process::TelemetryArgs;
use kvasir_proto::Role;
use kvasir_proto::auth::{Access, BearerSecret, SecretError};
use kvasir_telemetry::TraceConfig;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Serve one model: an inference engine with a paged prefix cache behind the `kvasir.worker.v1` services.
#[derive(Parser, Clone, Debug)]
#[command(name = "kvasir-worker", version, about, after_help = "Every flag can also be set by its environment variable.")]
pub struct Args {
    /// Model.
    #[command(flatten)]
    pub source: ModelArgs,

    /// Name that clients use for the model; the file's stem or the known name if absent.
    #[arg(long, env = "KVASIR_SERVED_NAME", value_name = "NAME")]
    pub served_name: Option<String>,

    /// What this worker is for: to serve a model, or to draft for workers that do. Drafting is not served yet: a draft worker answers probes,
    /// describes itself and says so.
    #[arg(long, env = "KVASIR_ROLE", default_value = "target")]
    pub role: WorkerRole,

    /// Stable name of this worker; the host's name if absent.
    #[arg(long, env = "KVASIR_UID", value_name = "NAME")]
    pub uid: Option<String>,

    /// The host's name, as a pod has it.
    #[arg(long, env = "HOSTNAME", hide = true, default_value = "worker")]
    pub hostname: String,

    /// Ports.
    #[command(flatten)]
    pub ports: PortArgs,

    /// Engine.
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Telemetry.
    #[command(flatten)]
    pub telemetry: TelemetryArgs,

    /// Folder of fetched models and remembered digests; `$HOME/.cache/kvasir` if absent.
    #[arg(long, env = "KVASIR_CACHE", value_name = "DIR")]
    pub cache: Option<PathBuf>,

    /// Home folder, for the default place of the cache.
    #[arg(long, env = "HOME", hide = true)]
    pub home: Option<PathBuf>,
}

/// Which model, and what getting it needs.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Model: a known name (`smollm2`), the path of a .gguf file, a folder with safetensors, `hf://OWNER/NAME@COMMIT` with an optional `/FILE`, or an
    /// https address of a .gguf file. What is fetched is kept in the cache and never fetched again.
    #[arg(long, env = "KVASIR_MODEL", value_name = "NAME|PATH|URL")]
    pub model: String,

    /// SHA-256 of the file behind an https address, 64 hexadecimal digits.
    #[arg(long, env = "KVASIR_MODEL_SHA256", value_name = "HEX")]
    pub model_sha256: Option<String>,

    /// File with an access token for `hf://` and https addresses.
    #[arg(long, env = "KVASIR_MODEL_TOKEN_FILE", value_name = "FILE")]
    pub model_token_file: Option<PathBuf>,

    /// Digest that the weights must have, 64 hexadecimal digits; with others the worker does not start.
    #[arg(long, env = "KVASIR_MODEL_DIGEST", value_name = "HEX")]
    pub model_digest: Option<String>,

    /// Address of Hugging Face or a mirror of it, for `hf://`.
    #[arg(long, env = "KVASIR_HUB", default_value = kvasir_model::HUB, value_name = "URL")]
    pub hub: String,
}

/// Ports, and who may use them.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Ports")]
pub struct PortArgs {
    /// Address of the gRPC services for routers and administrators.
    #[arg(long, env = "KVASIR_LISTEN", default_value = "127.0.0.1:7401", value_name = "ADDR")]
    pub listen: SocketAddr,

    /// Address of /metrics, /readyz and /healthz over HTTP.
    #[arg(long, env = "KVASIR_METRICS", default_value = "127.0.0.1:7402", value_name = "ADDR")]
    pub metrics: SocketAddr,

    /// File with the bearer secret that callers of the gRPC services must show, at least 16 visible characters.
    #[arg(long, env = "KVASIR_SECRET_FILE", value_name = "FILE")]
    pub secret_file: PathBuf,

    /// Address of a door for clients (OpenAI HTTP and gRPC on one port), to serve without a router.
    #[arg(long, env = "KVASIR_DOOR", value_name = "ADDR", requires = "pool_secret_file")]
    pub door: Option<SocketAddr>,

    /// Tenants of that door (TOML); without it everyone is the tenant `default`.
    #[arg(long, env = "KVASIR_TENANTS", value_name = "FILE", requires = "door")]
    pub tenants: Option<PathBuf>,

    /// File with the pool secret from which that door derives reuse domains, at least 16 bytes.
    #[arg(long, env = "KVASIR_POOL_SECRET_FILE", value_name = "FILE", requires = "door")]
    pub pool_secret_file: Option<PathBuf>,

    /// Seconds that running streams get after SIGTERM before they are handed back.
    #[arg(long, env = "KVASIR_DRAIN_SECONDS", default_value_t = 30, value_name = "SECONDS")]
    pub drain_seconds: u64,

    /// Largest request message, in MiB.
    #[arg(long, env = "KVASIR_REQUEST_MIB", default_value_t = 16, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub request_mib: u32,
}

/// Size and limits of the engine.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Compute threads; all cores if absent.
    #[arg(long, env = "KVASIR_THREADS", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=512))]
    pub threads: Option<u16>,

    /// Memory of the KV pool, such as `512MiB` or `4GiB`.
    #[arg(long, env = "KVASIR_KV_BYTES", default_value = "1GiB", value_name = "BYTES", value_parser = parse_bytes)]
    pub kv_bytes: u64,

    /// Blocks of the KV pool, instead of --kv-bytes.
    #[arg(long, env = "KVASIR_KV_BLOCKS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub kv_blocks: Option<u32>,

    /// Tokens per KV block: 16, 32, 64, 128 or 256.
    #[arg(long, env = "KVASIR_BLOCK_SIZE", default_value_t = 16, value_name = "TOKENS")]
    pub block_size: u32,

    /// Longest prompt plus output, in tokens; the model's own if absent or larger.
    #[arg(long, env = "KVASIR_CONTEXT", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,

    /// Prefix cache; `off` wins over every request's wish.
    #[arg(long, env = "KVASIR_PREFIX_CACHE", default_value = "auto")]
    pub prefix_cache: PrefixCache,

    /// Most sequences that are computed at once.
    #[arg(long, env = "KVASIR_SEQUENCES", default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub sequences: u32,

    /// Most tokens of one step.
    #[arg(long, env = "KVASIR_STEP_TOKENS", default_value_t = 2048, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub step_tokens: u32,

    /// Longest step while others decode, in milliseconds: what a token may wait for a neighbour's prompt.
    #[arg(long, env = "KVASIR_STEP_MS", default_value_t = 60, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub step_ms: u64,

    /// Choices that may wait for their first step; more are refused as overloaded.
    #[arg(long, env = "KVASIR_QUEUE", default_value_t = 1024, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub queue: u32,

    /// Prompt tokens that may wait for their first step; more are refused as overloaded.
    #[arg(long, env = "KVASIR_QUEUE_TOKENS", default_value_t = 1 << 20, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub queue_tokens: u64,

    /// Seconds after which a reader that takes nothing is cut off.
    #[arg(long, env = "KVASIR_STALL_SECONDS", default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub stall_seconds: u64,
}

/// What a worker is for.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum WorkerRole {
    /// Serves a model.
    Target,
    /// Drafts.
    Draft,
}

/// Modes of the prefix cache.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefixCache {
    /// The engine decides from measured cost.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

// === impl Args ===

impl Args {
    /// Name of this worker.
    pub fn uid(&self) -> &str {
        self.uid.as_deref().unwrap_or(&self.hostname)
    }

    /// Name of the model for clients.
    pub fn served_name(&self) -> String {
        self.served_name.clone().unwrap_or_else(|| kvasir_model::default_name(&self.source.model))
    }

    /// Folder of fetched models and remembered digests.
    pub fn cache_dir(&self) -> PathBuf {
        let home = || self.home.clone().unwrap_or_default().join(".cache/kvasir");
        self.cache.clone().unwrap_or_else(home)
    }

    /// Settings of the worker, with the bearer secret read from its file.
    pub fn settings(&self, secret: &str) -> Result<WorkerSettings, SecretError> {
        let access = Access::Bearer(BearerSecret::new(secret)?);
        let mut settings = WorkerSettings::new(self.uid(), access);
        let engine = &self.engine;
        settings.uid = WorkerUid(self.uid().into());
        settings.role = match self.role {
            WorkerRole::Target => Role::Target,
            WorkerRole::Draft => Role::Draft,
        };
        settings.listen = self.ports.listen;
        settings.kv = engine.kv_blocks.map_or(KvSize::Bytes(engine.kv_bytes), KvSize::Blocks);
        settings.cache = match engine.prefix_cache {
            PrefixCache::Auto => CacheMode::Auto,
            PrefixCache::On => CacheMode::On,
            PrefixCache::Off => CacheMode::Off,
        };
        settings.step.rows_max = engine.sequences as usize;
        settings.step.tokens_max = engine.step_tokens;
        settings.step.time_mixed = Duration::from_millis(engine.step_ms);
        settings.queue.sequences_max = engine.queue;
        settings.queue.tokens_max = engine.queue_tokens;
        settings.queue.stall_max = Duration::from_secs(engine.stall_seconds);
        settings.service = ServiceLimits {
            request_bytes_max: (self.ports.request_mib as usize) << 20,
            drain_deadline: Duration::from_secs(self.ports.drain_seconds),
            ..ServiceLimits::default()
        };
        Ok(settings)
    }

    /// Where spans go.
    pub fn trace_config(&self) -> TraceConfig {
        self.telemetry.trace_config("kvasir-worker", self.uid())
    }
}

/// Reads a number of bytes with an optional unit.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "ki" | "kib" => 10,
        "m" | "mi" | "mib" => 20,
        "g" | "gi" | "gib" => 30,
        "t" | "ti" | "tib" => 40,
        other => return Err(format!("unknown unit {other:?}; write for example 512MiB or 4GiB")),
    };
    let number: u64 = number.parse().map_err(|_| "expected a whole number with an optional unit, such as 4GiB".to_owned())?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(|| format!("{text} is out of range"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
    use super::*;

    fn parse(extra: &[&str]) -> Result<Args, clap::Error> {
        let base = ["kvasir-worker", "--model", "/models/a.gguf", "--secret-file", "/secret", "--hostname", "pod-0"];
        Args::try_parse_from(base.iter().chain(extra))
    }

    #[test]
    fn defaults_stand_as_documented() {
        let args = parse(&[]).unwrap();
        let settings = args.settings("0123456789abcdef").unwrap();
        assert_eq!(&*settings.uid.0, "pod-0");
        assert_eq!(args.served_name(), "a");
        assert_eq!(settings.kv, KvSize::Bytes(1 << 30));
        assert_eq!(settings.service.request_bytes_max, 16 << 20);
        assert_eq!(settings.service.drain_deadline, Duration::from_secs(30));
        assert_eq!(settings.step.rows_max, 64);
        assert_eq!(settings.queue.tokens_max, 1 << 20);
    }

    #[test]
    fn what_a_model_needs_and_the_role_are_read() {
        let args =
            parse(&["--role", "draft", "--model-sha256", "ab", "--model-token-file", "/t", "--hub", "https://mirror"]).unwrap();
        assert_eq!(args.settings("0123456789abcdef").unwrap().role, Role::Draft);
        assert_eq!((args.source.model_sha256.as_deref(), &*args.source.hub), (Some("ab"), "https://mirror"));
        assert_eq!(parse(&[]).unwrap().source.hub, "https://huggingface.co");
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse_bytes("4GiB"), Ok(4 << 30));
        assert_eq!(parse_bytes("512 Mi"), Ok(512 << 20));
        assert_eq!(parse_bytes("123"), Ok(123));
        for wrong in ["", "0", "GiB", "4 gallons", "-1", "99999999999TiB"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse(&["--kv-blocks", "7"]).unwrap().settings("0123456789abcdef").unwrap().kv, KvSize::Blocks(7));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for wrong in [
            &["--threads", "0"][..],
            &["--kv-blocks", "0"],
            &["--door", "127.0.0.1:1"],
            &["--tenants", "/t"],
            &["--trace-sampling", "2"],
            &["--queue", "0"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
        assert!(parse(&[]).unwrap().settings("short").is_err());
    }
}
