//! Ask: what routers and workers of one pool are asked and told in a pass.
//!
//! Owns whom to call at which address, and that many are called at once within bounds. A drain is told to the routers first, so that nothing
//! new is on its way when the worker begins to refuse, and then to the worker; both can be told again and are, at each pass, until it ends.

use super::Context;
use crate::admin::{Cordon, Described};
use crate::design::Design;
use crate::world::{Answer, RouterPod, RouterWorld, SeenPod};
use futures::{StreamExt as _, stream};
use std::time::Duration;

/// Calls that are open at once for one pool.
const CALLS_MAX: usize = 16;
/// How much longer than the drain a router leaves a worker alone.
const CORDON_MARGIN: Duration = Duration::from_mins(1);
/// Longest cordon that routers accept.
const CORDON_MAX: Duration = Duration::from_hours(1);

/// What every Ready router says of the workers.
pub(super) async fn routers(context: &Context, design: &Design, routers: &[RouterPod]) -> RouterWorld {
    let ask = |router: RouterPod| async move {
        let answer = match &design.bearer {
            Some(bearer) => {
                let address = address(&router.ip, design.routers.admin_port);
                context.admin.workers(&address, bearer).await.map_err(|error| error.to_string())
            }
            None => Err("the Secret that the pool's components show each other does not exist yet".to_owned()),
        };
        Answer { router: router.name, answer }
    };
    let answers = stream::iter(routers.to_vec()).map(ask).buffered(CALLS_MAX).collect().await;
    RouterWorld::new(answers)
}

/// Tells a drain to routers and worker, and how many requests are left; `None` if someone cannot tell.
pub(super) async fn drain(
    context: &Context,
    design: &Design,
    routers: &[RouterPod],
    world: &RouterWorld,
    seen: &SeenPod,
) -> Option<u32> {
    let bearer = design.bearer.as_ref()?;
    let elapsed = seen.pod.draining.unwrap_or_default();
    let left = design.rollout.stream_max.saturating_sub(elapsed);
    let mut at_routers = Some(0u32);
    if let Some(incarnation) = world.incarnation(&seen.pod.name, seen.ip.as_deref()) {
        let time = (left + CORDON_MARGIN).min(CORDON_MAX);
        let cordon = Cordon { worker: &seen.pod.name, incarnation, time };
        let tell = |router: &RouterPod| {
            let address = address(&router.ip, design.routers.admin_port);
            async move { context.admin.cordon(&address, bearer, &cordon).await }
        };
        let calls: Vec<_> = routers.iter().map(tell).collect();
        let answers: Vec<_> = stream::iter(calls).buffered(CALLS_MAX).collect().await;
        for answer in answers {
            match answer {
                Ok(open) => at_routers = at_routers.map(|sum| sum.saturating_add(open)),
                Err(error) => {
                    tracing::debug!(%error, pod = seen.pod.name, "a router could not be told of a drain");
                    at_routers = None;
                }
            }
        }
    }
    if !seen.runs {
        return at_routers;
    }
    let worker = address(seen.ip.as_deref()?, design.workers.port);
    match context.admin.drain(&worker, bearer, left).await {
        Ok(drained) => at_routers.map(|open| open.max(drained.in_flight)),
        Err(error) => {
            tracing::debug!(%error, pod = seen.pod.name, "a worker could not be told to drain");
            None
        }
    }
}

/// What ready workers serve, in the order of `seen`; those who cannot tell are left out.
pub(super) async fn describe(context: &Context, design: &Design, seen: &[&SeenPod]) -> Vec<((String, i32), Described)> {
    let Some(bearer) = &design.bearer else { return Vec::new() };
    let ask = |pod: &&SeenPod| {
        let key = (pod.uid.clone(), pod.restarts);
        let worker = pod.ip.as_deref().map(|ip| address(ip, design.workers.port));
        async move { Some((key, context.admin.describe(&worker?, bearer).await.ok()?)) }
    };
    let calls: Vec<_> = seen.iter().map(ask).collect();
    stream::iter(calls).buffered(CALLS_MAX).filter_map(std::future::ready).collect().await
}

/// How much of its model each of `seen` has fetched, in percent; of those that say so the least.
pub(super) async fn fetched(context: &Context, design: &Design, seen: &[&SeenPod]) -> Option<u32> {
    let ask = |pod: &&SeenPod| {
        let worker = pod.ip.as_deref().map(|ip| address(ip, design.workers.metrics_port));
        async move { context.admin.fetched(&worker?).await.ok()? }
    };
    let calls: Vec<_> = seen.iter().map(ask).collect();
    let told: Vec<u32> = stream::iter(calls).buffered(CALLS_MAX).filter_map(std::future::ready).collect().await;
    told.into_iter().min()
}

/// Host and port; addresses of IPv6 stand in brackets.
pub(super) fn address(ip: &str, port: u16) -> String {
    if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
}
