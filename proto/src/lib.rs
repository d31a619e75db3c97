//! The wire: generated code of the `.proto` files, and the one place that converts between wire and [`kvasir_core`].
//!
//! Owns the protocol of contracts §2 and §3, the strict reading of it ([`convert`]), what a worker says of itself ([`Description`]), and
//! who may call whom ([`auth`]). Refuses to know about sockets, engines and placement. Called by doors, workers, routers and the operator.
//!
//! Glossary
//! - *wire*: the generated messages in [`pb`], [`worker`], [`router`], [`inference`].
//! - *strict*: a message with a missing part, a wrong length, an unknown word or a NaN is refused with the field's name.

pub mod auth;
pub mod convert;
mod describe;
mod redact;

pub use describe::{
    ArtifactKind, ArtifactRef, BuildInfo, Description, DrafterInfo, DrafterKind, DrafterPlacement, DrafterState,
    ModelDescription, Phase, Role, TierCapacity,
};

/// `kvasir.inference.v1`: what clients speak.
pub use generated::kvasir::inference::v1 as inference;
/// `kvasir.router.v1`: router administration.
pub use generated::kvasir::router::v1 as router;
/// `kvasir.v1`: the error message and the words that all services share.
pub use generated::kvasir::v1 as pb;
/// `kvasir.worker.v1`: worker, draft and worker administration.
pub use generated::kvasir::worker::v1 as worker;

/// Encoded `FileDescriptorSet` of every `.proto` file, for reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kvasir.bin"));

/// The generated modules stand as their packages do, because they refer to each other by those paths.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated code")]
mod generated {
    pub mod kvasir {
        pub mod v1 {
            tonic::include_proto!("kvasir.v1");
        }
        pub mod worker {
            pub mod v1 {
                tonic::include_proto!("kvasir.worker.v1");
            }
        }
        pub mod router {
            pub mod v1 {
                tonic::include_proto!("kvasir.router.v1");
            }
        }
        pub mod inference {
            pub mod v1 {
                tonic::include_proto!("kvasir.inference.v1");
            }
        }
    }
}
