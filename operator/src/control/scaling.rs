//! Scaling: how many workers a pass aims at.
//!
//! Owns where the number comes from: the spec, or the pool's own scaler fed with what Ready routers count. Never writes `spec.replicas`; what
//! the scaler decided is `status.desiredReplicas`, and from there a new process goes on.

use super::Context;
use super::ask;
use super::observe::Look;
use super::pass::Pass;
use crate::api::{ConditionReason, ScalingStatus, ServingPool};
use crate::apply::answered;
use crate::design::Design;
use crate::rollout::Health;
use crate::scale::{Course, Rules, Sample};
use crate::status::{Fault, Note};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use kube::api::{Api, ListParams};
use kube::{Resource as _, ResourceExt};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Routers that are scraped at once for one pool.
const SCRAPES_MAX: usize = 8;
/// Time between two looks for autoscalers that target the pool.
const RIVALS_INTERVAL: Duration = Duration::from_mins(1);

// === impl Pass ===

impl Pass<'_> {
    /// Wished workers, with what the scaler says of them.
    pub(super) async fn scale(&mut self, design: &Design, look: &Look) -> (u32, Option<ScalingStatus>, Vec<Note>) {
        let asked = design.rollout.replicas;
        let rules = match Rules::read(&self.pool.spec) {
            Ok(Some(rules)) => rules,
            Ok(None) => return (asked, None, Vec::new()),
            Err(error) => {
                self.fault(Fault::new(ConditionReason::InvalidSpec, format!("spec.scaling: {error}")));
                return (asked, None, Vec::new());
            }
        };
        let former = self.former();
        let current = former.as_ref().and_then(|status| status.desired_replicas).map_or(asked, |desired| desired.max(0) as u32);
        let current = current.clamp(rules.bounds.0, rules.bounds.1);
        let routable = look.workers.iter().filter(|seen| seen.pod.health == Health::Routable).count() as u32;
        let now = Instant::now();
        if self.memory.scaler.is_due(now) {
            let answers = scrape(self.context, design, look).await;
            let decision = self.memory.scaler.decide(&rules, (current, routable), &answers, now);
            self.context.metrics.scaled(match decision.course {
                Course::Kept => "kept",
                Course::Out => "out",
                Course::In => "in",
                Course::Held => "held",
            });
        }
        let mut notes = self.rivals(now).await;
        let Some(decision) = self.memory.scaler.last() else { return (current, None, notes) };
        if decision.course == Course::Held {
            notes.push(Note { reason: ConditionReason::MissingMetrics, message: decision.message.clone() });
        }
        let desired = decision.desired.clamp(rules.bounds.0, rules.bounds.1);
        let before = former.and_then(|status| status.scaling).and_then(|scaling| scaling.changed_at);
        let changed_at = if desired == current { before } else { Some(self.context.clock.time()) };
        (desired, Some(ScalingStatus { changed_at, message: Some(decision.message.clone()) }), notes)
    }

    /// Autoscalers that believe to scale this pool.
    async fn rivals(&mut self, now: Instant) -> Vec<Note> {
        if self.memory.rivals.as_ref().is_none_or(|(at, _)| now.duration_since(*at) >= RIVALS_INTERVAL) {
            let api: Api<HorizontalPodAutoscaler> =
                Api::namespaced(self.context.client.clone(), &self.pool.namespace().unwrap_or_default());
            let found = match answered(api.list(&ListParams::default())).await {
                Ok(list) => list.items.iter().filter(|it| targets(it, self.pool)).map(ResourceExt::name_any).collect(),
                Err(error) => {
                    tracing::debug!(%error, "autoscalers cannot be listed");
                    Vec::new()
                }
            };
            self.memory.rivals = Some((now, found));
        }
        let found = self.memory.rivals.iter().flat_map(|(_, names)| names);
        let note = |name: &String| Note {
            reason: ConditionReason::AutoscalerConflict,
            message: format!(
                "HorizontalPodAutoscaler {name} targets this pool, whose scaling.owner is Operator, and has no effect; remove it, or set scaling.owner to External"
            ),
        };
        found.map(note).collect()
    }
}

async fn scrape(context: &Context, design: &Design, look: &Look) -> BTreeMap<String, Result<Sample, String>> {
    let ask = |router: &crate::world::RouterPod| {
        let (name, address) = (router.name.clone(), ask::address(&router.ip, design.routers.metrics_port));
        async move {
            let text = context.admin.metrics(&address).await.map_err(|error| error.to_string());
            (name, text.and_then(|text| Sample::read(&text)))
        }
    };
    let calls: Vec<_> = look.routers.iter().map(ask).collect();
    stream::iter(calls).buffered(SCRAPES_MAX).collect().await
}

fn targets(autoscaler: &HorizontalPodAutoscaler, pool: &ServingPool) -> bool {
    autoscaler.spec.as_ref().is_some_and(|spec| {
        let target = &spec.scale_target_ref;
        let group = target.api_version.as_deref().and_then(|version| version.split_once('/')).map(|(group, _)| group);
        target.kind == ServingPool::kind(&()) && target.name == pool.name_any() && group == Some(&*ServingPool::group(&()))
    })
}
