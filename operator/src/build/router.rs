//! Routers: their Deployment, flags, rights, Services, and how they are scraped.
//!
//! Owns which flag follows from which field. Routers hold nothing that outlives a request, so a Deployment replaces them: a new one is ready before
//! an old one leaves.

use super::frame::{Frame, bytes, cores, service_port};
use super::pod::{self, BEARER_FILE, LIVENESS, Mounted, Patience};
use super::{ROUTER_ADMIN_PORT, ROUTER_METRICS_PORT, ROUTER_PORT};
use crate::api::{Isolation, ServiceType};
use crate::apply::content_hash;
use crate::names::Component;
use crate::validate::{DRAIN_MARGIN, Pool, Settings};
use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::api::core::v1::{
    ConfigMap, ConfigMapEnvSource, Container, EnvFromSource, PodTemplateSpec, ResourceRequirements, Service, ServicePort,
    ServiceSpec,
};
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// Routers that evictions may take at once.
pub(super) const EVICTABLE: IntOrString = IntOrString::Int(1);
/// Name of the container.
const CONTAINER: &str = "router";
/// Seconds between "not ready" and the end of service, so that load balancers notice.
const SETTLE_SECONDS: u64 = 5;
/// Part of a router's memory that is its prefix index, and its bounds in MiB.
const INDEX_PART: u64 = 2;
const INDEX_MIB_MIN: u64 = 16;
const INDEX_MIB_MAX: u64 = 4_096;
/// Time after which a Deployment that does not move says so.
const PROGRESS_SECONDS: i32 = 600;

/// The routers' flags, as variables.
pub(super) fn flags(frame: &Frame<'_>) -> ConfigMap {
    ConfigMap {
        metadata: frame.metadata(frame.names.router_flags(), Some(Component::Router)),
        data: Some(variables(frame)),
        ..ConfigMap::default()
    }
}

fn variables(frame: &Frame<'_>) -> BTreeMap<String, String> {
    let (pool, names) = (frame.pool, frame.names);
    let router = &pool.router;
    let index = (router.size.memory >> 20) / INDEX_PART;
    let stream_seconds = pool.stream_max.as_secs() + u64::from(pool.stream_max.subsec_nanos() > 0);
    let mut variables: BTreeMap<String, String> = [
        ("KVASIR_HTTP", format!("0.0.0.0:{ROUTER_PORT}")),
        ("KVASIR_ADMIN", format!("0.0.0.0:{ROUTER_ADMIN_PORT}")),
        ("KVASIR_METRICS", format!("0.0.0.0:{ROUTER_METRICS_PORT}")),
        ("KVASIR_WORKERS_SERVICE", format!("{}/{}", pool.namespace, names.workers())),
        ("KVASIR_TENANTS_SECRET", format!("{}/{}", pool.namespace, names.keys())),
        ("KVASIR_SECRET_FILE", BEARER_FILE.to_owned()),
        ("KVASIR_RUNNING", router.running.to_string()),
        ("KVASIR_QUEUE", router.queue.to_string()),
        ("KVASIR_INDEX_MIB", index.clamp(INDEX_MIB_MIN, INDEX_MIB_MAX).to_string()),
        ("KVASIR_SETTLE_SECONDS", SETTLE_SECONDS.to_string()),
        ("KVASIR_GRACE_SECONDS", stream_seconds.to_string()),
        ("KVASIR_LOG", pool.telemetry.log.clone()),
        ("KVASIR_LOG_FORMAT", "json".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    if pool.isolation == Isolation::Pool {
        variables.insert("KVASIR_SHARED_POOL_UID".to_owned(), pool.uid.clone());
    }
    if let Some(slo) = &pool.slo {
        variables.insert("KVASIR_SLO_TTFT_MS".to_owned(), millis(slo.ttft));
        variables.insert("KVASIR_SLO_TPOT_MS".to_owned(), millis(slo.tpot));
        variables.insert("KVASIR_SLO_FRACTION".to_owned(), slo.fraction.to_string());
    }
    if let Some(endpoint) = &pool.telemetry.otlp {
        variables.insert("KVASIR_OTLP".to_owned(), endpoint.clone());
        variables.insert("KVASIR_TRACE_SAMPLING".to_owned(), pool.telemetry.sampling.to_string());
    }
    variables
}

/// At least one.
fn millis(time: Duration) -> String {
    time.as_millis().max(1).to_string()
}

/// The Deployment.
pub(super) fn deployment(frame: &Frame<'_>) -> Deployment {
    let names = frame.names;
    Deployment {
        metadata: frame.metadata(names.component(Component::Router), Some(Component::Router)),
        spec: Some(DeploymentSpec {
            replicas: i32::try_from(frame.pool.router.replicas).ok(),
            revision_history_limit: Some(2),
            progress_deadline_seconds: Some(PROGRESS_SECONDS),
            selector: frame.selector(Component::Router),
            // Said in full: what is left out keeps a former value when the type changes.
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".to_owned()),
                rolling_update: Some(RollingUpdateDeployment {
                    max_surge: Some(IntOrString::Int(1)),
                    max_unavailable: Some(IntOrString::Int(0)),
                }),
            }),
            template: pod_template(frame),
            ..DeploymentSpec::default()
        }),
        status: None,
    }
}

fn pod_template(frame: &Frame<'_>) -> PodTemplateSpec {
    let (pool, names) = (frame.pool, frame.names);
    let mounted = vec![Mounted::scratch(), Mounted::bearer(frame)];
    let flags = EnvFromSource {
        config_map_ref: Some(ConfigMapEnvSource { name: names.router_flags(), optional: None }),
        ..EnvFromSource::default()
    };
    let size = pool.router.size;
    let memory = ("memory".to_owned(), bytes(size.memory));
    let container = Container {
        env_from: Some(vec![flags]),
        ports: Some(vec![
            pod::port("http", ROUTER_PORT),
            pod::port("admin", ROUTER_ADMIN_PORT),
            pod::port("metrics", ROUTER_METRICS_PORT),
        ]),
        resources: Some(ResourceRequirements {
            requests: Some([("cpu".to_owned(), cores(size.millicores)), memory.clone()].into()),
            limits: Some([memory].into()),
            claims: None,
        }),
        startup_probe: Some(pod::probe("/healthz", &Patience { period: 1, timeout: 2, failures: 60 })),
        readiness_probe: Some(pod::probe("/readyz", &Patience { period: 2, timeout: 2, failures: 3 })),
        liveness_probe: Some(pod::probe("/healthz", &LIVENESS)),
        ..pod::container(CONTAINER, &pool.images.router, &pool.images, &mounted)
    };
    let mut spec = pod::pod(frame, Component::Router, container, mounted);
    spec.automount_service_account_token = Some(true);
    let grace = pool.stream_max + DRAIN_MARGIN;
    spec.termination_grace_period_seconds = Some((grace.as_secs() + 1 + SETTLE_SECONDS) as i64);
    let annotations = [
        ("kubectl.kubernetes.io/default-container".to_owned(), CONTAINER.to_owned()),
        ("kvasir.dev/bearer-digest".to_owned(), frame.bearer_digest.clone()),
        ("kvasir.dev/flags-digest".to_owned(), content_hash(&json!(variables(frame)))),
    ];
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(names.component_labels(Component::Router)),
            annotations: Some(annotations.into()),
            ..ObjectMeta::default()
        }),
        spec: Some(spec),
    }
}

/// What routers may do: follow the list of workers, and read their one Secret.
pub(super) fn role(frame: &Frame<'_>) -> Role {
    let text = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    Role {
        metadata: frame.metadata(frame.names.component(Component::Router), Some(Component::Router)),
        rules: Some(vec![
            PolicyRule {
                api_groups: Some(text(&["discovery.k8s.io"])),
                resources: Some(text(&["endpointslices"])),
                verbs: text(&["list", "watch"]),
                ..PolicyRule::default()
            },
            PolicyRule {
                api_groups: Some(text(&[""])),
                resources: Some(text(&["secrets"])),
                resource_names: Some(vec![frame.names.keys()]),
                verbs: text(&["get", "watch"]),
                ..PolicyRule::default()
            },
        ]),
    }
}

/// Gives routers their role.
pub(super) fn role_binding(frame: &Frame<'_>) -> RoleBinding {
    let name = frame.names.component(Component::Router);
    RoleBinding {
        metadata: frame.metadata(name.clone(), Some(Component::Router)),
        role_ref: RoleRef { api_group: "rbac.authorization.k8s.io".to_owned(), kind: "Role".to_owned(), name: name.clone() },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name,
            namespace: Some(frame.pool.namespace.clone()),
            api_group: None,
        }]),
    }
}

/// The Service that clients use, and the one through which routers are scraped: metrics are no clients' business.
pub(super) fn services(frame: &Frame<'_>, settings: &Settings) -> Vec<Service> {
    let router = &frame.pool.router;
    let selector = || Some(frame.names.selector(Component::Router));
    let mut metadata = frame.metadata(frame.names.component(Component::Router), Some(Component::Router));
    metadata.annotations = (!router.annotations.is_empty()).then(|| router.annotations.clone());
    let kind = match router.service {
        ServiceType::ClusterIP => "ClusterIP",
        ServiceType::NodePort => "NodePort",
        ServiceType::LoadBalancer => "LoadBalancer",
    };
    let mut services = vec![Service {
        metadata,
        spec: Some(ServiceSpec {
            type_: Some(kind.to_owned()),
            selector: selector(),
            ports: Some(vec![ServicePort { port: i32::from(router.port), ..service_port("http", ROUTER_PORT) }]),
            ..ServiceSpec::default()
        }),
        status: None,
    }];
    if is_monitored(frame.pool, settings) {
        services.push(Service {
            metadata: frame.metadata(frame.names.router_metrics(), Some(Component::Router)),
            spec: Some(ServiceSpec {
                cluster_ip: Some("None".to_owned()),
                selector: selector(),
                ports: Some(vec![service_port("metrics", ROUTER_METRICS_PORT)]),
                ..ServiceSpec::default()
            }),
            status: None,
        });
    }
    services
}

/// Whether the pool is scraped through a ServiceMonitor.
pub(super) fn is_monitored(pool: &Pool, settings: &Settings) -> bool {
    settings.service_monitors && pool.telemetry.monitor
}

/// The kind of the Prometheus operator.
pub(super) fn service_monitor_kind() -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("monitoring.coreos.com", "v1", "ServiceMonitor"), "servicemonitors")
}

/// Scrapes every Service of the pool that has a port for it.
pub(super) fn service_monitor(frame: &Frame<'_>) -> Value {
    json!({
        "metadata": frame.metadata(frame.names.monitor(), None),
        "spec": {
            "selector": { "matchLabels": { crate::names::POOL: frame.names.stem() } },
            "endpoints": [{ "port": "metrics", "path": "/metrics", "interval": "30s" }],
            "targetLabels": [crate::names::POOL],
        },
    })
}
