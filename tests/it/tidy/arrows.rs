//! Dependencies point one way (ARCHITECTURE.md, "Code map").

use super::{manifests, report};

/// Crate → the crates of ours that it may use.
const ARROWS: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("proto", &["core"]),
    ("telemetry", &[]),
    ("process", &["telemetry"]),
    ("kernels", &[]),
    ("model", &["core"]),
    ("door", &["core", "proto", "telemetry", "model"]),
    ("worker", &["core", "proto", "telemetry", "process", "kernels", "model", "door"]),
    ("router", &["core", "proto", "telemetry", "process", "model", "door"]),
    ("operator", &["core", "proto", "telemetry", "process"]),
    ("cli", &["core", "proto", "telemetry", "process", "kernels", "model", "door", "worker", "router", "operator"]),
    ("cluster", &[]),
    ("tests", &["core", "proto", "telemetry", "kernels", "model", "door", "worker", "router", "operator", "cli", "cluster"]),
    ("xtask", &[]),
];

/// Crates that must not know an outside crate, with the reason.
const FORBIDDEN: &[(&str, &[&str], &str)] = &[
    ("core", &["tokio", "serde", "tonic", "prost", "kube", "axum"], "core is pure vocabulary: no IO, async, formats or wire"),
    ("kernels", &["tokio", "serde", "tonic"], "kernels compute and know nothing else"),
    ("telemetry", &["axum"], "telemetry renders text; servers are the doors' business"),
];

#[test]
fn dependencies_point_one_way() {
    let mut findings = Vec::new();
    for (name, manifest) in manifests() {
        let Some((_, allowed)) = ARROWS.iter().find(|(crate_name, _)| *crate_name == name) else {
            findings.push(format!("{name}: a new crate needs a line in ARROWS and in ARCHITECTURE.md"));
            continue;
        };
        let sections: &[&str] = if name == "tests" { &["dependencies", "dev-dependencies"] } else { &["dependencies"] };
        for section in sections {
            let Some(dependencies) = manifest.get(*section).and_then(|section| section.as_table()) else { continue };
            for dependency in dependencies.keys() {
                if let Some(ours) = dependency.strip_prefix("kvasir-")
                    && !allowed.contains(&ours)
                {
                    findings.push(format!("{name} -> {ours}: not an arrow of ARCHITECTURE.md"));
                }
            }
            for (_, outside, reason) in FORBIDDEN.iter().filter(|(crate_name, ..)| *crate_name == name) {
                findings.extend(
                    outside
                        .iter()
                        .filter(|outside| dependencies.contains_key(**outside))
                        .map(|it| format!("{name} -> {it}: {reason}")),
                );
            }
        }
    }
    report("dependency arrows", &findings);
}

#[test]
fn every_dependency_has_its_version_in_one_place() {
    let mut findings = Vec::new();
    for (name, manifest) in manifests() {
        for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
            let Some(dependencies) = manifest.get(section).and_then(|section| section.as_table()) else { continue };
            findings.extend(
                dependencies
                    .iter()
                    .filter(|(_, spec)| spec.get("workspace").and_then(toml::Value::as_bool) != Some(true))
                    .map(|(dependency, _)| format!("{name}: `{dependency}` must be `workspace = true`")),
            );
        }
    }
    report("one version each", &findings);
}
