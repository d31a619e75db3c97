//! Integration tests: simulation, golden, end to end, performance, tidy.
