//! Specs that are read, and specs that are refused by field, value and what to do.

use super::*;
use crate::api::tests::{accepted_pools, case_pool, refused_pools};
use serde_json::{Value, json};

pub(crate) fn settings() -> Settings {
    Settings {
        worker_image: "registry.example/kvasir-worker:1".to_owned(),
        router_image: "registry.example/kvasir-router:1".to_owned(),
        pull_policy: crate::api::PullPolicy::IfNotPresent,
        pull_secrets: Vec::new(),
        operator_namespace: "kvasir-system".to_owned(),
        operator_labels: [("app.kubernetes.io/component".to_owned(), "operator".to_owned())].into(),
        service_monitors: true,
        image_volumes: true,
    }
}

fn pool(patch: &Value) -> Result<Pool, Vec<String>> {
    let object: ServingPool = serde_json::from_value(case_pool("pool", patch)).unwrap();
    read(&object, &settings()).map_err(|faults| faults.into_iter().map(|fault| fault.message).collect())
}

/// The only fault of a spec.
fn fault(patch: &Value) -> String {
    let mut faults = pool(patch).unwrap_err();
    assert_eq!(faults.len(), 1, "{faults:?}");
    faults.remove(0)
}

#[test]
fn what_the_schema_lets_pass_is_read() {
    for (rule, object) in accepted_pools() {
        let object: ServingPool = serde_json::from_value(object).unwrap();
        read(&object, &settings()).unwrap_or_else(|faults| panic!("{rule}: {faults:?}"));
    }
}

#[test]
fn what_the_schema_refuses_is_refused_here_too() {
    for (rule, object) in refused_pools() {
        let object: ServingPool = serde_json::from_value(object).unwrap();
        let faults = read(&object, &settings()).expect_err(&rule);
        assert!(faults.iter().all(|fault| fault.reason == ConditionReason::InvalidSpec && fault.lasting()), "{rule}: {faults:?}");
    }
}

#[test]
fn all_faults_are_found_at_once_and_name_field_value_and_what_to_do() {
    let faults =
        pool(&json!({ "engine": { "blockSize": 48, "kvMemory": "much" }, "maxStreamDuration": "10 minutes" })).unwrap_err();
    assert_eq!(faults.len(), 3, "{faults:?}");
    for (field, value, fix) in [
        ("spec.engine.blockSize", "48", "64"),
        ("spec.engine.kvMemory", "much", "`512Mi`"),
        ("maxStreamDuration", "10 minutes", "`10m`"),
    ] {
        assert!(faults.iter().any(|it| it.contains(field) && it.contains(value) && it.contains(fix)), "{field}: {faults:?}");
    }
}

#[test]
fn memory_is_the_sum_of_all_that_lives_in_it() {
    let read = pool(&json!({
        "engine": { "kvMemory": "4Gi", "resources": { "cpu": "2500m", "memory": "1Gi" } },
        "prefixCache": { "hostTier": { "size": "8Gi" } },
        "speculation": { "mode": "Auto", "drafter": "Model", "draft": {
            "model": { "source": { "file": { "path": "/d" } } }, "resources": { "cpu": "1", "memory": "3Gi" } } },
    }))
    .unwrap();
    assert_eq!(read.engine.pod, Size { millicores: 3_500, memory: 16 << 30 });
    assert_eq!((read.engine.threads, read.engine.model_bytes_max), (2, 1 << 30));
    let huge = json!({ "engine": { "kvMemory": "999999Ti" }, "prefixCache": { "hostTier": { "size": "9000000T" } } });
    assert!(pool(&huge).is_err());
    let sum = json!({ "engine": { "kvMemory": "900000T" }, "prefixCache": { "hostTier": { "size": "999999Ti" } } });
    assert!(pool(&sum).is_ok(), "two exabytes can be written down, though nobody has them");
}

#[test]
fn what_cannot_be_done_yet_is_noted_by_field_and_served_without() {
    let read = pool(&json!({
        "accelerator": { "count": 1, "resourceName": "nvidia.com/gpu" },
        "engine": { "numerics": "Fast", "kvDtype": "Int8" },
        "prefixCache": { "hostTier": { "size": "1Gi" }, "diskTier": { "size": "1Gi" }, "deviceShare": "50%" },
        "speculation": { "mode": "Auto" },
        "tenants": [{ "name": "a", "keySecretRef": { "name": "a" }, "cacheFloor": "5%", "quota": { "maxRunning": 1 } }],
        "slo": { "ttft": "1s", "tpot": "50ms" },
    }))
    .unwrap();
    let [note] = &*read.notes else { panic!("{:?}", read.notes) };
    assert_eq!(note.reason, ConditionReason::NotYetSupported);
    for field in [
        "accelerator",
        "engine.numerics",
        "engine.kvDtype",
        "hostTier",
        "diskTier",
        "deviceShare",
        "speculation.mode",
        "cacheFloor",
        "quota",
    ] {
        assert!(note.message.contains(field), "{field}: {}", note.message);
    }
    assert!(pool(&json!({})).unwrap().notes.is_empty());
}

#[test]
fn what_would_be_unsafe_without_is_refused() {
    let tls = fault(&json!({ "router": { "tls": { "secretRef": { "name": "cert" } } } }));
    assert!(tls.contains("spec.router.tls is cert") && tls.contains("in front of the Service"), "{tls}");
}

#[test]
fn image_volumes_are_used_only_where_the_cluster_has_them() {
    let image = format!("registry.example/m@sha256:{}", "a".repeat(64));
    let oci = case_pool("pool", &json!({ "model": { "source": { "file": null, "oci": { "image": image, "path": "m.gguf" } } } }));
    let object: ServingPool = serde_json::from_value(oci).unwrap();
    assert!(read(&object, &settings()).is_ok());
    let faults = read(&object, &Settings { image_volumes: false, ..settings() }).unwrap_err();
    assert!(faults[0].message.contains("--image-volumes"), "{faults:?}");
}

#[test]
fn budgets_are_counted_against_the_wished_workers() {
    let rollout = |rollout: Value| pool(&json!({ "replicas": 10, "rollout": rollout })).unwrap().rollout;
    let of = |value: Value| {
        let rollout = rollout(value);
        (rollout.max_unavailable, rollout.max_surge)
    };
    assert_eq!(of(json!({ "maxUnavailable": "25%", "maxSurge": "25%" })), (2, 3));
    assert_eq!(of(json!({ "maxUnavailable": "1%" })), (1, 1), "a percentage that rounds to nothing still lets one go");
    assert_eq!(of(json!({ "maxUnavailable": 0 })), (0, 1));
}

#[test]
fn a_patch_that_breaks_what_the_operator_relies_on_is_refused_by_name() {
    let worker = |member: &str, value: Value| json!({ "spec": { "containers": [{ "name": "worker", member: value }] } });
    for (patch, wanted) in [
        (worker("image", json!("other")), "containers[worker].image"),
        (worker("args", json!(["--x"])), "containers[worker].args"),
        (worker("command", json!(["sh"])), "containers[worker].command"),
        (worker("readinessProbe", json!({ "httpGet": { "path": "/", "port": 1 } })), "containers[worker].readinessProbe"),
        (worker("env", json!([{ "name": "KVASIR_LISTEN", "value": "x" }])), "KVASIR_LISTEN"),
        (worker("volumeMounts", json!([{ "name": "v", "mountPath": "/kvasir/model" }])), "/kvasir/model"),
        (worker("resources", json!({ "limits": { "memory": "1Gi" } })), "engine.resources"),
        (json!({ "metadata": { "name": "x" } }), "podTemplatePatch.metadata"),
        (json!({ "metadata": { "labels": { "kvasir.dev/pool": "x" } } }), "kvasir.dev/pool"),
        (json!({ "metadata": { "labels": { "a": "x".repeat(64) } } }), "at most 63"),
        (json!({ "metadata": { "annotations": { "a/b/c": "x" } } }), "a/b/c"),
        (json!({ "spec": { "nodeName": "n" } }), "spec.nodeName"),
        (json!({ "spec": { "hostNetwork": true } }), "spec.hostNetwork"),
        (json!({ "spec": { "restartPolicy": "Never" } }), "spec.restartPolicy"),
        (json!({ "spec": { "serviceAccountName": "admin" } }), "spec.serviceAccountName"),
        (json!({ "spec": { "terminationGracePeriodSeconds": 30 } }), "630 s are needed"),
        (json!({ "spec": { "volumes": [{ "name": "kvasir-cache", "emptyDir": {} }] } }), "`kvasir-cache`"),
        (json!({ "spec": { "nodeSelektor": { "a": "b" } } }), "spec.nodeSelektor"),
        (json!({ "spec": { "containers": [{ "name": "side" }] } }), "`side`"),
        (json!({ "spec": "x" }), "PodTemplateSpec"),
        (json!({ "metadata": { "annotations": { "a": "x".repeat(70_000) } } }), "65536 bytes are allowed"),
    ] {
        let message = fault(&json!({ "podTemplatePatch": patch }));
        assert!(message.contains(wanted), "{patch}: {message}");
    }
}

#[test]
fn a_patch_that_adds_is_read() {
    let patch = json!({
        "metadata": { "labels": { "team": "a" }, "annotations": { "example.org/x": "y" } },
        "spec": {
            "nodeSelector": { "gpu": "h200" },
            "tolerations": [{ "key": "gpu", "operator": "Exists" }],
            "priorityClassName": "serving",
            "terminationGracePeriodSeconds": 4000,
            "volumes": [{ "name": "models", "persistentVolumeClaim": { "claimName": "m" } }],
            "containers": [
                { "name": "worker", "env": [{ "name": "SSL_CERT_FILE", "value": "/ca/ca.crt" }, { "name": "KVASIR_HUB", "value": "https://mirror" }],
                  "volumeMounts": [{ "name": "models", "mountPath": "/models" }], "resources": { "limits": { "hugepages-2Mi": "1Gi" } } },
                { "name": "side", "image": "i" },
            ],
        },
    });
    assert!(pool(&json!({ "podTemplatePatch": patch })).unwrap().patch.is_some());
}
