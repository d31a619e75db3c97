//! Answers: routers and workers of a pool on played nodes, each on its pod's loopback address, over the real protocols.
//!
//! Owns the truth that only they know: who is registered where, who drains, how many streams are open. So it is here that each thing the
//! operator does is judged: at a drain, a deletion or a change of an image by what the operator was told last, at a creation by what exists.

use super::steps::Wish;
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use kvasir_operator::api::ServingPool;
use kvasir_proto::router as admin;
use kvasir_proto::router::router_admin_server::{RouterAdmin, RouterAdminServer};
use kvasir_proto::worker as wire;
use kvasir_proto::worker::worker_server::{Worker, WorkerServer};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tonic::{Request, Response, Status};

/// Streams that a worker gets as soon as routers take it.
const STREAMS: u32 = 2;
/// Looks of routers until they take a ready worker.
const LOOKS: u32 = 2;

/// What routers and workers know, and what was found wrong.
#[derive(Default)]
pub struct Truth {
    pub pods: BTreeMap<String, Seen>,
    /// Wishes by generation.
    pub wishes: BTreeMap<i64, Wish>,
    /// Newest generation that the operator has said to have looked at.
    pub observed: i64,
    /// Whether the devices of nodes are as they were at the last rest.
    pub calm: bool,
    /// Workers that were routable when the operator last asked.
    told: BTreeSet<String>,
    pub wrong: Vec<String>,
    /// What has moved so far.
    pub moves: u64,
}

/// A pod of the pool.
#[derive(Default)]
pub struct Seen {
    pub name: String,
    pub router: bool,
    pub pod: Pod,
    /// Containers are ready.
    pub ready: bool,
    pub leaving: bool,
    pub dead: bool,
    /// Whether the test took it away, and not the operator.
    pub taken: bool,
    draining: bool,
    streams: u32,
    looks: u32,
    cordons: BTreeSet<String>,
    restarts: i32,
    lives: u64,
    surge: bool,
    server: Option<JoinHandle<()>>,
    /// The server of the life before.
    ended: Option<JoinHandle<()>>,
}

/// A shared truth.
#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<Truth>>);

/// Keeps the answers coming until it is dropped.
pub struct Answers(#[expect(dead_code, reason = "dropping it ends the tasks")] JoinSet<()>);

fn is_true(pod: &Pod, kind: &str) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|it| it.type_ == kind && it.status == "True")
}

// === impl Seen ===

impl Seen {
    pub fn lives(&self) -> bool {
        !self.leaving && !self.dead
    }

    /// The process starts anew.
    fn born(&mut self) {
        (self.draining, self.streams, self.looks, self.taken) = (false, 0, 0, false);
        self.cordons.clear();
        self.lives += 1;
    }

    fn incarnation(&self) -> Vec<u8> {
        self.lives.to_be_bytes().to_vec()
    }

    fn serves(&self) -> bool {
        self.ready && self.lives() && !self.taken && !self.draining && self.looks >= LOOKS
    }
}

// === impl Truth ===

impl Truth {
    pub fn workers(&self) -> impl Iterator<Item = (&String, &Seen)> {
        self.pods.iter().filter(|(_, seen)| !seen.router)
    }

    fn routers(&self) -> impl Iterator<Item = (&String, &Seen)> {
        self.pods.iter().filter(|(_, seen)| seen.router && seen.lives() && is_true(&seen.pod, "Ready"))
    }

    /// Whether every Ready router takes it.
    pub fn routable(&self, uid: &str) -> bool {
        let Some(seen) = self.pods.get(uid) else { return false };
        let mut routers = self.routers().peekable();
        routers.peek().is_some() && seen.serves() && routers.all(|(router, it)| it.looks > 0 && !seen.cordons.contains(router))
    }

    /// Wishes that the operator may be carrying out.
    fn held(&self) -> impl Iterator<Item = &Wish> {
        self.wishes.range(self.observed..).map(|(_, wish)| wish)
    }

    /// The operator makes a worker unroutable.
    fn takes(&mut self, uid: &str, how: &str) {
        if !self.told.remove(uid) {
            return;
        }
        let floor = self.held().map(Wish::floor).min().unwrap_or_default();
        if (self.told.len() as u32) < floor {
            let name = &self.pods[uid].name;
            self.wrong.push(format!("{how} {name} leaves {} routable workers, {floor} are the least", self.told.len()));
        }
    }

    /// The test takes a worker away.
    pub fn lose(&mut self, uid: &str) {
        self.told.remove(uid);
        if let Some(seen) = self.pods.get_mut(uid) {
            (seen.taken, seen.streams) = (true, 0);
        }
    }

    /// The operator ends a worker's process.
    fn ends(&mut self, uid: &str, how: &str) {
        let Some(seen) = self.pods.get_mut(uid).filter(|seen| !seen.taken && seen.lives()) else { return };
        let (name, streams) = (seen.name.clone(), std::mem::take(&mut seen.streams));
        if streams > 0 {
            self.wrong.push(format!("{how} {name} cuts {streams} streams"));
        }
        if self.routable(uid) {
            self.takes(uid, how);
        }
    }

    fn see(&mut self, pod: Pod, shared: &Shared) {
        let uid = pod.uid().unwrap_or_default();
        let router = pod.labels().get("app.kubernetes.io/component").is_some_and(|it| it == "router");
        self.moves += 1;
        if !self.pods.contains_key(&uid) {
            self.pods.insert(uid.clone(), Seen { name: pod.name_any(), router, ..Seen::default() });
            if !router {
                self.judge_creation(&uid);
            }
        }
        let leaving = pod.metadata.deletion_timestamp.is_some();
        if leaving && !router {
            self.ends(&uid, "deletion of");
        }
        let image = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.containers.first()?.image.clone());
        let changed = self.pods[&uid].pod.spec.is_some() && image(&self.pods[&uid].pod) != image(&pod);
        if changed {
            self.ends(&uid, "change of the image of");
        }
        let container = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref()?.first().cloned());
        let restarts = container.as_ref().map_or(0, |it| it.restart_count);
        let runs = container.is_some_and(|it| it.state.is_some_and(|state| state.running.is_some()));
        let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
        let calm = self.calm;
        let seen = self.pods.get_mut(&uid).unwrap();
        if changed || restarts != seen.restarts {
            seen.born();
            seen.restarts = restarts;
        }
        seen.ready = is_true(&pod, "ContainersReady");
        if !seen.ready {
            (seen.looks, seen.streams) = (0, 0);
        }
        (seen.leaving, seen.dead) = (leaving, matches!(&*phase, "Failed" | "Succeeded"));
        seen.pod = pod;
        seen.answer(&uid, runs, shared);
        if seen.surge && calm && lacks_device(&seen.pod) {
            let text = format!("{} is beyond the wished number and waits for a device", seen.name);
            self.wrong.push(text);
        }
    }

    fn judge_creation(&mut self, uid: &str) {
        let live = self.workers().filter(|(_, it)| !(it.dead || it.taken && it.leaving)).count() as u32;
        let most = self.held().map(Wish::most).max().unwrap_or_default();
        let wished = self.held().map(|wish| wish.replicas).max().unwrap_or_default();
        let seen = self.pods.get_mut(uid).unwrap();
        seen.surge = live > wished;
        if live > most {
            let text = format!("{} is the {live}th worker, {most} are the most", seen.name);
            self.wrong.push(text);
        }
    }

    fn gone(&mut self, uid: &str) {
        self.moves += 1;
        self.ends(uid, "removal of");
        if let Some(seen) = self.pods.remove(uid) {
            seen.server.inspect(tokio::task::JoinHandle::abort);
        }
        self.told.remove(uid);
    }
}

/// Whether the scheduler says that devices are missing.
pub fn lacks_device(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|it| {
        it.type_ == "PodScheduled"
            && it.status == "False"
            && it.message.as_deref().is_some_and(|text| text.contains("Insufficient nvidia.com/gpu"))
    })
}

// === impl Seen ===

impl Seen {
    /// Listens where the pod has its address while its process runs.
    fn answer(&mut self, uid: &str, runs: bool, shared: &Shared) {
        if !runs || !self.lives() {
            if let Some(server) = self.server.take() {
                server.abort();
                self.ended = Some(server);
            }
            return;
        }
        let ip = self.pod.status.as_ref().and_then(|status| status.pod_ip.as_ref()?.parse::<IpAddr>().ok());
        let Some(ip) = ip.filter(|_| self.server.is_none()) else { return };
        let wanted = if self.router { "admin" } else { "grpc" };
        let ports = self.pod.spec.iter().flat_map(|spec| &spec.containers).flat_map(|it| it.ports.iter().flatten());
        let port = ports.into_iter().find(|port| port.name.as_deref() == Some(wanted)).unwrap().container_port;
        let one = One { uid: uid.to_owned(), shared: shared.clone() };
        let routes = if self.router {
            tonic::service::Routes::new(RouterAdminServer::new(one))
        } else {
            tonic::service::Routes::new(WorkerServer::new(one))
        };
        let address = SocketAddr::new(ip, port as u16);
        let ended = self.ended.take();
        self.server = Some(tokio::spawn(async move {
            if let Some(ended) = ended {
                // It was aborted; its port is free when it has ended.
                drop(ended.await);
            }
            let listener = TcpListener::bind(address).await.unwrap_or_else(|error| panic!("{address}: {error}"));
            axum::serve(listener, routes.into_axum_router()).await.unwrap();
        }));
    }
}

// === impl Shared ===

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, Truth> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers for every pod of a namespace from now on.
    pub fn answer(&self, client: &Client, namespace: &str) -> Answers {
        let mut tasks = JoinSet::new();
        let (shared, pods) = (self.clone(), Api::<Pod>::namespaced(client.clone(), namespace));
        tasks.spawn(async move {
            let mut events = watcher(pods, watcher::Config::default()).default_backoff().boxed();
            while let Some(event) = events.try_next().await.unwrap_or_else(|error| panic!("the watch of pods: {error}")) {
                match event {
                    watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => shared.lock().see(pod, &shared),
                    watcher::Event::Delete(pod) => shared.lock().gone(&pod.uid().unwrap_or_default()),
                    watcher::Event::Init | watcher::Event::InitDone => {}
                }
            }
        });
        let (shared, pools) = (self.clone(), Api::<ServingPool>::namespaced(client.clone(), namespace));
        tasks.spawn(async move {
            let mut events = watcher(pools, watcher::Config::default()).default_backoff().boxed();
            while let Some(event) = events.try_next().await.unwrap_or_else(|error| panic!("the watch of pools: {error}")) {
                if let watcher::Event::Apply(pool) | watcher::Event::InitApply(pool) = event {
                    let observed = pool.status.and_then(|status| status.observed_generation).unwrap_or_default();
                    let mut truth = shared.lock();
                    truth.observed = truth.observed.max(observed);
                }
            }
        });
        Answers(tasks)
    }
}

/// The process in one pod.
struct One {
    uid: String,
    shared: Shared,
}

fn unavailable() -> Status {
    Status::unavailable("not played")
}

#[tonic::async_trait]
impl RouterAdmin for One {
    async fn workers(&self, _: Request<admin::WorkersRequest>) -> Result<Response<admin::WorkersResponse>, Status> {
        let mut truth = self.shared.lock();
        let first = truth.routers().next().is_some_and(|(uid, _)| *uid == self.uid);
        let Some(router) = truth.pods.get_mut(&self.uid) else { return Err(unavailable()) };
        router.looks += 1;
        let complete = router.looks > 1;
        let mut workers = Vec::new();
        for seen in truth.pods.values_mut().filter(|it| !it.router && it.ready && it.lives() && !it.taken) {
            seen.looks += 1;
            let refused = seen.draining || seen.cordons.contains(&self.uid);
            if seen.looks < LOOKS || !complete {
                continue;
            }
            if seen.looks == LOOKS && !refused {
                seen.streams = STREAMS;
            }
            let state = if refused { admin::WorkerState::Draining } else { admin::WorkerState::Ready };
            workers.push(admin::RegisteredWorker {
                uid: seen.name.clone(),
                incarnation: seen.incarnation(),
                address: format!("http://{}:7401", seen.pod.status.as_ref().unwrap().pod_ip.clone().unwrap_or_default()),
                state: state.into(),
                in_flight: if first { seen.streams } else { 0 },
                ..admin::RegisteredWorker::default()
            });
        }
        let routable = truth.workers().map(|(uid, _)| uid.clone()).filter(|uid| truth.routable(uid)).collect();
        truth.told = routable;
        Ok(Response::new(admin::WorkersResponse { workers, complete, listed: true, stale: None }))
    }

    async fn in_flight(&self, _: Request<admin::InFlightRequest>) -> Result<Response<admin::InFlightResponse>, Status> {
        Ok(Response::new(admin::InFlightResponse::default()))
    }

    async fn secrets(&self, _: Request<admin::SecretsRequest>) -> Result<Response<admin::SecretsResponse>, Status> {
        Ok(Response::new(admin::SecretsResponse::default()))
    }

    async fn activate(&self, _: Request<admin::ActivateRequest>) -> Result<Response<admin::ActivateResponse>, Status> {
        Err(unavailable())
    }

    async fn cordon(&self, request: Request<admin::CordonRequest>) -> Result<Response<admin::CordonResponse>, Status> {
        let request = request.into_inner();
        let mut truth = self.shared.lock();
        let found = truth.workers().find(|(_, it)| it.name == request.uid && it.incarnation() == request.incarnation);
        let Some(uid) = found.map(|(uid, _)| uid.clone()) else { return Ok(Response::new(admin::CordonResponse::default())) };
        if truth.routable(&uid) {
            truth.takes(&uid, "drain of");
        }
        let first = truth.routers().next().is_some_and(|(uid, _)| *uid == self.uid);
        let seen = truth.pods.get_mut(&uid).unwrap();
        seen.cordons.insert(self.uid.clone());
        Ok(Response::new(admin::CordonResponse { in_flight: if first { seen.streams } else { 0 } }))
    }
}

type Never<T> = BoxStream<'static, Result<T, Status>>;

#[tonic::async_trait]
impl Worker for One {
    type GenerateStream = Never<wire::GenerateResponse>;
    type KvEventsStream = Never<wire::KvEventsResponse>;
    type ArtifactsStream = Never<wire::ArtifactsResponse>;
    type LoadStream = Never<wire::LoadResponse>;
    type FetchBlocksStream = Never<wire::FetchBlocksResponse>;

    async fn describe(&self, _: Request<wire::DescribeRequest>) -> Result<Response<wire::DescribeResponse>, Status> {
        let components =
            wire::IdentityComponents { weights_digest: vec![7; 32], tokenizer_digest: vec![8; 32], ..Default::default() };
        let model = wire::ServedModel { name: "m".to_owned(), components: Some(components), ..Default::default() };
        Ok(Response::new(wire::DescribeResponse { models: vec![model], ..Default::default() }))
    }

    /// One stream ends each time that the worker is told.
    async fn drain(&self, _: Request<wire::DrainRequest>) -> Result<Response<wire::DrainResponse>, Status> {
        let mut truth = self.shared.lock();
        if truth.routable(&self.uid) {
            truth.takes(&self.uid, "drain of");
        }
        let Some(seen) = truth.pods.get_mut(&self.uid) else { return Err(unavailable()) };
        (seen.draining, seen.streams) = (true, seen.streams.saturating_sub(1));
        let in_flight = seen.streams;
        truth.moves += 1;
        Ok(Response::new(wire::DrainResponse { in_flight, ..Default::default() }))
    }

    async fn generate(&self, _: Request<wire::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        Err(unavailable())
    }

    async fn kv_events(&self, _: Request<wire::KvEventsRequest>) -> Result<Response<Self::KvEventsStream>, Status> {
        Err(unavailable())
    }

    async fn artifacts(&self, _: Request<wire::ArtifactsRequest>) -> Result<Response<Self::ArtifactsStream>, Status> {
        Err(unavailable())
    }

    async fn load(&self, _: Request<wire::LoadRequest>) -> Result<Response<Self::LoadStream>, Status> {
        Err(unavailable())
    }

    async fn fetch_blocks(&self, _: Request<wire::FetchBlocksRequest>) -> Result<Response<Self::FetchBlocksStream>, Status> {
        Err(unavailable())
    }

    async fn probe(&self, _: Request<wire::ProbeRequest>) -> Result<Response<wire::ProbeResponse>, Status> {
        Err(unavailable())
    }
}
