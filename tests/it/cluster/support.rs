//! Clusters for the tests, and what is asked of them.

use crate::e2e::support::{model_cache, program};
use futures::FutureExt as _;
use kvasir_cluster::{Cluster, Image, Layers, Settings, is_root, until};
use serde_json::{Value, json};
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The images that tests build, by the program that each holds.
pub const ROUTER: &str = "kvasir.test/kvasir-router:1";
pub const WORKER: &str = "kvasir.test/kvasir-worker:1";
pub const CLI: &str = "kvasir.test/kvasir:1";
/// The model whose bytes the demo fetches.
pub const MODEL: &str = "smollm2";
/// Storage class of the volume with models, and the name of the claim on it.
pub const MODELS: &str = "models";

/// Longest wait for anything on a cluster.
pub const PATIENCE: Duration = Duration::from_mins(1);
/// Clusters want the machine for themselves.
static MACHINE: Mutex<()> = Mutex::new(());

/// Leave to have the machine's only cluster.
pub struct Turn {
    /// Where clusters lie.
    pub settings: Settings,
    _machine: MutexGuard<'static, ()>,
}

/// A program that the same build made.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join(name);
    assert!(path.exists(), "{} is missing: build with `cargo build --profile ci --workspace --all-targets`", path.display());
    path
}

/// Where the programs of a cluster are, or a line that names what is missing.
fn settings() -> Option<Settings> {
    let settings = Settings::from_environment().unwrap();
    let there = settings.bin().is_ok_and(|bin| bin.join("kube-apiserver").exists());
    (there || program("KVASIR_TEST_CLUSTER_BIN", "a Kubernetes").is_some()).then_some(settings)
}

/// Runs a test body on a cluster of its own, then stops the cluster.
pub fn on_cluster(layers: Layers, body: impl AsyncFnOnce(&Cluster)) {
    if let Some(turn) = Turn::take() {
        turn.run(layers, body);
    }
}

/// The same on `count` real nodes, which only root can have.
pub fn on_nodes(count: usize, body: impl AsyncFnOnce(&Cluster)) {
    if let Some(turn) = Turn::take_as_root() {
        turn.run(Layers::nodes(count), body);
    }
}

// === impl Turn ===

impl Turn {
    /// `None` where the programs are missing.
    pub fn take() -> Option<Self> {
        let settings = settings()?;
        Some(Self { settings, _machine: MACHINE.lock().unwrap_or_else(PoisonError::into_inner) })
    }

    /// `None` too for who is not root.
    #[expect(clippy::disallowed_methods, reason = "CI says so in the environment")]
    pub fn take_as_root() -> Option<Self> {
        if is_root() {
            return Self::take();
        }
        assert!(std::env::var_os("CI").is_none(), "real nodes need root");
        eprintln!("LEFT OUT: real nodes need root");
        None
    }

    /// Runs a test body on a cluster of its own, then stops the cluster.
    pub fn run(&self, layers: Layers, body: impl AsyncFnOnce(&Cluster)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(self.run_on_runtime(layers, body));
    }

    async fn run_on_runtime(&self, layers: Layers, body: impl AsyncFnOnce(&Cluster)) {
        let cluster = Cluster::start_with(layers, &self.settings).await.unwrap_or_else(|error| panic!("{error}"));
        let seconds: f64 = cluster.timings().iter().map(|(_, took)| took.as_secs_f64()).sum();
        eprintln!("{seconds:>7.1} s  cluster");
        let outcome = AssertUnwindSafe(body(&cluster)).catch_unwind().await;
        if outcome.is_err() {
            describe(&cluster);
        }
        cluster.stop().await;
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
    }
}

/// What a failed test leaves to look at.
fn describe(cluster: &Cluster) {
    for what in [&["get", "pods,events", "-A", "-o", "wide"][..], &["get", "nodes", "-o", "wide"]] {
        let shown = cluster.kubectl().and_then(|mut kubectl| Cluster::output(kubectl.args(what)));
        eprintln!("{}", shown.unwrap_or_else(|error| error.to_string()));
    }
}

/// What `kubectl` prints, or what it complains about.
pub fn try_kubectl(cluster: &Cluster, args: &[&str]) -> Result<String, String> {
    Cluster::output(cluster.kubectl().unwrap().args(args)).map_err(|error| error.to_string())
}

/// What `kubectl` prints.
pub fn kubectl(cluster: &Cluster, args: &[&str]) -> String {
    try_kubectl(cluster, args).unwrap_or_else(|error| panic!("{error}"))
}

/// What `kubectl get … -o json` says.
pub fn get(cluster: &Cluster, args: &[&str]) -> Value {
    serde_json::from_str(&kubectl(cluster, &[&["get", "-o", "json"], args].concat())).unwrap()
}

/// `kubectl VERB -f -` with an object; what it printed, or its complaint.
pub fn feed(cluster: &Cluster, args: &[&str], object: &Value) -> Result<String, String> {
    let mut command = cluster.kubectl().unwrap();
    command.args(args).args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(object.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// Applies an object.
pub fn apply(cluster: &Cluster, object: &Value) {
    feed(cluster, &["apply"], object).unwrap_or_else(|error| panic!("{object}: {error}"));
}

/// Asks again and again, at most [`PATIENCE`]; the last answer is told.
pub async fn eventually<T>(what: &str, mut ask: impl FnMut() -> Result<T, String>) -> T {
    until(what, PATIENCE, || std::future::ready(ask())).await.unwrap_or_else(|error| panic!("{error}"))
}

/// What a pod waits for, as the scheduler says it, once it says it.
pub async fn unschedulable(cluster: &Cluster, namespace: &str, pod: &str) -> String {
    eventually(&format!("pod `{pod}` is found unschedulable"), || {
        let pod = get(cluster, &["-n", namespace, "pod", pod]);
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let scheduled = conditions.iter().find(|it| it["type"] == "PodScheduled" && it["reason"] == "Unschedulable");
        scheduled.map(|it| it["message"].as_str().unwrap_or_default().to_owned()).ok_or_else(|| pod["status"].to_string())
    })
    .await
}

/// Standard output of a short command.
pub fn output(command: &mut Command) -> String {
    Cluster::output(command).unwrap_or_else(|error| panic!("{error}"))
}

/// Prints how long a step took.
pub fn step(what: &str, began: Instant) {
    eprintln!("{:>7.1} s  {what}", began.elapsed().as_secs_f64());
}

/// Builds images of the workspace's programs, the command-line client always among them, and imports them on every node.
pub async fn load_images(cluster: &Cluster, references: &[&str]) {
    for reference in references.iter().chain(&[CLI]) {
        load_program(cluster, reference, reference.trim_start_matches("kvasir.test/").trim_end_matches(":1")).await;
    }
}

/// The same of one program, under any name.
pub async fn load_program(cluster: &Cluster, reference: &str, program: &str) {
    let image = Image::scratch(reference).program(&format!("/usr/bin/{program}"), &built(program)).unwrap();
    cluster.load_image(&image).await.unwrap();
}

/// A volume on the first node that holds SmolLM2, fetched once into the user's cache; gives the file's path on the volume.
pub async fn model_volume(cluster: &Cluster) -> String {
    let file = kvasir_model::fetch(MODEL, &model_cache(), &mut |_| {}).unwrap();
    let (folder, name) = (file.parent().unwrap(), file.file_name().unwrap());
    cluster.local_volume(MODELS, 0, MODELS, "1Gi", folder).await.unwrap();
    name.to_str().unwrap().to_owned()
}

/// A volume that every node sees, with SmolLM2 under each of `names`.
pub async fn shared_models(cluster: &Cluster, names: &[&str]) {
    let file = kvasir_model::fetch(MODEL, &model_cache(), &mut |_| {}).unwrap();
    let folder = cluster.folder().join(MODELS);
    std::fs::create_dir_all(&folder).unwrap();
    for name in names {
        std::fs::copy(&file, folder.join(name)).unwrap();
    }
    cluster.shared_volume(MODELS, MODELS, "1Gi", &folder).await.unwrap();
}

/// A number that the soak passes to test binaries, which have no arguments of their own.
#[expect(clippy::disallowed_methods, reason = "the soak says so in the environment")]
pub fn from_environment(name: &str, gate: u64) -> u64 {
    std::env::var(name).ok().map_or(gate, |text| text.parse().unwrap())
}

/// A claim on the volume with models.
pub fn claim(namespace: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": MODELS, "namespace": namespace},
        "spec": {"storageClassName": MODELS, "accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Mi"}}},
    })
}

/// Processes of a pod on this machine that run `program`, by the pod's cgroup.
pub fn processes_of(uid: &str, program: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| name.parse::<u32>().is_ok());
    // A process that ends meanwhile is none.
    let read = |pid: &str, file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
    pids.filter(|pid| read(pid, "comm").trim() == program && read(pid, "cgroup").contains(uid)).collect()
}
