//! What clients speak: OpenAI JSON and SSE, gRPC inference, `prepare`, authentication.
//!
//! One implementation behind two thin doors. Owns everything between a client's bytes and one [`Serve`] trait, which a router's placement and a
//! worker's engine implement alike. Refuses to know placement, engines and Kubernetes.
//!
//! A request, from left to right: [`Door`] gate (tenant) → openai or grpc (an ask) → prepare (the only `Request`) → [`Serve`] → answer
//! (events) → openai or grpc (SSE, JSON, protobuf). Dropping the answer anywhere cancels the request everywhere.
//!
//! Glossary
//! - *gate*: default deny in front of every route; turns an API key into a [`Tenant`].
//! - *ask*: a request as a client wrote it, parsed, before it meets a model.
//! - *prepare*: template, tokens, limits; the only maker of [`kvasir_core::Request`].
//! - *answer*: the merged output of a call; ends with exactly one success or failure.
//! - *report*: what happened to a request, when the client asked for it (`kvasir.report`).

mod answer;
mod ask;
mod auth;
mod call;
mod door;
mod grpc;
mod openai;
pub mod params;
mod prepare;
mod serve;
mod server;

#[cfg(test)]
mod testing;

pub use auth::{Isolation, Tenant, TenantFileError, TenantTable, Tenants};
pub use door::{Door, DoorSettings};
pub use serve::{Catalog, ChunkStream, Prepared, Receipt, ReceiptSlot, Serve, ServedModel};
pub use server::{ServerSettings, serve};
