//! The schema as a whole: limits, descriptions, size, and the file in `crds/`.

use super::*;
use crate::testing::merge_patch;
use serde_json::{Value, json};
use std::path::Path;

fn schema() -> Value {
    let crd = serde_json::to_value(crd().unwrap()).unwrap();
    crd.pointer("/spec/versions/0/schema/openAPIV3Schema").unwrap().clone()
}

/// Calls `see` with every schema below `schema` and its path.
fn walk(path: &str, schema: &Value, see: &mut dyn FnMut(&str, &Value)) {
    see(path, schema);
    if let Some(properties) = schema["properties"].as_object() {
        for (name, property) in properties {
            walk(&format!("{path}.{name}"), property, see);
        }
    }
    for below in ["items", "additionalProperties"] {
        if schema[below].is_object() {
            walk(&format!("{path}[]"), &schema[below], see);
        }
    }
}

fn findings(rule: impl Fn(&str, &Value) -> Option<String>) -> Vec<String> {
    let mut found = Vec::new();
    for part in ["spec", "status"] {
        walk(part, &schema()["properties"][part], &mut |path, schema| {
            found.extend(rule(path, schema).map(|problem| format!("{path}: {problem}")));
        });
    }
    found
}

#[test]
fn the_committed_crd_is_what_the_types_say() {
    let file = Path::new("../crds/servingpools.kvasir.dev.yaml");
    let committed = std::fs::read_to_string(file).unwrap();
    assert!(committed == crd_yaml().unwrap(), "run `cargo run -p kvasir-operator --bin crds` and commit crds/");
}

#[test]
fn a_pool_that_nobody_has_looked_at_is_not_taken_for_one_that_is_as_wanted() {
    let status: ServingPoolStatus = serde_json::from_value(schema()["properties"]["status"]["default"].clone()).unwrap();
    let ready = &status.conditions[0];
    assert_eq!((&*ready.condition_type, ready.status, &*ready.reason), ("Ready", ConditionStatus::Unknown, "Pending"));
    let file = json!({"apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "metadata": {"name": "a"}, "spec": {"model": {"source": {"file": {"path": "/a.gguf"}}}}, "status": status});
    let mut pool: ServingPool = serde_json::from_value(file).unwrap();
    assert!(pool.told().is_none());
    pool.status.as_mut().unwrap().observed_generation = Some(1);
    assert!(pool.told().is_some());
}

#[test]
fn the_crd_is_smaller_than_100_kib_of_json() {
    let bytes = serde_json::to_vec(&crd().unwrap()).unwrap().len();
    assert!(bytes < 100 << 10, "{bytes} bytes");
}

#[test]
fn every_field_is_described_and_every_text_list_and_map_has_a_limit() {
    let problems = findings(|_, schema| {
        let described = schema["description"].as_str().is_some_and(|text| text.len() > 5);
        let bounded = match schema["type"].as_str() {
            Some("string") => schema["maxLength"].is_u64() || schema["enum"].is_array() || schema["format"] == "date-time",
            Some("array") => schema["maxItems"].is_u64(),
            Some("integer") => schema["minimum"].is_number() || schema["x-kubernetes-validations"].is_array(),
            Some("object") => !schema["additionalProperties"].is_object() || schema["maxProperties"].is_u64(),
            Some("boolean") => true,
            None => schema["x-kubernetes-int-or-string"] == true,
            Some(_) => false,
        };
        match (described, bounded) {
            (true, true) => None,
            (false, _) => Some("has no description".to_owned()),
            (true, false) => Some(format!("has no limit: {schema}")),
        }
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn numbers_have_formats_that_the_api_server_knows_and_nothing_is_nullable_or_a_union() {
    let problems = findings(|_, schema| {
        let format = schema["format"].as_str();
        if !matches!(format, None | Some("int32" | "int64" | "date-time" | "duration")) {
            return Some(format!("format {format:?}"));
        }
        if schema["type"] == "integer" && format.is_none() {
            return Some("an integer without format".to_owned());
        }
        let union =
            ["nullable", "anyOf", "oneOf", "allOf", "$ref", "title", "not"].iter().find(|key| schema.get(**key).is_some());
        union.map(|key| format!("has {key}"))
    });
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_rule_has_a_message_in_one_line_that_says_what_to_do() {
    let mut rules = Vec::new();
    walk("", &schema(), &mut |path, schema| {
        for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            rules.push((path.to_owned(), rule.clone()));
        }
    });
    assert!(rules.len() > 30, "{}", rules.len());
    for (path, rule) in rules {
        let message = rule["message"].as_str().or(rule["messageExpression"].as_str()).unwrap_or_default();
        assert!(message.len() > 20 && !message.contains('\n') && !message.ends_with('.'), "{path}: {rule}");
    }
}

#[test]
fn lists_of_named_things_merge_by_name() {
    let schema = schema();
    for (list, key) in [
        ("/properties/spec/properties/tenants", "name"),
        ("/properties/spec/properties/prefixCache/properties/sharedPrefixes", "name"),
        ("/properties/status/properties/conditions", "type"),
    ] {
        let list = schema.pointer(list).unwrap();
        assert_eq!((&list["x-kubernetes-list-type"], &list["x-kubernetes-list-map-keys"]), (&json!("map"), &json!([key])));
    }
}

#[test]
fn an_empty_spec_with_a_model_gets_every_default_from_the_schema() {
    let model = json!({ "source": { "file": { "path": "/models/a.gguf" } } });
    let minimal: ServingPoolSpec = serde_json::from_value(json!({ "model": model })).unwrap();
    assert_eq!(minimal, ServingPoolSpec::new(serde_json::from_value(model.clone()).unwrap()));
    let mut defaulted = json!({ "model": model });
    apply_defaults(&schema()["properties"]["spec"], &mut defaulted);
    assert_eq!(defaulted, serde_json::to_value(&minimal).unwrap());
    assert_eq!(defaulted["rollout"]["maxSurge"], 1);
}

/// What the API server does with defaults: fill absent members, then look below.
fn apply_defaults(schema: &Value, value: &mut Value) {
    let (Some(properties), Some(object)) = (schema["properties"].as_object(), value.as_object_mut()) else { return };
    for (name, property) in properties {
        if let Some(default) = property.get("default") {
            object.entry(name.clone()).or_insert_with(|| default.clone());
        }
        if let Some(member) = object.get_mut(name) {
            apply_defaults(property, member);
        }
    }
}

/// One rule's pools, as the file of cases has them.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    rule: String,
    #[serde(default)]
    accepted: Value,
    #[serde(default)]
    refused: Value,
    name: Option<[String; 2]>,
}

fn cases() -> Vec<Case> {
    serde_saphyr::from_str(include_str!("../../cases/rules.yaml")).unwrap()
}

/// The pool of a case, as it reaches admission.
pub(crate) fn case_pool(name: &str, patch: &Value) -> Value {
    let mut spec = json!({ "model": { "source": { "file": { "path": "/models/a.gguf" } } } });
    if !patch.is_null() {
        merge_patch(&mut spec, patch);
    }
    json!({ "apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "metadata": { "name": name, "namespace": "n", "uid": "u" },
        "spec": spec })
}

/// Every pool that a rule refuses, with the rule's message.
pub(crate) fn refused_pools() -> Vec<(String, Value)> {
    let of = |case: Case| {
        let name = case.name.map_or_else(|| "pool".to_owned(), |[_, refused]| refused);
        (case.rule, case_pool(&name, &case.refused))
    };
    cases().into_iter().map(of).collect()
}

/// Every pool that all rules let pass.
pub(crate) fn accepted_pools() -> Vec<(String, Value)> {
    let of = |case: Case| {
        let name = case.name.map_or_else(|| "pool".to_owned(), |[accepted, _]| accepted);
        (case.rule, case_pool(&name, &case.accepted))
    };
    cases().into_iter().map(of).collect()
}

/// What the rules say of a pool.
fn admission(pool: &Value) -> Vec<String> {
    let findings = kube::core::cel::Validator::new().validate_with_defaults(&schema(), pool, None);
    findings.err().map_or_else(Vec::new, |errors| errors.into_vec().into_iter().map(|error| error.message).collect())
}

#[test]
fn every_rule_lets_its_accepted_case_pass_and_refuses_the_other() {
    let mut problems = Vec::new();
    for (rule, pool) in accepted_pools() {
        let said = admission(&pool);
        if !said.is_empty() {
            problems.push(format!("{rule}: the accepted case is refused: {said:?}"));
        }
    }
    for (rule, pool) in refused_pools() {
        let said = admission(&pool);
        if !said.iter().any(|message| message.starts_with(&rule)) {
            problems.push(format!("{rule}: the refused case is not refused by it: {said:?}"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn every_rule_has_a_case() {
    let cases = cases();
    let mut rules = 0;
    walk("", &schema(), &mut |path, schema| {
        for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            let message = rule["message"].as_str().or(rule["messageExpression"].as_str()).unwrap_or_default();
            rules += 1;
            assert!(cases.iter().any(|case| message.trim_start_matches('\'').starts_with(&case.rule)), "{path}: {message}");
        }
    });
    assert!(rules > 35, "{rules}");
}
