//! One request, one trace, read back from a real Jaeger.

use super::support::{Process, free_port, program, smollm2, until, with_fleet};
use kvasir_cli::client::Client;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};

/// A running Jaeger.
pub(crate) struct Jaeger {
    _process: Process,
    otlp: SocketAddr,
    query: u16,
}

impl Jaeger {
    /// Takes traces at an address of `host`; everything else is on loopback.
    pub(crate) fn start(binary: &Path, dir: &Path, host: Ipv4Addr) -> Self {
        let (otlp, query, grpc) = (SocketAddr::from((host, free_port())), free_port(), free_port());
        let config = json!({
            "service": {
                "extensions": ["jaeger_storage", "jaeger_query"],
                "pipelines": {"traces": {"receivers": ["otlp"], "processors": [], "exporters": ["jaeger_storage_exporter"]}},
                "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "error"}}
            },
            "extensions": {
                "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": 10000}}}},
                "jaeger_query": {
                    "storage": {"traces": "memory"},
                    "http": {"endpoint": format!("127.0.0.1:{query}")},
                    "grpc": {"endpoint": format!("127.0.0.1:{grpc}")}
                }
            },
            "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": otlp.to_string()}}}},
            "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}}
        });
        let path = dir.join("jaeger.yaml");
        fs::write(&path, config.to_string()).unwrap();
        let process = Process::start(Command::new(binary).arg("--config").arg(path).stderr(Stdio::null()));
        Self { _process: process, otlp, query }
    }

    /// Where spans go.
    pub(crate) fn otlp(&self) -> String {
        format!("http://{}", self.otlp)
    }

    pub(crate) async fn trace(&self, id: &str) -> Vec<Value> {
        let client = Client::new(&format!("http://127.0.0.1:{}", self.query), None).unwrap();
        let answer = client.get(&format!("/api/traces/{id}")).await.unwrap_or(Value::Null);
        answer["data"][0]["spans"].as_array().cloned().unwrap_or_default()
    }
}

pub(crate) fn names(spans: &[Value]) -> BTreeSet<String> {
    spans.iter().map(|span| span["operationName"].as_str().unwrap_or_default().to_owned()).collect()
}

fn tag<'a>(span: &'a Value, key: &str) -> Option<&'a Value> {
    span["tags"].as_array()?.iter().find(|tag| tag["key"] == key).map(|tag| &tag["value"])
}

#[test]
fn a_request_is_one_trace_with_one_root_across_router_and_worker() {
    let Some(binary) = program("KVASIR_TEST_JAEGER", "a real Jaeger") else { return };
    let state = tempfile::tempdir().unwrap();
    let jaeger = Jaeger::start(&binary, state.path(), Ipv4Addr::LOCALHOST);
    let mut args = smollm2(1, state.path());
    args.otlp = Some(jaeger.otlp());
    with_fleet(&args, state.path(), |fleet| async move {
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let body = json!({"model": fleet.model(), "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8, "temperature": 0});
        send_traced(&fleet.http().to_string(), None, &body, &format!("00-{trace}-00f067aa0ba902b7-01")).await;
        let wanted: BTreeSet<String> =
            ["request", "prepare", "route", "attempt", "worker", "queue", "prefill", "decode"].map(str::to_owned).into();
        until("the trace arrives whole", || async {
            fleet_flush(&fleet).await;
            names(&jaeger.trace(trace).await).is_superset(&wanted)
        })
        .await;
        let spans = jaeger.trace(trace).await;
        let ids: BTreeSet<&str> = spans.iter().filter_map(|span| span["spanID"].as_str()).collect();
        let parent = |span: &Value| span["references"][0]["spanID"].as_str().unwrap_or_default().to_owned();
        let roots: Vec<&Value> = spans.iter().filter(|span| !ids.contains(parent(span).as_str())).collect();
        assert_eq!(roots.len(), 1, "one root: {:?}", names(&spans));
        assert_eq!(roots[0]["operationName"], "request");
        assert_eq!(parent(roots[0]), "00f067aa0ba902b7", "it hangs under the caller's span");
        let worker = spans.iter().find(|span| span["operationName"] == "worker").unwrap();
        let attempt = spans.iter().find(|span| span["operationName"] == "attempt").unwrap();
        assert_eq!(parent(worker), attempt["spanID"].as_str().unwrap(), "the worker's part hangs under the attempt");
        assert!(spans.iter().all(|span| tag(span, "error").is_none()), "nothing failed");
        let text = serde_json::to_string(&spans).unwrap();
        assert!(!text.contains("Name a river"), "no prompt in a span");
    });
}

async fn fleet_flush(fleet: &std::sync::Arc<kvasir_cli::local::Fleet>) {
    let fleet = fleet.clone();
    tokio::task::spawn_blocking(move || fleet.flush_traces()).await.unwrap();
}

/// Asks in the name of a caller's span, as the tenant whose key is given.
pub(crate) async fn send_traced(address: &str, key: Option<&str>, body: &Value, traceparent: &str) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let text = body.to_string();
    let key = key.map_or_else(String::new, |key| format!("authorization: Bearer {key}\r\n"));
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntraceparent: {traceparent}\r\n{key}connection: close\r\ncontent-length: {}\r\n\r\n",
        text.len()
    );
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    socket.write_all((head + &text).as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
