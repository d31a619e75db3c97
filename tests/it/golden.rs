//! Exactness: the same request gives the same bits on every road.

mod numerics;
mod oracle;
mod rig;
mod safetensors;
mod smol;
