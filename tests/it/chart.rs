//! The Helm chart through a real Helm: golden renders, the closed schema of its values, and what every rendered object must be.
//!
//! Owns the value sets in `charts/kvasir/tests/values` and their golden renders. What an API server says of these
//! objects stands in `cluster`, a stage of its own; pods are the business of the end-to-end test. A render takes about 50 ms.

mod arguments;
mod cluster;
mod examples;
mod helm;
mod monitoring;
mod objects;
mod programs;
pub(crate) mod rights;
mod values;

use helm::{Helm, chart};
use std::fs;
use std::path::PathBuf;

/// The value sets, each with its golden render.
const SETS: [&str; 3] = ["default", "full", "namespaced"];

fn values_of(set: &str) -> PathBuf {
    chart().join(format!("tests/values/{set}.yaml"))
}

#[test]
fn every_value_set_has_a_golden_render_and_no_golden_render_is_left_over() {
    for folder in ["tests/values", "tests/golden"] {
        let mut stems: Vec<String> = fs::read_dir(chart().join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
            .collect();
        stems.sort();
        assert_eq!(stems, SETS, "{folder}");
    }
}

/// A render whose CRDs end where their spec begins: what follows is compared with `crds/` elsewhere, and would double each of its changes here.
fn without_schemas(rendered: &str) -> String {
    let documents = rendered.split_inclusive("\n---\n").map(|document| match document.split_once("\nspec:\n") {
        Some((head, _)) if document.contains("\nkind: CustomResourceDefinition\n") => format!("{head}\n---\n"),
        _ => document.to_owned(),
    });
    documents.collect()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "whoever changes the chart asks for new golden files")]
fn renders_equal_their_golden_files() {
    let Some(helm) = Helm::find() else { return };
    let update = std::env::var_os("KVASIR_UPDATE_GOLDEN").is_some();
    for set in SETS {
        let rendered = without_schemas(&helm.render(&["--values", values_of(set).to_str().unwrap()]));
        let golden = chart().join(format!("tests/golden/{set}.yaml"));
        if update {
            fs::write(&golden, &rendered).unwrap();
        }
        let wanted = fs::read_to_string(&golden).unwrap();
        let line = rendered.lines().zip(wanted.lines()).position(|(have, want)| have != want);
        assert!(
            rendered == wanted,
            "{} differs from line {}: look at the change, then run this test with KVASIR_UPDATE_GOLDEN=1",
            golden.display(),
            line.unwrap_or_else(|| rendered.lines().count().min(wanted.lines().count())) + 1
        );
    }
}

#[test]
fn helm_lint_is_content_with_every_value_set() {
    let Some(helm) = Helm::find() else { return };
    for set in SETS {
        let values = values_of(set);
        let said = helm.run(&["lint", "--strict", chart().to_str().unwrap(), "--values", values.to_str().unwrap()]);
        assert!(said.is_ok(), "{set}: {}", said.unwrap_err());
    }
}

#[test]
fn notes_name_three_commands_for_the_release_that_was_made() {
    let Some(helm) = Helm::find() else { return };
    let notes = |set: &[&str]| {
        let folder = chart();
        let mut args = vec!["install", "blue", folder.to_str().unwrap(), "--dry-run=client", "--namespace", "ns-1"];
        args.extend(set);
        helm.run(&args).unwrap().split_once("NOTES:").unwrap().1.to_owned()
    };
    let text = notes(&["--set", "test.pool.name=mine,test.pool.namespace=team-a"]);
    let commands: Vec<&str> =
        text.lines().map(str::trim).filter(|line| line.starts_with("kubectl ") || line.starts_with("helm ")).collect();
    assert_eq!(
        commands,
        [
            "kubectl apply -n ns-1 -f deploy/examples/first.yaml",
            "kubectl wait -n team-a --for=condition=Ready --timeout=10m servingpool/mine",
            "helm test blue -n ns-1 --logs",
        ]
    );
    assert!(notes(&["--set", "test.enabled=false"]).contains("test.enabled"), "a test that is off is said to be off");
    assert!(notes(&["--set", "crds.install=false"]).contains("crds.install"), "CRDs of someone else are named");
}
