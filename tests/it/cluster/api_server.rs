//! API server only: what it makes of `crds/` and of the examples, which no schema library on the client's side can say.

use super::support::{apply, eventually, feed, get, kubectl, on_cluster, try_kubectl};
use crate::root;
use kube::api::{Api, DynamicObject, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kvasir_cluster::{Cluster, Layers};
use kvasir_operator::api::ServingPoolSpec;
use serde::Deserialize;
use serde_json::{Value, json};

const CRD: &str = "customresourcedefinition/servingpools.kvasir.dev";

fn crds() -> String {
    root().join("crds").display().to_string()
}

/// Applies the CRD and waits until pools can be made.
pub async fn install(cluster: &Cluster, args: &[&str]) {
    let folder = crds();
    kubectl(cluster, &[&["apply", "-f", &folder], args].concat());
    established(cluster).await;
}

async fn established(cluster: &Cluster) {
    eventually("the CRD is established", || {
        let conditions = get(cluster, &[CRD])["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is = |kind: &str| conditions.iter().any(|it| it["type"] == kind && it["status"] == "True");
        assert!(!is("NonStructuralSchema"), "{conditions:?}");
        is("Established").then_some(()).ok_or_else(|| format!("{conditions:?}"))
    })
    .await;
}

pub fn pool(namespace: &str, name: &str) -> Value {
    json!({
        "apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": {"file": {"path": "/models/a.gguf"}}}},
    })
}

#[test]
fn the_crd_is_taken_by_client_side_and_by_server_side_apply_in_any_order() {
    on_cluster(Layers::api(), async |cluster| {
        let (plain, server): (&[&str], &[&str]) = (&[], &["--server-side", "--force-conflicts"]);
        for order in [[plain, server], [server, plain]] {
            for args in order {
                install(cluster, args).await;
                // What is applied again changes nothing.
                let before = get(cluster, &[CRD])["metadata"]["resourceVersion"].clone();
                install(cluster, args).await;
                assert_eq!(get(cluster, &[CRD])["metadata"]["resourceVersion"], before, "{args:?}");
            }
            kubectl(cluster, &["delete", CRD]);
        }
    });
}

#[test]
fn pools_are_found_by_short_name_and_category_and_explained_and_printed_with_their_columns() {
    on_cluster(Layers::api(), async |cluster| {
        install(cluster, &[]).await;
        let namespace = cluster.namespace("api", &[]).await.unwrap();
        apply(cluster, &pool(&namespace, "a"));
        for what in ["spool", "servingpool", "servingpools", "all"] {
            let said = eventually(&format!("`{what}` is known"), || try_kubectl(cluster, &["-n", &namespace, "get", what])).await;
            let head = said.lines().next().unwrap();
            for column in ["NAME", "MODEL", "REVISION", "READY", "ROUTABLE", "DESIRED", "REASON", "AGE"] {
                assert!(head.contains(column), "{what}: {head}");
            }
        }
        let explained = kubectl(cluster, &["explain", "servingpool.spec.rollout.mode"]);
        for word in ["Auto", "InPlace", "SurgeFree", "Surge"] {
            assert!(explained.contains(word), "{explained}");
        }
    });
}

#[test]
fn the_api_server_fills_in_the_defaults_that_the_types_have() {
    on_cluster(Layers::api(), async |cluster| {
        install(cluster, &[]).await;
        let namespace = cluster.namespace("api", &[]).await.unwrap();
        let written = pool(&namespace, "a");
        apply(cluster, &written);
        let stored = get(cluster, &["-n", &namespace, "spool", "a"])["spec"].clone();
        let model = serde_json::from_value(written["spec"]["model"].clone()).unwrap();
        assert_eq!(stored, serde_json::to_value(ServingPoolSpec::new(model)).unwrap());
    });
}

#[test]
fn scale_writes_replicas_and_the_status_has_its_own_door() {
    on_cluster(Layers::api(), async |cluster| {
        install(cluster, &[]).await;
        let namespace = cluster.namespace("api", &[]).await.unwrap();
        apply(cluster, &pool(&namespace, "a"));
        for replicas in ["0", "3"] {
            kubectl(cluster, &["-n", &namespace, "scale", "spool", "a", "--replicas", replicas]);
            let pool = get(cluster, &["-n", &namespace, "spool", "a"]);
            assert_eq!(pool["spec"]["replicas"].to_string(), replicas);
        }
        let patch = |sub: &[&str], status: &Value| {
            let patch = json!({"status": status}).to_string();
            kubectl(cluster, &[&["-n", &namespace, "patch", "spool", "a", "--type=merge", "-p", &patch], sub].concat());
            get(cluster, &["-n", &namespace, "spool", "a"])
        };
        let before = get(cluster, &["-n", &namespace, "spool", "a"])["metadata"]["generation"].clone();
        let new = patch(&[], &json!({"replicas": 2}))["status"].clone();
        assert_eq!(new["replicas"], 0, "the main door drops a status: {new}");
        // Who waits for a pool that nobody has looked at goes on waiting.
        let ready = &new["conditions"][0];
        assert_eq!((&ready["type"], &ready["status"], &ready["reason"]), (&json!("Ready"), &json!("Unknown"), &json!("Pending")));
        let written = patch(&["--subresource=status"], &json!({"replicas": 2}));
        assert_eq!((&written["status"]["replicas"], &written["metadata"]["generation"]), (&json!(2), &before));
    });
}

#[test]
fn every_example_is_admitted_as_it_stands() {
    on_cluster(Layers::api(), async |cluster| {
        install(cluster, &[]).await;
        let folder = root().join("deploy/examples").display().to_string();
        let said = kubectl(cluster, &["apply", "--dry-run=server", "--validate=strict", "-f", &folder]);
        let files = std::fs::read_dir(folder).unwrap().count();
        let pools = said.lines().filter(|line| line.starts_with("servingpool.kvasir.dev/")).count();
        assert!(files >= 4 && pools >= files, "{said}");
    });
}

#[test]
fn a_field_that_is_not_there_is_refused_with_its_path() {
    on_cluster(Layers::api(), async |cluster| {
        install(cluster, &[]).await;
        let namespace = cluster.namespace("api", &[]).await.unwrap();
        let mut wrong = pool(&namespace, "a");
        wrong["spec"]["replica"] = json!(3);
        let said = feed(cluster, &["apply", "--validate=strict"], &wrong).unwrap_err();
        assert!(said.contains("unknown field \"spec.replica\""), "{said}");
    });
}

/// One rule's pools; the file says what the members mean.
#[derive(Deserialize)]
struct Case {
    rule: String,
    #[serde(default)]
    accepted: Value,
    #[serde(default)]
    refused: Value,
    name: Option<[String; 2]>,
}

/// JSON merge patch.
fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            into.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut into[key], value);
        }
    }
}

#[test]
fn every_rule_admits_its_accepted_pool_and_refuses_the_other_with_its_words() {
    on_cluster(Layers::api(), async |cluster| {
        install(cluster, &[]).await;
        let namespace = cluster.namespace("rules", &[]).await.unwrap();
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("kvasir.dev", "v1alpha1", "ServingPool"));
        let pools = Api::<DynamicObject>::namespaced_with(cluster.client().await.unwrap(), &namespace, &kind);
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let cases: Vec<Case> = serde_saphyr::from_str(include_str!("../../../operator/cases/rules.yaml")).unwrap();
        assert!(cases.len() > 30);
        let mut findings = Vec::new();
        for case in &cases {
            for (number, patch) in [&case.accepted, &case.refused].into_iter().enumerate() {
                let mut object = pool(&namespace, case.name.as_ref().map_or("a", |names| &names[number]));
                if !patch.is_null() {
                    merge(&mut object["spec"], patch);
                }
                let answer = pools.create(&dry_run, &serde_json::from_value(object).unwrap()).await;
                match (number, answer) {
                    (0, Ok(_)) => {}
                    (0, Err(error)) => findings.push(format!("{}: the accepted pool was refused: {error}", case.rule)),
                    (_, Ok(_)) => findings.push(format!("{}: the refused pool was accepted", case.rule)),
                    (_, Err(kube::Error::Api(status))) if status.code == 422 && status.message.contains(&case.rule) => {}
                    (_, Err(error)) => findings.push(format!("{}: refused in other words: {error}", case.rule)),
                }
            }
        }
        assert!(findings.is_empty(), "{}", findings.join("\n"));
    });
}
