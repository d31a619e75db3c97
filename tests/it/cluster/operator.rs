//! The operator as a process of this machine, on a cluster without real nodes; what it says is kept beside the cluster's own logs.

use super::support::built;
use crate::e2e::support::{Process, free_port, metric};
use kvasir_cluster::{Cluster, http_get, until};
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Longest wait for passes.
const PASSES_MAX: Duration = Duration::from_mins(2);
/// End of a log that a failed test shows.
const LOG_BYTES_MAX: usize = 6_000;

/// A running operator, killed when dropped.
pub struct Operator {
    process: Process,
    http: SocketAddr,
    log: PathBuf,
}

// === impl Operator ===

impl Operator {
    /// Starts the administrator's, which looks after the pools of all namespaces and keeps its lease in this one.
    pub fn beside(cluster: &Cluster, namespace: &str) -> Self {
        Self::start(cluster, cluster.admin().kubeconfig(), "1", &[&format!("--lease-namespace={namespace}")])
    }

    /// Starts one that reaches the API server this way, with `kvasir.test/worker:TAG` for workers. Resting pools are looked at every second.
    pub fn start(cluster: &Cluster, kubeconfig: &Path, tag: &str, args: &[&str]) -> Self {
        let http = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let log = cluster.folder().join(format!("operator-{}.log", http.port()));
        let out = File::create(&log).unwrap();
        let mut command = Command::new(built("kvasir-operator"));
        command.args(["--rest-seconds=1", "--lease-seconds=4", "--renew-seconds=2", "--retry-seconds=1"]);
        command
            .args([&format!("--default-worker-image=kvasir.test/worker:{tag}"), "--default-router-image=kvasir.test/router:1"]);
        command.args(args).arg(format!("--http={http}")).env("KUBECONFIG", kubeconfig);
        let spawned = command.stdout(out.try_clone().unwrap()).stderr(out).spawn();
        Self { process: Process(spawned.unwrap_or_else(|error| panic!("{command:?}: {error}"))), http, log }
    }

    /// Everything that it has said.
    pub fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// The end of it.
    pub fn log(&self) -> String {
        let text = self.said();
        text[text.ceil_char_boundary(text.len().saturating_sub(LOG_BYTES_MAX))..].to_owned()
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _gone = self.process.0.kill();
        self.process.0.wait().unwrap();
    }

    /// Sends SIGTERM and waits for the end; what it said.
    pub fn end(mut self) -> String {
        let pid = self.process.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let ended = self.process.0.wait().unwrap();
        assert!(ended.success(), "{ended}: {}", self.said());
        self.said()
    }

    /// Passes over pools so far.
    pub async fn passes(&self) -> Result<f64, String> {
        let text = http_get(self.http, "/metrics").await.map_err(|error| error.to_string())?;
        Ok(metric(&text, "kvasir_operator_reconcile_seconds_count", &[]))
    }

    /// Waits until this many more passes are over.
    pub async fn passed(&self, passes: usize) {
        let from = until("the operator tells of its passes", PASSES_MAX, || self.passes()).await.unwrap();
        until(&format!("{passes} passes are over"), PASSES_MAX, || async {
            let now = self.passes().await?;
            if now - from >= passes as f64 { Ok(()) } else { Err(format!("{} passes", now - from)) }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}; {}", self.said()));
    }

    /// Memory that is resident now.
    pub fn rss_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.0.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
    }
}
