//! Quota, admission, placement and attempts; no weights.
