//! ServingPool controller (its issue has not begun; the crate holds its place in the arrows).
