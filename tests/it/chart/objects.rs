//! What every rendered object must be: named, labelled, selectable for ever, restricted; and CRDs that are the generated ones.

use super::helm::{Helm, chart, container_args, one};
use super::values_of;
use crate::root;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// Selectors of everything that has one, with the object's kind.
fn selectors(objects: &[Value]) -> Vec<(String, Value)> {
    let of = |object: &Value| {
        let spec = &object["spec"];
        let selector = if object["kind"] == "NetworkPolicy" { &spec["podSelector"] } else { &spec["selector"] };
        let labels = if object["kind"] == "Service" { selector } else { &selector["matchLabels"] };
        (object["kind"].as_str().unwrap().to_owned(), labels.clone())
    };
    objects.iter().map(of).filter(|(_, labels)| labels.is_object()).collect()
}

pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() { copy(&path, &target) } else { fs::copy(&path, &target).map(drop).unwrap() }
    }
}

#[test]
fn r64_selectors_are_equal_whatever_is_set_and_whatever_the_versions_are() {
    let Some(helm) = Helm::find() else { return };
    let wanted = json!({
        "app.kubernetes.io/name": "kvasir",
        "app.kubernetes.io/instance": "kvasir",
        "app.kubernetes.io/component": "operator",
    });
    let later = tempfile::tempdir().unwrap();
    copy(&chart(), later.path());
    let manifest = fs::read_to_string(later.path().join("Chart.yaml")).unwrap();
    let raised = manifest.replace("ersion: 0.1.0", "ersion: 9.8.7+build.6");
    assert_ne!(manifest, raised);
    fs::write(later.path().join("Chart.yaml"), raised).unwrap();
    let full = values_of("full");
    let sets: [&[&str]; 3] = [&[], &["--values", full.to_str().unwrap()], &["--set", "fullnameOverride=other"]];
    let mut seen = 0;
    for folder in [chart().as_path(), later.path()] {
        for set in sets {
            for (kind, labels) in selectors(&helm.parse(&helm.render_folder(folder, set).unwrap())) {
                assert_eq!(labels, wanted, "{kind} of {} with {set:?}", folder.display());
                seen += 1;
            }
        }
    }
    // Deployment and Service everywhere; budget, policy and monitor where all is on.
    assert_eq!(seen, 2 * (2 + 5 + 2));
}

#[test]
fn every_object_carries_the_recommended_labels_and_a_namespace_where_it_has_one() {
    let Some(helm) = Helm::find() else { return };
    let full = values_of("full");
    for set in [vec![], vec!["--values", full.to_str().unwrap()]] {
        for object in helm.objects(&set) {
            let metadata = &object["metadata"];
            let name = format!("{} {}", object["kind"], metadata["name"]);
            for label in ["name", "instance", "component", "part-of", "version", "managed-by"] {
                assert!(metadata["labels"][format!("app.kubernetes.io/{label}")].is_string(), "{name}: {label}");
            }
            assert_eq!(metadata["labels"]["helm.sh/chart"], format!("kvasir-{}", env!("CARGO_PKG_VERSION")), "{name}");
            let global = object["kind"].as_str().unwrap().starts_with("Cluster") || object["kind"] == "CustomResourceDefinition";
            assert_eq!(metadata["namespace"].is_string(), !global, "{name}");
        }
    }
}

#[test]
fn the_longest_release_name_gives_names_that_kubernetes_takes() {
    let Some(helm) = Helm::find() else { return };
    let release = "a".repeat(53);
    let folder = chart();
    let rendered = helm.run(&["template", &release, folder.to_str().unwrap(), "--namespace", "ns"]).unwrap();
    for object in helm.parse(&rendered) {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        // Roles and their bindings may have longer names than what stands in DNS or in labels.
        let limit = if object["rules"].is_array() || object["roleRef"].is_object() { 253 } else { 63 };
        assert!(name.len() <= limit && !name.contains("--") && !name.ends_with('-'), "{name}");
    }
}

#[test]
fn pods_meet_the_restricted_standard_and_cannot_write_their_root() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&[]);
    let deployment = &one(&objects, "Deployment", "kvasir-operator")["spec"]["template"]["spec"];
    let test = &one(&objects, "Pod", "kvasir-generate")["spec"];
    for spec in [deployment, test] {
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
        assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        assert!(spec["securityContext"]["runAsUser"].as_i64().unwrap() > 0);
        for forbidden in ["hostNetwork", "hostPID", "hostIPC", "volumes"] {
            assert!(spec.get(forbidden).is_none(), "{forbidden}");
        }
        for container in spec["containers"].as_array().unwrap() {
            let context = &container["securityContext"];
            assert_eq!(context["allowPrivilegeEscalation"], false);
            assert_eq!(context["readOnlyRootFilesystem"], true);
            assert_eq!(context["capabilities"], json!({"drop": ["ALL"]}));
            assert!(
                container["resources"]["requests"]["memory"].is_string()
                    && container["resources"]["limits"]["memory"].is_string()
            );
        }
    }
    assert_eq!(one(&objects, "ServiceAccount", "kvasir-operator")["automountServiceAccountToken"], false);
    assert_eq!(test["automountServiceAccountToken"], false, "the test needs no right");
}

#[test]
fn a_number_of_replicas_is_rendered_only_where_it_is_wanted() {
    let Some(helm) = Helm::find() else { return };
    let replicas = |value: &str| {
        let objects = helm.objects(&["--set", value]);
        one(&objects, "Deployment", "kvasir-operator")["spec"].get("replicas").cloned()
    };
    assert_eq!(replicas("operator.replicas=0"), Some(json!(0)));
    assert_eq!(replicas("operator.replicas=2"), Some(json!(2)));
    assert_eq!(replicas("operator.replicas=null"), None, "an autoscaler may own the field");
    let budget = |value: &str| helm.objects(&["--set", value]).iter().any(|object| object["kind"] == "PodDisruptionBudget");
    assert!(!budget("operator.replicas=1"), "a budget of a single replica would forbid node drains");
    assert!(budget("operator.replicas=2") && budget("operator.replicas=null"));
}

#[test]
fn images_are_pinned_by_digest_and_moved_to_another_registry_in_one_place() {
    let Some(helm) = Helm::find() else { return };
    let digest = format!("sha256:{}", "a".repeat(64));
    let pins: Vec<String> =
        ["operator", "router", "worker", "cli"].iter().map(|name| format!("images.{name}.digest={digest}")).collect();
    let pins = pins.join(",");
    let images = |set: &str| {
        let objects = helm.objects(&["--set", set, "--set", "images.cli.tag=ignored"]);
        let deployment = one(&objects, "Deployment", "kvasir-operator")["spec"]["template"]["spec"].clone();
        let flag = |name: &str| {
            let prefix = format!("--default-{name}-image=");
            container_args(&deployment).iter().find_map(|arg| arg.strip_prefix(&prefix).map(str::to_owned)).unwrap()
        };
        let image = |spec: &Value| spec["containers"][0]["image"].as_str().unwrap().to_owned();
        let test = image(&one(&objects, "Pod", "kvasir-generate")["spec"]);
        [image(&deployment), flag("router"), flag("worker"), test]
    };
    let programs = ["kvasir-operator", "kvasir-router", "kvasir-worker", "kvasir"];
    assert_eq!(images(&pins), programs.map(|program| format!("kvasir.dev/{program}@{digest}")));
    let moved = images(&format!("{pins},global.imageRegistry=mirror.example:5000/x"));
    assert_eq!(moved, programs.map(|program| format!("mirror.example:5000/x/{program}@{digest}")));
    let bare = images("images.registry=,images.cli.digest=");
    assert_eq!(bare[0], "kvasir-operator:0.1.0", "the tag is the chart's appVersion");
    assert_eq!(bare[3], "kvasir:ignored");
}

#[test]
fn the_chart_the_images_and_the_code_have_one_version() {
    let version = env!("CARGO_PKG_VERSION");
    let manifest = fs::read_to_string(chart().join("Chart.yaml")).unwrap();
    for line in [format!("version: {version}"), format!("appVersion: {version}")] {
        assert!(manifest.lines().any(|have| have == line), "Chart.yaml lacks `{line}`");
    }
    let dockerfile = fs::read_to_string(root().join("deploy/Dockerfile")).unwrap();
    assert!(dockerfile.contains(&format!("image.version=\"{version}\"")), "deploy/Dockerfile has another version");
}

#[test]
fn r62_crds_are_the_generated_ones_and_templates_so_that_an_upgrade_brings_them_up() {
    let mut names: Vec<_> = fs::read_dir(root().join("crds")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    let mut copies: Vec<_> = fs::read_dir(chart().join("files/crds")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    copies.sort();
    assert_eq!(names, copies, "charts/kvasir/files/crds holds a copy of each file in crds/");
    assert!(!names.is_empty() && !chart().join("crds").exists(), "Helm never upgrades what lies in crds/");
    let helm = Helm::find();
    for name in names {
        let generated = fs::read_to_string(root().join("crds").join(&name)).unwrap();
        let copied = fs::read_to_string(chart().join("files/crds").join(&name)).unwrap();
        assert!(generated == copied, "cp crds/{0} charts/kvasir/files/crds/{0}", name.display());
        let Some(helm) = &helm else { continue };
        let wanted = helm.parse(&generated).remove(0);
        let rendered = |set: &str| {
            helm.objects(&["--set", set]).into_iter().find(|object| object["metadata"]["name"] == wanted["metadata"]["name"])
        };
        let kept = rendered("crds.keep=true").unwrap();
        assert_eq!(kept["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
        for (rendered, annotated) in [(kept, true), (rendered("crds.keep=false").unwrap(), false)] {
            assert_eq!(rendered["metadata"]["annotations"].is_object(), annotated);
            assert_eq!(rendered["spec"], wanted["spec"], "a value was changed on the way through the template");
        }
        assert!(rendered("crds.install=false").is_none());
    }
}

#[test]
fn nothing_in_the_chart_asks_the_cluster_or_draws_a_random_value() {
    let mut text = String::new();
    for folder in ["templates", "templates/tests"] {
        for entry in fs::read_dir(chart().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                text.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }
    for function in ["lookup ", "rand", "genCA", "genSignedCert", "genSelfSignedCert", "genPrivateKey", "uuidv4", "now "] {
        assert!(
            !text.contains(&format!("{{{{ {function}")) && !text.contains(&format!("({function}")),
            "{function}: two renders must be equal"
        );
    }
}
