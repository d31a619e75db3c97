//! A list of workers that was given at start and never changes.

use super::{Change, Discover, Endpoint};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};

/// Workers by address.
#[derive(Clone, Debug)]
pub struct Fixed(Vec<Endpoint>);

// === impl Fixed ===

impl Fixed {
    /// These endpoints; one that is listed twice counts once.
    pub fn new(mut endpoints: Vec<Endpoint>) -> Self {
        endpoints.sort();
        endpoints.dedup();
        Self(endpoints)
    }
}

impl Discover for Fixed {
    fn changes(self: Box<Self>) -> BoxStream<'static, Change> {
        stream::iter(self.0.into_iter().map(Change::Join)).chain(stream::iter([Change::Listed])).chain(stream::pending()).boxed()
    }
}
