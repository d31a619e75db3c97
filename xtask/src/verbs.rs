//! What each verb runs.

use crate::stages::{Outcome, Stages};
use crate::tools::{self, run};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The checkout that this was started from. Not the one that it was built in: clones that share a target folder share this program too.
fn root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    own.parent().unwrap_or(Path::new(".")).to_owned()
}

fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(args).current_dir(root());
    command
}

/// Everything, as tests need it.
fn build_all() -> Command {
    cargo(&["build", "--profile", "ci", "--workspace", "--all-targets", "--quiet"])
}

/// Where a profile's binaries are.
fn binary(profile: &str, name: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    target.join(profile).join(name)
}

/// `cargo xtask demo`
pub fn demo() -> Outcome {
    run(&mut cargo(&["build", "--profile", "ci", "--workspace", "--bins"]))?;
    run(Command::new(binary("ci", "kvasir")).arg("demo"))
}

/// `cargo xtask test`
pub fn test(cold: bool, only: Option<&str>) -> Outcome {
    if cold {
        return test_cold(only);
    }
    let mut tools = Tools::default();
    let mut stages = Stages::new(only);
    stages
        .run("format", || run(&mut cargo(&["fmt", "--all", "--check"])))
        .run("tools: python clients", || optional("Python clients", tools::python(), &mut tools.python))
        .run("tools: jaeger", || optional("Jaeger", tools::jaeger(), &mut tools.jaeger))
        .run("clippy", || {
            run(&mut cargo(&["clippy", "--profile", "ci", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]))
        })
        .run("build", || run(&mut build_all()))
        .run("tools: kubernetes", || optional("Kubernetes", harness("kubernetes"), &mut tools.cluster))
        .run("tools: helm", || optional("Helm", harness("helm"), &mut tools.helm))
        // Clusters want the machine for themselves, so their tests are a stage of their own.
        .run("tests", || run(tools.named(&mut cargo(&["test", "--profile", "ci", "--workspace", "--", "--skip", CLUSTER_TESTS]))))
        .run("cluster", || run(tools.named(&mut cluster_tests(CLUSTER_TESTS))))
        .run("deny", || {
            let mut deny = None;
            optional("cargo-deny", tools::deny(), &mut deny)?;
            let Some(deny) = deny else { return Ok(()) };
            run(Command::new(deny)
                .args(["--all-features", "check", "--hide-inclusion-graph", "bans", "licenses", "sources"])
                .current_dir(root()))
        });
    stages.finish()
}

/// `cargo xtask e2e`
pub fn e2e(only: Option<&str>) -> Outcome {
    let mut tools = Tools::default();
    let mut stages = Stages::new(None);
    stages
        .run("build", || run(&mut build_all()))
        .run("tools: jaeger", || optional("Jaeger", tools::jaeger(), &mut tools.jaeger))
        .run("tools: kubernetes", || optional("Kubernetes", harness("kubernetes"), &mut tools.cluster))
        .run("tools: helm", || optional("Helm", harness("helm"), &mut tools.helm))
        .run("cluster", || run(tools.named(&mut cluster_tests(only.unwrap_or(CLUSTER_TESTS)))));
    stages.finish()
}

/// What the names of tests on real clusters hold.
const CLUSTER_TESTS: &str = "cluster::";

/// Tests on real clusters, with the seconds of their steps.
fn cluster_tests(filter: &str) -> Command {
    cargo(&["test", "--profile", "ci", "--workspace", "--test", "it", "--", filter, "--nocapture"])
}

/// Outside programs that were had.
#[derive(Default)]
struct Tools {
    python: Option<PathBuf>,
    jaeger: Option<PathBuf>,
    cluster: Option<PathBuf>,
    helm: Option<PathBuf>,
}

// === impl Tools ===

impl Tools {
    /// Tells tests where they are.
    fn named<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let names = [
            ("KVASIR_TEST_PYTHON", &self.python),
            ("KVASIR_TEST_JAEGER", &self.jaeger),
            ("KVASIR_TEST_CLUSTER_BIN", &self.cluster),
            ("KVASIR_TEST_HELM", &self.helm),
        ];
        for (name, path) in names {
            if let Some(path) = path {
                command.env(name, path);
            }
        }
        command
    }
}

/// Programs of a test cluster, which the harness builds or installs itself.
fn harness(part: &str) -> Result<PathBuf, String> {
    // The same selection as the stage `build`, which has done it already: another one would compile shared dependencies again.
    run(&mut build_all())?;
    tools::cluster(&binary("ci", "kvasir-cluster"), part)
}

/// A missing prerequisite is a failure in CI and a named line elsewhere.
fn optional(name: &str, tool: Result<PathBuf, String>, slot: &mut Option<PathBuf>) -> Outcome {
    match tool {
        Ok(path) => {
            *slot = Some(path);
            Ok(())
        }
        Err(error) if std::env::var_os("CI").is_some() => Err(error),
        Err(error) => {
            println!("MISSING {name}: {error}; the tests that need it are left out and name it");
            Ok(())
        }
    }
}

/// The same with empty caches, in a folder of its own.
fn test_cold(only: Option<&str>) -> Outcome {
    let home = tools::cache()?.join("cold");
    if home.exists() {
        std::fs::remove_dir_all(&home).map_err(|error| format!("{}: {error}", home.display()))?;
    }
    let mut command = cargo(&["xtask", "test"]);
    if let Some(only) = only {
        command.args(["--only", only]);
    }
    command
        .env("CARGO_HOME", home.join("cargo"))
        .env("CARGO_TARGET_DIR", home.join("target"))
        .env("XDG_CACHE_HOME", home.join("cache"))
        .env("GOCACHE", home.join("go-build"))
        .env("GOMODCACHE", home.join("go-mod"))
        .env("PIP_CACHE_DIR", home.join("pip"));
    run(&mut command)
}

/// `cargo xtask bench`
pub fn bench(what: &str, quick: bool, json: Option<&str>) -> Outcome {
    match what {
        "numerics" => return bench_numerics(json),
        "candle" => return bench_candle(json),
        _ => {}
    }
    run(&mut cargo(&["build", "--release", "--workspace", "--bins"]))?;
    let mut command = Command::new(binary("release", "kvasir"));
    command.args(["bench", what]).current_dir(root());
    if quick {
        command.arg("--quick");
    }
    if let Some(file) = json {
        command.args(["--json", file]);
    }
    if what == "router" {
        let (smg, vllm_router) = tools::routers()?;
        command.arg("--smg").arg(smg).arg("--vllm-router").arg(vllm_router);
    }
    run(&mut command)
}

/// Makes llama.cpp's figures again, which the numerics gate compares ours with.
fn bench_numerics(json: Option<&str>) -> Outcome {
    let python = tools::llama_cpp()?;
    run(cargo(&["run", "--profile", "ci", "--package", "kvasir-tests", "--example", "numerics", "--"])
        .arg(python)
        .arg(json.unwrap_or("tests/it/golden/numerics.json")))
}

/// Prefill beside stock candle, which is compiled for this CPU: it chooses kernels at compile time.
fn bench_candle(json: Option<&str>) -> Outcome {
    let example = ["run", "--profile", "ci", "--package", "kvasir-tests", "--example", "candle_prefill"];
    run(cargo(&example)
        .args(["--target-dir", "target/native", "--", json.unwrap_or("docs/bench/candle-prefill.json")])
        .env("RUSTFLAGS", "-C target-cpu=native"))
}

/// `cargo xtask soak`: the gate's fuzz, simulation and changes under load, with `factor` times the operations, and as many changes.
pub fn soak(factor: u32) -> Outcome {
    let times = |base: u64| (base * u64::from(factor)).to_string();
    run(cargo(&["test", "--profile", "ci", "--workspace", "--", "--skip", CLUSTER_TESTS])
        .env("KVASIR_FUZZ_OPERATIONS", times(1_000_000))
        .env("KVASIR_INTERLEAVINGS", times(3_000)))?;
    let mut tools = Tools::default();
    optional("Kubernetes", harness("kubernetes"), &mut tools.cluster)?;
    optional("Helm", harness("helm"), &mut tools.helm)?;
    run(tools.named(&mut cluster_tests("cluster::rollouts")).env("KVASIR_ROLLOUTS", times(1)))?;
    run(tools.named(&mut cluster_tests("cluster::lives")).env("KVASIR_LIVES", times(1)))?;
    run(tools.named(&mut cluster_tests("cluster::replicas")).env("KVASIR_SCALE_ROUNDS", times(10)))?;
    run(tools.named(&mut cluster_tests("cluster::faults")).env("KVASIR_FAULTS", times(1)))
}
