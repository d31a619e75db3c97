//! What each verb runs.

use crate::stages::{Outcome, Stages};
use crate::tools::{self, run};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}

fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(args).current_dir(root());
    command
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
    let mut python = None;
    let mut jaeger = None;
    let mut stages = Stages::new(only);
    stages
        .run("format", || run(&mut cargo(&["fmt", "--all", "--check"])))
        .run("tools: python clients", || optional("Python clients", tools::python(), &mut python))
        .run("tools: jaeger", || optional("Jaeger", tools::jaeger(), &mut jaeger))
        .run("clippy", || {
            run(&mut cargo(&["clippy", "--profile", "ci", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]))
        })
        .run("build", || run(&mut cargo(&["build", "--profile", "ci", "--workspace", "--all-targets", "--quiet"])))
        .run("tests", || {
            let mut command = cargo(&["test", "--profile", "ci", "--workspace"]);
            for (name, path) in [("KVASIR_TEST_PYTHON", &python), ("KVASIR_TEST_JAEGER", &jaeger)] {
                if let Some(path) = path {
                    command.env(name, path);
                }
            }
            run(&mut command)
        })
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

/// `cargo xtask soak`: the gate's fuzz and simulation with `factor` times the operations.
pub fn soak(factor: u32) -> Outcome {
    let times = |base: u64| (base * u64::from(factor)).to_string();
    run(cargo(&["test", "--profile", "ci", "--workspace"])
        .env("KVASIR_FUZZ_OPERATIONS", times(1_000_000))
        .env("KVASIR_INTERLEAVINGS", times(3_000)))
}
