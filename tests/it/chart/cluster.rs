//! The chart on a real API server: what it installs is admitted, upgraded, rolled back and left behind as the documents say, and the rights that
//! it grants are enough for what they are for and for nothing more.
//!
//! No pod runs here: that is the business of the tests with real nodes.

use super::helm::{Helm, chart, one};
use super::{objects::copy, rights::rights, values_of};
use crate::e2e::support::program;
use crate::root;
use kvasir_cluster::{Cluster, Layers};
use serde_json::{Value, json};
use std::fs;
use std::future::Future;
use std::path::Path;
use std::process::Command;

/// The namespace of the release.
const NAMESPACE: &str = "kvasir-system";

/// A cluster without nodes, with the namespace of the release, which enforces the restricted standard.
struct Server {
    cluster: Cluster,
    folder: tempfile::TempDir,
}

/// Runs a test body on a fresh API server; nothing where the test command brings none.
fn on_a_server<F: Future<Output = ()>>(body: impl FnOnce(Server, Helm) -> F) {
    let Some(helm) = Helm::find() else { return };
    if program("KVASIR_TEST_CLUSTER_BIN", "a real Kubernetes").is_none() {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let server = Server { cluster: Cluster::start(Layers::api()).await.unwrap(), folder: tempfile::tempdir().unwrap() };
        server.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE,
            "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}));
        // Controllers make it elsewhere.
        server.apply(
            &json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": NAMESPACE}}),
        );
        body(server, helm).await;
    });
}

/// A chart folder whose CRD does not know `maxStreamDuration`.
fn former(helm: &Helm, folder: &Path) {
    copy(&chart(), folder);
    let file = folder.join("files/crds/servingpools.kvasir.dev.yaml");
    let mut crd = helm.parse(&fs::read_to_string(&file).unwrap()).remove(0);
    let pointer = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties";
    let fields = crd.pointer_mut(pointer).unwrap().as_object_mut().unwrap();
    assert!(fields.remove("maxStreamDuration").is_some());
    let name = crd["metadata"]["name"].as_str().unwrap();
    let head = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata:\n";
    fs::write(&file, format!("{head}  name: {name}\nspec: {}\n", crd["spec"])).unwrap();
}

/// Kinds of the Prometheus operator, as far as an API server needs to know them.
fn monitoring(kind: &str, plural: &str) -> Value {
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("{plural}.monitoring.coreos.com")},
        "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": {"kind": kind, "plural": plural},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]}})
}

fn example(helm: &Helm, file: &str) -> Vec<Value> {
    helm.parse(&fs::read_to_string(root().join(format!("deploy/examples/{file}.yaml"))).unwrap())
}

// === impl Server ===

impl Server {
    fn kubectl(&self, args: &[&str]) -> Result<String, String> {
        run(self.cluster.kubectl().unwrap().args(args))
    }

    fn helm(&self, args: &[&str]) -> Result<String, String> {
        run(self.cluster.helm().unwrap().args(args).args(["--namespace", NAMESPACE]))
    }

    fn upgrade(&self, folder: &Path, more: &[&str]) -> Result<String, String> {
        let args = [&["upgrade", "--install", "kvasir", folder.to_str().unwrap()], more].concat();
        let said = self.helm(&args)?;
        let wait = ["wait", "--for=condition=Established", "--timeout=30s", "crd/servingpools.kvasir.dev"];
        self.kubectl(&wait).map(|_| said)
    }

    /// Applies an object as somebody, or says why it was refused.
    fn try_apply(&self, object: &Value, more: &[&str]) -> Result<String, String> {
        let file = self.folder.path().join("object.json");
        fs::write(&file, object.to_string()).unwrap();
        let args = ["apply", "--server-side", "--field-manager=test", "--namespace", NAMESPACE, "-f", file.to_str().unwrap()];
        self.kubectl(&[&args[..], more].concat())
    }

    fn apply(&self, object: &Value) {
        self.try_apply(object, &[]).unwrap();
    }

    /// The kinds of the Prometheus operator, as far as charts need them.
    fn serve_monitoring(&self) {
        for (kind, plural) in [("ServiceMonitor", "servicemonitors"), ("PrometheusRule", "prometheusrules")] {
            self.apply(&monitoring(kind, plural));
            let name = format!("crd/{plural}.monitoring.coreos.com");
            self.kubectl(&["wait", "--for=condition=Established", "--timeout=30s", &name]).unwrap();
        }
    }

    fn pool(&self, name: &str) -> Value {
        let text = self.kubectl(&["get", "servingpool", name, "--namespace", NAMESPACE, "-o", "json"]).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
fn r62_an_upgrade_brings_the_crd_up_and_neither_it_nor_a_rollback_nor_uninstalling_touches_a_pool() {
    on_a_server(|server, helm| async move {
        let old = tempfile::tempdir().unwrap();
        former(&helm, old.path());
        server.upgrade(old.path(), &[]).unwrap();
        server.apply(&example(&helm, "first")[0]);
        let first = server.pool("first");
        assert!(first["spec"].get("maxStreamDuration").is_none(), "the former CRD does not know it");
        server.upgrade(&chart(), &[]).unwrap();
        let stays = |when: &str| {
            let now = server.pool("first");
            for member in ["uid", "generation", "resourceVersion"] {
                assert_eq!(now["metadata"][member], first["metadata"][member], "{member} {when}");
            }
            now
        };
        assert_eq!(stays("after the upgrade")["spec"]["maxStreamDuration"], "10m", "the new default shows");
        let mut changed = example(&helm, "first").remove(0);
        changed["metadata"]["name"] = "second".into();
        changed["spec"]["maxStreamDuration"] = "7m".into();
        server.apply(&changed);
        assert_eq!(server.pool("second")["spec"]["maxStreamDuration"], "7m", "a new field survives a read-back");
        server.helm(&["rollback", "kvasir", "1"]).unwrap();
        stays("after the rollback");
        server.helm(&["uninstall", "kvasir"]).unwrap();
        stays("after uninstalling");
        assert!(
            server
                .kubectl(&["get", "deployment", "kvasir-operator", "--namespace", NAMESPACE])
                .unwrap_err()
                .contains("not found")
        );
        server.upgrade(&chart(), &[]).unwrap();
        stays("after installing again");
        assert_eq!(server.pool("second")["spec"]["maxStreamDuration"], "7m", "what is stored was not cut");
    });
}

#[test]
fn r64_a_live_release_takes_every_value_set_and_a_namespaced_one_stands_beside_it() {
    on_a_server(|server, _helm| async move {
        server.upgrade(&chart(), &[]).unwrap();
        server.serve_monitoring();
        let full = values_of("full");
        let full = full.to_str().unwrap();
        server.upgrade(&chart(), &["--values", full, "--set", "fullnameOverride="]).unwrap();
        server.upgrade(&chart(), &["--values", full]).unwrap();
        server.upgrade(&chart(), &["--reset-values"]).unwrap();
        let namespaced = values_of("namespaced");
        let folder = chart();
        let mut beside = vec!["install", "beside", folder.to_str().unwrap(), "--values", namespaced.to_str().unwrap()];
        beside.extend(["--namespace", "team-a", "--create-namespace"]);
        run(server.cluster.helm().unwrap().args(&beside)).unwrap();
        let wide = server.kubectl(&["get", "clusterroles", "-o", "name"]).unwrap();
        assert!(wide.contains("kvasir-system-kvasir-operator") && !wide.contains("team-a"), "{wide}");
        // The replicas that another one set stay where no number is rendered.
        let scale = |namespace: &str, name: &str| {
            let name = format!("deployment/{name}");
            server.kubectl(&["scale", &name, "--replicas=3", "--namespace", namespace]).unwrap();
            name
        };
        let name = scale("team-a", "beside-kvasir-operator");
        beside[0] = "upgrade";
        run(server.cluster.helm().unwrap().args(beside.iter().filter(|arg| **arg != "--create-namespace"))).unwrap();
        let replicas = server.kubectl(&["get", &name, "--namespace", "team-a", "-o", "jsonpath={.spec.replicas}"]).unwrap();
        assert_eq!(replicas, "3");
    });
}

#[test]
fn the_pods_of_the_release_are_admitted_in_a_restricted_namespace() {
    on_a_server(|server, helm| async move {
        server.upgrade(&chart(), &[]).unwrap();
        let objects = helm.objects(&[]);
        server.try_apply(one(&objects, "Pod", "kvasir-generate"), &["--dry-run=server"]).unwrap();
        let deployment = one(&objects, "Deployment", "kvasir-operator");
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator", "namespace": NAMESPACE},
            "spec": deployment["spec"]["template"]["spec"]});
        server.try_apply(&pod, &["--dry-run=server"]).unwrap();
        let mut root_pod = pod;
        root_pod["spec"]["securityContext"]["runAsNonRoot"] = false.into();
        assert!(
            server.try_apply(&root_pod, &["--dry-run=server"]).unwrap_err().contains("restricted"),
            "the standard is enforced here"
        );
    });
}

#[test]
fn r65_the_operator_may_grant_routers_what_they_need_and_nobody_more() {
    on_a_server(|server, helm| async move {
        server.upgrade(&chart(), &[]).unwrap();
        // An unknown kind gets no answer.
        server.serve_monitoring();
        let account = format!("--as=system:serviceaccount:{NAMESPACE}:kvasir-operator");
        let may = |verb: &str, what: &str, more: &[&str]| {
            // The exit code says no, and a warning on an unknown kind is no answer.
            server.kubectl(&[&["auth", "can-i", verb, what, &account], more].concat()).is_ok_and(|said| said.trim() == "yes")
        };
        let wide = rights(one(&helm.objects(&[]), "ClusterRole", "kvasir-system-kvasir-operator"));
        for [group, resource, verb, _] in wide {
            let (resource, sub) = resource.split_once('/').unwrap_or((&resource, ""));
            let what = if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") };
            let sub = format!("--subresource={sub}");
            assert!(may(&verb, &what, &["--all-namespaces", &sub]), "{verb} {what} {sub}");
        }
        assert!(may("update", "leases.coordination.k8s.io/kvasir-operator", &["--namespace", NAMESPACE]));
        assert!(!may("update", "leases.coordination.k8s.io/other", &["--namespace", NAMESPACE]));
        assert!(!may("update", "leases.coordination.k8s.io/kvasir-operator", &["--namespace", "default"]));
        for verb in ["create", "update", "patch", "delete"] {
            assert!(!may(verb, "servingpools.kvasir.dev", &["--all-namespaces"]), "{verb}");
        }
        let role = |verbs: &[&str]| {
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "p-router", "namespace": NAMESPACE},
                "rules": [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
                    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["p-keys"], "verbs": verbs}]})
        };
        let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": "p-router", "namespace": NAMESPACE},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "p-router"},
            "subjects": [{"kind": "ServiceAccount", "name": "p-router", "namespace": NAMESPACE}]});
        server.try_apply(&role(&["get", "watch"]), &[&account]).unwrap();
        server.try_apply(&binding, &[&account]).unwrap();
        let refused = server.try_apply(&role(&["get", "watch", "update"]), &[&account]).unwrap_err();
        assert!(refused.contains("not currently held"), "{refused}");
    });
}
