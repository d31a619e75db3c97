//! The operator as a process of its own beside a cluster, as the administrator.

use super::support::built;
use kvasir_cluster::Cluster;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// End of a log that a failed test shows.
const LOG_BYTES_MAX: usize = 6_000;

/// A running operator; it is killed when it is dropped.
pub struct Process {
    child: Child,
    log: PathBuf,
}

// === impl Process ===

impl Process {
    /// Looks after the pools of all namespaces, with its lease in `namespace`.
    pub fn start(cluster: &Cluster, namespace: &str) -> Self {
        Self::start_with(cluster, namespace, cluster.admin().kubeconfig(), &[])
    }

    /// The same with another way to the API server, and more flags.
    pub fn start_with(cluster: &Cluster, namespace: &str, kubeconfig: &Path, flags: &[&str]) -> Self {
        let log = cluster.folder().join(format!("operator-{namespace}.log"));
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let mut command = Command::new(built("kvasir-operator"));
        command.args(["--http=127.0.0.1:0", "--default-worker-image=kvasir.test/worker:1", "--rest-seconds=1"]);
        command.args([
            "--default-router-image=kvasir.test/router:1",
            "--lease-seconds=4",
            "--renew-seconds=2",
            "--retry-seconds=1",
        ]);
        command.arg(format!("--lease-namespace={namespace}")).args(flags).env("KUBECONFIG", kubeconfig);
        command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        Self { child: command.spawn().unwrap(), log }
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// The end of what all operators of this namespace have said.
    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        text[text.ceil_char_boundary(text.len().saturating_sub(LOG_BYTES_MAX))..].to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
