//! Separate processes on a static list: what happens when a worker is killed in mid-stream.

use super::support::{Process, free_port, metric, until};
use kvasir_cli::client::Client;
use kvasir_model::synth::TinyModel;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A program that the same build made.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test.parent().and_then(Path::parent).unwrap().join(name);
    assert!(path.exists(), "{} is missing: build with `cargo build --profile ci --workspace --all-targets`", path.display());
    path
}

fn worker(dir: &Path, model: &Path, number: u32) -> (Process, u16) {
    let (port, metrics) = (free_port(), free_port());
    let mut command = Command::new(built("kvasir-worker"));
    command.args(["--served-name", "tiny", "--kv-bytes", "8MiB", "--threads", "1", "--uid", &format!("w{number}")]);
    command.args(["--listen", &format!("127.0.0.1:{port}"), "--metrics", &format!("127.0.0.1:{metrics}")]);
    command.arg("--model").arg(model).arg("--secret-file").arg(dir.join("secret")).arg("--cache").arg(dir);
    (Process::start(command.stderr(Stdio::inherit())), port)
}

fn router(dir: &Path, workers: &[u16]) -> (Process, u16) {
    let http = free_port();
    let list: Vec<String> = workers.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let mut command = Command::new(built("kvasir-router"));
    command.args(["--worker", &list.join(","), "--settle-seconds", "0"]);
    command.args(["--http", &format!("127.0.0.1:{http}")]);
    command.arg("--secret-file").arg(dir.join("secret")).arg("--pool-secret-file").arg(dir.join("pool"));
    (Process::start(command.stderr(Stdio::inherit())), http)
}

#[test]
fn a_killed_worker_ends_its_streams_with_an_error_and_the_other_answers() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("secret"), "a-secret-of-the-worker-pool-0123456789").unwrap();
    std::fs::write(dir.path().join("pool"), "a-pool-secret-0123456789-0123456789").unwrap();
    let model = dir.path().join("tiny.gguf");
    std::fs::write(&model, TinyModel { context_len: 4096, ..TinyModel::default() }.to_gguf().unwrap()).unwrap();
    let mut workers: Vec<(Process, u16)> = (0..2).map(|number| worker(dir.path(), &model, number)).collect();
    let ports: Vec<u16> = workers.iter().map(|(_, port)| *port).collect();
    let (_router, http) = router(dir.path(), &ports);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let client = Client::new(&format!("http://127.0.0.1:{http}"), None).unwrap();
        until("two workers are ready", || async {
            let ready = client.get_text("/readyz").await.is_ok_and(|(status, _)| status == 200);
            let Ok((_, metrics)) = client.get_text("/metrics").await else { return false };
            ready && metric(&metrics, "kvasir_router_index_workers", &["state=\"exact\""]) == 2.0
        })
        .await;
        let body = |max_tokens: u32| {
            let tokens: Vec<u32> = (0..100).collect();
            json!({"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "seed": 3, "ignore_eos": true, "kvasir": {"report": true}})
        };
        let first = client.complete(body(4), |_| ()).await.unwrap();
        let holder = first.worker().to_owned();
        let number: usize = holder.trim_start_matches('w').parse().unwrap();
        let mut pieces = 0;
        let victim = &mut workers[number].0.0;
        let broken = client
            .complete(body(3500), |_| {
                pieces += 1;
                if pieces == 20 {
                    victim.kill().unwrap();
                }
            })
            .await;
        let error = broken.expect_err("the stream of a killed worker ends in an error").to_string();
        assert!(error.contains("worker"), "{error}");
        assert!(pieces >= 20);
        let next = client.complete(body(4), |_| ()).await.unwrap();
        assert_ne!(next.worker(), holder, "the other worker answers");
        assert_eq!(next.text, first.text, "with the same text");
    });
}
