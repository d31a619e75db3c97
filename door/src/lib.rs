//! What clients speak: OpenAI JSON and SSE, gRPC inference, `prepare`, authentication.
//!
//! (module map grows with the crate)

mod serve;

pub use serve::{Catalog, ChunkStream, Prepared, ROUTER_STATES, Receipt, ReceiptSlot, Serve, ServedModel};
