#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]
//! Applying against the mock API server.

use super::*;
use crate::testing::MockApi;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::json;

fn owner() -> OwnerReference {
    OwnerReference { uid: "pool-uid".to_owned(), name: "pool".to_owned(), ..OwnerReference::default() }
}

fn config(value: &str) -> Desired {
    let body = json!({"metadata": {"name": "c", "namespace": "ns", "ownerReferences": [{"apiVersion": "kvasir.dev/v1alpha1",
        "kind": "ServingPool", "name": "pool", "uid": "pool-uid", "controller": true}]}, "data": {"k": value}});
    Desired::from_value(ApiResource::erase::<ConfigMap>(&()), body).unwrap()
}

fn live(api: &MockApi) -> impl Fn(&Desired) -> Option<Arc<DynamicObject>> + '_ {
    |desired| {
        let found = api.get(&desired.resource.plural, &desired.namespace, &desired.name)?;
        Some(Arc::new(serde_json::from_value(found).unwrap()))
    }
}

#[tokio::test]
async fn an_object_is_written_once_and_then_left_alone() {
    let api = MockApi::new();
    let applier = Applier::new(api.client());
    let first = applier.apply(&owner(), &[config("v")], live(&api)).await;
    assert_eq!(first.changes[0].action, Action::Created);
    let writes = api.writes().len();
    for _ in 0..10 {
        assert_eq!(applier.apply(&owner(), &[config("v")], live(&api)).await, Applied::default());
    }
    // A field of someone else is no drift.
    api.change("configmaps", "ns", "c", |object| object["metadata"]["labels"] = json!({"foreign": "label"}));
    assert_eq!(applier.apply(&owner(), &[config("v")], live(&api)).await, Applied::default());
    assert_eq!(api.writes().len(), writes);
}

#[tokio::test]
async fn an_edit_is_an_update_and_a_foreign_hand_is_repaired_and_told() {
    let api = MockApi::new();
    let applier = Applier::new(api.client());
    applier.apply(&owner(), &[config("v")], live(&api)).await;
    let edited = applier.apply(&owner(), &[config("w")], live(&api)).await;
    assert_eq!(edited.changes[0].action, Action::Updated);
    api.change("configmaps", "ns", "c", |object| object["data"]["k"] = json!("x"));
    let repaired = applier.apply(&owner(), &[config("w")], live(&api)).await;
    assert_eq!(
        repaired.changes[0],
        Change { action: Action::Repaired, object: "ConfigMap c".to_owned(), field: Some("data.k".to_owned()) }
    );
    assert_eq!(api.get("configmaps", "ns", "c").unwrap()["data"]["k"], "w");
}

#[tokio::test]
async fn an_object_of_someone_else_is_never_touched() {
    let api = MockApi::new();
    let foreign =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "ns"}, "data": {"k": "theirs"}});
    api.put("configmaps", foreign);
    let applied = Applier::new(api.client()).apply(&owner(), &[config("v")], |_| None).await;
    assert_eq!(applied.faults[0].reason, ConditionReason::NameTaken);
    assert_eq!(api.get("configmaps", "ns", "c").unwrap()["data"]["k"], "theirs");
}

#[tokio::test]
async fn a_field_that_the_server_keeps_otherwise_is_no_loop() {
    let api = MockApi::new();
    let applier = Applier::new(api.client());
    applier.apply(&owner(), &[config("v")], live(&api)).await;
    // As if admission rewrote the value at every write.
    let mangled = |desired: &Desired| {
        let mut object = (*live(&api)(desired)?).clone();
        object.data["data"]["k"] = json!("rewritten");
        Some(Arc::new(object))
    };
    let stubborn = Applier::new(api.client());
    let mut after = (*mangled(&config("v")).unwrap()).clone();
    stubborn.remember(&config("v"), &after);
    assert!(stubborn.is_stubborn(&config("v"), Some(&after)));
    assert_eq!(stubborn.apply(&owner(), &[config("v")], mangled).await, Applied::default());
    after.metadata.resource_version = Some("999".to_owned());
    assert!(!stubborn.is_stubborn(&config("v"), Some(&after)), "a newer version is looked at again");
}

#[tokio::test]
async fn what_nobody_wants_goes_and_what_is_kept_once_stays_as_made() {
    let api = MockApi::new();
    let applier = Applier::new(api.client());
    let secret = |value: &str| {
        let body = json!({"metadata": {"name": "s", "namespace": "ns", "ownerReferences": [{"apiVersion": "v1", "kind": "X",
            "name": "pool", "uid": "pool-uid"}]}, "data": {"k": value}});
        Desired::from_value(ApiResource::erase::<Secret>(&()), body).unwrap().kept()
    };
    applier.apply(&owner(), &[config("v"), secret("YQ==")], live(&api)).await;
    assert_eq!(applier.apply(&owner(), &[secret("Yg==")], live(&api)).await, Applied::default());
    let everything = || {
        ["configmaps", "secrets"].into_iter().flat_map(|plural| api.all(plural)).map(|object| {
            let object: DynamicObject = serde_json::from_value(object).unwrap();
            let resource = match object.types.as_ref().unwrap().kind.as_str() {
                "Secret" => ApiResource::erase::<Secret>(&()),
                _ => ApiResource::erase::<ConfigMap>(&()),
            };
            (resource, Arc::new(object))
        })
    };
    let pruned = applier.prune(&owner(), &[secret("Yg==")], everything()).await;
    assert_eq!(pruned.changes, [Change { action: Action::Pruned, object: "ConfigMap c".to_owned(), field: None }]);
    assert!(api.get("secrets", "ns", "s").is_some() && api.get("configmaps", "ns", "c").is_none());
    // Another pool's objects are not ours to prune.
    let other = OwnerReference { uid: "other".to_owned(), ..owner() };
    assert_eq!(applier.prune(&other, &[], everything()).await, Applied::default());
}

#[test]
fn faults_have_the_documented_words() {
    let fault = |code: u16, message: &str| {
        let status = kube::core::Status { code, message: message.to_owned(), ..kube::core::Status::default() };
        RequestError::from(kube::Error::Api(Box::new(status))).fault("apply", "Pod p").reason
    };
    assert_eq!(fault(403, "User \"x\" cannot create resource \"pods\""), ConditionReason::Forbidden);
    assert_eq!(fault(403, "exceeded quota: q"), ConditionReason::Refused);
    assert_eq!(fault(422, "Invalid value"), ConditionReason::Refused);
    assert_eq!(fault(500, "etcd"), ConditionReason::ApiUnavailable);
    assert_eq!(RequestError::TimedOut.fault("apply", "x").reason, ConditionReason::ApiUnavailable);
}
