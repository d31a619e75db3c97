//! Rights and secrets, told by the API server: what operator and routers ask is what they are granted, nothing is refused, nobody reads another's
//! key, and no secret leaves the Secrets.
//!
//! The operator runs as a process with the account and the rights of the chart; routers as processes with the account that it made for them. No
//! node is needed: pods that nobody runs are made, changed and deleted all the same.

use super::api_server::pool;
use super::operator::Operator;
use super::support::{apply, built, eventually, get, kubectl, on_cluster, step, try_kubectl};
use crate::chart::rights::rights;
use crate::e2e::support::{Process, free_port};
use crate::root;
use kvasir_cli::client::Client;
use kvasir_cluster::{AuditEvent, Cluster, Layers, until};
use kvasir_operator::design::ROUTABLE;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SYSTEM: &str = "kvasir-system";
/// From a change of a tenant's Secret until no router takes the old key.
const REVOKED_MAX: Duration = Duration::from_secs(5);
const KEY: &str = "sk-of-the-harbour-0f1e2d3c4b5a6978";
const NEXT_KEY: &str = "sk-of-the-harbour-8796a5b4c3d2e1f0";
const OTHER_KEY: &str = "sk-of-the-quay-13579bdf02468ace";

/// Granted and never seen in the log, with the reason.
const UNSEEN: [(&str, &str, &str); 3] = [
    // Asked for by an admission plugin of some clusters, not by a request.
    ("kvasir.dev", "servingpools/finalizers", "update"),
    // Held in order to be handed on to routers.
    ("discovery.k8s.io", "endpointslices", "list"),
    ("discovery.k8s.io", "endpointslices", "watch"),
];

type Right = [String; 3];

fn right(group: &str, resource: &str, verb: &str) -> Right {
    [group, resource, verb].map(str::to_owned)
}

/// Group, resource and verb of every request; an apply that made an object needs `create` too.
fn used(events: &[AuditEvent], user: &str) -> BTreeSet<Right> {
    let mut used = BTreeSet::new();
    for event in events.iter().filter(|event| event.user == user && !event.resource.is_empty()) {
        let resource = if event.subresource.is_empty() {
            event.resource.clone()
        } else {
            format!("{}/{}", event.resource, event.subresource)
        };
        used.insert(right(&event.group, &resource, &event.verb));
        if event.verb == "patch" && event.code == 201 {
            used.insert(right(&event.group, &resource, "create"));
        }
    }
    used
}

fn granted<'a>(roles: impl IntoIterator<Item = &'a Value>) -> BTreeSet<Right> {
    roles.into_iter().flat_map(rights).map(|[group, resource, verb, _]| [group, resource, verb]).collect()
}

fn refused(events: &[AuditEvent], user: &str) -> Vec<String> {
    let own = events.iter().filter(|event| event.user == user && matches!(event.code, 401 | 403));
    own.map(|event| format!("{} {}", event.verb, event.uri)).collect()
}

/// CRDs, a kind of the Prometheus operator, the chart without a running operator.
fn install(cluster: &Cluster) {
    let monitor = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
        "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced",
            "names": {"kind": "ServiceMonitor", "plural": "servicemonitors"},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]}});
    apply(cluster, &monitor);
    let mut helm = cluster.helm().unwrap();
    helm.arg("install").arg("kvasir").arg(root().join("charts/kvasir")).args(["--set", "operator.replicas=0"]);
    Cluster::output(helm.args(["--namespace", SYSTEM, "--create-namespace"])).unwrap_or_else(|error| panic!("{error}"));
    for crd in ["servicemonitors.monitoring.coreos.com", "servingpools.kvasir.dev"] {
        kubectl(cluster, &["wait", "--for=condition=Established", "--timeout=30s", &format!("crd/{crd}")]);
    }
}

fn tenant_secret(namespace: &str, name: &str, key: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}, "stringData": {"value": key}})
}

/// What an older operator might have left: one object of each kind, owned by the pool and wanted by nobody.
fn leftovers(namespace: &str, pool: &Value) -> Vec<Value> {
    let metadata = json!({"name": "harbour-left", "namespace": namespace,
        "labels": {"app.kubernetes.io/managed-by": "kvasir-operator", "kvasir.dev/pool": "harbour"},
        "ownerReferences": [{"apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "name": "harbour",
            "uid": pool["metadata"]["uid"], "controller": true}]});
    let selector = json!({"matchLabels": {"app": "left"}});
    let deployment = json!({"replicas": 0, "selector": selector, "template": {"metadata": {"labels": {"app": "left"}},
        "spec": {"containers": [{"name": "main", "image": "kvasir.test/none:1"}]}}});
    let kinds = [
        ("v1", "Service", json!({"spec": {"ports": [{"port": 80}]}})),
        ("v1", "ServiceAccount", json!({})),
        ("v1", "Secret", json!({})),
        ("v1", "ConfigMap", json!({})),
        ("apps/v1", "Deployment", json!({"spec": deployment})),
        ("policy/v1", "PodDisruptionBudget", json!({"spec": {"selector": selector}})),
        ("networking.k8s.io/v1", "NetworkPolicy", json!({"spec": {"podSelector": selector}})),
        ("rbac.authorization.k8s.io/v1", "Role", json!({"rules": []})),
        (
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            json!({"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "harbour-left"}}),
        ),
        ("resource.k8s.io/v1", "ResourceClaimTemplate", json!({"spec": {"spec": {}}})),
        ("monitoring.coreos.com/v1", "ServiceMonitor", json!({"spec": {}})),
    ];
    let whole = |(api, kind, rest): (&str, &str, Value)| {
        let mut object = rest;
        object["apiVersion"] = json!(api);
        object["kind"] = json!(kind);
        object["metadata"] = metadata.clone();
        object
    };
    kinds.into_iter().map(whole).collect()
}

/// Pools that make the operator use what it has.
fn pools(namespace: &str) -> [Value; 2] {
    let mut harbour = pool(namespace, "harbour");
    harbour["spec"]["tenants"] = json!([
        {"name": "harbour", "keySecretRef": {"name": "harbour-key", "key": "value"}},
        {"name": "quay", "keySecretRef": {"name": "quay-key", "key": "value"}},
    ]);
    let mut fleet = pool(namespace, "fleet");
    fleet["spec"]["accelerator"] = json!({"count": 1, "deviceClassName": "gpu"});
    fleet["spec"]["rollout"] = json!({"mode": "Surge", "maxSurge": 1});
    fleet["spec"]["scaling"] = json!({"owner": "Operator", "min": 1, "max": 2, "targets": {"queue": 4}});
    [harbour, fleet]
}

fn merge(cluster: &Cluster, namespace: &str, what: &[&str], patch: &Value) {
    kubectl(cluster, &[&["-n", namespace, "patch", "--type=merge", "-p", &patch.to_string()], what].concat());
}

/// Waits until an account has used a right.
async fn uses(cluster: &Cluster, user: &str, wanted: &Right) {
    eventually(&format!("{user} uses {wanted:?}"), || {
        let used = used(&cluster.audit().all().unwrap(), user);
        if used.contains(wanted) { Ok(()) } else { Err("not yet".to_owned()) }
    })
    .await;
}

/// Everything that a pool's life brings about, until each right has been used; what the two operators said.
async fn a_whole_life(cluster: &Cluster, namespace: &str, user: &str) -> String {
    let access = cluster.service_account(SYSTEM, "kvasir-operator").await.unwrap();
    let args = ["--lease-namespace=kvasir-system", "--log=debug"];
    let operator = Operator::start(cluster, access.kubeconfig(), "1", &args);
    uses(cluster, user, &right("", "pods", "create")).await;
    uses(cluster, user, &right("autoscaling", "horizontalpodautoscalers", "list")).await;
    // A foreign hand, twice: the second time is told as a series.
    for _ in 0..2 {
        merge(cluster, namespace, &["configmap", "harbour-router-flags"], &json!({"data": {"KVASIR_QUEUE": "1"}}));
        eventually("the drift is repaired", || {
            let queue = get(cluster, &["-n", namespace, "configmap", "harbour-router-flags"])["data"]["KVASIR_QUEUE"].clone();
            if queue == "1" { Err(queue.to_string()) } else { Ok(()) }
        })
        .await;
    }
    uses(cluster, user, &right("events.k8s.io", "events", "patch")).await;
    let owner = get(cluster, &["-n", namespace, "spool", "harbour"]);
    for left in leftovers(namespace, &owner) {
        apply(cluster, &left);
        uses(cluster, user, &deletes(&left)).await;
    }
    // A gate that stands open although nobody takes the worker.
    let gate = json!({"status": {"conditions": [{"type": ROUTABLE, "status": "True"}]}}).to_string();
    kubectl(
        cluster,
        &["-n", namespace, "patch", "pod", "harbour-worker-0", "--subresource=status", "--type=strategic", "-p", &gate],
    );
    uses(cluster, user, &right("", "pods/status", "patch")).await;
    // Another shape with a surge depends on free devices.
    merge(cluster, namespace, &["spool", "fleet"], &json!({"spec": {"engine": {"contextLength": 1024}}}));
    for (group, resource, verb) in [
        ("", "nodes", "list"),
        ("resource.k8s.io", "deviceclasses", "get"),
        ("resource.k8s.io", "resourceslices", "list"),
        ("resource.k8s.io", "resourceclaims", "list"),
    ] {
        uses(cluster, user, &right(group, resource, verb)).await;
    }
    let said = operator.end();
    // The next one has another image for workers, and changes it in place.
    let operator = Operator::start(cluster, access.kubeconfig(), "2", &args);
    uses(cluster, user, &right("", "pods", "patch")).await;
    merge(cluster, namespace, &["spool", "harbour"], &json!({"spec": {"replicas": 0}}));
    uses(cluster, user, &right("", "pods", "delete")).await;
    routers_take_keys_and_give_them_up(cluster, namespace).await;
    said + &operator.end()
}

fn deletes(object: &Value) -> Right {
    let api = object["apiVersion"].as_str().unwrap();
    let group = api.split_once('/').map_or("", |(group, _)| group);
    let kind = object["kind"].as_str().unwrap().to_lowercase();
    let plural = if kind.ends_with('y') { format!("{}ies", kind.trim_end_matches('y')) } else { format!("{kind}s") };
    right(group, &plural, "delete")
}

/// A router and what it says.
struct Router {
    _process: Process,
    http: u16,
}

impl Router {
    fn start(cluster: &Cluster, kubeconfig: &Path, namespace: &str, bearer: &Path, workers: &str) -> Self {
        let http = free_port();
        let out = File::create(cluster.folder().join(format!("router-{http}.log"))).unwrap();
        let mut command = Command::new(built("kvasir-router"));
        command.args([workers, "--settle-seconds=0", "--log=debug", &format!("--http=127.0.0.1:{http}")]);
        command.arg(format!("--tenants-secret={namespace}/harbour-keys")).arg("--secret-file").arg(bearer);
        command.env("KUBECONFIG", kubeconfig).stdout(out.try_clone().unwrap()).stderr(out);
        Self { _process: Process(command.spawn().unwrap()), http }
    }

    /// Whether it lets a key in, whatever becomes of the request.
    async fn takes(&self, key: &str) -> Result<bool, String> {
        let client =
            Client::new(&format!("http://127.0.0.1:{}", self.http), Some(key.to_owned())).map_err(|error| error.to_string())?;
        let body = json!({"model": "mock", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello?"}]});
        match client.chat(body, |_| ()).await.map_err(|error| error.to_string()) {
            Err(error) if error.contains("401") => Ok(false),
            // Keys that have not come yet are no refusal, and neither is a missing worker.
            Err(error) if error.contains("keys") || error.contains("connect") => Err(error),
            Ok(_) | Err(_) => Ok(true),
        }
    }

    async fn comes_to(&self, key: &str, taken: bool) {
        until(&format!("a router takes a key: {taken}"), REVOKED_MAX, || async {
            let takes = self.takes(key).await?;
            if takes == taken { Ok(()) } else { Err(takes.to_string()) }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
    }
}

/// One router finds its workers by EndpointSlices, one has a worker that answers; both follow the one Secret with the account made for them.
async fn routers_take_keys_and_give_them_up(cluster: &Cluster, namespace: &str) {
    let began = Instant::now();
    let access = cluster.service_account(namespace, "harbour-router").await.unwrap();
    let bearer: PathBuf = cluster.folder().join("bearer");
    fs::write(&bearer, secret_values(cluster, namespace, "harbour-bearer").remove(0)).unwrap();
    let mut mock = Command::new(built("kvasir-mock-worker"));
    mock.arg("--secret-file").arg(&bearer).stdout(Stdio::piped());
    let mut mock = Process(mock.spawn().unwrap());
    let mut address = String::new();
    BufReader::new(mock.0.stdout.take().unwrap()).read_line(&mut address).unwrap();
    let routers = [format!("--workers-service={namespace}/harbour-workers"), format!("--worker={}", address.trim())]
        .map(|workers| Router::start(cluster, access.kubeconfig(), namespace, &bearer, &workers));
    for router in &routers {
        until("a router has keys", super::support::PATIENCE, || async {
            if router.takes(KEY).await? { Ok(()) } else { Err("the key is refused".to_owned()) }
        })
        .await
        .unwrap_or_else(|error| panic!("{error}"));
        router.comes_to(NEXT_KEY, false).await;
    }
    step("routers have keys", began);
    let answer = Client::new(&format!("http://127.0.0.1:{}", routers[1].http), Some(KEY.to_owned())).unwrap();
    let body = json!({"model": "mock", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello?"}]});
    until("the worker answers", super::support::PATIENCE, || async {
        answer.chat(body.clone(), |_| ()).await.map(drop).map_err(|error| error.to_string())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}"));

    apply(cluster, &tenant_secret(namespace, "harbour-key", NEXT_KEY));
    let began = Instant::now();
    for router in &routers {
        router.comes_to(KEY, false).await;
    }
    let revoked = began.elapsed();
    assert!(revoked <= REVOKED_MAX, "{revoked:?}");
    step("a key is revoked on every router", began);
    for router in &routers {
        router.comes_to(NEXT_KEY, true).await;
        router.comes_to(OTHER_KEY, true).await;
    }
}

/// What a Secret holds.
fn secret_values(cluster: &Cluster, namespace: &str, name: &str) -> Vec<String> {
    let template = "{{range $name, $value := .data}}{{$value | base64decode}}{{\"\\n\"}}{{end}}";
    let text = kubectl(cluster, &["-n", namespace, "get", "secret", name, "-o", &format!("go-template={template}")]);
    text.lines().map(str::to_owned).collect()
}

/// No value of a Secret stands anywhere else.
fn nothing_is_given_away(cluster: &Cluster, namespace: &str, said: &str) {
    let listed = kubectl(cluster, &["api-resources", "--verbs=list", "-o", "name"]);
    let kinds: Vec<&str> = listed.lines().filter(|kind| *kind != "secrets").collect();
    let mut open = kubectl(cluster, &["get", &kinds.join(","), "-A", "-o", "json"]);
    assert!(open.contains("harbour-router-flags") && open.contains("fleet-worker-0"), "everything is looked at");
    open.push_str(said);
    for file in fs::read_dir(cluster.folder()).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|kind| kind == "log") {
            open.push_str(&String::from_utf8_lossy(&fs::read(path).unwrap()));
        }
    }
    assert!(open.contains("requestURI") && open.contains("secrets and tenants are in force"), "logs are looked at");
    let mut secrets = vec![KEY.to_owned(), NEXT_KEY.to_owned(), OTHER_KEY.to_owned()];
    for name in ["harbour-bearer", "harbour-pool-secret", "fleet-bearer", "fleet-pool-secret"] {
        let values = secret_values(cluster, namespace, name);
        assert!(!values.is_empty() && values.iter().all(|value| value.len() >= 16), "{name}");
        secrets.extend(values);
    }
    let held = kubectl(cluster, &["-n", namespace, "get", "secrets", "-o", "json"]);
    assert!(held.contains(base64(NEXT_KEY.as_bytes()).trim_end_matches('=')), "what is searched for is found where it belongs");
    for secret in &secrets {
        let encoded = base64(secret.as_bytes());
        let given_away = open.contains(secret.as_str()) || open.contains(encoded.trim_end_matches('='));
        assert!(!given_away, "a secret that begins with {} stands in the open", &secret[..4]);
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = |chunk: &[u8]| {
        let bits = chunk.iter().fold(0u32, |bits, byte| (bits << 8) | u32::from(*byte)) << (8 * (3 - chunk.len()));
        (0..=chunk.len()).map(move |at| char::from(DIGITS[((bits >> (18 - 6 * at)) & 63) as usize])).collect::<String>()
    };
    bytes.chunks(3).map(digits).collect()
}

#[test]
fn rights_granted_are_rights_used_and_no_secret_leaves_the_secrets() {
    on_cluster(Layers::controllers(), async |cluster| {
        install(cluster);
        cluster.device_class("gpu", "device.driver == \"gpu.example.com\"").await.unwrap();
        let namespace = cluster.namespace("tenants", &[("pod-security.kubernetes.io/enforce", "restricted")]).await.unwrap();
        apply(cluster, &tenant_secret(&namespace, "harbour-key", KEY));
        apply(cluster, &tenant_secret(&namespace, "quay-key", OTHER_KEY));
        for pool in pools(&namespace) {
            apply(cluster, &pool);
        }
        let user = format!("system:serviceaccount:{SYSTEM}:kvasir-operator");
        let began = Instant::now();
        let said = a_whole_life(cluster, &namespace, &user).await;
        step("a whole life", began);

        let events = cluster.audit().all().unwrap();
        let roles = [
            get(cluster, &["clusterrole", "kvasir-system-kvasir-operator"]),
            get(cluster, &["-n", SYSTEM, "role", "kvasir-operator-lease"]),
        ];
        let mut granted_to_operator = granted(&roles);
        for (group, resource, verb) in UNSEEN {
            assert!(granted_to_operator.remove(&right(group, resource, verb)), "{resource} {verb}: no exception is needed");
        }
        assert_eq!(used(&events, &user), granted_to_operator);
        assert_eq!(refused(&events, &user), Vec::<String>::new());

        let router = format!("system:serviceaccount:{namespace}:harbour-router");
        let role = get(cluster, &["-n", &namespace, "role", "harbour-router"]);
        assert_eq!(used(&events, &router), granted([&role]));
        assert_eq!(refused(&events, &router), Vec::<String>::new());
        let read = events.iter().filter(|event| event.user == router && event.resource == "secrets");
        assert!(
            read.clone().count() > 0 && read.clone().all(|event| event.name == "harbour-keys"),
            "{:?}",
            read.collect::<Vec<_>>()
        );

        // Neither another namespace's account nor the routers of the pool beside may read the tenants' keys.
        let other = cluster.namespace("other", &[]).await.unwrap();
        for (account, secret) in [
            (format!("{other}:default"), "harbour-key"),
            (format!("{other}:default"), "harbour-keys"),
            (format!("{namespace}:fleet-router"), "harbour-keys"),
            (format!("{namespace}:fleet-router"), "harbour-key"),
            (format!("{namespace}:harbour-router"), "harbour-key"),
            (format!("{namespace}:harbour-worker"), "harbour-key"),
        ] {
            let asked = format!("--as=system:serviceaccount:{account}");
            let answer = try_kubectl(cluster, &["-n", &namespace, "get", "secret", secret, &asked]);
            assert!(answer.as_ref().is_err_and(|said| said.contains("Forbidden")), "{account} {secret}: {answer:?}");
        }
        nothing_is_given_away(cluster, &namespace, &said);
    });
}
