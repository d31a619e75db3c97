//! Worker and draft pods, and the Services that list them.
//!
//! Owns which flag follows from which field. Refuses to know pods that run: what changes here reaches them by a rollout.

use super::devices::{self, PodDevices};
use super::frame::{Frame, bytes, cores, grpc_port, service_port};
use super::pod::{self, BEARER_FILE, LIVENESS, Mounted, Patience, literal};
use super::{WORKER_METRICS_PORT, WORKER_PORT};
use crate::api::CacheMode;
use crate::design::{ROUTABLE, Template, WORKER_CONTAINER};
use crate::names::Component;
use crate::status::Fault;
use crate::validate::{DRAIN_MARGIN, Draft, Model, Pool, Size, Source};
use k8s_openapi::DeepMerge as _;
use k8s_openapi::api::core::v1::{
    Container, EnvVar, EnvVarSource, ImageVolumeSource, ObjectFieldSelector, PersistentVolumeClaimVolumeSource, PodReadinessGate,
    PodTemplateSpec, ResourceRequirements, Service, ServiceSpec, Volume,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::BTreeMap;
use std::time::Duration;

/// What a worker pod is for.
#[derive(Clone, Copy)]
pub(super) enum Role<'a> {
    /// Serves the model.
    Target {
        /// Whether it asks for devices of its draft.
        draft_devices: bool,
    },
    /// Serves the draft.
    Draft(&'a Draft),
}

/// Where a worker keeps what it fetches and remembers.
const CACHE: &str = "/kvasir/cache";
/// Where a model's volume is seen.
const MODEL: &str = "/kvasir/model";
/// Where an access token is seen.
const TOKEN: &str = "/kvasir/token";
/// Where the tiers lie.
const HOST_TIER: &str = "/kvasir/host-tier";
const DISK_TIER: &str = "/kvasir/disk-tier";
/// Room in the cache for what is remembered of a model that lies elsewhere.
const DIGESTS_BYTES: u64 = 64 << 20;
/// Room beside a model that is fetched: its parts before they are in place.
const FETCH_MARGIN_BYTES: u64 = 1 << 30;
/// Slowest reading of weights that a start is given time for, in bytes per second.
const LOAD_RATE_MIN: u64 = 32 << 20;
/// Slowest download that a start is given time for.
const FETCH_RATE_MIN: u64 = 4 << 20;
/// Time that a start takes beside reading weights, in seconds.
const START_SECONDS: u64 = 60;
/// Time between two looks at a worker that starts, in seconds.
const STARTUP_PERIOD: i32 = 2;
/// Part of a draft pod's memory that is its KV pool.
const DRAFT_KV_PART: u64 = 4;

/// Pods of one role.
pub(super) fn template(frame: &Frame<'_>, role: Role<'_>) -> Result<Template, Vec<Fault>> {
    let (component, per_pod) = match role {
        Role::Target { draft_devices } => (Component::Worker, devices::per_target(frame.pool, draft_devices)),
        Role::Draft(draft) => (Component::Draft, draft.devices.map_or(0, std::num::NonZeroU32::get)),
    };
    let mut template = pod_template(frame, role);
    if let Some(patch) = &frame.pool.patch {
        template.merge_from(patch.clone());
        keep_gate(&mut template, component);
    }
    Ok(Template {
        prefix: frame.names.component(component),
        labels: frame.names.selector(component),
        body: serde_json::to_value(template).map_err(|error| vec![super::frame::unserialisable(&error)])?,
        port: WORKER_PORT,
        metrics_port: WORKER_METRICS_PORT,
        accelerator: devices::accelerator(frame.pool, per_pod),
    })
}

/// Services that list pods, ready or not: routers ask each one themselves.
pub(super) fn services(frame: &Frame<'_>) -> Vec<Service> {
    let list = |name: String, component: Component| Service {
        metadata: frame.metadata(name, Some(component)),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".to_owned()),
            publish_not_ready_addresses: Some(true),
            selector: Some(frame.names.selector(component)),
            ports: Some(vec![grpc_port(), service_port("metrics", WORKER_METRICS_PORT)]),
            ..ServiceSpec::default()
        }),
        status: None,
    };
    let mut services = vec![list(frame.names.workers(), Component::Worker)];
    if frame.pool.draft_pods() {
        services.push(list(frame.names.drafts(), Component::Draft));
    }
    services
}

fn pod_template(frame: &Frame<'_>, role: Role<'_>) -> PodTemplateSpec {
    let pool = frame.pool;
    let (component, model, size, asked) = match role {
        Role::Target { draft_devices } => {
            (Component::Worker, &pool.model, pool.engine.pod, devices::of_target(frame, draft_devices))
        }
        Role::Draft(draft) => (Component::Draft, &draft.model, draft.size, devices::of_draft(frame, draft)),
    };
    let mounted = volumes(frame, role, model);
    let fetch = model.source.is_fetched();
    let bytes_max = match role {
        Role::Target { .. } => pool.engine.model_bytes_max,
        Role::Draft(draft) => draft.size.memory,
    };
    let container = Container {
        args: Some(arguments(pool, role, model)),
        env: Some(vec![from_field("KVASIR_UID", "metadata.name")]),
        ports: Some(vec![pod::port("grpc", WORKER_PORT), pod::port("metrics", WORKER_METRICS_PORT)]),
        resources: Some(resources(size, ephemeral(pool, role, model), &asked)),
        startup_probe: Some(pod::probe("/readyz", &startup(bytes_max, fetch))),
        readiness_probe: Some(pod::probe("/readyz", &Patience { period: 5, timeout: 3, failures: 3 })),
        liveness_probe: Some(pod::probe("/healthz", &LIVENESS)),
        ..pod::container(WORKER_CONTAINER, &pool.images.worker, &pool.images, &mounted)
    };
    let mut spec = pod::pod(frame, component, container, mounted);
    spec.termination_grace_period_seconds = Some(seconds(pool.stream_max + DRAIN_MARGIN) as i64);
    spec.resource_claims = asked.claim.map(|(claim, _)| vec![claim]);
    let mut template = PodTemplateSpec { metadata: Some(metadata(frame, component, model)), spec: Some(spec) };
    keep_gate(&mut template, component);
    template
}

fn metadata(frame: &Frame<'_>, component: Component, model: &Model) -> ObjectMeta {
    let mut annotations: BTreeMap<String, String> = [
        ("kubectl.kubernetes.io/default-container".to_owned(), WORKER_CONTAINER.to_owned()),
        ("kvasir.dev/bearer-digest".to_owned(), frame.bearer_digest.clone()),
    ]
    .into();
    // Other bytes behind the same path: only this makes the pool roll on to them.
    annotations.extend(model.revision.iter().map(|revision| ("kvasir.dev/model-revision".to_owned(), revision.clone())));
    ObjectMeta { name: None, annotations: Some(annotations), ..frame.metadata(String::new(), Some(component)) }
}

/// Workers gate their readiness by what routers say, whatever a patch asks for; no router knows draft pods.
fn keep_gate(template: &mut PodTemplateSpec, component: Component) {
    let Some(spec) = template.spec.as_mut().filter(|_| component == Component::Worker) else { return };
    let gates = spec.readiness_gates.get_or_insert_default();
    if gates.iter().all(|gate| gate.condition_type != ROUTABLE) {
        gates.push(PodReadinessGate { condition_type: ROUTABLE.to_owned() });
    }
}

fn arguments(pool: &Pool, role: Role<'_>, model: &Model) -> Vec<String> {
    let engine = &pool.engine;
    let mut arguments = vec![
        format!("--listen=0.0.0.0:{WORKER_PORT}"),
        format!("--metrics=0.0.0.0:{WORKER_METRICS_PORT}"),
        format!("--secret-file={BEARER_FILE}"),
        format!("--cache={CACHE}"),
    ];
    arguments.extend(model_arguments(model));
    match role {
        Role::Target { .. } => {
            arguments.push(format!("--served-name={}", literal(&pool.served_name)));
            arguments.push(format!("--threads={}", engine.threads));
            arguments.push(format!("--kv-bytes={}", engine.kv_bytes));
        }
        Role::Draft(draft) => {
            arguments.push("--role=draft".to_owned());
            arguments.push(format!("--served-name={}", literal(&pool.served_name)));
            arguments.push(format!("--threads={}", (draft.size.millicores / 1_000).max(1)));
            arguments.push(format!("--kv-bytes={}", draft.size.memory / DRAFT_KV_PART));
        }
    }
    arguments.extend([
        format!("--block-size={}", engine.block_size),
        format!("--sequences={}", engine.sequences),
        format!("--step-tokens={}", engine.step_tokens),
        format!("--step-ms={}", engine.step_ms),
    ]);
    arguments.extend(engine.context.map(|tokens| format!("--context={tokens}")));
    let cache = match pool.prefix_cache {
        CacheMode::Auto => "auto",
        CacheMode::On => "on",
        CacheMode::Off => "off",
    };
    arguments.extend([
        format!("--prefix-cache={cache}"),
        format!("--drain-seconds={}", seconds(pool.stream_max)),
        "--log-format=json".to_owned(),
        format!("--log={}", literal(&pool.telemetry.log)),
    ]);
    if let Some(endpoint) = &pool.telemetry.otlp {
        arguments.push(format!("--otlp={}", literal(endpoint)));
        arguments.push(format!("--trace-sampling={}", pool.telemetry.sampling));
    }
    arguments
}

fn model_arguments(model: &Model) -> Vec<String> {
    let place = match &model.source {
        Source::HuggingFace { repo, commit, file, .. } => {
            let file = file.as_ref().map_or_else(String::new, |file| format!("/{file}"));
            format!("hf://{repo}@{commit}{file}")
        }
        Source::Https { url, .. } => url.clone(),
        Source::Claim { path, .. } | Source::Image { path, .. } => format!("{MODEL}/{path}"),
        Source::File { path } => path.clone(),
    };
    let mut arguments = vec![format!("--model={}", literal(&place))];
    if let Source::Https { sha256, .. } = &model.source {
        arguments.push(format!("--model-sha256={sha256}"));
    }
    arguments.extend(model.source.token().map(|token| format!("--model-token-file={TOKEN}/{}", token.key)));
    arguments.extend(model.digest.as_ref().map(|digest| format!("--model-digest={digest}")));
    arguments
}

fn volumes(frame: &Frame<'_>, role: Role<'_>, model: &Model) -> Vec<Mounted> {
    let pool = frame.pool;
    let claim = |claim: &str, read_only: bool| Volume {
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim.to_owned(),
            read_only: read_only.then_some(true),
        }),
        ..Volume::default()
    };
    let cache = match &pool.cache_claim {
        Some(name) => claim(name, false),
        None => pod::empty_dir(cache_bytes(pool, role, model), None),
    };
    let mut mounted = vec![Mounted::scratch(), Mounted::bearer(frame), Mounted::writable("cache", CACHE, cache)];
    match &model.source {
        Source::Claim { claim: name, .. } => mounted.push(Mounted::read_only("model", MODEL, claim(name, true))),
        Source::Image { image, .. } => {
            let source = ImageVolumeSource { reference: Some(image.clone()), pull_policy: Some("IfNotPresent".to_owned()) };
            mounted.push(Mounted::read_only("model", MODEL, Volume { image: Some(source), ..Volume::default() }));
        }
        Source::HuggingFace { .. } | Source::Https { .. } | Source::File { .. } => {}
    }
    mounted.extend(model.source.token().map(|token| Mounted::secret("token", TOKEN, &token.name, &token.key)));
    if matches!(role, Role::Target { .. }) {
        let tier = pool.host_tier.as_ref().filter(|tier| tier.survives_restart);
        mounted.extend(tier.map(|tier| Mounted::writable("host-tier", HOST_TIER, pod::empty_dir(tier.bytes, Some("Memory")))));
        mounted.extend(pool.disk_tier.map(|size| Mounted::writable("disk-tier", DISK_TIER, pod::empty_dir(size, None))));
    }
    mounted
}

/// Room for the cache of a pod without a claim.
fn cache_bytes(pool: &Pool, role: Role<'_>, model: &Model) -> u64 {
    let model_bytes = match role {
        Role::Target { .. } => pool.engine.model_bytes_max,
        Role::Draft(draft) => draft.size.memory,
    };
    if model.source.is_fetched() { model_bytes.saturating_add(FETCH_MARGIN_BYTES) } else { DIGESTS_BYTES }
}

/// Disk of the node that a pod fills, if it is worth a request.
fn ephemeral(pool: &Pool, role: Role<'_>, model: &Model) -> u64 {
    let fetched = model.source.is_fetched() && pool.cache_claim.is_none();
    let cache = if fetched { cache_bytes(pool, role, model) } else { 0 };
    let tier = pool.disk_tier.filter(|_| matches!(role, Role::Target { .. }));
    cache.saturating_add(tier.unwrap_or(0))
}

fn resources(size: Size, ephemeral: u64, asked: &PodDevices) -> ResourceRequirements {
    let devices = asked.resource.iter().map(|(name, count)| (name.clone(), Quantity(count.to_string())));
    let mut limits: BTreeMap<String, Quantity> = devices.collect();
    limits.insert("memory".to_owned(), bytes(size.memory));
    let mut requests = limits.clone();
    requests.insert("cpu".to_owned(), cores(size.millicores));
    if ephemeral > 0 {
        requests.insert("ephemeral-storage".to_owned(), bytes(ephemeral));
    }
    let claims = asked.claim.as_ref().map(|(_, claim)| vec![claim.clone()]);
    ResourceRequirements { limits: Some(limits), requests: Some(requests), claims }
}

/// How long a start may take: until weights of the largest size that fits are read, or fetched and read.
fn startup(bytes_max: u64, fetch: bool) -> Patience {
    let rate = if fetch { FETCH_RATE_MIN } else { LOAD_RATE_MIN };
    let looks = (START_SECONDS + bytes_max / rate).div_ceil(STARTUP_PERIOD as u64);
    Patience { period: STARTUP_PERIOD, timeout: 2, failures: i32::try_from(looks).unwrap_or(i32::MAX) }
}

/// Whole seconds, rounded up.
fn seconds(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

/// A variable with a field of the pod.
pub(super) fn from_field(name: &str, path: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { field_path: path.to_owned(), ..ObjectFieldSelector::default() }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    }
}
