//! A real Helm without a cluster, and what it renders as objects.

use crate::e2e::support::program;
use crate::root;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// The API server that the end-to-end test runs.
const KUBE_VERSION: &str = "1.34.4";

/// Helm with homes of its own and no way to a cluster.
pub struct Helm {
    binary: PathBuf,
    home: TempDir,
}

/// The chart's folder.
pub fn chart() -> PathBuf {
    root().join("charts/kvasir")
}

// === impl Helm ===

impl Helm {
    /// The Helm that the test command names.
    pub fn find() -> Option<Self> {
        Some(Self { binary: program("KVASIR_TEST_HELM", "a real Helm 4")?, home: tempfile::tempdir().unwrap() })
    }

    /// Standard output, or what it complained about.
    pub fn run(&self, args: &[&str]) -> Result<String, String> {
        let home = self.home.path();
        let output = Command::new(&self.binary)
            .args(args)
            .env("HELM_CACHE_HOME", home.join("cache"))
            .env("HELM_CONFIG_HOME", home.join("config"))
            .env("HELM_DATA_HOME", home.join("data"))
            .env("KUBECONFIG", home.join("no-cluster"))
            .output()
            .unwrap_or_else(|error| panic!("{}: {error}", self.binary.display()));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(String::from_utf8(output.stdout).unwrap()) } else { Err(said) }
    }

    /// The chart in `folder` for the release `kvasir` in the namespace `kvasir-system`.
    pub fn render_folder(&self, folder: &Path, args: &[&str]) -> Result<String, String> {
        let mut all = vec!["template", "kvasir", folder.to_str().unwrap(), "--namespace", "kvasir-system"];
        all.extend(["--kube-version", KUBE_VERSION]);
        all.extend(args);
        self.run(&all)
    }

    /// The chart's objects as text.
    pub fn render(&self, args: &[&str]) -> String {
        self.render_folder(&chart(), args).unwrap()
    }

    /// The chart's objects.
    pub fn objects(&self, args: &[&str]) -> Vec<Value> {
        self.parse(&self.render(args))
    }

    /// The documents of a YAML text, read as Kubernetes tools read them: by Helm itself, which writes each as JSON.
    pub fn parse(&self, yaml: &str) -> Vec<Value> {
        let reader = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| fs::write(reader.path().join(name), text).unwrap();
        fs::create_dir(reader.path().join("templates")).unwrap();
        file("Chart.yaml", "apiVersion: v2\nname: reader\nversion: 0.0.0\n");
        file("input.yaml", yaml);
        let template =
            "{{ range regexSplit \"(?m)^---$\" (.Files.Get \"input.yaml\") -1 }}\n---\n{{ . | fromYaml | toJson }}\n{{ end }}";
        file("templates/json.yaml", template);
        let text = self.run(&["template", "reader", reader.path().to_str().unwrap()]).unwrap();
        let documents: Vec<Value> =
            text.lines().filter(|line| line.starts_with('{')).map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(documents.iter().all(|document| document.get("Error").is_none()), "{documents:?}");
        documents.into_iter().filter(|document| document.as_object().is_some_and(|members| !members.is_empty())).collect()
    }
}

/// The only object of a kind and, where several have the kind, of a name.
pub fn one<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut found = objects.iter().filter(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    let object = found.next().unwrap_or_else(|| panic!("no {kind} {name}"));
    assert!(found.next().is_none(), "two of {kind} {name}");
    object
}

/// The first container's arguments.
pub fn container_args(pod_spec: &Value) -> Vec<String> {
    pod_spec["containers"][0]["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap().to_owned()).collect()
}

#[test]
fn yaml_is_read_as_kubernetes_reads_it() {
    let Some(helm) = Helm::find() else { return };
    let read = helm.parse("# nothing\n---\na: 21600000\nb: \"0123\"\nc: On\n---\nd: [1.5]\n");
    assert_eq!(read, [serde_json::json!({"a": 21_600_000, "b": "0123", "c": true}), serde_json::json!({"d": [1.5]})]);
}
