//! JSON as the API server treats it: merges, selectors, paths. Pure.

use serde_json::{Map, Value};

/// The member by which the items of a list are told apart, if they are objects that have one.
fn list_key(items: &[Value]) -> Option<&'static str> {
    ["uid", "name", "type", "containerPort", "topologyKey", "mountPath", "key"]
        .into_iter()
        .find(|key| !items.is_empty() && items.iter().all(|item| item.get(key).is_some()))
}

/// Lays `patch` over `base`; lists of named objects merge by their key, others are replaced, null removes.
pub(super) fn merge(base: &mut Value, patch: &Value) {
    match (base, patch) {
        (Value::Object(base), Value::Object(patch)) => {
            for (name, value) in patch {
                if value.is_null() {
                    base.remove(name);
                } else if let Some(member) = base.get_mut(name) {
                    merge(member, value);
                } else {
                    base.insert(name.clone(), without_nulls(value));
                }
            }
        }
        (Value::Array(base), Value::Array(patch)) => match list_key(patch).filter(|key| list_key(base) == Some(*key)) {
            Some(key) => {
                for item in patch {
                    match base.iter_mut().find(|old| old.get(key) == item.get(key)) {
                        Some(old) => merge(old, item),
                        None => base.push(item.clone()),
                    }
                }
            }
            None => base.clone_from(patch),
        },
        (base, patch) => *base = patch.clone(),
    }
}

fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(map) => Value::Object(
            map.iter().filter(|(_, it)| !it.is_null()).map(|(name, it)| (name.clone(), without_nulls(it))).collect(),
        ),
        other => other.clone(),
    }
}

/// A JSON merge patch (RFC 7386): lists are replaced.
pub(crate) fn merge_patch(base: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *base = patch.clone();
        return;
    };
    if !base.is_object() {
        *base = Value::Object(Map::new());
    }
    let Value::Object(base) = base else { return };
    for (name, value) in patch {
        if value.is_null() {
            base.remove(name);
        } else {
            merge_patch(base.entry(name.clone()).or_insert(Value::Null), value);
        }
    }
}

/// Removes from `live` what `old` had applied and `new` no longer has.
pub(super) fn drop_given_up(live: &mut Value, old: &Value, new: &Value) {
    match (live, old, new) {
        (Value::Object(live), Value::Object(old), Value::Object(new)) => {
            for (name, value) in old {
                match (live.get_mut(name), new.get(name)) {
                    (Some(_), None) => {
                        live.remove(name);
                    }
                    (Some(member), Some(kept)) => drop_given_up(member, value, kept),
                    (None, _) => {}
                }
            }
        }
        (Value::Array(live), Value::Array(old), Value::Array(new)) => {
            let Some(key) = list_key(old) else { return };
            live.retain(|item| {
                let was = old.iter().any(|it| it.get(key) == item.get(key));
                !was || new.iter().any(|it| it.get(key) == item.get(key))
            });
            for item in live {
                let find = |list: &[Value]| list.iter().find(|it| it.get(key) == item.get(key)).cloned();
                if let (Some(old), Some(new)) = (find(old), find(new)) {
                    drop_given_up(item, &old, &new);
                }
            }
        }
        _ => {}
    }
}

/// Whether labels satisfy a selector such as `a=b,c in (d,e),!f`.
pub(super) fn labels_match(object: &Value, selector: &str) -> bool {
    let label = |name: &str| object.pointer("/metadata/labels").and_then(|labels| labels.get(name)).and_then(Value::as_str);
    terms(selector).iter().all(|term| {
        if let Some((name, values)) = term.split_once(" in ") {
            let values = values.trim().trim_matches(['(', ')']);
            return label(name.trim()).is_some_and(|label| values.split(',').any(|value| value.trim() == label));
        }
        match term.split_once('=') {
            Some((name, value)) => label(name.trim_end_matches('!')).is_some_and(|it| it == value) != name.ends_with('!'),
            None => match term.strip_prefix('!') {
                Some(name) => label(name).is_none(),
                None => label(term).is_some(),
            },
        }
    })
}

/// Whether fields satisfy a selector such as `metadata.name=x,status.phase!=Failed`.
pub(super) fn fields_match(object: &Value, selector: &str) -> bool {
    terms(selector).iter().all(|term| {
        let (path, value) = term.split_once('=').unwrap_or((term, ""));
        let (path, not) = path.strip_suffix('!').map_or((path, false), |path| (path, true));
        let found = object.pointer(&format!("/{}", path.replace('.', "/"))).and_then(Value::as_str).unwrap_or_default();
        (found == value) != not
    })
}

fn terms(selector: &str) -> Vec<&str> {
    let (mut terms, mut depth, mut from) = (Vec::new(), 0, 0);
    for (at, letter) in selector.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                terms.push(selector[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    terms.push(selector[from..].trim());
    terms.retain(|term| !term.is_empty());
    terms
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_an_applier_gives_up_goes_and_what_others_own_stays() {
        let mut live = json!({"spec": {"a": 1, "b": 2, "list": [{"name": "x", "v": 1}, {"name": "foreign"}]}});
        let old = json!({"spec": {"a": 1, "list": [{"name": "x", "v": 1}]}});
        let new = json!({"spec": {"list": [{"name": "y"}]}});
        drop_given_up(&mut live, &old, &new);
        merge(&mut live, &new);
        assert_eq!(live, json!({"spec": {"b": 2, "list": [{"name": "foreign"}, {"name": "y"}]}}));
    }

    #[test]
    fn selectors_select() {
        let object = json!({"metadata": {"name": "n", "labels": {"a": "b", "c": "d"}}, "status": {"phase": "Failed"}});
        for yes in ["a=b", "a=b,c in (x,d)", "!e", "a", "a!=x"] {
            assert!(labels_match(&object, yes), "{yes}");
        }
        for no in ["a=c", "c in (x,y)", "!a", "e", "a!=b"] {
            assert!(!labels_match(&object, no), "{no}");
        }
        assert!(fields_match(&object, "metadata.name=n") && !fields_match(&object, "status.phase!=Failed"));
    }
}
