//! Parting: when a connection may be closed without cutting anybody short.
//!
//! Owns the count of one connection's running requests and the header that asks a client to leave. An HTTP/2 client is told by the protocol itself, at
//! once. An HTTP/1 client that was not told with its last answer gets [`super::ServerSettings::linger`] to send another request, whose answer tells it.

use super::Stage;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use http::{HeaderValue, Request, Version, header};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::watch;
use tower::ServiceExt as _;

/// One connection's part in the end of its server.
#[derive(Clone)]
pub(super) struct Parting {
    stages: watch::Receiver<Stage>,
    running: watch::Sender<Running>,
    linger: Duration,
}

/// What a connection is doing.
#[derive(Clone, Copy, Default)]
struct Running {
    requests: usize,
    /// The protocol tells the client that the connection ends.
    told_by_protocol: bool,
}

/// A request that runs until its answer has been sent or dropped.
struct Guard(watch::Sender<Running>);

struct Counted {
    body: Body,
    _guard: Guard,
}

// === impl Parting ===

impl Parting {
    pub(super) fn new(stages: watch::Receiver<Stage>, linger: Duration) -> Self {
        Self { stages, running: watch::Sender::new(Running::default()), linger }
    }

    /// Waits until the connection may be told to end.
    pub(super) async fn due(&self) {
        let mut stages = self.stages.clone();
        // An error means that the server is gone, which is an end as well.
        let _gone = stages.wait_for(|stage| *stage == Stage::Parts).await.is_err();
        let mut running = self.running.subscribe();
        loop {
            let idle = running.wait_for(|running| running.requests == 0 || running.told_by_protocol).await.map(|it| *it);
            if idle.is_err() || idle.is_ok_and(|running| running.told_by_protocol) {
                return;
            }
            let busy = running.wait_for(|running| running.requests > 0);
            if tokio::time::timeout(self.linger, busy).await.is_err() {
                return;
            }
        }
    }

    /// Has a request answered, and tells its client to leave if the end has begun.
    pub(super) async fn answer(self, routes: Router, request: Request<Incoming>) -> Result<Response, Infallible> {
        let version = request.version();
        let guard = self.begins(version);
        let (mut head, body) = routes.oneshot(request).await?.into_parts();
        if version < Version::HTTP_2 && *self.stages.borrow() != Stage::Serves {
            head.headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(Response::from_parts(head, Body::new(Counted { body, _guard: guard })))
    }

    fn begins(&self, version: Version) -> Guard {
        self.running.send_modify(|running| {
            running.requests += 1;
            running.told_by_protocol = version >= Version::HTTP_2;
        });
        Guard(self.running.clone())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.send_modify(|running| running.requests -= 1);
    }
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
