//! Design: what a pool turns into, in the form that the shell carries out.
//!
//! Owns the border between the pure road (spec → objects) and the shell. Refuses to know how a spec is read: a [`Blueprint`] does. The shell
//! never looks into a spec, so whatever a pool means stands in one place.

use crate::api::{ConditionReason, ServingPool};
use crate::apply::Desired;
use crate::rollout::{Mode, Revision};
use crate::status::{Fault, ModelFacts, Note};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kvasir_proto::auth::BearerSecret;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Reads pools.
pub trait Blueprint: Send + Sync {
    /// Objects that have to be read before the pool can be designed.
    fn references(&self, pool: &ServingPool) -> Vec<Reference>;

    /// What the pool turns into, or why it cannot be served as written.
    fn design(&self, pool: &ServingPool, found: &Found) -> Result<Design, Vec<Fault>>;
}

/// An object in the pool's namespace that its spec names.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reference {
    /// A Secret.
    Secret(String),
    /// A ConfigMap.
    ConfigMap(String),
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Secrets by name; those that do not exist are absent.
    pub secrets: BTreeMap<String, Arc<Secret>>,
    /// ConfigMaps by name; those that do not exist are absent.
    pub config_maps: BTreeMap<String, Arc<ConfigMap>>,
}

/// What a pool turns into.
#[derive(Clone, Debug)]
pub struct Design {
    /// Every object but pods.
    pub objects: Vec<Desired>,
    /// The workers.
    pub workers: Template,
    /// The workers without devices for their draft: used instead where the scheduler finds no pair for `workers`, if the pool asks for
    /// service without draft in that case.
    pub without_draft: Option<Template>,
    /// Draft pods with their number; SeparatePod only.
    pub drafts: Option<(Template, u32)>,
    /// The routers.
    pub routers: RouterDesign,
    /// What components of the pool show each other; absent while its Secret does not exist.
    pub bearer: Option<BearerSecret>,
    /// Label selector of the workers, for /scale.
    pub selector: String,
    /// How workers are replaced.
    pub rollout: RolloutRules,
    /// What is known of the model from the spec alone.
    pub model: ModelFacts,
    /// Whether a draft is asked for.
    pub draft: bool,
    /// Attribute that the devices of a worker and of its draft have to share; absent where nothing ties them.
    pub link: Option<String>,
    /// What a change in place keeps, for people.
    pub survives: Option<String>,
    /// What is served otherwise than asked for.
    pub notes: Vec<Note>,
}

/// How pods of one role are made.
#[derive(Clone, PartialEq, Debug)]
pub struct Template {
    /// Names are this, a dash and an index.
    pub prefix: String,
    /// Labels by which pods of this role and pool are found.
    pub labels: BTreeMap<String, String>,
    /// A pod without name, with `metadata` (namespace, labels, owner) and `spec`.
    pub body: Value,
    /// Port of the worker's gRPC service.
    pub port: u16,
    /// Port of /metrics and /readyz.
    pub metrics_port: u16,
    /// Devices that one pod needs, for counting free ones: extended resource or device class.
    pub accelerator: Accelerator,
}

/// What kind of device a pod needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Accelerator {
    /// None, or an extended resource: it stands in the pod's requests.
    InRequests,
    /// Devices of a class, through claims.
    Class {
        /// Name of the DeviceClass.
        name: String,
        /// Devices per pod.
        count: u32,
    },
}

/// The routers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouterDesign {
    /// Labels by which router pods are found.
    pub labels: BTreeMap<String, String>,
    /// Wanted.
    pub replicas: u32,
    /// Port of the admin service.
    pub admin_port: u16,
    /// Port of /metrics.
    pub metrics_port: u16,
}

/// How workers are replaced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RolloutRules {
    /// Workers that the spec asks for.
    pub replicas: u32,
    /// How.
    pub mode: Mode,
    /// How many may be unroutable.
    pub max_unavailable: u32,
    /// How many there may be beyond.
    pub max_surge: u32,
    /// Time without a move after which a rollout counts as failed.
    pub progress_deadline: Duration,
    /// Longest stream.
    pub stream_max: Duration,
    /// Whether nothing is to be rolled.
    pub paused: bool,
}

/// Name of the container in a worker pod that serves.
pub const WORKER_CONTAINER: &str = "worker";
/// Annotation: index among the pods of one role.
pub const INDEX: &str = "kvasir.dev/index";
/// Annotation: hash of the template without its image.
pub const SHAPE: &str = "kvasir.dev/shape";
/// Annotation: the template without its image, so that a lost pod can be made again while another revision is being rolled out.
pub const TEMPLATE: &str = "kvasir.dev/template";
/// Annotation: since when the pod drains.
pub const DRAIN_SINCE: &str = "kvasir.dev/drain-since";
/// Pod condition and readiness gate: taken by every Ready router.
pub const ROUTABLE: &str = "kvasir.dev/routable";

// === impl Template ===

impl Template {
    /// What a pod of it is made from.
    pub fn revision(&self) -> Revision {
        let mut body = self.body.clone();
        let image = image_mut(&mut body).map(Value::take).unwrap_or_default();
        Revision { shape: crate::apply::content_hash(&body), image: image.as_str().unwrap_or_default().to_owned() }
    }

    /// Hash of shape and image, for names and status.
    pub fn hash(&self) -> String {
        revision_hash(&self.revision())
    }

    /// Name of the pod of an index.
    pub fn name(&self, index: u32) -> String {
        format!("{}-{index}", self.prefix)
    }

    /// The pod of an index.
    pub fn pod(&self, index: u32) -> Value {
        let revision = self.revision();
        let mut body = self.body.clone();
        body["apiVersion"] = "v1".into();
        body["kind"] = "Pod".into();
        body["metadata"]["name"] = self.name(index).into();
        body["metadata"]["annotations"][INDEX] = index.to_string().into();
        body["metadata"]["annotations"][SHAPE] = revision.shape.into();
        body["metadata"]["annotations"][TEMPLATE] = self.body.to_string().into();
        body
    }

    /// The template that a pod of another revision was made from, as the pod tells it; `None` if it does not.
    pub fn recall(&self, text: &str, revision: &Revision) -> Option<Self> {
        let mut body: Value = serde_json::from_str(text).ok()?;
        *image_mut(&mut body)? = revision.image.clone().into();
        let recalled = Self { body, ..self.clone() };
        (recalled.revision() == *revision).then_some(recalled)
    }
}

/// Short hash of a revision.
pub fn revision_hash(revision: &Revision) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(revision.shape.as_bytes()).update(&[0]).update(revision.image.as_bytes());
    hasher.finalize().to_hex()[..10].to_owned()
}

fn image_mut(body: &mut Value) -> Option<&mut Value> {
    let containers = body.pointer_mut("/spec/containers")?.as_array_mut()?;
    containers.iter_mut().find(|container| container["name"] == WORKER_CONTAINER)?.get_mut("image")
}

impl Found {
    /// A value in a Secret, or what is missing.
    pub fn secret_value(&self, name: &str, key: &str) -> Result<&[u8], Fault> {
        let secret = self.secrets.get(name).ok_or_else(|| {
            Fault::new(ConditionReason::MissingObject, format!("Secret {name} does not exist; create it with the key `{key}`"))
        })?;
        secret
            .data
            .as_ref()
            .and_then(|data| data.get(key))
            .map(|value| &*value.0)
            .ok_or_else(|| Fault::new(ConditionReason::MissingObject, format!("Secret {name} has no key `{key}`; add it")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn template(image: &str, argument: &str) -> Template {
        Template {
            prefix: "p-worker".to_owned(),
            labels: BTreeMap::new(),
            body: json!({"metadata": {"namespace": "ns"}, "spec": {"containers": [
                {"name": "sidecar", "image": "s"}, {"name": "worker", "image": image, "args": [argument]}]}}),
            port: 7401,
            metrics_port: 7402,
            accelerator: Accelerator::InRequests,
        }
    }

    #[test]
    fn revisions_differ_in_image_only_if_only_the_workers_image_does() {
        let (one, two, other) =
            (template("i:1", "a").revision(), template("i:2", "a").revision(), template("i:1", "b").revision());
        assert_eq!((&one.shape, &*one.image, &*two.image), (&two.shape, "i:1", "i:2"));
        assert_ne!(one.shape, other.shape);
        assert_ne!(template("i:1", "a").hash(), template("i:2", "a").hash());
    }

    #[test]
    fn a_pod_carries_its_index_and_shape() {
        let pod = template("i:1", "a").pod(7);
        assert_eq!(pod["metadata"]["name"], "p-worker-7");
        assert_eq!(pod["metadata"]["annotations"][INDEX], "7");
        assert_eq!(pod["metadata"]["annotations"][SHAPE], template("i:9", "a").revision().shape);
    }

    #[test]
    fn a_pod_tells_what_it_was_made_from_even_after_its_image_changed_in_place() {
        let (old, new) = (template("i:1", "a"), template("i:1", "b"));
        let pod = old.pod(0);
        let text = pod["metadata"]["annotations"][TEMPLATE].as_str().unwrap();
        let patched = template("i:2", "a");
        assert_eq!(new.recall(text, &patched.revision()), Some(patched));
        assert_eq!(new.recall(text, &new.revision()), None, "another shape was asked for than the pod has");
        assert_eq!(new.recall("{}", &old.revision()), None);
    }
}
