//! A real Kubernetes on this machine, without a registry and without containers around it: `Cluster::start(Layers::api()).await?`.
//!
//! Owns the processes, certificates, addresses and files of test clusters, the tools they need, images, and nodes that only seem to be there.
//! Refuses to know what is tested: nothing here names a product's object. Called by integration tests and by `cargo xtask e2e`; never shipped.
//!
//! Glossary
//! - **layer**: how much runs: API server; controllers; real nodes. Each holds the ones before it.
//! - **real node**: containerd, kubelet and kube-proxy in namespaces of their own on this machine. **Played node**: objects only.
//! - **place**: one of the few slots for clusters on a machine; it sets folder, bridge and address ranges.

mod access;
mod args;
mod audit;
mod cgroup;
mod cluster;
mod control;
mod devices;
mod error;
mod identities;
mod image;
mod layers;
mod names;
mod node;
mod nodes;
mod pki;
mod plan;
mod play;
mod probe;
mod process;
mod ready;
mod scratch;
mod space;
pub mod tools;

pub use access::Access;
pub use args::{Cli, KUBERNETES_VERSION, Part, Settings, Verb};
pub use audit::{AuditEvent, AuditLog, Mark};
pub use cluster::{Cluster, is_root};
pub use devices::DeviceSpec;
pub use error::Error;
pub use image::Image;
pub use layers::{Component, Layers};
pub use play::{NodeSpec, Play, PlayedNodes};
pub use probe::{http_get, http_ok, until};
pub use process::is_running;
pub use scratch::clean;
