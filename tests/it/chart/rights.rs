//! The operator's rights: one list without wildcards, the same in both scopes, each with its reason.

use super::helm::{Helm, chart, one};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

/// Every (API group, resource, verb, name or empty) of a role.
pub fn rights(role: &Value) -> BTreeSet<[String; 4]> {
    let words = |rule: &Value, field: &str| -> Vec<String> {
        rule[field].as_array().map(|list| list.iter().map(|word| word.as_str().unwrap().to_owned()).collect()).unwrap_or_default()
    };
    let mut found = BTreeSet::new();
    for rule in role["rules"].as_array().unwrap() {
        let mut names = words(rule, "resourceNames");
        if names.is_empty() {
            names.push(String::new());
        }
        for group in words(rule, "apiGroups") {
            for resource in words(rule, "resources") {
                for verb in words(rule, "verbs") {
                    for name in &names {
                        let right = [group.clone(), resource.clone(), verb.clone(), name.clone()];
                        assert!(found.insert(right.clone()), "{right:?} is granted twice");
                    }
                }
            }
        }
    }
    found
}

#[test]
fn r65_both_scopes_grant_the_same_but_for_what_lies_outside_of_namespaces() {
    let Some(helm) = Helm::find() else { return };
    let cluster = helm.objects(&[]);
    let namespaced = helm.objects(&["--set", "scope=Namespace"]);
    let wide = rights(one(&cluster, "ClusterRole", "kvasir-system-kvasir-operator"));
    let narrow = rights(one(&namespaced, "Role", "kvasir-operator"));
    let outside: BTreeSet<&str> = wide.difference(&narrow).map(|[_, resource, ..]| resource.as_str()).collect();
    assert_eq!(outside, BTreeSet::from(["deviceclasses", "nodes", "resourceclaims", "resourceslices"]));
    assert!(narrow.is_subset(&wide));
    assert!(namespaced.iter().all(|object| !object["kind"].as_str().unwrap().starts_with("Cluster")), "nothing of the cluster's");
    let lease = |objects: &[Value]| rights(one(objects, "Role", "kvasir-operator-lease"));
    assert_eq!(lease(&cluster), lease(&namespaced));
}

#[test]
fn there_is_no_wildcard_and_nothing_that_would_let_the_operator_grow() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&[]);
    let all: Vec<[String; 4]> = objects.iter().filter(|object| object["rules"].is_array()).flat_map(rights).collect();
    assert!(all.len() > 30, "{}", all.len());
    for right in &all {
        assert!(right.iter().all(|word| word != "*"), "{right:?}");
        let [_, resource, verb, _] = right;
        assert!(!matches!(verb.as_str(), "escalate" | "bind" | "impersonate" | "approve" | "sign"), "{right:?}");
        assert!(
            !matches!(
                resource.as_str(),
                "clusterroles" | "clusterrolebindings" | "pods/exec" | "pods/attach" | "serviceaccounts/token"
            ),
            "{right:?}"
        );
    }
    let operator = rights(one(&objects, "ClusterRole", "kvasir-system-kvasir-operator"));
    let writes: Vec<_> = operator
        .iter()
        .filter(|[_, resource, verb, _]| resource == "servingpools" && !matches!(verb.as_str(), "get" | "list" | "watch"))
        .collect();
    assert!(writes.is_empty(), "a pool's spec belongs to people: {writes:?}");
    let lease = rights(one(&objects, "Role", "kvasir-operator-lease"));
    assert!(lease.iter().all(|[_, _, verb, name]| verb == "create" || name == "kvasir-operator"), "{lease:?}");
}

#[test]
fn every_rule_says_why_it_is_there() {
    let text = fs::read_to_string(chart().join("templates/_rules.tpl")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let rules: Vec<usize> = (0..lines.len()).filter(|at| lines[*at].starts_with("- apiGroups:")).collect();
    assert!(rules.len() > 15, "{}", rules.len());
    for at in rules {
        assert!(lines[at - 1].starts_with("# "), "_rules.tpl:{}: no reason above", at + 1);
    }
}

#[test]
fn roles_are_bound_to_the_account_that_the_pods_use() {
    let Some(helm) = Helm::find() else { return };
    for (set, account) in [
        ("scope=Cluster", "kvasir-operator"),
        ("serviceAccount.create=false,serviceAccount.name=runner,scope=Namespace", "runner"),
    ] {
        let objects = helm.objects(&["--set", set]);
        let pod = &one(&objects, "Deployment", "kvasir-operator")["spec"]["template"]["spec"];
        assert_eq!(pod["serviceAccountName"], account);
        let bindings: Vec<&Value> = objects.iter().filter(|object| object["roleRef"].is_object()).collect();
        assert_eq!(bindings.len(), 2);
        for binding in bindings {
            let subjects = binding["subjects"].as_array().unwrap();
            assert_eq!(subjects.len(), 1);
            assert_eq!((&subjects[0]["name"], &subjects[0]["namespace"]), (&account.into(), &"kvasir-system".into()));
            one(&objects, binding["roleRef"]["kind"].as_str().unwrap(), binding["roleRef"]["name"].as_str().unwrap());
        }
        assert_eq!(objects.iter().any(|object| object["kind"] == "ServiceAccount"), account != "runner");
    }
    let bare = helm.objects(&["--set", "rbac.create=false"]);
    assert!(bare.iter().all(|object| object["rules"].is_null() && object["roleRef"].is_null()));
}

#[test]
fn people_who_edit_a_namespace_edit_its_pools_and_people_who_view_it_only_view() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&[]);
    let view = one(&objects, "ClusterRole", "kvasir-system-kvasir-pools-view");
    let edit = one(&objects, "ClusterRole", "kvasir-system-kvasir-pools-edit");
    assert_eq!(view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"], "true");
    assert!(edit["metadata"]["labels"].get("rbac.authorization.k8s.io/aggregate-to-view").is_none());
    assert!(rights(view).iter().all(|[_, _, verb, _]| matches!(verb.as_str(), "get" | "list" | "watch")));
    let statuses = rights(edit).into_iter().filter(|[_, resource, ..]| resource == "servingpools/status").count();
    assert_eq!(statuses, 0, "status is the operator's word");
}
