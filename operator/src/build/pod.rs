//! What pods of every component have in common: a restricted security context, a root that cannot be written, scratch space, probes, spread.
//!
//! Owns the names and paths in a container that are the operator's; `validate` keeps patches off them.

use super::frame::{Frame, bytes};
use super::secrets::BEARER_KEY;
use crate::api::PullPolicy;
use crate::names::Component;
use crate::validate::{Images, RESERVED_NAMES};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EmptyDirVolumeSource, HTTPGetAction, KeyToPath, LocalObjectReference,
    PodSecurityContext, PodSpec, Probe, SeccompProfile, SecretVolumeSource, SecurityContext, TopologySpreadConstraint, Volume,
    VolumeMount,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// User of the images; also owner of what is written to volumes.
const USER: i64 = 65_532;
/// Room for temporary files.
const SCRATCH_BYTES: u64 = 64 << 20;
/// Path of the bearer's file.
pub(super) const BEARER_FILE: &str = "/kvasir/bearer/bearer";

/// A volume of a pod and where its container sees it.
pub(super) struct Mounted {
    pub(super) volume: Volume,
    pub(super) mount: VolumeMount,
}

/// When a probe counts as failed.
pub(super) struct Patience {
    pub(super) period: i32,
    pub(super) timeout: i32,
    pub(super) failures: i32,
}

// === impl Mounted ===

impl Mounted {
    /// A volume that the container can write.
    pub(super) fn writable(name: &str, path: &str, volume: Volume) -> Self {
        let name = format!("{RESERVED_NAMES}{name}");
        let mount = VolumeMount { name: name.clone(), mount_path: path.to_owned(), ..VolumeMount::default() };
        Self { volume: Volume { name, ..volume }, mount }
    }

    /// A volume that it can only read.
    pub(super) fn read_only(name: &str, path: &str, volume: Volume) -> Self {
        let mut mounted = Self::writable(name, path, volume);
        mounted.mount.read_only = Some(true);
        mounted
    }

    /// One key of a Secret as a file in the folder `path`.
    pub(super) fn secret(name: &str, path: &str, secret: &str, key: &str) -> Self {
        let item = KeyToPath { key: key.to_owned(), path: key.to_owned(), mode: None };
        let source = SecretVolumeSource {
            secret_name: Some(secret.to_owned()),
            items: Some(vec![item]),
            default_mode: Some(0o440),
            ..SecretVolumeSource::default()
        };
        Self::read_only(name, path, Volume { secret: Some(source), ..Volume::default() })
    }

    /// What components show each other.
    pub(super) fn bearer(frame: &Frame<'_>) -> Self {
        Self::secret("bearer", "/kvasir/bearer", &frame.names.bearer(), BEARER_KEY)
    }

    /// Room for temporary files.
    pub(super) fn scratch() -> Self {
        Self::writable("scratch", "/tmp", empty_dir(SCRATCH_BYTES, None))
    }
}

/// A volume that lives as long as its pod.
pub(super) fn empty_dir(size: u64, medium: Option<&str>) -> Volume {
    let source = EmptyDirVolumeSource { medium: medium.map(str::to_owned), size_limit: Some(bytes(size)) };
    Volume { empty_dir: Some(source), ..Volume::default() }
}

/// A container with `mounted` volumes that may do nothing but its work.
pub(super) fn container(name: &str, image: &str, images: &Images, mounted: &[Mounted]) -> Container {
    Container {
        name: name.to_owned(),
        image: Some(image.to_owned()),
        image_pull_policy: Some(pull_policy(images.pull_policy).to_owned()),
        // What a container says last is why it ended; the pool's status tells it.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        volume_mounts: Some(mounted.iter().map(|it| it.mount.clone()).collect()),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
            ..SecurityContext::default()
        }),
        ..Container::default()
    }
}

/// A pod of one container that may run where the restricted Pod Security Standard is enforced.
pub(super) fn pod(frame: &Frame<'_>, component: Component, container: Container, mounted: Vec<Mounted>) -> PodSpec {
    let secrets = frame.pool.images.pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    let secrets: Vec<LocalObjectReference> = secrets.collect();
    PodSpec {
        containers: vec![container],
        volumes: Some(mounted.into_iter().map(|it| it.volume).collect()),
        service_account_name: Some(frame.names.component(component)),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        restart_policy: Some("Always".to_owned()),
        image_pull_secrets: (!secrets.is_empty()).then_some(secrets),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            fs_group: Some(USER),
            fs_group_change_policy: Some("OnRootMismatch".to_owned()),
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None }),
            ..PodSecurityContext::default()
        }),
        topology_spread_constraints: Some(vec![TopologySpreadConstraint {
            max_skew: 1,
            topology_key: "kubernetes.io/hostname".to_owned(),
            when_unsatisfiable: "ScheduleAnyway".to_owned(),
            label_selector: Some(frame.selector(component)),
            ..TopologySpreadConstraint::default()
        }]),
        ..PodSpec::default()
    }
}

/// A port of a container.
pub(super) fn port(name: &str, port: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: i32::from(port),
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

/// A probe of the port `metrics`, where all programs answer.
pub(super) fn probe(path: &str, patience: &Patience) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String("metrics".to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(patience.period),
        timeout_seconds: Some(patience.timeout),
        failure_threshold: Some(patience.failures),
        ..Probe::default()
    }
}

/// Alive: its loops run. Far slower than readiness, so that a busy node is no reason to restart.
pub(super) const LIVENESS: Patience = Patience { period: 10, timeout: 5, failures: 6 };

fn pull_policy(policy: PullPolicy) -> &'static str {
    match policy {
        PullPolicy::IfNotPresent => "IfNotPresent",
        PullPolicy::Always => "Always",
        PullPolicy::Never => "Never",
    }
}

/// A text that the kubelet hands on as it is: it replaces `$(NAME)` in arguments.
pub(super) fn literal(text: &str) -> String {
    text.replace("$(", "$$(")
}
