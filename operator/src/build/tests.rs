//! What pools turn into: golden manifests, and what must hold of every one.

use super::*;
use crate::api::tests::{accepted_pools, case_pool};
use crate::api::{ConditionReason, PullPolicy};
use crate::design::Template;
use crate::validate::tests::settings;
use k8s_openapi::ByteString;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const KEY: &str = "sk-tenant-key-0123456789";

fn builder() -> Builder {
    Builder::new(settings(), Seed::known())
}

fn object(value: Value) -> ServingPool {
    serde_json::from_value(value).unwrap()
}

fn pool(patch: &Value) -> ServingPool {
    object(case_pool("pool", patch))
}

fn secret(name: &str, key: &str, value: &str) -> (String, Arc<Secret>) {
    let data = [(key.to_owned(), ByteString(value.as_bytes().to_vec()))];
    (name.to_owned(), Arc::new(Secret { data: Some(data.into()), ..Secret::default() }))
}

/// Everything that a pool names exists; every tenant has a key of its own.
fn found(pool: &ServingPool) -> Found {
    let tenants = pool.spec.tenants.iter().map(|tenant| {
        let reference = &tenant.key_secret_ref;
        secret(&reference.name, &reference.key, &format!("{KEY}-{}", tenant.name))
    });
    let prefixes = pool.spec.prefix_cache.shared_prefixes.iter().map(|prefix| {
        let data = [(prefix.config_map_ref.key.clone(), "text".to_owned())];
        (prefix.config_map_ref.name.clone(), Arc::new(ConfigMap { data: Some(data.into()), ..ConfigMap::default() }))
    });
    Found { secrets: tenants.collect(), config_maps: prefixes.collect() }
}

fn design(pool: &ServingPool) -> Design {
    builder().design(pool, &found(pool)).unwrap_or_else(|faults| panic!("{faults:?}"))
}

fn named<'a>(design: &'a Design, kind: &str, name: &str) -> &'a Value {
    let found = design.objects.iter().find(|it| it.resource.kind == kind && it.name == name);
    &found.unwrap_or_else(|| panic!("no {kind} {name}")).body
}

/// Objects and pods of a design as one list, with what was derived from the seed blotted out.
fn manifests(design: &Design) -> Value {
    let mut all: Vec<Value> = design.objects.iter().map(|it| it.body.clone()).collect();
    all.push(design.workers.pod(0));
    all.extend(design.without_draft.as_ref().map(|template| template.pod(0)));
    all.extend(design.drafts.as_ref().map(|(template, _)| template.pod(0)));
    for manifest in &mut all {
        // What follows from the rest of the object.
        let annotations = manifest["metadata"]["annotations"].as_object_mut().unwrap();
        annotations
            .retain(|name, _| ![crate::apply::CONTENT_HASH, crate::design::TEMPLATE, crate::design::SHAPE].contains(&&**name));
        if manifest["kind"] == "Secret" {
            for value in manifest["data"].as_object_mut().unwrap().values_mut() {
                *value = json!("(bytes)");
            }
        }
    }
    let notes: Vec<String> = design.notes.iter().map(|note| format!("{}: {}", note.reason, note.message)).collect();
    sorted(json!({ "manifests": all, "notes": notes, "selector": design.selector, "survives": design.survives }))
}

fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let members: BTreeMap<String, Value> = map.into_iter().map(|(name, value)| (name, sorted(value))).collect();
            Value::Object(members.into_iter().collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(sorted).collect()),
        other => other,
    }
}

fn example(file: &str) -> ServingPool {
    let path = Path::new("../deploy/examples").join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let mut pool = documents.into_iter().find(|it| it["kind"] == "ServingPool").unwrap();
    pool["metadata"]["namespace"] = json!("team-a");
    pool["metadata"]["uid"] = json!("0c3a7c0e-0000-4000-8000-000000000001");
    object(pool)
}

const FILE_DRAFT: &str = "/models/draft.gguf";

fn draft(placement: &str, more: &Value) -> Value {
    let mut draft = json!({ "placement": placement, "model": { "source": { "file": { "path": FILE_DRAFT } } } });
    draft.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({ "mode": "Auto", "drafter": "Model", "draft": draft })
}

fn linked_pair() -> Value {
    json!({
        "accelerator": { "count": 1, "deviceClassName": "gpu.nvidia.com" },
        "speculation": draft("OtherDevice", &json!({ "interconnect": { "matchAttribute": "gpu.nvidia.com/nvlinkDomain" } })),
    })
}

#[test]
fn the_first_example() {
    insta::assert_json_snapshot!(manifests(&design(&example("first.yaml"))));
}

#[test]
fn the_example_with_a_shared_prompt() {
    insta::assert_json_snapshot!(manifests(&design(&example("a-shared-prompt.yaml"))));
}

#[test]
fn the_example_with_long_answers() {
    insta::assert_json_snapshot!(manifests(&design(&example("b-long-answers.yaml"))));
}

#[test]
fn the_example_with_saturation() {
    insta::assert_json_snapshot!(manifests(&design(&example("c-saturation.yaml"))));
}

#[test]
fn devices_by_extended_resource() {
    let spec = json!({ "accelerator": { "count": 2, "resourceName": "nvidia.com/gpu" }, "parallelism": { "tensor": 2 } });
    insta::assert_json_snapshot!(manifests(&design(&pool(&spec))));
}

#[test]
fn a_linked_pair_of_devices_by_claim() {
    insta::assert_json_snapshot!(manifests(&design(&pool(&linked_pair()))));
}

#[test]
fn a_draft_in_pods_of_its_own() {
    let spec =
        json!({ "speculation": draft("SeparatePod", &json!({ "replicas": 2, "resources": { "cpu": "2", "memory": "1Gi" } })) });
    insta::assert_json_snapshot!(manifests(&design(&pool(&spec))));
}

#[test]
fn a_pool_with_a_long_name_and_a_patch() {
    let spec = json!({ "podTemplatePatch": {
        "metadata": { "labels": { "team": "a" } },
        "spec": { "nodeSelector": { "zone": "b" }, "volumes": [{ "name": "models", "persistentVolumeClaim": { "claimName": "m" } }],
            "readinessGates": [{ "conditionType": "example.org/warm" }],
            "containers": [{ "name": "worker", "volumeMounts": [{ "name": "models", "mountPath": "/models" }] },
                { "name": "side", "image": "i", "securityContext": {
                    "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } } }] } } });
    let pool = object(case_pool(&format!("{}-long", "name-".repeat(40)), &spec));
    insta::assert_json_snapshot!(manifests(&design(&pool)));
}

#[test]
fn the_same_pool_gives_the_same_objects_whoever_builds_them() {
    let pool = example("a-shared-prompt.yaml");
    assert_eq!(manifests(&design(&pool)), manifests(&design(&pool)));
    let other = Builder::new(settings(), Seed::random().unwrap());
    // Once the Secrets exist, another process with another seed changes nothing.
    let first = design(&pool);
    let mut found = found(&pool);
    for made in first.objects.iter().filter(|it| it.resource.kind == "Secret") {
        found.secrets.insert(made.name.clone(), Arc::new(serde_json::from_value(made.body.clone()).unwrap()));
    }
    let second = other.design(&pool, &found).unwrap();
    assert!(first.bearer.is_none() && second.bearer.is_some());
    assert_eq!((first.objects, first.workers), (second.objects, second.workers));
}

#[test]
fn a_generated_secret_is_kept_and_differs_between_pools() {
    let (one, two) = (case_pool("one", &json!({})), case_pool("two", &json!({})));
    let mut two = two;
    two["metadata"]["uid"] = json!("another");
    let (one, two) = (design(&object(one)), design(&object(two)));
    for suffix in ["bearer", "pool-secret"] {
        let of = |design: &Design, name: &str| named(design, "Secret", name)["data"].clone();
        assert_ne!(of(&one, &format!("one-{suffix}")), of(&two, &format!("two-{suffix}")));
        let kept = one.objects.iter().find(|it| it.name == format!("one-{suffix}")).unwrap();
        assert!(kept.once);
    }
    let keys = one.objects.iter().find(|it| it.name == "one-keys").unwrap();
    assert!(!keys.once, "tenants change");
}

#[test]
fn a_change_reaches_pods_and_an_image_alone_can_change_in_place() {
    let base = design(&pool(&json!({}))).workers.revision();
    let image = design(&pool(&json!({ "images": { "worker": "other:2" } }))).workers.revision();
    assert_eq!((&base.shape, image.image.as_str()), (&image.shape, "other:2"));
    for change in [
        json!({ "engine": { "blockSize": 32 } }),
        json!({ "model": { "revision": "2" } }),
        json!({ "prefixCache": { "mode": "Off" } }),
        json!({ "observability": { "log": "debug" } }),
    ] {
        assert_ne!(design(&pool(&change)).workers.revision().shape, base.shape, "{change}");
    }
    for same in [
        json!({ "replicas": 7 }),
        json!({ "router": { "replicas": 3 } }),
        json!({ "rollout": { "maxSurge": 2 } }),
        json!({ "paused": true }),
    ] {
        assert_eq!(design(&pool(&same)).workers.revision(), base, "{same}");
    }
}

#[test]
fn routers_roll_when_their_flags_change() {
    let digest = |spec: Value| {
        let design = design(&pool(&spec));
        named(&design, "Deployment", "pool-router")["spec"]["template"]["metadata"]["annotations"]["kvasir.dev/flags-digest"]
            .clone()
    };
    assert_ne!(digest(json!({})), digest(json!({ "router": { "maxRunning": 5 } })));
    assert_eq!(digest(json!({})), digest(json!({ "engine": { "blockSize": 32 } })));
}

#[test]
fn a_tenant_whose_secret_is_gone_is_locked_out_and_said() {
    let pool = pool(&json!({ "tenants": [
        { "name": "a", "keySecretRef": { "name": "key-a" }, "weight": 3 }, { "name": "b", "keySecretRef": { "name": "key-b" } }] }));
    let mut found = found(&pool);
    let tenants = |found: &Found| {
        let design = builder().design(&pool, found).unwrap();
        let secret: Secret = serde_json::from_value(named(&design, "Secret", "pool-keys").clone()).unwrap();
        (String::from_utf8(secret.data.unwrap()["tenants.toml"].0.clone()).unwrap(), design.notes)
    };
    let (file, notes) = tenants(&found);
    assert!(
        file.contains("name = \"a\"") && file.contains("name = \"b\"") && file.contains("weight = 3") && notes.is_empty(),
        "{file}"
    );
    found.secrets.remove("key-b");
    let (file, notes) = tenants(&found);
    assert!(file.contains("name = \"a\"") && !file.contains("name = \"b\""), "{file}");
    assert!(notes[0].reason == ConditionReason::MissingObject && notes[0].message.contains("key-b"), "{notes:?}");
    found.secrets.clear();
    assert_eq!(tenants(&found).0, "tenant = []\n", "nobody, and not everybody");
}

#[test]
fn two_tenants_with_one_key_are_refused_without_saying_it() {
    let pool = pool(&json!({ "tenants": [
        { "name": "a", "keySecretRef": { "name": "k" } }, { "name": "b", "keySecretRef": { "name": "k", "key": "other" } }] }));
    let mut found = Found::default();
    let data = [("value", format!("x\n{KEY}\n")), ("other", KEY.to_owned())]
        .map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes())));
    found.secrets.insert("k".to_owned(), Arc::new(Secret { data: Some(data.into()), ..Secret::default() }));
    let faults = builder().design(&pool, &found).unwrap_err();
    assert!(faults[0].message.contains("a and b") && !faults[0].message.contains(KEY), "{faults:?}");
}

#[test]
fn a_named_pool_secret_is_used_and_kept_when_it_vanishes() {
    let pool = pool(&json!({ "poolSecretRef": { "name": "mine" } }));
    let missing = builder().design(&pool, &Found::default()).unwrap_err();
    assert!(missing[0].reason == ConditionReason::MissingObject && missing[0].message.contains("mine"), "{missing:?}");
    let mut found = Found { secrets: [secret("mine", "value", "short")].into(), ..Found::default() };
    assert!(builder().design(&pool, &found).unwrap_err()[0].message.contains("openssl"));
    found.secrets.extend([secret("mine", "value", "a-pool-secret-of-some-length\n")]);
    let design = builder().design(&pool, &found).unwrap();
    let keys: Secret = serde_json::from_value(named(&design, "Secret", "pool-keys").clone()).unwrap();
    assert_eq!(keys.data.as_ref().unwrap()["pool-secret"].0, b"a-pool-secret-of-some-length");
    assert!(design.objects.iter().all(|it| it.name != "pool-pool-secret"));
    found.secrets = [("pool-keys".to_owned(), Arc::new(keys.clone()))].into();
    let kept = builder().design(&pool, &found).unwrap();
    assert_eq!(named(&kept, "Secret", "pool-keys"), named(&design, "Secret", "pool-keys"));
    assert!(kept.notes[0].message.contains("stays in force"), "{:?}", kept.notes);
}

#[test]
fn what_a_user_writes_is_no_variable_of_the_kubelet() {
    let design = design(&pool(&json!({ "model": { "source": { "file": { "path": "/m/$(KVASIR_UID).gguf" } } } })));
    let args = &design.workers.body["spec"]["containers"][0]["args"];
    assert!(args.as_array().unwrap().contains(&json!("--model=/m/$$(KVASIR_UID).gguf")), "{args}");
}

#[test]
fn a_pair_is_given_up_only_where_the_pool_says_so() {
    let optional = design(&pool(&linked_pair()));
    let claims = |template: &Template| template.body["spec"]["resourceClaims"][0]["resourceClaimTemplateName"].clone();
    let fallback = optional.without_draft.as_ref().unwrap();
    assert_ne!(claims(&optional.workers), claims(fallback));
    let templates = optional.objects.iter().filter(|it| it.resource.kind == "ResourceClaimTemplate");
    let names: Vec<&str> = templates.map(|it| &*it.name).collect();
    for template in [&optional.workers, fallback] {
        assert!(names.iter().any(|name| claims(template) == **name), "{names:?}");
    }
    let mut firm = linked_pair();
    firm["speculation"]["draft"]["onFailure"] = json!("Fail");
    assert!(design(&pool(&firm)).without_draft.is_none());
}

#[test]
fn images_volumes_and_tokens_are_mounted_where_the_worker_looks() {
    let image = format!("registry.example/m@sha256:{}", "a".repeat(64));
    let oci = design(&pool(&json!({ "model": { "source": { "file": null, "oci": { "image": image, "path": "m.gguf" } } } })));
    let spec = &oci.workers.body["spec"];
    assert!(spec["volumes"].as_array().unwrap().iter().any(|it| it["image"]["reference"] == json!(image)), "{spec}");
    assert!(spec["containers"][0]["args"].as_array().unwrap().contains(&json!("--model=/kvasir/model/m.gguf")), "{spec}");
    let hub = json!({ "model": { "revision": "a".repeat(40), "source": { "file": null, "huggingFace": {
        "repo": "o/m", "file": "m.gguf", "tokenSecretRef": { "name": "hub" } } } } });
    let hub = design(&pool(&hub));
    let spec = &hub.workers.body["spec"]["containers"][0];
    let args = spec["args"].as_array().unwrap();
    assert!(args.contains(&json!(format!("--model=hf://o/m@{}/m.gguf", "a".repeat(40)))), "{spec}");
    assert!(args.contains(&json!("--model-token-file=/kvasir/token/value")), "{spec}");
    assert!(hub.notes[0].message.contains("Secret hub does not exist"), "{:?}", hub.notes);
}

/// Pools of many shapes.
fn pools() -> Vec<ServingPool> {
    let mut pools: Vec<ServingPool> = accepted_pools().into_iter().map(|(_, pool)| object(pool)).collect();
    pools.extend(["first.yaml", "a-shared-prompt.yaml", "b-long-answers.yaml", "c-saturation.yaml"].map(example));
    pools.extend([linked_pair(), json!({ "speculation": draft("SeparatePod", &json!({})) })].map(|spec| pool(&spec)));
    pools.push(object(case_pool(&"n".repeat(253), &json!({ "poolSecretRef": null }))));
    pools
}

#[test]
fn every_object_has_a_known_kind_an_owner_and_is_what_its_type_can_hold() {
    let kinds = kinds(true);
    for pool in pools() {
        let design = design(&pool);
        for made in &design.objects {
            assert!(kinds.contains(&made.resource), "{}", made.resource.kind);
            let owner = &made.body["metadata"]["ownerReferences"][0];
            assert_eq!((&owner["uid"], &owner["kind"]), (&json!(pool.metadata.uid), &json!("ServingPool")));
            assert_eq!(made.body["metadata"]["labels"][crate::names::MANAGED_BY], crate::names::MANAGER);
            assert!(made.name.len() <= 63, "{}", made.name);
        }
        let mut names: Vec<(&str, &str)> = design.objects.iter().map(|it| (&*it.resource.kind, &*it.name)).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all, "{names:?}");
    }
}

#[test]
fn every_pod_may_run_where_the_restricted_standard_is_enforced() {
    for pool in pools() {
        let design = design(&pool);
        let mut specs = vec![design.workers.body["spec"].clone()];
        specs.extend(design.drafts.iter().map(|(template, _)| template.body["spec"].clone()));
        specs.extend(
            design
                .objects
                .iter()
                .filter(|it| it.resource.kind == "Deployment")
                .map(|it| it.body["spec"]["template"]["spec"].clone()),
        );
        for spec in specs {
            assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
            assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
            assert!(spec["volumes"].as_array().unwrap().iter().all(|volume| volume.get("hostPath").is_none()));
            let container = &spec["containers"][0];
            assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
            assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
            assert_eq!(container["securityContext"]["capabilities"]["drop"], json!(["ALL"]));
            assert_eq!(container["resources"]["limits"]["memory"], container["resources"]["requests"]["memory"]);
            let grace = spec["terminationGracePeriodSeconds"].as_u64().unwrap();
            assert!(grace >= pool.spec.max_stream_duration.parse().unwrap().as_secs() + 30, "{grace}");
        }
    }
}

#[test]
fn no_secret_stands_where_it_can_be_read_by_the_way() {
    for pool in pools() {
        let design = design(&pool);
        let mut secrets = vec![KEY.to_owned()];
        for made in design.objects.iter().filter(|it| it.resource.kind == "Secret") {
            let secret: Secret = serde_json::from_value(made.body.clone()).unwrap();
            for (key, value) in secret.data.unwrap() {
                if key != "tenants.toml" {
                    secrets.push(String::from_utf8(value.0.clone()).unwrap());
                    secrets.push(made.body["data"][&key].as_str().unwrap().to_owned());
                }
            }
        }
        assert!(secrets.len() >= 5, "both secrets, plain and as Kubernetes writes them");
        let elsewhere = format!("{} {:?} {:?}", manifests(&design), design.notes, design.routers);
        for secret in secrets {
            assert!(!elsewhere.contains(&secret), "a secret of {:?}", pool.metadata.name);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_validates_is_built_with_labels_and_names_that_fit(
        name in "[a-z]([-a-z0-9]{0,251}[a-z0-9])?",
        replicas in 0..10_000_i32,
        block in prop::sample::select(vec![16, 32, 64, 128, 256]),
        kv in "[1-9][0-9]{0,5}(Mi|Gi|M|G)",
        stream in "[1-9][0-9]{0,3}(s|m)",
        served in proptest::option::of("[A-Za-z0-9][A-Za-z0-9._:/-]{0,100}"),
        surge in 0..100_u32,
        policy in prop::bool::ANY,
    ) {
        let spec = json!({
            "model": { "name": served }, "engine": { "blockSize": block, "kvMemory": kv }, "replicas": replicas,
            "maxStreamDuration": stream, "rollout": { "maxSurge": format!("{surge}%") },
            "networkPolicy": if policy { "Managed" } else { "Off" },
            "images": { "pullPolicy": if policy { "Never" } else { "Always" } },
        });
        let pool = object(case_pool(&name, &spec));
        let design = match builder().design(&pool, &Found::default()) {
            Ok(design) => design,
            Err(faults) => {
                prop_assert!(faults.iter().all(|it| it.message.contains("spec.maxStreamDuration")), "{faults:?}");
                return Ok(());
            }
        };
        let mut bodies: Vec<Value> = design.objects.iter().map(|it| it.body.clone()).collect();
        bodies.push(design.workers.pod(19_999));
        for body in bodies {
            prop_assert!(body["metadata"]["name"].as_str().unwrap().len() <= 63, "{body}");
            for (label, value) in body["metadata"]["labels"].as_object().unwrap() {
                prop_assert!(value.as_str().unwrap().len() <= 63, "{label}");
            }
        }
        let policies = design.objects.iter().filter(|it| it.resource.kind == "NetworkPolicy").count();
        prop_assert_eq!(policies, if policy { 2 } else { 0 });
    }
}

#[test]
fn settings_of_the_operator_reach_pods_unless_the_pool_says_otherwise() {
    let settings = Settings {
        pull_policy: PullPolicy::Never,
        pull_secrets: vec!["regcred".to_owned()],
        service_monitors: false,
        ..settings()
    };
    let builder = Builder::new(settings, Seed::known());
    let design = builder.design(&pool(&json!({})), &Found::default()).unwrap();
    let spec = &design.workers.body["spec"];
    assert_eq!(
        (&spec["containers"][0]["imagePullPolicy"], &spec["imagePullSecrets"]),
        (&json!("Never"), &json!([{ "name": "regcred" }]))
    );
    assert!(design.objects.iter().all(|it| it.resource.kind != "ServiceMonitor" && !it.name.ends_with("router-metrics")));
    let own = json!({ "images": { "pullPolicy": "Always", "pullSecrets": [{ "name": "mine" }], "router": "r:2" } });
    let design = builder.design(&pool(&own), &Found::default()).unwrap();
    let spec = &named(&design, "Deployment", "pool-router")["spec"]["template"]["spec"];
    assert_eq!((&spec["containers"][0]["image"], &spec["containers"][0]["imagePullPolicy"]), (&json!("r:2"), &json!("Always")));
    assert_eq!(spec["imagePullSecrets"], json!([{ "name": "mine" }]));
}
