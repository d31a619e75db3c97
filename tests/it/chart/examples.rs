//! The example pools: they are what the types read, and they keep saying what they are for.

use super::helm::Helm;
use crate::root;
use kvasir_operator::api::ServingPool;
use serde_json::Value;
use std::fs;

/// What each example must still show.
pub const EXAMPLES: [(&str, &str); 4] = [
    ("first", "first"),
    ("a-shared-prompt", "shared-prompt"),
    ("b-long-answers", "long-answers"),
    ("c-saturation", "saturation"),
];

/// Members of `written` that `read` lacks or has otherwise.
fn lost(path: &str, written: &Value, read: &Value, found: &mut Vec<String>) {
    match (written, read) {
        (Value::Object(members), Value::Object(_)) => {
            for (name, member) in members {
                lost(&format!("{path}.{name}"), member, &read[name], found);
            }
        }
        (Value::Array(items), Value::Array(others)) if items.len() == others.len() => {
            for (item, other) in items.iter().zip(others) {
                lost(&format!("{path}[]"), item, other, found);
            }
        }
        _ if written == read => {}
        _ => found.push(format!("{path}: {written} was read as {read}")),
    }
}

pub fn pool(helm: &Helm, file: &str) -> (Value, ServingPool) {
    let text = fs::read_to_string(root().join(format!("deploy/examples/{file}.yaml"))).unwrap();
    let written = helm.parse(&text).into_iter().find(|object| object["kind"] == "ServingPool").unwrap();
    let read = serde_json::from_value(written.clone()).unwrap_or_else(|error| panic!("{file}: {error}"));
    (written, read)
}

#[test]
fn every_example_is_listed_here() {
    let mut files: Vec<String> = fs::read_dir(root().join("deploy/examples"))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    files.sort();
    let mut listed: Vec<&str> = EXAMPLES.iter().map(|(file, _)| *file).collect();
    listed.sort_unstable();
    assert_eq!(files, listed);
}

#[test]
fn nothing_that_an_example_says_is_unknown_to_the_types() {
    let Some(helm) = Helm::find() else { return };
    for (file, name) in EXAMPLES {
        let (written, read) = pool(&helm, file);
        assert_eq!(written["metadata"]["name"], name);
        let mut found = Vec::new();
        lost(file, &written, &serde_json::to_value(&read).unwrap(), &mut found);
        assert!(found.is_empty(), "{}", found.join("\n"));
    }
}

#[test]
fn a_misspelt_field_of_an_example_would_be_noticed() {
    let written = serde_json::json!({"spec": {"replicass": 2, "list": [{"a": 1}]}});
    let mut found = Vec::new();
    lost("x", &written, &serde_json::json!({"spec": {"replicas": 1, "list": [{"a": 1}]}}), &mut found);
    assert_eq!(found, ["x.spec.replicass: 2 was read as null"]);
}

#[test]
fn words_that_yaml_takes_for_booleans_are_quoted() {
    for (file, _) in EXAMPLES {
        let text = fs::read_to_string(root().join(format!("deploy/examples/{file}.yaml"))).unwrap();
        for line in text.lines() {
            let value = line.split_once(": ").map_or("", |(_, value)| value.trim());
            assert!(!matches!(value, "On" | "Off" | "on" | "off" | "yes" | "no" | "Yes" | "No"), "{file}: `{line}`");
        }
    }
}
