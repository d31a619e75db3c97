//! The event stream: snapshot, then batches, cut into messages of bounded size; a subscriber that lags gets a new snapshot.

use super::WorkerService;
use crate::kv::EventStream;
use futures::Stream;
use futures::stream;
use kvasir_core::Error;
use kvasir_proto::convert::events_to_wire;
use kvasir_proto::worker as wire;

/// State of one subscriber.
struct Batches {
    events: EventStream,
    /// Messages of the present batch, in order.
    parts: std::vec::IntoIter<wire::KvEventsResponse>,
}

// === impl WorkerService ===

impl WorkerService {
    /// Events for one subscriber, until the engine ends.
    pub(super) async fn kv_events(&self) -> Result<impl Stream<Item = wire::KvEventsResponse> + Send + 'static, Error> {
        let batches = Batches { events: self.0.engine.events().await?, parts: Vec::new().into_iter() };
        Ok(stream::unfold(batches, |mut batches| async move {
            loop {
                if let Some(part) = batches.parts.next() {
                    return Some((part, batches));
                }
                let batch = batches.events.recv().await?;
                batches.parts = events_to_wire(&batch).into_iter();
            }
        }))
    }
}
