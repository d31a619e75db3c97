//! The gate: whether this process may write now, and the layer under a client that holds it to it.

use http::{Method, Request};
use kube::client::Body;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tower::BoxError;
use tower::filter::{FilterLayer, Predicate};

/// Whether this process may write; cheap to clone.
#[derive(Clone, Debug)]
pub struct Gate(watch::Sender<Option<Instant>>);

/// A write was refused on this side.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this process does not hold the lease, so it writes nothing")]
pub struct NotLeading;

/// Puts a gate under a client.
pub type GateLayer = FilterLayer<Gate>;

// === impl Gate ===

impl Gate {
    /// A gate that is closed.
    pub fn closed() -> Self {
        Self(watch::Sender::new(None))
    }

    /// A gate without an elector: open for ever.
    pub fn open() -> Self {
        // As far ahead as a monotonic clock may go without overflow: a century.
        Self(watch::Sender::new(Some(Instant::now() + std::time::Duration::from_hours(100 * 365 * 24))))
    }

    /// Whether writes pass now.
    pub fn is_open(&self) -> bool {
        self.0.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Opens it until `until`.
    pub fn open_until(&self, until: Instant) {
        self.0.send_replace(Some(until));
    }

    /// Closes it.
    pub fn close(&self) {
        self.0.send_replace(None);
    }

    /// Returns when it is open.
    pub async fn opened(&self) {
        let mut changes = self.0.subscribe();
        while !self.is_open() {
            // The sender lives in self, so waiting cannot fail.
            let _lives = changes.changed().await;
        }
    }

    /// Returns when it is closed, be it by its deadline.
    pub async fn shut(&self) {
        let mut changes = self.0.subscribe();
        while let Some(until) = { *changes.borrow_and_update() }.filter(|_| self.is_open()) {
            tokio::select! {
                _lives = changes.changed() => {}
                () = sleep_until(until) => {}
            }
        }
    }
}

impl Predicate<Request<Body>> for Gate {
    type Request = Request<Body>;

    fn check(&mut self, request: Request<Body>) -> Result<Request<Body>, BoxError> {
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        if reads || self.is_open() { Ok(request) } else { Err(NotLeading.into()) }
    }
}
