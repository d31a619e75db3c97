//! What tests rely on: a cluster leaves nothing behind, and a start after a crash is clean.

use super::support::{Turn, built, kubectl, on_nodes, output};
use kvasir_cluster::{Layers, clean, is_running};
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Everything of clusters that this machine shows, one line each.
fn traces(scratch: &Path) -> BTreeSet<String> {
    let text = |program: &str, args: &[&str]| output(Command::new(program).args(args));
    let mut lines: Vec<(&str, String)> = vec![
        ("mount", fs::read_to_string("/proc/mounts").unwrap()),
        ("interface", text("ip", &["-brief", "link"])),
        ("route", text("ip", &["route"])),
        ("rule", text("iptables-save", &[])),
    ];
    lines.extend(entries("/run/netns").map(|path| ("network namespace", format!("kvasir? {}", path.display()))));
    for hierarchy in entries("/sys/fs/cgroup") {
        lines.extend(entries(hierarchy).map(|group| ("cgroup", group.display().to_string())));
    }
    for process in entries("/proc") {
        let line = fs::read(process.join("cmdline")).unwrap_or_default();
        lines.push(("process", String::from_utf8_lossy(&line).replace(['\0', '\n'], " ")));
    }
    let scratch = scratch.display().to_string();
    let of_cluster = |kind: &str, line: &str| {
        line.contains(&scratch) || kind != "process" && (line.contains("kvasir") || line.contains("KUBE-"))
    };
    let all = lines.iter().flat_map(|(kind, text)| text.lines().map(move |line| (*kind, line)));
    all.filter(|(kind, line)| of_cluster(kind, line)).map(|(kind, line)| format!("{kind}: {line}")).collect()
}

/// The same when no cluster is to be seen.
fn traces_at_rest(scratch: &Path) -> BTreeSet<String> {
    clean(scratch).unwrap();
    traces(scratch)
}

fn entries(folder: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// A harness in a process of its own that can be killed.
struct Harness {
    child: Child,
    pids: Vec<u32>,
}

// === impl Harness ===

impl Harness {
    /// Starts a cluster with a real node and waits until it is up.
    fn start(scratch: &Path) -> Self {
        let mut command = Command::new(built("kvasir-cluster"));
        command.arg("--scratch").arg(scratch).args(["up", "--nodes", "1"]).stdout(Stdio::piped());
        let mut harness = Self { child: command.spawn().unwrap(), pids: Vec::new() };
        let mut line = String::new();
        BufReader::new(harness.child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let kubeconfig = line.trim().strip_prefix("export KUBECONFIG=").unwrap_or_else(|| panic!("it did not start: {line}"));
        let folder = Path::new(kubeconfig).parent().and_then(Path::parent).unwrap();
        let files = fs::read_dir(folder.join("pids")).unwrap();
        let texts = files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
        harness.pids = texts.map(|text| text.split(' ').next().unwrap().parse().unwrap()).collect();
        harness
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        // It may be gone already.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

#[test]
fn a_stopped_cluster_leaves_nothing_on_the_machine() {
    let Some(turn) = Turn::take_as_root() else { return };
    let scratch = turn.settings.scratch.clone();
    let before = traces_at_rest(&scratch);
    let mut pids = Vec::new();
    turn.run(Layers::nodes(2), async |cluster| {
        pids = cluster.pids();
        let seen = traces(&scratch);
        for kind in ["interface", "route", "cgroup", "process"] {
            assert!(seen.difference(&before).any(|line| line.starts_with(kind)), "a running cluster shows: {seen:?}");
        }
    });
    assert_eq!(traces(&scratch), before);
    assert!(pids.len() >= 8 && pids.iter().all(|pid| !is_running(*pid)), "{pids:?}");
}

#[test]
fn a_start_after_kill_9_is_clean_and_ends_what_the_crashed_run_left() {
    let Some(turn) = Turn::take_as_root() else { return };
    let scratch = turn.settings.scratch.clone();
    let before = traces_at_rest(&scratch);
    let crashed = Harness::start(&scratch);
    let pids = crashed.pids.clone();
    assert!(pids.len() >= 8 && pids.iter().all(|pid| is_running(*pid)), "{pids:?}");
    // A SIGKILL, and nobody is told.
    drop(crashed);
    turn.run(Layers::nodes(1), async |cluster| {
        assert!(pids.iter().all(|pid| !is_running(*pid)), "{pids:?}");
        let namespaces = kubectl(cluster, &["get", "namespaces", "-o", "name"]);
        assert!(namespaces.contains("namespace/default"), "{namespaces}");
    });
    assert_eq!(traces(&scratch), before);
}

#[test]
fn the_machine_itself_is_as_it_was_while_nodes_run() {
    on_nodes(1, async |_| {
        // What a kubelet and a kube-proxy set for the whole machine, they set for their node only.
        let rules = output(&mut Command::new("iptables-save"));
        assert!(!rules.contains("KUBE-"), "{rules}");
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        assert!(!mounts.contains("/kubelet/pods/"), "{mounts}");
    });
}
