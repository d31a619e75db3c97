//! The store behind the mock API server, and the service that reads requests and writes answers.

use super::objects::{drop_given_up, fields_match, labels_match, merge, merge_patch};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tower::BoxError;

/// Body of an answer.
type AnswerBody = UnsyncBoxBody<Bytes, Infallible>;

/// Kinds whose status is a subresource.
const WITH_STATUS: [&str; 3] = ["pods", "deployments", "servingpools"];

/// Where an object is kept: plural, namespace, name.
pub(crate) type Key = (String, String, String);

/// A call that was made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Call {
    /// `get`, `list`, `watch`, `create`, `replace`, `apply`, `patch` or `delete`.
    pub verb: &'static str,
    /// Plural, with the subresource after a slash.
    pub resource: String,
    /// Name; empty for lists.
    pub name: String,
    /// Status code of the answer, 0 if none came.
    pub code: u16,
}

/// What happens to a call instead of being carried out as usual.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// It is refused with 500 and nothing happens.
    Fails,
    /// It takes this long.
    Takes(Duration),
    /// It is carried out and the answer is lost.
    LosesAnswer,
}

/// The server; cheap to clone.
#[derive(Clone)]
pub(crate) struct MockApi {
    state: Arc<Mutex<State>>,
    changed: Arc<watch::Sender<u64>>,
}

struct Event {
    kind: &'static str,
    key: Key,
    object: Value,
    version: u64,
}

#[derive(Default)]
struct State {
    version: u64,
    uids: u64,
    objects: BTreeMap<Key, Value>,
    applied: BTreeMap<(Key, String, bool), Value>,
    events: Vec<Event>,
    calls: Vec<Call>,
    counted: u64,
    fault: Option<(u64, Fault)>,
    lease_fault: Option<(u64, Fault)>,
    lose_leases: bool,
    /// Plural that nobody may touch.
    forbidden: Option<String>,
    /// Whether no connection is to be had; watches end.
    broken_off: bool,
    now: Option<Timestamp>,
}

/// A request, taken apart.
struct Ask {
    verb: &'static str,
    key: Key,
    group_version: String,
    sub: String,
    query: BTreeMap<String, String>,
    body: Value,
    patch: String,
}

type Answer = Result<Value, (StatusCode, &'static str, String)>;

// === impl Call ===

impl Call {
    /// Whether it changes something.
    pub(crate) fn mutates(&self) -> bool {
        !matches!(self.verb, "get" | "list" | "watch")
    }
}

// === impl MockApi ===

impl MockApi {
    pub(crate) fn new() -> Self {
        Self { state: Arc::default(), changed: Arc::new(watch::Sender::new(0)) }
    }

    /// A client of this server.
    pub(crate) fn client(&self) -> Client {
        Client::new(self.service(), "default")
    }

    /// What poses as a client's service.
    pub(crate) fn service(
        &self,
    ) -> impl tower::Service<Request<Body>, Response = Response<AnswerBody>, Error = BoxError, Future: Send + 'static>
    + Send
    + 'static
    + use<> {
        let server = self.clone();
        tower::service_fn(move |request| server.clone().serve(request))
    }

    /// Lets every request for a lease hang, or no longer.
    pub(crate) fn lose_leases(&self, lose: bool) {
        self.state().lose_leases = lose;
    }

    /// Lets the `nth` request for a lease from now meet a fault.
    pub(crate) fn lease_fault(&self, nth: u64, fault: Fault) {
        self.state().lease_fault = Some((nth, fault));
    }

    /// Every call so far.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// Calls that change something and are no lease.
    pub(crate) fn writes(&self) -> Vec<Call> {
        self.calls().into_iter().filter(|call| call.mutates() && call.resource != "leases").collect()
    }

    /// Forgets the calls so far, and lets the `nth` counted call from now (from 0; watches and leases are not counted) meet a fault.
    pub(crate) fn fault(&self, nth: u64, fault: Fault) {
        let mut state = self.state();
        (state.counted, state.fault) = (0, Some((nth, fault)));
    }

    /// Whether the fault has been met.
    pub(crate) fn fault_met(&self) -> bool {
        self.state().fault.is_none()
    }

    /// Refuses every request for a kind.
    pub(crate) fn forbid(&self, plural: &str) {
        self.state().forbidden = Some(plural.to_owned());
    }

    /// Refuses nothing any more.
    pub(crate) fn allow(&self) {
        self.state().forbidden = None;
    }

    /// Lets no request through and ends all watches, or lets them through again.
    pub(crate) fn break_off(&self, broken_off: bool) {
        self.state().broken_off = broken_off;
        self.changed.send_modify(|_| {});
    }

    /// Sets the time that deletion timestamps get.
    pub(crate) fn set_now(&self, now: Timestamp) {
        self.state().now = Some(now);
    }

    /// Puts an object as it stands, as another client would.
    pub(crate) fn put(&self, plural: &str, object: Value) {
        let key = key_of(plural, &object);
        let mut state = self.state();
        state.store(&key, object);
        self.tell(&state);
    }

    /// Changes an object in place, as another client would.
    pub(crate) fn change(&self, plural: &str, namespace: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let mut state = self.state();
        let key = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        if let Some(mut object) = state.objects.get(&key).cloned() {
            change(&mut object);
            state.store(&key, object);
        }
        self.tell(&state);
    }

    /// Removes an object at once.
    pub(crate) fn remove(&self, plural: &str, namespace: &str, name: &str) {
        let mut state = self.state();
        state.erase(&(plural.to_owned(), namespace.to_owned(), name.to_owned()));
        self.tell(&state);
    }

    /// Version of the newest change.
    pub(crate) fn version(&self) -> u64 {
        self.state().version
    }

    /// One object.
    pub(crate) fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        self.state().objects.get(&(plural.to_owned(), namespace.to_owned(), name.to_owned())).cloned()
    }

    /// All objects of a kind.
    pub(crate) fn all(&self, plural: &str) -> Vec<Value> {
        self.state().objects.iter().filter(|(key, _)| key.0 == plural).map(|(_, object)| object.clone()).collect()
    }

    /// Everything, without what differs from run to run.
    pub(crate) fn everything(&self) -> BTreeMap<Key, Value> {
        self.state().objects.clone()
    }

    /// Does what a delete call does.
    pub(crate) fn delete(&self, plural: &str, namespace: &str, name: &str, policy: &str) {
        let mut state = self.state();
        let key = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        let _gone = state.delete(&key, &json!({ "propagationPolicy": policy }));
        self.tell(&state);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, state: &State) {
        self.changed.send_replace(state.version);
    }

    async fn serve(self, request: Request<Body>) -> Result<Response<AnswerBody>, BoxError> {
        let ask = Ask::read(request).await?;
        if self.state().broken_off {
            return Err("no connection to the API server".into());
        }
        let fault = self.count(&ask);
        if let Some(Fault::Takes(time)) = fault {
            tokio::time::sleep(time).await;
        }
        let forbidden = self.state().forbidden.as_ref() == Some(&ask.key.0);
        if ask.verb == "watch" && !forbidden {
            self.record(&ask, StatusCode::OK);
            return Ok(self.watch(&ask));
        }
        let answer = match fault {
            _ if forbidden => {
                Err((StatusCode::FORBIDDEN, "Forbidden", format!("{} is forbidden: User \"x\" cannot {}", ask.key.0, ask.verb)))
            }
            Some(Fault::Fails) => Err((StatusCode::INTERNAL_SERVER_ERROR, "InternalError", "an injected fault".to_owned())),
            _ => self.carry_out(&ask),
        };
        if fault == Some(Fault::LosesAnswer) {
            self.state().calls.push(ask.call(0));
            return Err("the connection was lost (an injected fault)".into());
        }
        let (code, body) = match answer {
            Ok(value) if ask.verb == "create" => (StatusCode::CREATED, value),
            Ok(value) => (StatusCode::OK, value),
            Err((code, reason, message)) => {
                let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                    "message": message, "reason": reason, "code": code.as_u16()});
                (code, status)
            }
        };
        self.record(&ask, code);
        let response = Response::builder().status(code).header("content-type", "application/json");
        Ok(response.body(Full::new(Bytes::from(serde_json::to_vec(&body)?)).boxed_unsync())?)
    }

    fn count(&self, ask: &Ask) -> Option<Fault> {
        let mut state = self.state();
        if ask.key.0 == "leases" {
            if state.lose_leases {
                return Some(Fault::Takes(Duration::from_hours(1)));
            }
            return match &mut state.lease_fault {
                Some((0, fault)) => {
                    let fault = *fault;
                    state.lease_fault = None;
                    Some(fault)
                }
                Some((left, _)) => {
                    *left -= 1;
                    None
                }
                None => None,
            };
        }
        if ask.verb == "watch" {
            return None;
        }
        let nth = state.counted;
        state.counted += 1;
        match state.fault {
            Some((at, fault)) if at == nth => {
                state.fault = None;
                Some(fault)
            }
            _ => None,
        }
    }

    fn record(&self, ask: &Ask, code: StatusCode) {
        self.state().calls.push(ask.call(code.as_u16()));
    }

    fn carry_out(&self, ask: &Ask) -> Answer {
        let mut state = self.state();
        let answer = match ask.verb {
            "get" => state.get(&ask.key),
            "list" => Ok(state.list(ask)),
            "create" => state.create(ask),
            "replace" => state.replace(ask),
            "apply" => state.apply(ask),
            "patch" => state.patch(ask),
            "delete" => state.delete(&ask.key, &ask.body),
            verb => Err((StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", format!("{verb} is not served"))),
        };
        self.tell(&state);
        answer
    }

    fn watch(&self, ask: &Ask) -> Response<AnswerBody> {
        let from: u64 = ask.query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
        let plural = ask.key.0.clone();
        let namespace = ask.key.1.clone();
        let query = ask.query.clone();
        let start = (self.clone(), from, self.changed.subscribe());
        let lines = futures::stream::unfold(start, move |(server, seen, mut changed)| {
            let (plural, namespace, query) = (plural.clone(), namespace.clone(), query.clone());
            async move {
                loop {
                    if server.state().broken_off {
                        return None;
                    }
                    let next = server.state().next_event(seen, &plural, &namespace, &query);
                    if let Some((version, line)) = next {
                        let frame = http_body::Frame::data(Bytes::from(line));
                        return Some((Ok::<_, Infallible>(frame), (server, version, changed)));
                    }
                    changed.changed().await.ok()?;
                }
            }
        });
        Response::new(StreamBody::new(lines).boxed_unsync())
    }
}

// === impl State ===

impl State {
    fn next_event(&self, seen: u64, plural: &str, namespace: &str, query: &BTreeMap<String, String>) -> Option<(u64, String)> {
        let event = self.events.iter().find(|event| {
            event.version > seen
                && event.key.0 == plural
                && (namespace.is_empty() || event.key.1 == namespace)
                && selected(&event.object, query)
        })?;
        Some((event.version, format!("{}\n", json!({"type": event.kind, "object": event.object}))))
    }

    fn bump(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    /// Writes an object with a new resource version, unless nothing differs; generations move with the spec.
    fn store(&mut self, key: &Key, mut object: Value) -> Value {
        let old = self.objects.get(key).cloned();
        if let Some(old) = &old {
            let generation = old.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or(1);
            let moved = without_status(old) != without_status(&object);
            object["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
            object["metadata"]["generation"] = json!(generation + i64::from(moved && old.get("spec") != object.get("spec")));
            object["metadata"]["uid"] = old["metadata"]["uid"].clone();
            if *old == object {
                return object;
            }
        } else {
            self.uids += 1;
            object["metadata"]["uid"] = json!(format!("uid-{}", self.uids));
            object["metadata"]["generation"] = json!(1);
            object["metadata"]["creationTimestamp"] = json!(self.now().to_string());
        }
        let version = self.bump();
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let deleting = object.pointer("/metadata/deletionTimestamp").is_some();
        let finalizers = object.pointer("/metadata/finalizers").and_then(Value::as_array).is_some_and(|list| !list.is_empty());
        let on_node = key.0 == "pods" && object.pointer("/spec/nodeName").is_some();
        if deleting && !finalizers && !on_node {
            self.objects.insert(key.clone(), object.clone());
            self.erase(key);
            return object;
        }
        let kind = if old.is_some() { "MODIFIED" } else { "ADDED" };
        self.events.push(Event { kind, key: key.clone(), object: object.clone(), version });
        self.objects.insert(key.clone(), object.clone());
        object
    }

    fn erase(&mut self, key: &Key) {
        let Some(mut object) = self.objects.remove(key) else { return };
        self.applied.retain(|(at, ..), _| at != key);
        let version = self.bump();
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        self.events.push(Event { kind: "DELETED", key: key.clone(), object, version });
    }

    fn now(&self) -> Timestamp {
        let now = self.now.unwrap_or(Timestamp::UNIX_EPOCH);
        Timestamp::from_second(now.as_second()).unwrap_or(now)
    }

    fn get(&self, key: &Key) -> Answer {
        self.objects.get(key).cloned().ok_or_else(|| missing(key))
    }

    fn list(&self, ask: &Ask) -> Value {
        let (plural, namespace, _) = &ask.key;
        let keeps = |(key, object): &(&Key, &Value)| {
            key.0 == *plural && (namespace.is_empty() || key.1 == *namespace) && selected(object, &ask.query)
        };
        // As with a real server, items of its own kinds do not say what they are; those of a custom resource do.
        let untyped = |object: &Value| {
            let mut object = object.clone();
            if let Some(members) = object.as_object_mut().filter(|_| plural != "servingpools") {
                members.retain(|name, _| name != "apiVersion" && name != "kind");
            }
            object
        };
        let items: Vec<Value> = self.objects.iter().filter(keeps).map(|(_, object)| untyped(object)).collect();
        json!({"kind": "List", "apiVersion": ask.group_version, "metadata": {"resourceVersion": self.version.to_string()}, "items": items})
    }

    fn create(&mut self, ask: &Ask) -> Answer {
        let key = key_in(&ask.key, &ask.body);
        if self.objects.contains_key(&key) {
            return Err((StatusCode::CONFLICT, "AlreadyExists", format!("{} {} already exists", key.0, key.2)));
        }
        Ok(self.store(&key, ask.fresh(&key)))
    }

    fn replace(&mut self, ask: &Ask) -> Answer {
        let old = self.get(&ask.key)?;
        check_version(&old, &ask.body)?;
        let mut object = ask.body.clone();
        if ask.sub == "status" {
            let status = object["status"].take();
            object = old;
            object["status"] = status;
        } else if let Some(status) = old.get("status").filter(|_| WITH_STATUS.contains(&&*ask.key.0)) {
            object["status"] = status.clone();
        }
        Ok(self.store(&ask.key, object))
    }

    fn patch(&mut self, ask: &Ask) -> Answer {
        let old = self.get(&ask.key)?;
        check_version(&old, &ask.body)?;
        let mut object = old.clone();
        if ask.patch.contains("strategic") {
            merge(&mut object, &ask.body);
        } else {
            merge_patch(&mut object, &ask.body);
        }
        Ok(self.store(&ask.key, keep_part(&ask.key, &ask.sub, &old, object)))
    }

    fn apply(&mut self, ask: &Ask) -> Answer {
        let manager = ask.query.get("fieldManager").cloned().unwrap_or_default();
        let slot = (ask.key.clone(), manager, ask.sub == "status");
        let Some(old) = self.objects.get(&ask.key).cloned() else {
            if !ask.sub.is_empty() {
                return Err(missing(&ask.key));
            }
            self.applied.insert(slot, ask.body.clone());
            return Ok(self.store(&ask.key, ask.fresh(&ask.key)));
        };
        check_version(&old, &ask.body)?;
        let mut object = old.clone();
        if let Some(former) = self.applied.insert(slot, ask.body.clone()) {
            drop_given_up(&mut object, &former, &ask.body);
        }
        merge(&mut object, &ask.body);
        Ok(self.store(&ask.key, keep_part(&ask.key, &ask.sub, &old, object)))
    }

    fn delete(&mut self, key: &Key, options: &Value) -> Answer {
        let mut object = self.get(key)?;
        if let Some(uid) = options.pointer("/preconditions/uid")
            && *uid != object["metadata"]["uid"]
        {
            return Err((StatusCode::CONFLICT, "Conflict", "the uid in the precondition does not match".to_owned()));
        }
        let policy = options.get("propagationPolicy").and_then(Value::as_str).unwrap_or("Background");
        let mut finalizers = object.pointer("/metadata/finalizers").and_then(Value::as_array).cloned().unwrap_or_default();
        for (name, finalizer) in [("Foreground", "foregroundDeletion"), ("Orphan", "orphan")] {
            if policy == name && !finalizers.contains(&json!(finalizer)) {
                finalizers.push(json!(finalizer));
            }
        }
        let graceful = key.0 == "pods" && object.pointer("/spec/nodeName").is_some();
        if finalizers.is_empty() && !graceful {
            self.erase(key);
            return Ok(json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {}}));
        }
        if object.pointer("/metadata/deletionTimestamp").is_none() {
            let grace = object.pointer("/spec/terminationGracePeriodSeconds").and_then(Value::as_i64).unwrap_or(30);
            let at = if graceful { self.now() + Duration::from_secs(grace.max(0) as u64) } else { self.now() };
            object["metadata"]["deletionTimestamp"] = json!(at.to_string());
            object["metadata"]["deletionGracePeriodSeconds"] = json!(if graceful { grace } else { 0 });
        }
        if !finalizers.is_empty() {
            object["metadata"]["finalizers"] = json!(finalizers);
        }
        Ok(self.store(key, object))
    }
}

fn keep_part(key: &Key, sub: &str, old: &Value, mut object: Value) -> Value {
    if sub == "status" {
        let status = object["status"].take();
        object = old.clone();
        object["status"] = status;
    } else if WITH_STATUS.contains(&&*key.0) {
        match old.get("status") {
            Some(status) => object["status"] = status.clone(),
            None => {
                object.as_object_mut().map(|object| object.remove("status"));
            }
        }
    }
    object
}

fn without_status(object: &Value) -> Value {
    let mut object = object.clone();
    object.as_object_mut().map(|object| object.remove("status"));
    object
}

fn check_version(old: &Value, new: &Value) -> Result<(), (StatusCode, &'static str, String)> {
    match new.pointer("/metadata/resourceVersion").and_then(Value::as_str) {
        Some(version) if !version.is_empty() && old["metadata"]["resourceVersion"] != version => {
            Err((StatusCode::CONFLICT, "Conflict", "the object has been modified".to_owned()))
        }
        _ => Ok(()),
    }
}

fn missing(key: &Key) -> (StatusCode, &'static str, String) {
    (StatusCode::NOT_FOUND, "NotFound", format!("{} \"{}\" not found", key.0, key.2))
}

fn selected(object: &Value, query: &BTreeMap<String, String>) -> bool {
    query.get("labelSelector").is_none_or(|selector| labels_match(object, selector))
        && query.get("fieldSelector").is_none_or(|selector| fields_match(object, selector))
}

fn key_of(plural: &str, object: &Value) -> Key {
    let text = |path: &str| object.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
    (plural.to_owned(), text("/metadata/namespace"), text("/metadata/name"))
}

fn key_in(at: &Key, object: &Value) -> Key {
    let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
    (at.0.clone(), at.1.clone(), if at.2.is_empty() { name.to_owned() } else { at.2.clone() })
}

// === impl Ask ===

impl Ask {
    async fn read(request: Request<Body>) -> Result<Self, BoxError> {
        let (parts, body) = request.into_parts();
        let body = body.collect_bytes().await?;
        let body = if body.is_empty() { Value::Null } else { serde_json::from_slice(&body)? };
        let patch = parts.headers.get("content-type").and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
        let query: BTreeMap<String, String> = query(parts.uri.query().unwrap_or_default());
        let segments: Vec<&str> = parts.uri.path().split('/').filter(|segment| !segment.is_empty()).collect();
        let (group_version, rest) = match segments.split_first() {
            Some((&"api", rest)) => (rest.first().copied().unwrap_or_default().to_owned(), rest.get(1..).unwrap_or_default()),
            Some((_, rest)) if rest.len() > 2 => (format!("{}/{}", rest[0], rest[1]), &rest[2..]),
            _ => return Err(format!("the mock serves no {}", parts.uri.path()).into()),
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => ((*namespace).to_owned(), rest),
            rest => (String::new(), rest),
        };
        let [plural, name, sub] = std::array::from_fn(|at| rest.get(at).copied().unwrap_or_default().to_owned());
        let watching = query.get("watch").is_some_and(|watch| watch == "true" || watch == "1");
        let verb = match parts.method {
            Method::GET if watching => "watch",
            Method::GET if name.is_empty() => "list",
            Method::GET => "get",
            Method::POST => "create",
            Method::PUT => "replace",
            Method::PATCH if patch.contains("apply-patch") => "apply",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => "unknown",
        };
        Ok(Self { verb, key: (plural, namespace, name), group_version, sub, query, body, patch })
    }

    fn call(&self, code: u16) -> Call {
        let resource = if self.sub.is_empty() { self.key.0.clone() } else { format!("{}/{}", self.key.0, self.sub) };
        let name = key_in(&self.key, &self.body).2;
        Call { verb: self.verb, resource, name, code }
    }

    fn fresh(&self, key: &Key) -> Value {
        let mut object = self.body.clone();
        object["metadata"]["name"] = json!(key.2);
        if !key.1.is_empty() {
            object["metadata"]["namespace"] = json!(key.1);
        }
        if WITH_STATUS.contains(&&*key.0) {
            object.as_object_mut().map(|object| object.remove("status"));
        }
        if key.0 == "pods" {
            object["status"] = json!({"phase": "Pending"});
        }
        object
    }
}

/// Reads `a=b&c=d` with percent signs.
fn query(text: &str) -> BTreeMap<String, String> {
    text.split('&').filter_map(|pair| pair.split_once('=')).map(|(name, value)| (decode(name), decode(value))).collect()
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let digits: String = rest.by_ref().take(2).map(char::from).collect();
                bytes.push(u8::from_str_radix(&digits, 16).unwrap_or(b'?'));
            }
            other => bytes.push(other),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
