//! Pool secrets and tenants from one named Kubernetes Secret, watched through the cluster's API.
//!
//! Owns the watch and the check beside it. Refuses to know what is in force. The keys of the Secret are [`TENANTS_KEY`], [`POOL_SECRET_KEY`] and, while a
//! rotation is under way, [`NEXT_SECRET_KEY`].
//!
//! Two ways lead here, and the first one that brings a newer version wins: a watch, which is quick, and a check every [`CHECK_EVERY`], which holds
//! also when the watch's connection died without a word. A change is therefore known at most `CHECK_EVERY + CHECK_MAX` after it was made, as
//! long as the API server answers; when it does not, what was in force stays and that is told. Each watch begins with the present state, so nothing is
//! listed and no version can be too old.
//!
//! A Secret that is deleted withdraws nothing: that it is gone does not say which keys are. To let nobody in, write `tenant = []`.
//!
//! Answers are read here and not by the client, which logs the text of an answer that it cannot read.
//!
//! Needs `get` and `watch` on `secrets`, and only on the one name.

use super::Secrets;
use super::material::{Material, MaterialError, Raw};
use crate::kubernetes::{Complaint, ObjectName, WATCH_SECONDS};
use crate::pause::Pause;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use k8s_openapi::ByteString;
use kube::Client;
use kube::api::{GetParams, WatchEvent, WatchParams};
use kube::core::Request;
use kvasir_door::Isolation;
use serde::Deserialize;
use serde_json::Value;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

/// A Secret whose content is never printed, and whose reading fails for nothing that is JSON: errors of a typed reading quote values.
#[derive(Clone, Deserialize)]
#[serde(from = "Value")]
struct SecretObject {
    version: String,
    data: Value,
}

/// What brings newer versions into force.
struct Newest {
    name: ObjectName,
    requests: Request,
    isolation: Isolation,
    secrets: Arc<Secrets>,
    seen: Mutex<Seen>,
}

/// Resource versions, compared as the numbers that API servers count in, so that an answer that comes late does not let a withdrawn key in again.
#[derive(Default)]
struct Seen {
    /// What was looked at last.
    newest: Option<String>,
    /// An older one that the last check found. Found again it is the truth: the cluster was restored from a backup.
    older: Option<String>,
}

/// What to do with a version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Known,
    Late,
    Take,
}

/// Key of the tenants file.
const TENANTS_KEY: &str = "tenants.toml";
/// Key of the pool secret that is active at the start.
const POOL_SECRET_KEY: &str = "pool-secret";
/// Key of the pool secret that comes after it.
const NEXT_SECRET_KEY: &str = "pool-secret-next";
/// Time between two checks.
pub(super) const CHECK_EVERY: Duration = Duration::from_secs(2);
/// Longest time for one check.
pub(super) const CHECK_MAX: Duration = Duration::from_secs(2);
/// Silence after which a watch is given up: its server ends it before.
const SILENCE_MAX: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 5);
/// First pause between two watches.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// Longest pause; the check goes on meanwhile.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Follows the Secret until it is dropped.
pub(crate) async fn follow(client: Client, name: ObjectName, isolation: Isolation, secrets: Arc<Secrets>) {
    let requests = Request::new(format!("/api/v1/namespaces/{}/secrets", name.namespace));
    let newest = Newest { name, requests, isolation, secrets, seen: Mutex::default() };
    tokio::join!(newest.watch(&client), newest.check_often(&client));
}

// === impl Newest ===

impl Newest {
    async fn watch(&self, client: &Client) {
        let mut pause = Pause::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let began = Instant::now();
            // A check tells of a server that is away.
            if let Err(Complaint { code, message }) = self.watch_once(client).await {
                tracing::debug!(secret = %self.name, code, why = message, "the watch of the Secret broke");
            }
            if began.elapsed() > PAUSE_MAX / 2 {
                pause.succeeded();
            }
            sleep(pause.failed()).await;
        }
    }

    /// From the present state until the watch ends.
    async fn watch_once(&self, client: &Client) -> Result<(), Complaint> {
        let silent = |_elapsed| Complaint::new("timeout", "the API server does not answer");
        let params = WatchParams::default().fields(&format!("metadata.name={}", self.name.name)).timeout(WATCH_SECONDS);
        let request = self.requests.watch(&params, "0").map_err(|error| unsent(&error))?;
        let events = timeout(SILENCE_MAX, client.request_events::<SecretObject>(request)).await.map_err(silent)?;
        let mut events: BoxStream<'_, kube::Result<WatchEvent<SecretObject>>> =
            events.map_err(|error| Complaint::of(&error))?.boxed();
        while let Some(event) = timeout(SILENCE_MAX, events.next()).await.map_err(silent)? {
            match event.map_err(|error| Complaint::of(&error))? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => self.found(&object, false),
                WatchEvent::Error(status) => return Err(Complaint::of_status(&status)),
                // A check tells of an object that is gone.
                WatchEvent::Deleted(_) | WatchEvent::Bookmark(_) => {}
            }
        }
        Ok(())
    }

    async fn check_often(&self, client: &Client) {
        let mut checks = interval(CHECK_EVERY);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            checks.tick().await;
            let checked = timeout(CHECK_MAX, self.check(client)).await;
            let checked = checked.unwrap_or_else(|_elapsed| Err(Complaint::new("timeout", "the API server does not answer")));
            if let Err(Complaint { code, message }) = checked {
                let fix = match code {
                    "not_found" => "; it is to be made by whoever deploys this router",
                    "forbidden" => "; grant get and watch on this one Secret",
                    _ => "",
                };
                self.secrets.unreadable(&format!("Secret {}: {message}{fix}", self.name));
            }
        }
    }

    /// Asks for the version alone, and for the content only when it is another one.
    async fn check(&self, client: &Client) -> Result<(), Complaint> {
        let params = GetParams::default();
        let head = self.requests.get_metadata(&self.name.name, &params).map_err(|error| unsent(&error))?;
        let head = ask(client, head).await?;
        if self.lock().newest.as_ref() == Some(&head.version) {
            self.secrets.unchanged();
            return Ok(());
        }
        let whole = self.requests.get(&self.name.name, &params).map_err(|error| unsent(&error))?;
        self.found(&ask(client, whole).await?, true);
        Ok(())
    }

    /// Brings this version into force unless a newer one was seen.
    fn found(&self, object: &SecretObject, by_check: bool) {
        // Held until it is in force: two versions cannot overtake each other.
        let mut seen = self.lock();
        if seen.verdict(&object.version, by_check) != Verdict::Take {
            return self.secrets.unchanged();
        }
        match object.material(&self.name, &self.isolation) {
            // An error has been recorded by whoever refused it.
            Ok(material) => drop(self.secrets.apply(material, object.version.clone())),
            Err(error) => self.secrets.refused(&error),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Seen ===

impl Seen {
    fn verdict(&mut self, version: &str, by_check: bool) -> Verdict {
        let number = |version: &str| version.parse::<u128>().ok();
        let older = self.newest.as_deref().and_then(number).zip(number(version)).is_some_and(|(newest, this)| this < newest);
        let verdict = match (&self.newest, &self.older) {
            (Some(newest), _) if newest == version => Verdict::Known,
            (_, Some(before)) if older && by_check && before == version => Verdict::Take,
            _ if older => Verdict::Late,
            _ => Verdict::Take,
        };
        match verdict {
            Verdict::Take => *self = Self { newest: Some(version.to_owned()), older: None },
            Verdict::Late if by_check => self.older = Some(version.to_owned()),
            Verdict::Late | Verdict::Known => {}
        }
        verdict
    }
}

// === impl SecretObject ===

impl SecretObject {
    fn material(&self, name: &ObjectName, isolation: &Isolation) -> Result<Material, MaterialError> {
        let what = |key: &str| format!("Secret {name}, key {key}");
        let part = |key: &str| {
            let value = self.data.get(key)?;
            // The server's own encoding; anything else would not have come from it.
            Some(
                ByteString::deserialize(value)
                    .map(|bytes| bytes.0)
                    .map_err(|_content| MaterialError::NotText { what: what(key) }),
            )
        };
        let needed = |key: &str, fix| part(key).unwrap_or_else(|| Err(MaterialError::Missing { what: what(key), fix }));
        let mut pool_secrets = vec![(what(POOL_SECRET_KEY), needed(POOL_SECRET_KEY, "write the pool's secret there")?)];
        if let Some(next) = part(NEXT_SECRET_KEY) {
            pool_secrets.push((what(NEXT_SECRET_KEY), next?));
        }
        let tenants = needed(TENANTS_KEY, "write `open = true` there to let everyone in, or `tenant = []` to let nobody in")?;
        Material::parse(Raw { pool_secrets, tenants: Some((what(TENANTS_KEY), tenants)) }, isolation)
    }
}

impl fmt::Debug for SecretObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretObject(..)")
    }
}

impl From<Value> for SecretObject {
    fn from(mut object: Value) -> Self {
        let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default().to_owned();
        Self { version, data: object.get_mut("data").map(Value::take).unwrap_or_default() }
    }
}

async fn ask(client: &Client, request: http::Request<Vec<u8>>) -> Result<SecretObject, Complaint> {
    let text = client.request_text(request).await.map_err(|error| Complaint::of(&error))?;
    serde_json::from_str(&text).map_err(|_content| Complaint::malformed())
}

fn unsent(error: &kube::core::request::Error) -> Complaint {
    Complaint::new("refused", format!("the request cannot be made: {error}"))
}
