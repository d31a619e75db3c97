//! Outside programs that tests need, fetched or built once into the cache: a Python environment with real clients, Jaeger, cargo-deny.
//!
//! Owns versions and places of these; those of a test cluster are `kvasir-cluster`'s own. A tool that cannot be had is an error here; the caller decides whether that is a failure (CI) or a named line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Real clients for the end-to-end tests.
const PYTHON_PACKAGES: &[&str] = &[
    "openai==3.57.0",
    "grpcio==1.85.1",
    "grpcio-tools==1.85.1",
    "grpcio-status==1.85.1",
    "grpcio-reflection==1.85.1",
    "tokenizers==0.23.3",
];
/// Name of the environment; raise it when the packages change.
const PYTHON_ENVIRONMENT: &str = "python-1";
/// Routers of other projects, for the router bench.
const ROUTER_PACKAGES: &[&str] = &["smg==1.13.0", "vllm-router==0.1.17"];
/// Name of their environment; raise it when the packages change.
const ROUTER_ENVIRONMENT: &str = "routers-1";
const JAEGER_VERSION: &str = "v1.76.0";
/// Holds its own llama.cpp; the figures of `numerics.json` belong to it.
const LLAMA_CPP_VERSION: &str = "0.3.36";
const LLAMA_CPP_CMAKE_ARGS: &str = "-DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF \
     -DCMAKE_C_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16' -DCMAKE_CXX_FLAGS='-mno-amx-tile -mno-amx-int8 -mno-amx-bf16'";
const DENY_VERSION: &str = "0.20.2";

/// The folder of everything that is built or fetched once.
pub fn cache() -> Result<PathBuf, String> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))
        .ok_or("neither XDG_CACHE_HOME nor HOME is set")?;
    Ok(base.join("kvasir"))
}

/// A command in words, for messages.
pub fn run(command: &mut Command) -> Result<(), String> {
    let shown = format!("{command:?}");
    let status = command.status().map_err(|error| format!("{shown}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{shown}: {status}")) }
}

/// Python of an environment that has the real clients.
pub fn python() -> Result<PathBuf, String> {
    Ok(environment(PYTHON_ENVIRONMENT, PYTHON_PACKAGES)?.join("bin/python"))
}

/// `smg` and `vllm-router`, in this order.
pub fn routers() -> Result<(PathBuf, PathBuf), String> {
    let venv = environment(ROUTER_ENVIRONMENT, ROUTER_PACKAGES)?;
    Ok((venv.join("bin/smg"), venv.join("bin/vllm-router")))
}

/// A virtual environment with these packages, made once.
fn environment(name: &str, packages: &[&str]) -> Result<PathBuf, String> {
    let venv = cache()?.join(name);
    let python = venv.join("bin/python");
    let done = venv.join("complete");
    if !done.exists() {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))
            .map_err(|error| format!("{error}; install Python 3 with venv and pip"))?;
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(packages))?;
        fs::write(&done, "").map_err(|error| format!("{}: {error}", done.display()))?;
    }
    Ok(venv)
}

/// Python of an environment that has a real llama.cpp, built from source for this CPU (about 10 min, once).
///
/// Without AMX: some machines advertise it and crash in it.
pub fn llama_cpp() -> Result<PathBuf, String> {
    let venv = cache()?.join(format!("llama-cpp-{LLAMA_CPP_VERSION}"));
    let python = venv.join("bin/python");
    let done = venv.join("complete");
    if !done.exists() {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv))
            .map_err(|error| format!("{error}; install Python 3 with venv and pip"))?;
        run(Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-binary", "llama-cpp-python"])
            .arg(format!("llama-cpp-python=={LLAMA_CPP_VERSION}"))
            .env("CMAKE_ARGS", LLAMA_CPP_CMAKE_ARGS))
        .map_err(|error| format!("{error}; install a C++ compiler"))?;
        fs::write(&done, "").map_err(|error| format!("{}: {error}", done.display()))?;
    }
    Ok(python)
}

/// A real Jaeger (v2 binary: OTLP on 4317, query API on 16686).
pub fn jaeger() -> Result<PathBuf, String> {
    let binary = cache()?.join(format!("bin/jaeger-{JAEGER_VERSION}"));
    if !binary.exists() {
        let build = cache()?.join("build-jaeger");
        fs::create_dir_all(&build).map_err(|error| format!("{}: {error}", build.display()))?;
        fs::write(build.join("go.mod"), "module kvasir.dev/tools\n\ngo 1.24\n").map_err(|error| error.to_string())?;
        let go = |args: &[&str]| {
            run(Command::new("go").args(args).current_dir(&build).env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=mod"))
                .map_err(|error| format!("{error}; install Go 1.24 or newer"))
        };
        let package = "github.com/jaegertracing/jaeger/cmd/jaeger";
        go(&["get", "-tool", &format!("{package}@{JAEGER_VERSION}")])?;
        go(&["build", "-trimpath", "-ldflags", "-s -w", "-o", "jaeger", package])?;
        place(&build.join("jaeger"), &binary)?;
    }
    Ok(binary)
}

/// Folder of the programs of a test cluster, or the path of one of them: what `kvasir-cluster tools PART` prints last.
pub fn cluster(harness: &Path, part: &str) -> Result<PathBuf, String> {
    let mut command = Command::new(harness);
    command.args(["tools", part]).stderr(Stdio::inherit());
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", output.status));
    }
    let said = String::from_utf8_lossy(&output.stdout);
    said.lines().last().map(PathBuf::from).ok_or_else(|| format!("{command:?} named no path"))
}

/// `cargo deny`.
pub fn deny() -> Result<PathBuf, String> {
    let binary = cache()?.join(format!("bin/cargo-deny-{DENY_VERSION}"));
    if !binary.exists() {
        let root = cache()?.join("build-deny");
        run(Command::new("cargo")
            .args(["install", "--quiet", "--locked", "--version", DENY_VERSION, "cargo-deny", "--root"])
            .arg(&root)
            .env("CARGO_TARGET_DIR", root.join("target")))?;
        place(&root.join("bin/cargo-deny"), &binary)?;
        // The build folder is large and never used again.
        let _kept_on_failure = fs::remove_dir_all(root);
    }
    Ok(binary)
}

/// Moves a finished binary to its place in one step, so that a crash never leaves half of one.
fn place(from: &Path, to: &Path) -> Result<(), String> {
    let explain = |error: std::io::Error| format!("{}: {error}", to.display());
    fs::create_dir_all(to.parent().unwrap_or(to)).map_err(explain)?;
    let temporary = to.with_extension("partial");
    fs::copy(from, &temporary).map_err(explain)?;
    fs::rename(&temporary, to).map_err(explain)
}
