//! Compute kernels: quantised matmul, paged attention, norms, rope; equal bits on every instruction set.
//!
//! Every kernel here gives the same bits for the same row whatever the number of rows beside it, the
//! number of threads and the instruction set. That is what lets a worker reuse, resume, batch and
//! speculate without ever changing a token.
//!
//! Glossary
//! - *row*: one token's activations. *column*: one output feature of a weight matrix.
//! - *tile*: 16 columns of a weight matrix, interleaved so that a vector lane is a column.
//! - *block*: 32 consecutive inputs that share one activation scale. *super-block*: 256 inputs of a K type.
//! - *instruction set*: [`Isa`]; chosen at run time, never at compile time.
//!
//! The crate knows nothing of models, requests or caches.
#![allow(clippy::inline_always, reason = "vector code takes on the features of its caller only when it is inlined there")]
#![allow(
    unsafe_code,
    reason = "vector intrinsics and sharing one output buffer between the pool's threads; each use says why it is sound"
)]

pub mod attention;
mod error;
mod isa;
pub mod math;
mod matmul;
pub mod noise;
pub mod norm;
mod pool;
mod quant;
pub mod reduce;
pub mod rope;
mod vector;

pub use error::KernelError;
pub use isa::Isa;
pub use matmul::{MAX_GROUP, Product, Scratch, Weights, matmul, matmul_group};
pub use pool::Pool;
pub use quant::{WeightType, dequantize};

/// Part of every cached block's identity: raised whenever any kernel's result changes in any bit.
pub const NUMERICS_REVISION: u32 = 1;
