//! The schema of the values: closed, described, and refusing with words that name the field.

use super::helm::{Helm, chart};
use serde_json::Value;
use std::fs;

fn schema() -> Value {
    serde_json::from_str(&fs::read_to_string(chart().join("values.schema.json")).unwrap()).unwrap()
}

/// Calls `see` with every schema that describes a value, and its path.
fn walk(path: &str, schema: &Value, see: &mut dyn FnMut(&str, &Value)) {
    see(path, schema);
    if let Some(properties) = schema["properties"].as_object() {
        for (name, property) in properties {
            walk(&format!("{path}.{name}"), property, see);
        }
    }
    if schema["items"].is_object() {
        walk(&format!("{path}[]"), &schema["items"], see);
    }
}

#[test]
fn every_object_is_closed_and_everything_is_described_and_bounded() {
    let mut findings = Vec::new();
    walk("values", &schema(), &mut |path, schema| {
        let list = path.ends_with("metricsFromNamespaces[]");
        if schema.get("$ref").is_none() && !list && schema["description"].as_str().is_none_or(|text| text.len() < 10) {
            findings.push(format!("{path}: no description"));
        }
        let kind = schema["type"].as_str();
        let closed = schema["additionalProperties"] == false || schema["additionalProperties"]["type"] == "string";
        if kind == Some("object") && !closed {
            findings.push(format!("{path}: open"));
        }
        let bounded = ["maxLength", "pattern", "enum"].iter().any(|word| schema.get(word).is_some());
        if kind == Some("string") && !bounded {
            findings.push(format!("{path}: any text"));
        }
        if kind == Some("array") && schema.get("maxItems").is_none() {
            findings.push(format!("{path}: any number"));
        }
    });
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn every_value_that_the_schema_knows_has_its_default_in_the_values_file() {
    let Some(helm) = Helm::find() else { return };
    let defaults = helm.parse(&fs::read_to_string(chart().join("values.yaml")).unwrap()).remove(0);
    let mut missing = Vec::new();
    walk("", &schema(), &mut |path, schema| {
        let leaf = schema["type"] != "object" && schema.get("$ref").is_none() && !path.contains("[]");
        let pointer = path.replace('.', "/");
        if leaf && defaults.pointer(&pointer).is_none() {
            missing.push(pointer);
        }
    });
    assert!(missing.is_empty(), "values.yaml lacks {missing:?}");
}

#[test]
fn a_bad_value_is_refused_with_a_message_that_names_the_field() {
    let Some(helm) = Helm::find() else { return };
    let cases = [
        ("operator.replicass=2", "'/operator': additional properties 'replicass' not allowed"),
        ("operator.replicas=many", "'/operator/replicas'"),
        ("operator.replicas=1e3", "'/operator/replicas'"),
        ("operator.replicas=9", "'/operator/replicas'"),
        ("operator.resources.limits.memory=lots", "'/operator/resources/limits/memory'"),
        ("operator.resources.limits.gpu=1", "'/operator/resources/limits': additional properties 'gpu' not allowed"),
        ("operator.podAnnotations.a=true", "'/operator/podAnnotations/a'"),
        ("operator.podLabels.app\\.kubernetes\\.io/name=other", "'/operator/podLabels/app.kubernetes.io~1name'"),
        ("operator.tolerations[0].tolerationSeconds=soon", "'/operator/tolerations/0/tolerationSeconds'"),
        ("scope=namespace", "'/scope': value must be one of 'Cluster', 'Namespace'"),
        ("fullnameOverride=No_Name", "'/fullnameOverride'"),
        ("images.worker.digest=sha256:12", "'/images/worker/digest'"),
        ("images.pullPolicy=Sometimes", "'/images/pullPolicy'"),
        ("crds.install=yes", "'/crds/install'"),
        ("serviceAccount.create=false", "'/serviceAccount/name'"),
        ("telemetry.otlp.endpoint=collector:4317", "'/telemetry/otlp/endpoint'"),
        ("metrics.serviceMonitor.interval=30", "'/metrics/serviceMonitor/interval'"),
        ("metrics.rules.failedShare=2", "'/metrics/rules/failedShare'"),
        ("metrics.dashboard.labels.helm\\.sh/chart=x", "'/metrics/dashboard/labels/helm.sh~1chart'"),
        ("networkPolicy.metricsFromNamespaces={Bad_Name}", "'/networkPolicy/metricsFromNamespaces/0'"),
        ("global.imagePullSecrets[0]=regcred", "'/global/imagePullSecrets/0'"),
        ("test.pool.name=", "'/test/pool/name'"),
        ("test.pool.port=70000", "'/test/pool/port'"),
        ("test.timeoutSeconds=1e9", "'/test/timeoutSeconds'"),
    ];
    for (value, wanted) in cases {
        let refusal = helm.render_folder(&chart(), &["--set", value]).expect_err(value);
        assert!(refusal.contains(wanted), "--set {value}: `{wanted}` is not in\n{refusal}");
    }
}

#[test]
fn r67_numbers_are_rendered_plain_and_texts_stay_texts() {
    let Some(helm) = Helm::find() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("values.yaml");
    fs::write(
        &file,
        "operator: {replicas: 3, podAnnotations: {a: \"0123\", b: \"true\", c: \"1e3\", d: \"21600000\", e: \"null\"}, tolerations: [{tolerationSeconds: 2147483647}]}\n\
         test: {timeoutSeconds: 3600}\nglobal: {imagePullSecrets: [{name: \"0123\"}]}\nimages: {worker: {repository: w, tag: \"1048576\"}}\n",
    )
    .unwrap();
    let from_file = helm.objects(&["--values", file.to_str().unwrap()]);
    let from_flags = helm.objects(&[
        "--set",
        "operator.replicas=3,operator.tolerations[0].tolerationSeconds=2147483647,test.timeoutSeconds=3600,images.worker.repository=w",
        "--set-string",
        "operator.podAnnotations.a=0123,operator.podAnnotations.b=true,operator.podAnnotations.c=1e3,operator.podAnnotations.d=21600000",
        "--set-string",
        "operator.podAnnotations.e=null,global.imagePullSecrets[0].name=0123,images.worker.tag=1048576",
    ]);
    assert_eq!(from_file, from_flags, "a file and flags mean the same");
    let deployment = super::helm::one(&from_file, "Deployment", "kvasir-operator");
    assert_eq!(deployment["spec"]["replicas"], 3);
    let pod = &deployment["spec"]["template"];
    let annotations = &pod["metadata"]["annotations"];
    let texts: Vec<&str> = ["a", "b", "c", "d", "e"].iter().map(|key| annotations[*key].as_str().unwrap()).collect();
    assert_eq!(texts, ["0123", "true", "1e3", "21600000", "null"]);
    assert_eq!(pod["spec"]["tolerations"][0]["tolerationSeconds"], 2_147_483_647);
    assert_eq!(pod["spec"]["imagePullSecrets"][0]["name"], "0123");
    assert!(super::helm::container_args(&pod["spec"]).iter().any(|arg| arg.ends_with("/w:1048576")));
    assert_eq!(
        super::helm::one(&from_file, "Pod", "kvasir-generate")["spec"]["activeDeadlineSeconds"],
        3660,
        "a minute more than the generation gets"
    );
}

/// Every value that can be set by itself, with its schema.
fn leaves() -> Vec<(String, Value)> {
    fn collect(path: &str, schema: &Value, all: &Value, found: &mut Vec<(String, Value)>) {
        let Some(properties) = schema["properties"].as_object() else {
            let pointer = schema["$ref"].as_str().map(|pointer| pointer.trim_start_matches('#').to_owned());
            let schema = pointer.map_or_else(|| schema.clone(), |pointer| all.pointer(&pointer).unwrap().clone());
            found.push((path.to_owned(), schema));
            return;
        };
        for (name, property) in properties {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            collect(&path, property, all, found);
        }
    }
    let (all, mut found) = (schema(), Vec::new());
    collect("", &all, &all, &mut found);
    found
}

#[test]
#[expect(clippy::disallowed_methods, reason = "whoever changes a value asks for a new table")]
fn the_documented_table_is_the_one_of_schema_and_defaults() {
    use std::fmt::Write as _;
    const BEGIN: &str = "<!-- values -->\n";
    const END: &str = "<!-- /values -->";
    let Some(helm) = Helm::find() else { return };
    let defaults = helm.parse(&fs::read_to_string(chart().join("values.yaml")).unwrap()).remove(0);
    let mut table = "| value | default | what it is |\n| --- | --- | --- |\n".to_owned();
    for (path, schema) in leaves() {
        let default =
            defaults.pointer(&format!("/{}", path.replace('.', "/"))).map_or_else(String::new, |value| format!("`{value}`"));
        writeln!(table, "| `{path}` | {default} | {} |", schema["description"].as_str().unwrap()).unwrap();
    }
    let page = crate::root().join("docs/kubernetes.md");
    let text = fs::read_to_string(&page).unwrap();
    let (head, rest) = text.split_once(BEGIN).unwrap();
    let (_, tail) = rest.split_once(END).unwrap();
    let wanted = format!("{head}{BEGIN}{table}{END}{tail}");
    if std::env::var_os("KVASIR_UPDATE_GOLDEN").is_some() {
        fs::write(&page, &wanted).unwrap();
    } else {
        assert!(text == wanted, "docs/kubernetes.md: look at the change, then run this test with KVASIR_UPDATE_GOLDEN=1");
    }
}
