//! The router beside `smg` and `vllm-router`: CPU per request, throughput and latency in front of engines that do no work.
//!
//! Owns the arms, their order and what is compared. All arms stand in front of four engines that stream 16 chunks, are sent the same prompts
//! by the same closed loop, and take turns: each repetition starts every arm anew, in a rotated order. The engines of the HTTP peers speak
//! OpenAI over HTTP; ours are `kvasir-mock-worker`s, which speak `worker.proto`, keep a true block cache and report its events.
//!
//! Tokenising: the peers forward text and never tokenise it. Ours does, so what it costs beside that is measured with prompts that the door
//! tokenised during the warm-up and has in its cache of segments: all the rest of the road (JSON, template, keys, placement) is taken as with
//! any text. The peer that it is compared with gets the same prompts. An arm with fresh prompts tells the whole price, one with token ids what is
//! left without any text; tokenising itself is timed in this process over the same prompts.

mod engine;
mod load;
mod process;
mod prompts;
mod report;

use super::BenchError;
use crate::args::RouterBenchArgs;
use crate::model::{ModelError, obtain};
use engine::Engine;
use kvasir_model::{ModelFile, Text, TextError};
use load::{Figures, Load};
use process::Process;
use prompts::{Form, MODEL, Prompts};
use report::report;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

/// Engines or workers behind each router.
const WORKERS: usize = 4;
/// Clients of the loaded stretch.
const CLIENTS: usize = 32;
/// Stretch under load before anything counts.
const WARM_UP: Duration = Duration::from_secs(1);
/// Longest time that a program may take until it serves.
const READY_MAX: Duration = Duration::from_secs(30);
/// Pause between two tries to reach a program that starts.
const READY_POLL: Duration = Duration::from_millis(100);
/// Answers with a report at the end of an arm of ours.
const REPORTS: usize = 64;
/// The tokeniser's model.
const TEXT_MODEL: &str = "smollm2";
/// What `route` may add to the median answer, in ms.
const ADDED_AIM_MS: f64 = 0.3;

/// Why the router bench failed.
#[derive(Debug, thiserror::Error)]
pub enum RouterBenchError {
    /// A mock engine did not start.
    #[error("a mock engine cannot listen: {0}")]
    Engine(std::io::Error),
    /// The bench's own files.
    #[error("cannot write {path}: {source}")]
    Write {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A program did not start.
    #[error("cannot start {program}: {source}; `cargo xtask bench router` builds ours and fetches the others")]
    Spawn {
        /// Which.
        program: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A program ended, or printed nothing.
    #[error("{name} ended or said nothing; it wrote: {log}")]
    Ended {
        /// Which.
        name: String,
        /// The end of its log.
        log: String,
    },
    /// A program did not serve in time.
    #[error("{name} does not serve after {READY_MAX:?}: {last}")]
    NotReady {
        /// Which.
        name: String,
        /// The last failure.
        last: Box<RouterBenchError>,
    },
    /// Nobody listens.
    #[error("cannot connect to {target}: {message}")]
    Connect {
        /// Where.
        target: SocketAddr,
        /// Why.
        message: String,
    },
    /// An answer is not what was asked for.
    #[error("wrong answer: {0}")]
    Answer(String),
    /// The kernel's figures are missing.
    #[error("cannot read {path}: {source}; this bench needs Linux")]
    Proc {
        /// Which.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The kernel's figures look otherwise.
    #[error("{path} is not as expected: {text}")]
    Format {
        /// Which.
        path: String,
        /// What it holds.
        text: String,
    },
    /// The tokeniser refused a prompt.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The tokeniser's model.
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Arm {
    Direct,
    Smg(&'static str, Form),
    VllmRouter(&'static str),
    Kvasir(Form),
}

/// All arms; the policies are the peers' own names.
const ARMS: [Arm; 9] = [
    Arm::Direct,
    Arm::Smg("cache_aware", Form::Chat),
    Arm::Smg("cache_aware", Form::Seen),
    Arm::Smg("round_robin", Form::Chat),
    Arm::VllmRouter("cache_aware"),
    Arm::VllmRouter("round_robin"),
    Arm::Kvasir(Form::Chat),
    Arm::Kvasir(Form::Seen),
    Arm::Kvasir(Form::Ids),
];

/// A started arm.
struct Running {
    targets: Vec<SocketAddr>,
    router: Option<Process>,
    workers: Option<Process>,
}

/// One repetition of an arm at one number of clients.
#[derive(Clone, Copy, Debug)]
struct Sample {
    figures: Figures,
    /// CPU of the router per request; 0 where there is no router.
    cpu_us: f64,
    rss_mib: f64,
}

/// All repetitions of an arm.
#[derive(Default)]
struct Series {
    one: Vec<Sample>,
    many: Vec<Sample>,
    reports: Vec<Value>,
}

/// The run.
struct Rig<'a> {
    args: &'a RouterBenchArgs,
    folder: PathBuf,
    binaries: PathBuf,
    model: PathBuf,
    engines: Vec<Engine>,
    prompts: Arc<Prompts>,
    stretch: Duration,
}

/// Runs the bench.
pub async fn router(args: &RouterBenchArgs, cache: &Path) -> Result<(), BenchError> {
    let folder = std::env::temp_dir().join(format!("kvasir-bench-router-{}", std::process::id()));
    fs::create_dir_all(&folder).map_err(|source| RouterBenchError::Write { path: folder.clone(), source })?;
    let outcome = run(args, cache, &folder).await;
    // Only logs and throw-away secrets are in it.
    let _left_over = fs::remove_dir_all(&folder);
    outcome
}

async fn run(args: &RouterBenchArgs, cache: &Path, folder: &Path) -> Result<(), BenchError> {
    let model = obtain(TEXT_MODEL, cache).map_err(ModelError::from).map_err(RouterBenchError::from)?;
    let text = ModelFile::open(&model).and_then(|file| file.text()).map_err(ModelError::from).map_err(RouterBenchError::from)?;
    let rig = Rig::new(args, folder, model, &text)?;
    let repetitions = if args.common.quick { 3 } else { 5 };
    let mut all: BTreeMap<&'static str, Series> = BTreeMap::new();
    for repetition in 0..repetitions {
        for turn in 0..ARMS.len() {
            let arm = ARMS[(turn + repetition) % ARMS.len()];
            println!("repetition {} of {repetitions}: {}", repetition + 1, arm.name());
            rig.measure(arm, repetition as u64, all.entry(arm.name()).or_default()).await?;
        }
    }
    let tokenising = rig.prompts.tokenising(&text, 4_000)?;
    report(&args.common, &rig, &all, tokenising, repetitions)
}

// === impl Arm ===

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Smg("cache_aware", Form::Seen) => "smg cache_aware, seen",
            Self::Smg("cache_aware", _) => "smg cache_aware",
            Self::Smg(..) => "smg round_robin",
            Self::VllmRouter("cache_aware") => "vllm-router cache_aware",
            Self::VllmRouter(_) => "vllm-router round_robin",
            Self::Kvasir(Form::Chat) => "kvasir text",
            Self::Kvasir(Form::Seen) => "kvasir text, seen",
            Self::Kvasir(Form::Ids) => "kvasir token ids",
        }
    }

    fn form(self) -> Form {
        match self {
            Self::Kvasir(form) | Self::Smg(_, form) => form,
            Self::Direct | Self::VllmRouter(_) => Form::Chat,
        }
    }

    /// Whether every engine has to get a share.
    fn spreads(self) -> bool {
        matches!(self, Self::Direct | Self::Smg("round_robin", _) | Self::VllmRouter("round_robin"))
    }
}

// === impl Rig ===

impl<'a> Rig<'a> {
    fn new(args: &'a RouterBenchArgs, folder: &Path, model: PathBuf, text: &Text) -> Result<Self, RouterBenchError> {
        for (name, secret) in [("bearer", "bench-bearer-secret-0123"), ("pool", "bench-pool-secret-01234567")] {
            let path = folder.join(name);
            fs::write(&path, secret).map_err(|source| RouterBenchError::Write { path, source })?;
        }
        let beside = || std::env::current_exe().ok().and_then(|own| Some(own.parent()?.to_owned())).unwrap_or_default();
        Ok(Self {
            args,
            folder: folder.to_owned(),
            binaries: args.binaries.clone().unwrap_or_else(beside),
            model,
            engines: (0..WORKERS).map(|_| Engine::start()).collect::<Result<_, _>>()?,
            prompts: Arc::new(Prompts::new(text)?),
            stretch: Duration::from_millis(if args.common.quick { 1_500 } else { 4_000 }),
        })
    }

    async fn measure(&self, arm: Arm, repetition: u64, series: &mut Series) -> Result<(), RouterBenchError> {
        let mut running = self.start(arm).await?;
        let before: Vec<u64> = self.engines.iter().map(Engine::answered).collect();
        let load = Arc::new(Load {
            targets: running.targets.clone(),
            form: arm.form(),
            prompts: Arc::clone(&self.prompts),
            // The same prompts for every arm, others in every repetition.
            next: AtomicU64::new(repetition << 32),
        });
        self.wait_until_served(arm, &mut running, &load).await?;
        load.run(CLIENTS, WARM_UP).await?;
        series.one.push(self.stretch(&running, &load, 1).await?);
        series.many.push(self.stretch(&running, &load, CLIENTS).await?);
        if let Arm::Kvasir(_) = arm {
            for _ in 0..REPORTS {
                series.reports.push(report_of(&load.one(true).await?)?);
            }
        }
        let answered: Vec<u64> = self.engines.iter().zip(&before).map(|(engine, before)| engine.answered() - before).collect();
        if arm.spreads() && answered.contains(&0) {
            return Err(RouterBenchError::Answer(format!("{} left an engine without work: {answered:?}", arm.name())));
        }
        for process in [running.router, running.workers].into_iter().flatten() {
            process.stop().await;
        }
        Ok(())
    }

    async fn stretch(&self, running: &Running, load: &Arc<Load>, clients: usize) -> Result<Sample, RouterBenchError> {
        let cpu = || running.router.as_ref().map_or(Ok(Duration::ZERO), Process::cpu);
        let before = cpu()?;
        let figures = load.run(clients, self.stretch).await?;
        let used = cpu()?.saturating_sub(before);
        let rss_mib = running.router.as_ref().map_or(Ok(0.0), Process::rss_mib)?;
        if running.router.is_some() && used.is_zero() {
            return Err(RouterBenchError::Answer("a router used no CPU: its work is done by another process".to_owned()));
        }
        Ok(Sample { figures, cpu_us: used.as_secs_f64() * 1e6 / figures.requests.max(1) as f64, rss_mib })
    }

    async fn start(&self, arm: Arm) -> Result<Running, RouterBenchError> {
        let engines: Vec<SocketAddr> = self.engines.iter().map(|engine| engine.address).collect();
        let urls = engines.iter().map(|address| format!("http://{address}"));
        let port = free_port()?;
        let listen = |first: &str| vec![first.to_owned(), "--host".into(), "127.0.0.1".into(), "--port".into(), port.to_string()];
        let metrics = free_port()?.to_string();
        let (program, args) = match arm {
            Arm::Direct => return Ok(Running { targets: engines, router: None, workers: None }),
            Arm::Kvasir(_) => return self.start_kvasir(arm, port).await,
            Arm::Smg(policy, _) => {
                let mut args = listen("launch");
                args.extend(
                    ["--policy", policy, "--prometheus-port", &metrics, "--log-level", "error", "--worker-urls"]
                        .map(str::to_owned),
                );
                (&self.args.smg, args.into_iter().chain(urls).collect::<Vec<_>>())
            }
            Arm::VllmRouter(policy) => {
                let mut args = listen("--log-level=error");
                args.extend(["--policy", policy, "--prometheus-port", &metrics, "--worker-urls"].map(str::to_owned));
                (&self.args.vllm_router, args.into_iter().chain(urls).collect())
            }
        };
        let mut process = Process::spawn(arm.name(), program, &args, &self.folder)?;
        process.forget_output();
        Ok(Running { targets: vec![local(port)], router: Some(process), workers: None })
    }

    async fn start_kvasir(&self, arm: Arm, port: u16) -> Result<Running, RouterBenchError> {
        let bearer = self.folder.join("bearer").display().to_string();
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<String>>();
        let args = words(&[
            "--workers",
            &WORKERS.to_string(),
            "--model",
            MODEL,
            "--text",
            &self.model.display().to_string(),
            "--secret-file",
            &bearer,
            "--prefill-token-us",
            "0",
            "--decode-token-us",
            "0",
        ]);
        let mut workers = Process::spawn("kvasir-mock-worker", &self.binaries.join("kvasir-mock-worker"), &args, &self.folder)?;
        let addresses = workers.lines(WORKERS).await?.join(",");
        let pool = self.folder.join("pool").display().to_string();
        let args = words(&[
            "--worker",
            &addresses,
            "--http",
            &local(port).to_string(),
            "--secret-file",
            &bearer,
            "--pool-secret-file",
            &pool,
            "--ready-workers",
            &WORKERS.to_string(),
            "--log",
            "error",
        ]);
        let mut router = Process::spawn(arm.name(), &self.binaries.join("kvasir-router"), &args, &self.folder)?;
        router.forget_output();
        Ok(Running { targets: vec![local(port)], router: Some(router), workers: Some(workers) })
    }

    async fn wait_until_served(&self, arm: Arm, running: &mut Running, load: &Load) -> Result<(), RouterBenchError> {
        let began = Instant::now();
        loop {
            let Err(last) = load.one(false).await else { return Ok(()) };
            for process in [&mut running.router, &mut running.workers].into_iter().flatten() {
                process.check()?;
            }
            if began.elapsed() > READY_MAX {
                return Err(RouterBenchError::NotReady { name: arm.name().to_owned(), last: Box::new(last) });
            }
            tokio::time::sleep(READY_POLL).await;
        }
    }
}

/// The `kvasir` member of an answer; its prefix must have been reused, or the arm would not measure what it says.
fn report_of(answer: &str) -> Result<Value, RouterBenchError> {
    let events =
        answer.lines().filter_map(|line| line.strip_prefix("data: ")).filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let report = events.map(|event| event["kvasir"].clone()).find(Value::is_object);
    match report {
        Some(report) if report["hits"]["device"].as_u64().is_some_and(|tokens| tokens > 0) => Ok(report),
        _ => Err(RouterBenchError::Answer(format!("no report of a reused prefix: {answer}"))),
    }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// A port that is free now; the program that takes it fails loudly if another was faster.
fn free_port() -> Result<u16, RouterBenchError> {
    let listener = TcpListener::bind(local(0)).map_err(RouterBenchError::Engine)?;
    Ok(listener.local_addr().map_err(RouterBenchError::Engine)?.port())
}
