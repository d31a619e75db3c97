//! What the routers say of the workers: who is routable, and whether all agree.

use crate::admin::Registered;
use crate::rollout::RouterView;
use crate::status::RouterSync;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use std::sync::Arc;

/// A router pod that can be asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouterPod {
    /// Its name.
    pub name: String,
    /// Its address without port.
    pub ip: String,
}

/// What one Ready router answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Its name.
    pub router: String,
    /// Its workers, or why it could not be asked.
    pub answer: Result<Registered, String>,
}

/// What all Ready routers answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RouterWorld {
    answers: Vec<Answer>,
    view: RouterView,
}

/// Whether a worker is routable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Routable {
    /// Every Ready router takes it.
    Yes,
    /// One does not; says which and why.
    No(String),
    /// Not every Ready router could be asked.
    Unknown,
}

/// Of `pods` those routers that are Ready and not leaving.
pub fn router_pods<'a>(pods: impl Iterator<Item = &'a Arc<Pod>>) -> Vec<RouterPod> {
    let mut routers: Vec<RouterPod> = pods
        .filter(|pod| pod.metadata.deletion_timestamp.is_none() && super::is_true(pod, "Ready"))
        .filter_map(|pod| Some(RouterPod { name: pod.name_any(), ip: pod.status.as_ref()?.pod_ip.clone()? }))
        .collect();
    routers.sort_by(|left, right| left.name.cmp(&right.name));
    routers
}

// === impl RouterWorld ===

impl RouterWorld {
    /// From the answers of every Ready router.
    pub fn new(answers: Vec<Answer>) -> Self {
        let silent = answers.iter().find_map(|it| it.answer.as_ref().err().map(|error| format!("router {}: {error}", it.router)));
        let view = match silent {
            _ if answers.is_empty() => RouterView::NoneReady,
            Some(error) => RouterView::Unreachable(error),
            None => RouterView::Known,
        };
        Self { answers, view }
    }

    /// Whether everyone could be asked.
    pub fn view(&self) -> &RouterView {
        &self.view
    }

    /// How many routers are Ready.
    pub fn ready(&self) -> u32 {
        self.answers.len() as u32
    }

    /// Requests that wait at all routers together; `None` if one could not be asked.
    pub fn waiting(&self) -> Option<u32> {
        self.answers.iter().map(|it| it.answer.as_ref().ok().map(|it| it.waiting)).sum()
    }

    /// Requests that all routers have open on a worker.
    pub fn in_flight(&self, name: &str, ip: Option<&str>) -> Option<u32> {
        let of = |registered: &Registered| {
            registered.workers.iter().filter(|it| is(&it.uid, &it.address, name, ip)).map(|it| it.in_flight).sum::<u32>()
        };
        self.answers.iter().map(|it| it.answer.as_ref().ok().map(of)).sum()
    }

    /// Which life of a worker routers speak to.
    pub fn incarnation(&self, name: &str, ip: Option<&str>) -> Option<&[u8]> {
        let registered = self.answers.iter().filter_map(|it| it.answer.as_ref().ok());
        registered.flat_map(|it| &it.workers).find(|it| is(&it.uid, &it.address, name, ip)).map(|it| &*it.incarnation)
    }

    /// Whether a worker is routable.
    pub fn routable(&self, name: &str, ip: Option<&str>) -> Routable {
        match &self.view {
            RouterView::NoneReady => return Routable::No("no router is Ready".to_owned()),
            RouterView::Unreachable(_) => return Routable::Unknown,
            RouterView::Known => {}
        }
        for Answer { router, answer } in &self.answers {
            let Ok(registered) = answer else { return Routable::Unknown };
            let Some(worker) = registered.workers.iter().find(|it| is(&it.uid, &it.address, name, ip)) else {
                return Routable::No(format!("router {router} does not know it"));
            };
            if let Some(refusal) = &worker.refusal {
                return Routable::No(format!("router {router}: {refusal}"));
            }
        }
        Routable::Yes
    }

    /// Whether every Ready router has a complete list with all `ready` workers on it, given by name and address, and keys that are not older than
    /// the Secret's version.
    pub fn sync<'a>(&self, ready: impl Iterator<Item = (&'a str, Option<&'a str>)>, keys_version: Option<&str>) -> RouterSync {
        match &self.view {
            RouterView::NoneReady => return RouterSync::NoneReady,
            RouterView::Unreachable(why) => return RouterSync::Unreachable(why.clone()),
            RouterView::Known => {}
        }
        let registered: Vec<_> = self.answers.iter().filter_map(|it| Some((&it.router, it.answer.as_ref().ok()?))).collect();
        if let Some((router, _)) = registered.iter().find(|(_, it)| !it.complete) {
            return RouterSync::CatchingUp(format!("router {router} has not probed every worker yet"));
        }
        if let Some((router, why)) = registered.iter().find_map(|(router, it)| Some((router, it.stale.as_ref()?))) {
            return RouterSync::CatchingUp(format!("router {router}: {why}"));
        }
        let number = |version: &str| version.parse::<u64>().ok();
        let older =
            |version: &str| number(version).zip(keys_version.and_then(number)).is_some_and(|(theirs, newest)| theirs < newest);
        if let Some((router, _)) = registered.iter().find(|(_, it)| older(&it.keys_version)) {
            return RouterSync::CatchingUp(format!("router {router} has not taken over the newest keys yet"));
        }
        for (name, ip) in ready {
            if let Routable::No(why) = self.routable(name, ip) {
                return RouterSync::CatchingUp(format!("worker {name}: {why}"));
            }
        }
        RouterSync::InSync
    }
}

/// A worker tells its pod's name; until it has told one, routers call it by its address.
fn is(uid: &str, address: &str, name: &str, ip: Option<&str>) -> bool {
    let host = address.trim_start_matches("http://").rsplit_once(':').map_or(address, |(host, _)| host);
    uid == name || ip.is_some_and(|ip| host.trim_matches(['[', ']']) == ip)
}
