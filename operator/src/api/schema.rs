//! The CRD that follows from the types, as an object and as the text of the file in `crds/`.
//!
//! Owns what the derive leaves open: no `nullable` (an explicit null then means the default), no schema titles, defaults that let nested defaults apply,
//! the status of a pool that nobody has looked at yet, and the YAML that a person can read in a diff. Refuses to know any field by name.

use super::{Condition, ConditionReason, ConditionStatus, ConditionType, ServingPool};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::CustomResourceExt as _;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value};
use std::fmt::Write as _;

/// First lines of the generated file.
const HEADER: &str = "# Generated from operator/src/api by `cargo run -p kvasir-operator --bin crds`; a test compares the two.\n";

/// The CRD, as it is installed.
pub fn crd() -> Result<CustomResourceDefinition, serde_json::Error> {
    let mut value = serde_json::to_value(ServingPool::crd())?;
    if let Some(versions) = value.pointer_mut("/spec/versions").and_then(Value::as_array_mut) {
        for version in versions {
            if let Some(schema) = version.pointer_mut("/schema/openAPIV3Schema") {
                tidy(schema);
            }
            if let Some(status) = version.pointer_mut("/schema/openAPIV3Schema/properties/status") {
                status["default"] = serde_json::json!({ "conditions": [awaited()] });
            }
        }
    }
    serde_json::from_value(value)
}

/// What the API server says of a new pool until the operator does. Without it who waits (kstatus, as Helm does) takes a pool without a status
/// for one that is as wanted.
fn awaited() -> Condition {
    let text = "the operator has not looked at the pool yet; check that it runs and watches this namespace";
    let never = Time(Timestamp::UNIX_EPOCH);
    Condition::new(ConditionType::Ready, ConditionStatus::Unknown, ConditionReason::Pending, text.to_owned(), None, never)
}

/// The text of `crds/servingpools.kvasir.dev.yaml`.
pub fn crd_yaml() -> Result<String, serde_json::Error> {
    let mut text = HEADER.to_owned();
    write_yaml(&mut text, &sorted(serde_json::to_value(crd()?)?), 0);
    Ok(text)
}

/// An object whose fields the API server keeps without knowing them.
pub(super) fn free_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// Removes what only the derive needs.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.remove("nullable");
            let is_schema = map.contains_key("type") || map.contains_key("x-kubernetes-int-or-string");
            if is_schema && map.get("title").is_some_and(Value::is_string) {
                map.remove("title");
            }
            map.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let mut members: Vec<(String, Value)> = map.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            members.sort_by(|left, right| left.0.cmp(&right.0));
            Value::Object(members.into_iter().collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

/// Block style; scalars are written as JSON, which YAML includes, so that no text can be taken for another type.
fn write_yaml(out: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, member) in map {
                let _ = write!(out, "{:indent$}{}:", "", yaml_key(key));
                write_member(out, member, indent + 2);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                let _ = write!(out, "{:indent$}-", "");
                if is_scalar(item) {
                    write_member(out, item, indent + 2);
                } else {
                    // The first line of a nested block stands behind the dash.
                    let mut nested = String::new();
                    write_yaml(&mut nested, item, indent + 2);
                    out.push(' ');
                    out.push_str(nested.trim_start());
                }
            }
        }
        scalar => {
            let _ = writeln!(out, "{:indent$}{scalar}", "");
        }
    }
}

fn write_member(out: &mut String, member: &Value, indent: usize) {
    if is_scalar(member) {
        let _ = writeln!(out, " {}", yaml_scalar(member));
    } else {
        out.push('\n');
        write_yaml(out, member, indent);
    }
}

fn is_scalar(value: &Value) -> bool {
    match value {
        Value::Object(map) => map.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => true,
    }
}

/// A word stands plain, every other text as JSON.
fn yaml_scalar(value: &Value) -> String {
    match value.as_str() {
        Some(text) if is_plain(text) => text.to_owned(),
        _ => value.to_string(),
    }
}

fn yaml_key(key: &str) -> String {
    if is_plain(key) { key.to_owned() } else { Value::String(key.to_owned()).to_string() }
}

/// Whether no YAML reader takes the text for anything but itself.
fn is_plain(text: &str) -> bool {
    const OTHER_TYPES: [&str; 10] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan"];
    text.starts_with(|letter: char| letter.is_ascii_alphabetic())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./".contains(&byte))
        && !OTHER_TYPES.contains(&text.to_ascii_lowercase().as_str())
}
