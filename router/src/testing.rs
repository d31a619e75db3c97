//! An API server that answers as a test tells it, behind a real client.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use axum::body::Body;
use futures::StreamExt as _;
use kube::Client;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::UnboundedReceiverStream;

/// What the client asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verb {
    Get,
    /// Of metadata alone.
    GetHead,
    List,
    Watch,
}

/// One request.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) verb: Verb,
    pub(crate) path: String,
    pub(crate) query: String,
}

/// One answer.
pub(crate) enum Reply {
    Object(Value),
    /// An object after some time.
    Late(Duration, Value),
    /// A refusal with this code.
    Status(u16),
    /// Text that is no JSON.
    Garbage(&'static str),
    /// Events, as long as the sender lives.
    Events(mpsc::UnboundedReceiver<String>),
    /// Never.
    Silence,
    /// The connection breaks.
    Broken,
}

/// A handle to the server.
#[derive(Clone)]
pub(crate) struct ApiServer {
    pub(crate) client: Client,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl ApiServer {
    /// Every request is answered by `answer`.
    pub(crate) fn new(answer: impl FnMut(&Asked) -> Reply + Send + 'static) -> Self {
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let (seen, answer) = (Arc::clone(&asked), Arc::new(Mutex::new(answer)));
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let asking = read(&request);
            seen.lock().unwrap().push(asking.clone());
            let reply = (answer.lock().unwrap())(&asking);
            respond(reply)
        });
        Self { client: Client::new(service, "default"), asked }
    }

    /// Requests so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn read(request: &http::Request<kube::client::Body>) -> Asked {
    let (path, query) = (request.uri().path().to_owned(), request.uri().query().unwrap_or_default().to_owned());
    let head = request.headers().get("accept").is_some_and(|accept| accept.to_str().unwrap().contains("PartialObjectMetadata"));
    let named = !path.ends_with("secrets") && !path.ends_with("endpointslices");
    let verb = match (query.contains("watch=true"), named, head) {
        (true, ..) => Verb::Watch,
        (_, true, true) => Verb::GetHead,
        (_, true, false) => Verb::Get,
        _ => Verb::List,
    };
    Asked { verb, path, query }
}

async fn respond(reply: Reply) -> Result<http::Response<Body>, tower::BoxError> {
    let (code, body) = match reply {
        Reply::Object(object) => (200, Body::from(object.to_string())),
        Reply::Late(time, object) => {
            sleep(time).await;
            (200, Body::from(object.to_string()))
        }
        Reply::Garbage(text) => (200, Body::from(text)),
        Reply::Status(code) => {
            let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": "as told", "reason": "Told"});
            (code, Body::from(status.to_string()))
        }
        Reply::Events(events) => (200, Body::from_stream(UnboundedReceiverStream::new(events).map(Ok::<_, Infallible>))),
        Reply::Silence => std::future::pending().await,
        Reply::Broken => return Err("the connection broke".into()),
    };
    Ok(http::Response::builder().status(code).body(body)?)
}

/// A line of a watch.
pub(crate) fn event(kind: &str, object: &Value) -> String {
    json!({"type": kind, "object": object}).to_string() + "\n"
}

/// What a watch says when its version is too old.
pub(crate) fn gone() -> String {
    event("ERROR", &json!({"kind": "Status", "status": "Failure", "code": 410, "message": "too old", "reason": "Expired"}))
}

/// A list of objects at a version.
pub(crate) fn list(kind: &str, version: u64, items: &[Value]) -> Reply {
    Reply::Object(json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": version.to_string()}, "items": items}))
}
