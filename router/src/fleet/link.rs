//! One worker, watched: connect, describe, probe, follow load and cache events; again after every failure.
//!
//! Owns the connection and the worker's membership in the index. Refuses to decide anything about requests. Reports to the fleet's owner.
//!
//! Flow: connect → Describe → text of its models → then at once: probes every [`PROBE_EVERY`], load reports, cache events. A stream that ends is
//! opened again and asks for a probe; a probe that fails ends the session; another incarnation begins a new one immediately.
//!
//! Guarantees: the owner hears of a life before anything of that life; a life that is over loses its credit before the next is reported.

use super::{Life, LinkParts, Report};
use crate::discover::Endpoint;
use crate::index::{Applied, MemberId};
use crate::pause::Pause;
use crate::rendezvous::salt_of;
use crate::view::Readiness;
use crate::worker_client::{ANSWER_MAX, CallError, WorkerClient};
use kvasir_core::{Error, Incarnation, Reason, WorkerUid};
use kvasir_door::ServedModel;
use kvasir_proto::{Description, Role};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, timeout};

/// Watches one worker.
pub(super) struct Link {
    endpoint: Endpoint,
    number: u64,
    parts: LinkParts,
    owner: mpsc::Sender<(Endpoint, u64, Report)>,
    member: Option<Member>,
}

/// The worker's present membership in the index.
struct Member {
    uid: WorkerUid,
    incarnation: Incarnation,
    id: MemberId,
}

/// What the three parts of a session tell each other.
#[derive(Default)]
struct Asks {
    /// Probe now.
    probe: Notify,
    /// A load report was passed on.
    loaded: Notify,
}

/// Why a session ended.
enum Ended {
    /// The worker cannot be reached or used.
    Failed(Error),
    /// The worker has begun a new life.
    Restarted,
    /// The owner is gone.
    Orphaned,
}

/// Time between probes; a worker that says nothing is known to be gone within two of them.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// First pause after a failure.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause after failures in a row: a worker that comes back is found within it.
const PAUSE_MAX: Duration = Duration::from_secs(5);

// === impl Link ===

impl Link {
    pub(super) fn new(endpoint: Endpoint, number: u64, parts: LinkParts, owner: mpsc::Sender<(Endpoint, u64, Report)>) -> Self {
        Self { endpoint, number, parts, owner, member: None }
    }

    pub(super) async fn run(mut self) {
        let mut pause = Pause::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let began = Instant::now();
            match self.session().await {
                Ended::Orphaned => return,
                Ended::Restarted => continue,
                Ended::Failed(error) => {
                    tracing::debug!(worker = %self.endpoint, %error, "worker is lost");
                    self.interrupted();
                    let lost = match error.reason {
                        Reason::WorkerLost => Readiness::Lost(error),
                        _ => Readiness::Unready(error),
                    };
                    if self.tell(Report::Readiness(lost)).await.is_err() {
                        return;
                    }
                }
            }
            if began.elapsed() > PAUSE_MAX {
                pause.succeeded();
            }
            sleep(pause.failed()).await;
        }
    }

    async fn session(&mut self) -> Ended {
        match self.begin().await {
            Ok((client, incarnation)) => self.follow(&client, incarnation).await,
            Err(ended) => ended,
        }
    }

    /// Connects and tells the owner who is there.
    async fn begin(&mut self) -> Result<(WorkerClient, Incarnation), Ended> {
        let client = WorkerClient::connect(self.endpoint.uri(), self.parts.credentials.clone()).await.map_err(Ended::from)?;
        let description = client.describe().await.map_err(Ended::from)?;
        if description.role != Role::Target {
            let message = format!("worker {} only drafts for others; list it as a drafter of a target worker", description.uid);
            return Err(Ended::Failed(Error::new(Reason::UnsupportedCombination, message)));
        }
        let models = self.models(&client, &description).await.map_err(Ended::from)?;
        let (uid, incarnation) = (description.uid, description.incarnation);
        let id = self.attach(uid.clone(), incarnation);
        let life = Life { uid, incarnation, member: id, block_size: description.block_size };
        self.tell(Report::Described { life, models, client: client.clone() }).await?;
        Ok((client, incarnation))
    }

    async fn models(&self, client: &WorkerClient, description: &Description) -> Result<Vec<ServedModel>, CallError> {
        let mut models = Vec::with_capacity(description.models.len());
        for model in &description.models {
            let text = self.parts.texts.get(client, model).await?;
            models.push(ServedModel {
                name: model.name.clone(),
                identity: model.identity(),
                text,
                block_size: description.block_size,
                context: model.context,
                vocab: model.vocab,
                capacity: model.capacity,
                created: model.created,
            });
        }
        Ok(models)
    }

    /// Probes, load and events side by side until the session ends.
    async fn follow(&self, client: &WorkerClient, incarnation: Incarnation) -> Ended {
        let asks = Asks::default();
        tokio::select! {
            ended = self.probes(client, incarnation, &asks) => ended,
            ended = self.loads(client, incarnation, &asks) => ended,
            ended = self.events(client, &asks) => ended,
        }
    }

    async fn probes(&self, client: &WorkerClient, incarnation: Incarnation, asks: &Asks) -> Ended {
        let mut last: Option<Readiness> = None;
        loop {
            let probed = match client.probe().await {
                Ok(probed) => probed,
                Err(failed) => return failed.into(),
            };
            if probed.incarnation != incarnation {
                return Ended::Restarted;
            }
            let readiness = match probed.refusal {
                None => Readiness::Ready,
                Some(refusal) if refusal.reason == Reason::Draining => Readiness::Draining,
                Some(refusal) => Readiness::Unready(refusal),
            };
            if readiness == Readiness::Ready && last.is_none() {
                // Without a load report it could not be placed on: ready means usable. A worker that sends none is told of all the same.
                let _without = timeout(ANSWER_MAX, asks.loaded.notified()).await;
            }
            if last.as_ref() != Some(&readiness) {
                if let Err(ended) = self.tell(Report::Readiness(readiness.clone())).await {
                    return ended;
                }
                last = Some(readiness);
            }
            // Elapsed is the normal case: nobody asked for an earlier probe.
            let _asked = timeout(PROBE_EVERY, asks.probe.notified()).await;
        }
    }

    async fn loads(&self, client: &WorkerClient, incarnation: Incarnation, asks: &Asks) -> Ended {
        let mut pause = Pause::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            if let Ok(mut reports) = client.load().await {
                while let Ok(Some((load, age))) = reports.next().await {
                    pause.succeeded();
                    if load.incarnation != incarnation {
                        return Ended::Restarted;
                    }
                    if load.draining {
                        // Its own word is faster than the next probe.
                        asks.probe.notify_one();
                    }
                    let measured = Instant::now().checked_sub(age).unwrap_or_else(Instant::now);
                    if let Err(ended) = self.tell(Report::Load(load, measured)).await {
                        return ended;
                    }
                    asks.loaded.notify_one();
                }
            }
            asks.probe.notify_one();
            sleep(pause.failed()).await;
        }
    }

    async fn events(&self, client: &WorkerClient, asks: &Asks) -> Ended {
        let mut pause = Pause::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let mut gap = false;
            if let Ok(mut events) = client.events().await {
                while let Ok(Some(batch)) = events.next().await {
                    let Some(member) = &self.member else { break };
                    let now = self.parts.index.time(Instant::now());
                    let applied = self.parts.index.write().apply(member.id, &batch, now);
                    match applied {
                        Applied::Applied | Applied::Duplicate => pause.succeeded(),
                        Applied::Fenced => return Ended::Restarted,
                        Applied::Gap => {
                            gap = true;
                            break;
                        }
                    }
                }
            }
            self.interrupted();
            if !gap {
                asks.probe.notify_one();
            }
            sleep(pause.failed()).await;
        }
    }

    /// The membership of this life; another life's is given up at once.
    fn attach(&mut self, uid: WorkerUid, incarnation: Incarnation) -> MemberId {
        if let Some(member) = self.member.as_ref().filter(|member| member.uid == uid && member.incarnation == incarnation) {
            return member.id;
        }
        let mut index = self.parts.index.write();
        if let Some(old) = self.member.take() {
            index.detach(old.id);
        }
        let id = index.attach(salt_of(&uid), incarnation);
        drop(index);
        self.member = Some(Member { uid, incarnation, id });
        id
    }

    fn interrupted(&self) {
        if let Some(member) = &self.member {
            let now = self.parts.index.time(Instant::now());
            self.parts.index.write().interrupted(member.id, now);
        }
    }

    async fn tell(&self, report: Report) -> Result<(), Ended> {
        self.owner.send((self.endpoint.clone(), self.number, report)).await.map_err(|_gone| Ended::Orphaned)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(member) = &self.member {
            self.parts.index.write().detach(member.id);
        }
    }
}

impl From<CallError> for Ended {
    fn from(failed: CallError) -> Self {
        Self::Failed(failed.error)
    }
}

/// A random number in [0, 1); without a random source every link waits alike, which is only less smooth.
pub(crate) fn random_unit() -> f64 {
    getrandom::u32().map_or(0.5, |random| f64::from(random) / (f64::from(u32::MAX) + 1.0))
}
