//! Whether a live object still is what was applied, in the fields that were applied.
//!
//! Owns the knowledge of what the API server does to a field without changing its meaning: it fills in defaults, drops empty values, writes
//! quantities in its own form, adds items to lists that are keyed by a name. Pure.

use serde_json::Value;

/// Members by which the items of a list are told apart.
const KEYS: [&str; 8] = ["name", "uid", "type", "containerPort", "mountPath", "topologyKey", "key", "port"];
/// Members that can be written and not read back.
const WRITE_ONLY: [&str; 1] = ["stringData"];

/// Path of the first wanted field that is not so in the live object.
pub fn first_difference(wanted: &Value, live: &Value) -> Option<String> {
    differ(wanted, Some(live), "")
}

fn differ(wanted: &Value, live: Option<&Value>, path: &str) -> Option<String> {
    let here = || Some(path.to_owned());
    let Some(live) = live.filter(|live| !live.is_null()) else {
        return if is_empty(wanted) { None } else { here() };
    };
    match (wanted, live) {
        (Value::Object(wanted), Value::Object(live)) => {
            let members = wanted.iter().filter(|(name, _)| !WRITE_ONLY.contains(&&***name));
            members.map(|(name, value)| differ(value, live.get(name), &join(path, name))).find(Option::is_some).flatten()
        }
        (Value::Array(wanted), Value::Array(live)) => match key_of(wanted) {
            Some(key) => wanted.iter().find_map(|item| {
                let name = &item[key];
                let found = live.iter().find(|it| it.get(key) == Some(name));
                differ(item, found.or(Some(&Value::Null)), &format!("{path}[{}]", text(name)))
            }),
            None if wanted.len() != live.len() => here(),
            None => {
                let pairs = wanted.iter().zip(live).enumerate();
                pairs.map(|(at, (wanted, live))| differ(wanted, Some(live), &format!("{path}[{at}]"))).find(Option::is_some)?
            }
        },
        (wanted, live) if wanted == live => None,
        (Value::String(wanted), Value::String(live)) if is_quantity(path) && quantity(wanted) == quantity(live) => None,
        _ => here(),
    }
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn key_of(items: &[Value]) -> Option<&'static str> {
    KEYS.into_iter().find(|key| {
        let values: Vec<&Value> = items.iter().filter_map(|item| item.get(key)).collect();
        let unique = values.iter().enumerate().all(|(at, value)| !values[..at].contains(value));
        !items.is_empty() && values.len() == items.len() && unique
    })
}

/// What the server may drop: empty texts, lists and maps, false, zero and null.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.values().all(is_empty),
    }
}

fn is_quantity(path: &str) -> bool {
    ["requests.", "limits.", "sizeLimit", "capacity.", "divisor"].iter().any(|part| path.contains(part))
}

/// Value of a quantity in thousandths of a thousandth; two texts with one value mean the same.
pub(crate) fn quantity(text: &str) -> Option<i128> {
    const SUFFIXES: [(&str, i128); 15] = [
        ("Ki", 1 << 10),
        ("Mi", 1 << 20),
        ("Gi", 1 << 30),
        ("Ti", 1 << 40),
        ("Pi", 1 << 50),
        ("Ei", 1 << 60),
        ("k", 1_000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
        ("P", 1_000_000_000_000_000),
        ("E", 1_000_000_000_000_000_000),
        ("m", -1_000),
        ("u", -1_000_000),
        ("", 1),
    ];
    let (digits, factor) = SUFFIXES.iter().find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))?;
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let micro: i128 = format!("{whole}{fraction:0<6}").get(..whole.len() + 6)?.parse().ok()?;
    Some(if factor < 0 { micro / -factor } else { micro.checked_mul(factor)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_the_server_fills_in_or_writes_otherwise_is_no_drift() {
        let wanted = json!({"spec": {"replicas": 2, "host": "", "flag": false, "none": null, "containers": [
            {"name": "w", "resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}}}]}});
        let live = json!({"spec": {"replicas": 2, "dnsPolicy": "ClusterFirst", "containers": [
            {"name": "sidecar"},
            {"name": "w", "image": "i", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}]}});
        assert_eq!(first_difference(&wanted, &live), None);
    }

    #[test]
    fn what_someone_changed_is_named_by_its_path() {
        let wanted = json!({"spec": {"ports": [{"name": "grpc", "port": 80}], "labels": {"a": "b"}, "args": ["x", "y"]}});
        for (live, path) in [
            (
                json!({"spec": {"ports": [{"name": "grpc", "port": 81}], "labels": {"a": "b"}, "args": ["x", "y"]}}),
                "spec.ports[grpc].port",
            ),
            (json!({"spec": {"ports": [{"name": "grpc", "port": 80}], "labels": {}, "args": ["x", "y"]}}), "spec.labels.a"),
            (json!({"spec": {"ports": [], "labels": {"a": "b"}, "args": ["x", "y"]}}), "spec.ports[grpc]"),
            (json!({"spec": {"ports": [{"name": "grpc", "port": 80}], "labels": {"a": "b"}, "args": ["x"]}}), "spec.args"),
        ] {
            assert_eq!(first_difference(&wanted, &live).as_deref(), Some(path));
        }
    }

    #[test]
    fn quantities_are_compared_by_value() {
        for (left, right) in [("1", "1000m"), ("1.5Gi", "1536Mi"), ("100m", "0.1"), ("2k", "2000"), ("1500u", "1.5m")] {
            assert_eq!(quantity(left), quantity(right), "{left} {right}");
        }
        assert_ne!(quantity("1Gi"), quantity("1G"));
        assert_eq!(quantity("x"), None);
    }
}
