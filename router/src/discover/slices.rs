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
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use set::SliceSet;
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;
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
    events: Option<BoxStream<'static, watcher::Result<Event<EndpointSlice>>>>,
    /// Changes that are not handed on yet.
    ready: VecDeque<Change>,
    pause: Pause,
    resume: Option<Instant>,
    stale: bool,
}

/// Label that every slice carries.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";
/// Longest time between two steps of a list.
const LIST_MAX: Duration = Duration::from_secs(10);
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

    fn open(&self) -> BoxStream<'static, watcher::Result<Event<EndpointSlice>>> {
        let config = watcher::Config::default().labels(&format!("{SERVICE_LABEL}={}", self.service.name)).timeout(WATCH_SECONDS);
        watcher(self.api.clone(), config).boxed()
    }
}

impl Discover for Slices {
    fn changes(self: Box<Self>) -> BoxStream<'static, Change> {
        let follow = Follow {
            set: SliceSet::new(self.port.clone()),
            slices: *self,
            events: None,
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
            let slices = &self.slices;
            let events = self.events.get_or_insert_with(|| slices.open());
            let event = if self.set.arriving() {
                timeout(LIST_MAX, events.next())
                    .await
                    .map_err(|_elapsed| Complaint::new("timeout", "the API server does not answer"))
            } else {
                Ok(events.next().await)
            };
            match event {
                Ok(Some(Ok(event))) => self.event(event),
                Ok(Some(Err(error))) => self.failed(complaint(&error)),
                Ok(None) => self.failed(Complaint::new("ended", "the watch ended")),
                Err(silence) => self.failed(silence),
            }
        }
    }

    fn event(&mut self, event: Event<EndpointSlice>) {
        if matches!(event, Event::InitDone) {
            self.pause.succeeded();
        }
        self.ready.extend(self.set.apply(event));
        if self.stale && matches!(self.ready.back(), Some(Change::Listed | Change::Fresh)) {
            self.stale = false;
            tracing::info!(service = %self.slices.service, endpoints = self.set.len(), "the workers' Service is followed again");
        }
    }

    fn failed(&mut self, complaint: Complaint) {
        self.events = None;
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

fn complaint(error: &watcher::Error) -> Complaint {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Complaint::of(error),
        watcher::Error::WatchError(status) => Complaint::of_status(status),
        watcher::Error::NoResourceVersion => Complaint::new("malformed", "the API server's answer has no resource version"),
    }
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
