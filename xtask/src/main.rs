//! Thin entry points.
fn main() {}
