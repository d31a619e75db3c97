//! The worker service over real gRPC on loopback, on the hash-model: every method, who may call it, and how it ends.

mod access;
mod admin;
mod artifacts;
mod cancel;
mod door;
mod drain;
mod events;
mod generate;
mod http;
mod load;
mod rig;
