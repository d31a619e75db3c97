//! Steps: a plan carried out on pods.
//!
//! Owns the requests behind each step, all of them conditional on the pod's uid, so that a step meant for one pod never meets its successor.
//! Refuses to decide. A step that fails leaves the others to be tried; the next pass plans anew.

use super::events::Occurrence;
use super::pass::Pass;
use crate::api::ConditionReason;
use crate::apply::{FIELD_MANAGER, answered};
use crate::design::{DRAIN_SINCE, Template, WORKER_CONTAINER};
use crate::rollout::{Revision, Step, Why};
use crate::status::Fault;
use crate::world::SeenPod;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::json;

/// Most steps of one pass; the rest is planned anew.
const STEPS_MAX: usize = 64;

/// Pods of one role and what they are made from.
pub(super) struct Role<'a> {
    pub(super) template: &'a Template,
    pub(super) seen: &'a [SeenPod],
    /// Whether `seen` was read from the API server in this pass.
    pub(super) fresh: bool,
}

// === impl Pass ===

impl Pass<'_> {
    /// Carries out what one plan asks for.
    pub(super) async fn carry_out(&mut self, role: &Role<'_>, steps: &[Step]) {
        for step in steps.iter().take(STEPS_MAX) {
            if self.lost_lead() {
                return;
            }
            match step {
                Step::Create { index, revision } => self.create(role, *index, revision).await,
                Step::PatchImage { name, image } => self.patch_image(role, name, image).await,
                Step::BeginDrain { name, why } => self.begin_drain(role, name, *why).await,
                Step::Delete { name, why } => self.delete(role, name, *why).await,
            }
        }
    }

    async fn create(&mut self, role: &Role<'_>, index: u32, revision: &Revision) {
        let name = role.template.name(index);
        // A plan asks only for revisions that can be made.
        let Some(template) = made_from(role, revision) else { return };
        let pod: Pod = match serde_json::from_value(template.pod(index)) {
            Ok(pod) => pod,
            Err(error) => {
                return self.fault(Fault::new(ConditionReason::InvalidSpec, format!("Pod {name} cannot be written: {error}")));
            }
        };
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        match answered(self.pods_api().create(&params, &pod)).await {
            Ok(made) => {
                self.memory.wrote(&made);
                self.created.push(name.clone());
                self.did("create", Occurrence::normal("PodCreated", "Create", format!("created pod {name}")));
            }
            Err(error) if error.is_conflict() && role.fresh => {
                let text = format!("Pod {name} exists and does not belong to this pool; rename or remove it");
                self.fault(Fault::new(ConditionReason::NameTaken, text));
            }
            Err(error) if error.is_conflict() => self.memory.unsure(),
            Err(error) => self.failed(&error, "create", &name),
        }
    }

    async fn patch_image(&mut self, role: &Role<'_>, name: &str, image: &str) {
        let Some(seen) = find(role, name) else { return };
        // A container that starts anew takes work again, so its drain ends with the same write.
        let patch = json!({"metadata": {"uid": seen.uid, "annotations": {DRAIN_SINCE: null}},
            "spec": {"containers": [{"name": WORKER_CONTAINER, "image": image}]}});
        match answered(self.pods_api().patch(name, &params(), &Patch::Strategic(patch))).await {
            Ok(pod) => {
                self.memory.wrote(&pod);
                let text = format!("changed the image of pod {name} in place to {image}");
                self.did("patch_image", Occurrence::normal("ImageChanged", "Patch", text));
            }
            Err(error) => self.failed(&error, "patch", name),
        }
    }

    async fn begin_drain(&mut self, role: &Role<'_>, name: &str, why: Why) {
        let Some(seen) = find(role, name) else { return };
        let since = self.context.clock.now().to_string();
        let patch = json!({"metadata": {"uid": seen.uid, "annotations": {DRAIN_SINCE: since}}});
        match answered(self.pods_api().patch(name, &params(), &Patch::Strategic(patch))).await {
            Ok(pod) => {
                self.memory.wrote(&pod);
                let text = format!("pod {name} drains: {}", because(why));
                self.did("drain", Occurrence::normal("PodDrains", "Drain", text));
                self.tell_drain(seen).await;
            }
            Err(error) => self.failed(&error, "patch", name),
        }
    }

    async fn delete(&mut self, role: &Role<'_>, name: &str, why: Why) {
        let Some(seen) = find(role, name) else { return };
        let params = DeleteParams {
            preconditions: Some(Preconditions { uid: Some(seen.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        // Noted first: if the answer is lost, the pod may be on its way out all the same.
        self.memory.ours.insert(seen.uid.clone());
        match answered(self.pods_api().delete(name, &params)).await {
            Ok(deleted) => {
                match deleted.left() {
                    Some(pod) if pod.metadata.deletion_timestamp.is_some() => self.memory.wrote(&pod),
                    _ => self.memory.gone(name, &seen.uid),
                }
                let text = format!("deleted pod {name}: {}", because(why));
                self.did("delete", Occurrence::normal("PodDeleted", "Delete", text));
            }
            Err(error) if error.is_not_found() => self.memory.gone(name, &seen.uid),
            Err(error) => self.failed(&error, "delete", name),
        }
    }

    pub(super) fn pods_api(&self) -> Api<Pod> {
        Api::namespaced(self.context.client.clone(), &self.pool.namespace().unwrap_or_default())
    }

    fn failed(&mut self, error: &crate::apply::RequestError, verb: &'static str, name: &str) {
        self.memory.unsure();
        if error.is_not_found() || error.is_conflict() {
            // The pod is another one than was planned for; the next pass sees which.
            self.writes += 1;
        } else {
            self.request_failed(error, verb, &format!("Pod {name}"));
        }
    }
}

fn made_from(role: &Role<'_>, revision: &Revision) -> Option<Template> {
    if role.template.revision() == *revision {
        return Some(role.template.clone());
    }
    let told = role.seen.iter().filter_map(|seen| seen.template.as_deref());
    told.into_iter().find_map(|text| role.template.recall(text, revision))
}

fn find<'a>(role: &Role<'a>, name: &str) -> Option<&'a SeenPod> {
    role.seen.iter().find(|seen| seen.pod.name == name)
}

fn params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

fn because(why: Why) -> &'static str {
    match why {
        Why::Dead => "it has ended",
        Why::Excess => "there are more pods than wanted",
        Why::Outdated => "a newer template is wanted",
        Why::OutdatedBroken => "a newer template is wanted and it cannot serve",
    }
}
