//! Fleets for the tests, and outside programs that a test needs.

use kvasir_cli::args::LocalArgs;
use kvasir_cli::local::Fleet;
use kvasir_model::synth::TinyModel;
use std::future::Future;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for anything in these tests.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// The folder of fetched models, shared with the programs.
pub fn model_cache() -> PathBuf {
    cache().join("models")
}

#[expect(clippy::disallowed_methods, reason = "tests find the user's cache as the programs do")]
fn cache() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    base.unwrap_or_else(|| PathBuf::from("/var/tmp")).join("kvasir")
}

/// A program named by an environment variable that `cargo xtask test` sets. Without it the test fails in CI and says elsewhere that it was
/// left out.
#[expect(clippy::disallowed_methods, reason = "the test command names the programs")]
pub fn program(variable: &str, what: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Some(path.into());
    }
    assert!(std::env::var_os("CI").is_none(), "{variable} is not set: `cargo xtask test` brings {what}");
    eprintln!("LEFT OUT: {variable} is not set, run `cargo xtask test` for {what}");
    None
}

/// Arguments of a fleet on free ports with the real SmolLM2.
pub fn smollm2(workers: u32, state: &Path) -> LocalArgs {
    LocalArgs { kv_mib: 256, ..LocalArgs::for_measurement("smollm2", workers, state) }
}

/// Arguments of a fleet on free ports with a model of random weights.
pub fn tiny(workers: u32, state: &Path) -> LocalArgs {
    let path = model_file(2048, state);
    LocalArgs { kv_mib: 8, ..LocalArgs::for_measurement(path.to_str().unwrap(), workers, state) }
}

/// Writes a model of random weights that takes `context` tokens.
pub fn model_file(context: usize, dir: &Path) -> PathBuf {
    let path = dir.join("tiny.gguf");
    std::fs::write(&path, TinyModel { context_len: context, ..TinyModel::default() }.to_gguf().unwrap()).unwrap();
    path
}

/// Runs a test body on a fleet, then stops the fleet.
pub fn with_fleet<F: Future<Output = ()>>(args: &LocalArgs, state: &Path, body: impl FnOnce(std::sync::Arc<Fleet>) -> F) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let fleet = std::sync::Arc::new(Fleet::start(args, &model_cache(), state).await.unwrap());
        body(fleet.clone()).await;
        let fleet = std::sync::Arc::into_inner(fleet).expect("the body gave the fleet back");
        fleet.stop().await;
    });
}

/// Waits until `holds`, asking again every few milliseconds, at most [`PATIENCE`].
pub async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < PATIENCE, "{what} did not come true within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A child process that is killed when the test ends, however it ends.
pub struct Process(pub Child);

impl Process {
    pub fn start(command: &mut Command) -> Self {
        Self(command.stdout(Stdio::null()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// Value of a metric line that begins with `name` and contains all of `labels`, summed over components.
pub fn metric(text: &str, name: &str, labels: &[&str]) -> f64 {
    text.lines()
        .filter(|line| line.split(['{', ' ']).next() == Some(name) && labels.iter().all(|label| line.contains(label)))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}
