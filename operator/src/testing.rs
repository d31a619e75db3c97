//! A mock API server for tests: an in-memory store that poses as the client's service.
//!
//! Owns enough of the API machinery for a controller to run against it: resource versions, generations, status subresources, server-side
//! apply, merge patches, preconditions, finalizers and graceful deletion, lists and watches with label selectors. Records every call and can
//! make the n-th one fail, take long, or be carried out while its answer is lost. Refuses to validate, default or admit anything: that needs
//! a real API server. Beside it a small cluster: a scheduler with a number of devices, a kubelet, the controllers of Deployments and of garbage,
//! and routers and workers that answer.

mod cluster;
mod fleet;
mod objects;
mod sketch;
mod store;

pub(crate) use cluster::{Cluster, DEVICE};
pub(crate) use fleet::Fleet;
pub(crate) use objects::merge_patch;
pub(crate) use sketch::Sketch;
pub(crate) use store::{Fault, MockApi};
