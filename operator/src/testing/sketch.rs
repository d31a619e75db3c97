//! A blueprint of few lines: enough of a pool that a controller has all kinds of work with it.

use super::DEVICE;
use crate::api::{ConditionReason, RolloutMode, ServingPool};
use crate::apply::Desired;
use crate::design::{Accelerator, Blueprint, Design, Found, ROUTABLE, Reference, RolloutRules, RouterDesign, Template};
use crate::names::{Component, Names, selector_text};
use crate::rollout::Mode;
use crate::status::{Fault, ModelFacts};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::ResourceExt as _;
use kube::core::ApiResource;
use kvasir_proto::auth::BearerSecret;
use serde_json::{Value, json};

/// Reads pools. The label `drafts` asks for so many draft pods, `pair` for two devices per worker or else one without draft; the image `broken-spec` of the router stands for a spec that cannot be served.
pub(crate) struct Sketch;

// === impl Sketch ===

impl Sketch {
    pub(crate) fn kinds() -> Vec<ApiResource> {
        vec![ApiResource::erase::<Secret>(&()), ApiResource::erase::<ConfigMap>(&()), ApiResource::erase::<Deployment>(&())]
    }
}

fn metadata(pool: &ServingPool, name: &str, labels: &std::collections::BTreeMap<String, String>) -> Value {
    json!({"name": name, "namespace": pool.namespace(), "labels": labels, "ownerReferences": [{"apiVersion": "kvasir.dev/v1alpha1",
        "kind": "ServingPool", "name": pool.name_any(), "uid": pool.uid(), "controller": true, "blockOwnerDeletion": true}]})
}

fn objects(pool: &ServingPool, names: &Names) -> Vec<Desired> {
    let spec = &pool.spec;
    let desired = |resource: ApiResource, name: &str, content: Value| {
        let mut body = content;
        body["metadata"] = metadata(pool, name, &names.labels());
        Desired::from_value(resource, body).unwrap()
    };
    let router = names.component_labels(Component::Router);
    let mut objects = vec![
        desired(ApiResource::erase::<Secret>(&()), &names.bearer(), json!({"data": {"bearer": "MDEyMzQ1Njc4OWFiY2RlZg=="}}))
            .kept(),
        desired(
            ApiResource::erase::<ConfigMap>(&()),
            &names.router_flags(),
            json!({"data": {"sampling": spec.observability.sampling}}),
        ),
        desired(
            ApiResource::erase::<Deployment>(&()),
            &names.component(Component::Router),
            json!({"spec": {"replicas": spec.router.replicas, "template": {"metadata": {"labels": router}, "spec": {"containers": [
                {"name": "router", "image": "r"}]}}}}),
        ),
    ];
    // A part of the pool that can be switched off.
    if spec.network_policy == crate::api::NetworkPolicyMode::Managed {
        objects.push(desired(ApiResource::erase::<ConfigMap>(&()), &names.monitor(), json!({"data": {"extra": "yes"}})));
    }
    objects
}

impl Blueprint for Sketch {
    fn references(&self, pool: &ServingPool) -> Vec<Reference> {
        vec![Reference::Secret(Names::new(&pool.name_any()).bearer())]
    }

    fn design(&self, pool: &ServingPool, found: &Found) -> Result<Design, Vec<Fault>> {
        let (spec, names) = (&pool.spec, Names::new(&pool.name_any()));
        if spec.images.router.as_deref() == Some("broken-spec") {
            return Err(vec![Fault::new(
                ConditionReason::InvalidSpec,
                "spec.images.router: `broken-spec` is no image; name one",
            )]);
        }
        let objects = objects(pool, &names);
        let stream_max = spec.max_stream_duration.parse().unwrap();
        let rollout = &spec.rollout;
        let labelled = |name: &str| pool.labels().get(name);
        let worker = |role: &str, component: Component, devices: &str| Template {
            prefix: names.component(component),
            labels: names.selector(component),
            body: json!({"metadata": {"namespace": pool.namespace(), "labels": names.component_labels(component),
                "ownerReferences": metadata(pool, "", &names.labels())["ownerReferences"]},
                "spec": {"terminationGracePeriodSeconds": stream_max.as_secs() + 30,
                    "readinessGates": if component == Component::Worker { json!([{"conditionType": ROUTABLE}]) } else { json!([]) },
                    "containers": [{"name": "worker", "image": spec.images.worker, "args": [role, spec.observability.log],
                        "resources": {"limits": {DEVICE: devices}}}]}}),
            port: 7401,
            metrics_port: 7402,
            accelerator: Accelerator::InRequests,
        };
        let replicas = spec.replicas as u32;
        Ok(Design {
            objects,
            workers: worker("worker", Component::Worker, if labelled("pair").is_some() { "2" } else { "1" }),
            without_draft: labelled("pair").map(|_| worker("worker", Component::Worker, "1")),
            drafts: labelled("drafts").map(|count| (worker("draft", Component::Draft, "1"), count.parse().unwrap())),
            routers: RouterDesign {
                labels: names.selector(Component::Router),
                replicas: spec.router.replicas as u32,
                admin_port: 7301,
                metrics_port: 7302,
            },
            bearer: found.secrets.contains_key(&names.bearer()).then(|| BearerSecret::new("0123456789abcdef").unwrap()),
            selector: selector_text(&names.selector(Component::Worker)),
            rollout: RolloutRules {
                replicas,
                mode: match rollout.mode {
                    RolloutMode::Auto => Mode::Auto,
                    RolloutMode::InPlace => Mode::InPlace,
                    RolloutMode::SurgeFree => Mode::SurgeFree,
                    RolloutMode::Surge => Mode::Surge,
                },
                max_unavailable: rollout.max_unavailable.of_rounded_down(replicas).unwrap(),
                max_surge: rollout.max_surge.of_rounded_up(replicas).unwrap(),
                progress_deadline: rollout.progress_deadline.parse().unwrap(),
                stream_max,
                paused: spec.paused,
            },
            model: ModelFacts { name: pool.name_any(), ..ModelFacts::default() },
            draft: labelled("pair").or(labelled("drafts")).is_some(),
            link: None,
            survives: None,
            notes: Vec::new(),
        })
    }
}
