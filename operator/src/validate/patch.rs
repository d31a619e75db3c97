//! What a pool lays over its worker pods: read as Kubernetes reads it, and refused by name where it would break what the operator relies on.
//!
//! Owns the list of what is relied on. The rules look at the patch alone: whatever the operator itself writes has a reserved name, so a patch that
//! passes can be merged blindly.

use super::Devices;
use super::findings::Findings;
use super::operations::{is_label_value, is_qualified};
use crate::api::ServingPoolSpec;
use crate::design::WORKER_CONTAINER;
use k8s_openapi::api::core::v1::{Container, PodSpec, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;
use std::time::Duration;

/// Beginning of the names of volumes and claims that are the operator's.
pub const RESERVED: &str = "kvasir-";
/// Paths in the worker's container that are the operator's.
pub const RESERVED_PATHS: [&str; 2] = ["/kvasir", "/tmp"];
/// Beginning of the environment variables that are the operator's.
const RESERVED_VARIABLES: &str = "KVASIR_";
/// Variables with that beginning that a patch may set: the operator never does.
const FREE_VARIABLES: [&str; 1] = ["KVASIR_HUB"];
/// Prefix of labels and annotations that are the operator's.
const RESERVED_KEYS: [&str; 2] = ["kvasir.dev/", "app.kubernetes.io/"];
/// Largest patch, as JSON: what is laid over every pod is stored with every pod.
const BYTES_MAX: usize = 64 << 10;

const FIELD: &str = "spec.podTemplatePatch";

/// Reads the patch. `grace` is what a pod needs to end its streams.
pub(super) fn read(
    spec: &ServingPoolSpec,
    devices: &Devices,
    grace: Duration,
    findings: &mut Findings,
) -> Option<PodTemplateSpec> {
    let patch = spec.pod_template_patch.as_ref().filter(|patch| !patch.is_null())?;
    let bytes = patch.to_string().len();
    if bytes > BYTES_MAX {
        findings.refuse(
            FIELD,
            format_args!("{bytes} bytes"),
            format_args!("{BYTES_MAX} bytes are allowed; put large texts into a ConfigMap"),
        );
        return None;
    }
    let read: PodTemplateSpec = match serde_json::from_value(patch.clone()) {
        Ok(read) => read,
        Err(error) => {
            findings.refuse(FIELD, "not readable as a PodTemplateSpec", error);
            return None;
        }
    };
    if let Some(path) = lost(patch, &serde_json::to_value(&read).unwrap_or_default()) {
        findings.refuse(
            &format!("{FIELD}.{path}"),
            "unknown",
            "a PodTemplateSpec has no such field; see `kubectl explain pod.spec`",
        );
    }
    let mut check = Check { findings };
    check.metadata(read.metadata.as_ref());
    if let Some(pod) = &read.spec {
        check.pod(pod, grace);
        check.volumes(pod);
        let worker = pod.containers.iter().find(|container| container.name == WORKER_CONTAINER);
        if let Some(worker) = worker {
            check.worker(worker, devices);
        }
        let others = pod.containers.iter().filter(|container| container.name != WORKER_CONTAINER);
        for container in others.chain(pod.init_containers.iter().flatten()) {
            check.other(container);
        }
    }
    Some(read)
}

/// Path of the first member that reading lost, because Kubernetes has no such field.
fn lost(written: &Value, read: &Value) -> Option<String> {
    let join = |name: &str, rest: String| if rest.is_empty() { name.to_owned() } else { format!("{name}.{rest}") };
    match (written, read) {
        (Value::Object(written), Value::Object(read)) => {
            written.iter().filter(|(_, value)| !value.is_null()).find_map(|(name, value)| {
                let rest = read.get(name).map_or_else(|| Some(String::new()), |read| lost(value, read))?;
                Some(join(name, rest))
            })
        }
        (Value::Array(written), Value::Array(read)) => {
            let mut pairs = written.iter().zip(read).enumerate();
            pairs.find_map(|(at, (written, read))| Some(join(&at.to_string(), lost(written, read)?)))
        }
        _ => None,
    }
}

struct Check<'a> {
    findings: &'a mut Findings,
}

// === impl Check ===

impl Check<'_> {
    fn refuse(&mut self, path: &str, set: bool, fix: &str) {
        if set {
            self.findings.refuse(&format!("{FIELD}.{path}"), "set", fix);
        }
    }

    fn metadata(&mut self, metadata: Option<&ObjectMeta>) {
        let Some(metadata) = metadata else { return };
        let mut rest = metadata.clone();
        let labels = rest.labels.take().unwrap_or_default();
        let annotations = rest.annotations.take().unwrap_or_default();
        self.refuse(
            "metadata",
            rest != ObjectMeta::default(),
            "a patch sets labels and annotations only; the operator owns the rest",
        );
        for key in labels.keys().chain(annotations.keys()) {
            if RESERVED_KEYS.iter().any(|prefix| key.starts_with(prefix)) {
                self.findings.refuse(&format!("{FIELD}.metadata"), key, "pods are found by it; choose another key");
            } else if !is_qualified(key) {
                let fix = "a key is a name of at most 63 characters, with an optional DNS prefix";
                self.findings.refuse(&format!("{FIELD}.metadata"), key, fix);
            }
        }
        for value in labels.values().filter(|value| !is_label_value(value)) {
            let fix =
                "a label's value has at most 63 letters, digits, `-`, `_` and `.`, and begins and ends with a letter or digit";
            self.findings.refuse(&format!("{FIELD}.metadata.labels"), value, fix);
        }
    }

    fn pod(&mut self, pod: &PodSpec, grace: Duration) {
        let account = pod.service_account_name.is_some() || pod.service_account.is_some();
        for (path, set, fix) in [
            ("spec.nodeName", pod.node_name.is_some(), "it bypasses the scheduler; use nodeSelector"),
            ("spec.hostNetwork", pod.host_network == Some(true), "workers on one node would fight for ports"),
            (
                "spec.restartPolicy",
                pod.restart_policy.as_deref().is_some_and(|it| it != "Always"),
                "the operator relies on Always",
            ),
            ("spec.serviceAccountName", account, "each pool's workers have an account of their own without rights"),
            ("spec.activeDeadlineSeconds", pod.active_deadline_seconds.is_some(), "it ends workers with their streams"),
            (
                "spec.ephemeralContainers",
                pod.ephemeral_containers.is_some(),
                "they are added to running pods: use `kubectl debug`",
            ),
            ("spec.resources", pod.resources.is_some(), "size workers with engine.resources"),
            ("spec.topologySpreadConstraints", has_no_key(pod), "each one needs topologyKey and whenUnsatisfiable"),
        ] {
            self.refuse(path, set, fix);
        }
        if let Some(seconds) = pod.termination_grace_period_seconds.filter(|it| *it < grace.as_secs() as i64) {
            let fix =
                format!("{} s are needed: maxStreamDuration and what a worker needs to hand back the rest", grace.as_secs());
            self.findings.refuse(&format!("{FIELD}.spec.terminationGracePeriodSeconds"), seconds, fix);
        }
    }

    fn volumes(&mut self, pod: &PodSpec) {
        let volumes = pod.volumes.iter().flatten().map(|volume| ("volumes", &volume.name));
        let claims = pod.resource_claims.iter().flatten().map(|claim| ("resourceClaims", &claim.name));
        for (list, name) in volumes.chain(claims) {
            if name.is_empty() || name.starts_with(RESERVED) {
                let fix = "each one needs a name, and names that begin with `kvasir-` are the operator's";
                self.findings.refuse(&format!("{FIELD}.spec.{list}[].name"), format_args!("`{name}`"), fix);
            }
        }
    }

    fn worker(&mut self, worker: &Container, devices: &Devices) {
        for (member, set, fix) in [
            ("image", worker.image.is_some(), "use images.worker, so that it can change in place"),
            ("imagePullPolicy", worker.image_pull_policy.is_some(), "use images.pullPolicy"),
            ("command", worker.command.is_some(), "the operator starts the worker"),
            ("args", worker.args.is_some(), "flags follow from the pool's other fields"),
            ("readinessProbe", worker.readiness_probe.is_some(), "routing follows the worker's own readiness"),
            ("ports", worker.ports.is_some(), "routers and the operator find the worker by its ports; give sidecars their own"),
            ("restartPolicy", worker.restart_policy.is_some(), "the operator relies on Always"),
        ] {
            self.refuse(&format!("spec.containers[{WORKER_CONTAINER}].{member}"), set, fix);
        }
        let at = |member: &str| format!("{FIELD}.spec.containers[{WORKER_CONTAINER}].{member}");
        for variable in worker.env.iter().flatten().map(|variable| &variable.name) {
            if variable.starts_with(RESERVED_VARIABLES) && !FREE_VARIABLES.contains(&&**variable) {
                self.findings.refuse(&at("env"), variable, "variables that begin with KVASIR_ are flags; use the pool's fields");
            }
        }
        for path in worker.volume_mounts.iter().flatten().map(|mount| &mount.mount_path) {
            let inside = |of: &str| path.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
            if path.is_empty() || path == "/" || RESERVED_PATHS.iter().any(|of| inside(of)) {
                self.findings.refuse(&at("volumeMounts"), path, "/, /tmp and /kvasir are the operator's; mount it elsewhere");
            }
        }
        let resources = worker.resources.clone().unwrap_or_default();
        let asked = resources.requests.iter().chain(&resources.limits).flat_map(|amounts| amounts.keys());
        for name in asked {
            let device = matches!(devices, Devices::Resource { name: device, .. } if device == name);
            if device || matches!(&**name, "cpu" | "memory" | "ephemeral-storage") {
                self.findings.refuse(&at("resources"), name, "use engine.resources, prefixCache and accelerator");
            }
        }
    }

    fn other(&mut self, container: &Container) {
        if container.name.is_empty() || container.image.is_none() {
            let fix = "each container but the worker needs a name and an image";
            self.findings.refuse(&format!("{FIELD}.spec.containers[].name"), format_args!("`{}`", container.name), fix);
        }
    }
}

fn has_no_key(pod: &PodSpec) -> bool {
    pod.topology_spread_constraints.iter().flatten().any(|it| it.topology_key.is_empty() || it.when_unsatisfiable.is_empty())
}
