//! Workers by the EndpointSlices of one headless Service, watched through the cluster's API.
//!
//! Owns the watch: list, follow, again after every failure. Refuses to decide who is in (see [`set`]) and whether it works (the fleet probes).
//!
//! Flow: list → the difference to what was known, then [`Change::Listed`] → events as they come. After any failure [`Change::Stale`] → a jittered pause →
//! a new list → the difference → [`Change::Fresh`].
//!
//! Guarantees
//! 1. No failure makes anyone leave: only a complete list or an event does.
//! 2. A failure is followed by a new list and not only by a new watch, so that what was missed in between is found.
//! 3. A watch that its server ends in good order goes on where it was; one that ends as soon as it began is paused for like a failure, so that no server
//!    is asked in a circle.
//!
//! Needs `list` and `watch` on `endpointslices` of the group `discovery.k8s.io` in the Service's namespace.

mod set;
#[cfg(test)]
mod tests;

use super::{Change, Discover, Stale};
use crate::kubernetes::{Complaint, ObjectName, WATCH_SECONDS};
use crate::pause::Pause;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::runtime::watcher::Event;
use kube::{Api, Client};
use set::SliceSet;
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep_until, timeout};

/// Follows the slices of one Service.
pub struct Slices {
    api: Api<EndpointSlice>,
    service: ObjectName,
    port: PortChoice,
}

/// Which port of an endpoint is the worker's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PortChoice {
    /// The TCP port of this name.
    Name(String),
    /// This one, whatever the slices list.
    Number(u16),
}

/// Why a text chooses no port.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{0}` is no port; write its name in the Service (1 to 15 characters out of a-z, 0-9 and `-`) or a number from 1 to 65535"
)]
pub struct PortChoiceError(String);

struct Follow {
    slices: Slices,
    set: SliceSet,
    stage: Stage,
    /// Changes that are not handed on yet.
    ready: VecDeque<Change>,
    pause: Pause,
    resume: Option<Instant>,
    stale: bool,
}

/// How far a round of list and watch has come.
enum Stage {
    /// A list is under way; the text tells where its next page begins.
    List(Option<String>),
    /// Everything up to this version is known.
    Listed(String),
    /// And what comes after it is told.
    Watch { version: String, began: Instant, events: Events },
}

type Events = BoxStream<'static, kube::Result<WatchEvent<EndpointSlice>>>;

/// Label that every slice carries.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";
/// Longest time for one page of a list, and for the beginning of a watch.
const LIST_MAX: Duration = Duration::from_secs(10);
/// Slices of one page.
const PAGE_SLICES: u32 = 500;
/// Silence after which a watch is given up: its server ends it before.
const SILENCE_MAX: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 5);
/// A watch that lives as long as this is one that works.
const LIVED_MIN: Duration = Duration::from_secs(1);
/// First pause after a failure.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// Longest pause: a server that comes back is found within it, and many routers do not keep it down.
const PAUSE_MAX: Duration = Duration::from_secs(8);
/// Longest name of a port, in bytes.
const PORT_NAME_BYTES_MAX: usize = 15;

// === impl Slices ===

impl Slices {
    /// The slices of `service`.
    pub fn new(client: Client, service: ObjectName, port: PortChoice) -> Self {
        Self { api: Api::namespaced(client, &service.namespace), service, port }
    }

    fn selector(&self) -> String {
        format!("{SERVICE_LABEL}={}", self.service.name)
    }

    /// The beginning of a watch.
    async fn watch(&self, version: String) -> Result<Stage, Complaint> {
        let params = WatchParams::default().labels(&self.selector()).timeout(WATCH_SECONDS);
        let opened = timeout(LIST_MAX, self.api.watch(&params, &version)).await.map_err(silent)?;
        let events = opened.map_err(|error| Complaint::of(&error))?.boxed();
        Ok(Stage::Watch { version, began: Instant::now(), events })
    }
}

impl Discover for Slices {
    fn changes(self: Box<Self>) -> BoxStream<'static, Change> {
        let follow = Follow {
            set: SliceSet::new(self.port.clone()),
            slices: *self,
            stage: Stage::List(None),
            ready: VecDeque::new(),
            pause: Pause::new(PAUSE_MIN, PAUSE_MAX),
            resume: None,
            stale: false,
        };
        stream::unfold(follow, |mut follow| async move { Some((follow.next().await, follow)) }).boxed()
    }
}

// === impl Follow ===

impl Follow {
    async fn next(&mut self) -> Change {
        loop {
            if let Some(change) = self.ready.pop_front() {
                return change;
            }
            if let Some(resume) = self.resume.take() {
                sleep_until(resume).await;
            }
            match self.step().await {
                Ok(stage) => self.stage = stage,
                Err(complaint) => self.failed(complaint),
            }
        }
    }

    async fn step(&mut self) -> Result<Stage, Complaint> {
        // After a failure everything is listed again.
        match std::mem::replace(&mut self.stage, Stage::List(None)) {
            Stage::List(token) => self.list(token).await,
            Stage::Listed(version) => self.slices.watch(version).await,
            Stage::Watch { version, began, events } => self.hear(version, began, events).await,
        }
    }

    /// One page of a list.
    async fn list(&mut self, token: Option<String>) -> Result<Stage, Complaint> {
        if token.is_none() {
            self.tell(Event::Init);
        }
        let params = ListParams { continue_token: token, ..ListParams::default() };
        let params = params.labels(&self.slices.selector()).limit(PAGE_SLICES);
        let list = timeout(LIST_MAX, self.slices.api.list(&params)).await.map_err(silent)?;
        let list = list.map_err(|error| Complaint::of(&error))?;
        for slice in list.items {
            self.tell(Event::InitApply(slice));
        }
        if let Some(token) = list.metadata.continue_.filter(|token| !token.is_empty()) {
            return Ok(Stage::List(Some(token)));
        }
        let without = || Complaint::new("malformed", "the API server's list has no resource version");
        let version = list.metadata.resource_version.filter(|version| !version.is_empty()).ok_or_else(without)?;
        self.tell(Event::InitDone);
        Ok(Stage::Listed(version))
    }

    /// One event of a watch.
    async fn hear(&mut self, version: String, began: Instant, mut events: Events) -> Result<Stage, Complaint> {
        let Some(event) = timeout(SILENCE_MAX, events.next()).await.ok().flatten() else {
            // Its server ended it in good order, or is not heard of any more.
            if began.elapsed() >= LIVED_MIN {
                self.pause.succeeded();
            } else {
                self.resume = Some(Instant::now() + self.pause.failed());
            }
            return Ok(Stage::Listed(version));
        };
        let version = match event.map_err(|error| Complaint::of(&error))? {
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                let version = slice.metadata.resource_version.clone();
                self.tell(Event::Apply(slice));
                version
            }
            WatchEvent::Deleted(slice) => {
                let version = slice.metadata.resource_version.clone();
                self.tell(Event::Delete(slice));
                version
            }
            WatchEvent::Bookmark(mark) => Some(mark.metadata.resource_version),
            WatchEvent::Error(status) => return Err(Complaint::of_status(&status)),
        };
        self.pause.succeeded();
        let without = || Complaint::new("malformed", "an event of the API server has no resource version");
        Ok(Stage::Watch { version: version.filter(|version| !version.is_empty()).ok_or_else(without)?, began, events })
    }

    fn tell(&mut self, event: Event<EndpointSlice>) {
        self.ready.extend(self.set.apply(event));
        if self.stale && matches!(self.ready.back(), Some(Change::Listed | Change::Fresh)) {
            self.stale = false;
            tracing::info!(service = %self.slices.service, endpoints = self.set.len(), "the workers' Service is followed again");
        }
    }

    fn failed(&mut self, complaint: Complaint) {
        self.set.interrupted();
        let pause = self.pause.failed();
        self.resume = Some(Instant::now() + pause);
        let Complaint { code, mut message } = complaint;
        if code == "forbidden" {
            message += "; grant list and watch on endpointslices.discovery.k8s.io";
        }
        let service = &self.slices.service;
        if self.stale {
            tracing::debug!(%service, code, why = message, "the workers' Service can still not be followed");
        } else {
            tracing::warn!(%service, code, why = message, endpoints = self.set.len(), "the workers' Service cannot be followed; the last list stays");
        }
        self.stale = true;
        self.ready.push_back(Change::Stale(Stale { code, message }));
    }
}

fn silent(_elapsed: Elapsed) -> Complaint {
    Complaint::new("timeout", "the API server does not answer")
}

// === impl PortChoice ===

impl PortChoice {
    /// Reads a name or a number.
    pub fn parse(text: &str) -> Result<Self, PortChoiceError> {
        let refused = || PortChoiceError(text.to_owned());
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().ok().filter(|port| *port > 0).map(Self::Number).ok_or_else(refused);
        }
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let named = text.len() <= PORT_NAME_BYTES_MAX && text.bytes().all(plain);
        if named { Ok(Self::Name(text.to_owned())) } else { Err(refused()) }
    }
}

impl fmt::Display for PortChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Number(number) => write!(f, "{number}"),
        }
    }
}
