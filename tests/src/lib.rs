//! Integration tests of the whole: `it/tidy` (shape of the code), `it/golden` (exactness on real models), `it/e2e` (as a user sees it).
//!
//! One test binary, so that the workspace links once. This library is empty on purpose: test support lives beside the tests.
