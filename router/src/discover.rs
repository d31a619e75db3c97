//! Where workers are: a stream of joins and leaves.
//!
//! Owns the vocabulary between whoever knows the endpoints (a static list, or the EndpointSlices of a Service) and the fleet. Refuses to know whether
//! an endpoint works: the fleet probes each itself.

mod fixed;
mod slices;

pub use fixed::Fixed;
pub use slices::{PortChoice, PortChoiceError, Slices};

use futures::stream::BoxStream;
use std::fmt;

/// Address of a worker's gRPC service.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Endpoint(String);

/// One change of membership.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// An endpoint is there.
    Join(Endpoint),
    /// An endpoint is going or gone: it gets nothing new from now on.
    Leave(Endpoint),
    /// The first list is complete.
    Listed,
    /// The source cannot be followed. What it said last stands: that nothing is heard of a worker is no reason to leave it.
    Stale(Stale),
    /// The source is followed again, and everything that was missed has been said.
    Fresh,
}

/// Why the list may be behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stale {
    /// One word, for metrics.
    pub code: &'static str,
    /// For people.
    pub message: String,
}

/// Knows where workers are.
pub trait Discover: Send + 'static {
    /// All changes from the beginning. The stream never ends while the source can still change.
    fn changes(self: Box<Self>) -> BoxStream<'static, Change>;
}

/// Why an address is no endpoint.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("worker address `{address}` is invalid: {problem}; write `host:port`, `http://host:port` or `https://host:port`")]
pub struct EndpointError {
    address: String,
    problem: String,
}

// === impl Endpoint ===

impl Endpoint {
    /// Reads `host:port` or a URI with scheme http or https.
    pub fn parse(address: &str) -> Result<Self, EndpointError> {
        let refuse = |problem: &str| EndpointError { address: address.to_owned(), problem: problem.to_owned() };
        let text = address.trim();
        let whole = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let uri: http::Uri = whole.parse().map_err(|error: http::uri::InvalidUri| refuse(&error.to_string()))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) {
            return Err(refuse("the scheme is neither http nor https"));
        }
        if uri.port_u16().is_none_or(|port| port == 0) {
            return Err(refuse("the port is missing or 0"));
        }
        if uri.path() != "/" || uri.query().is_some() {
            return Err(refuse("a path does not belong to it"));
        }
        Ok(Self(whole.trim_end_matches('/').to_owned()))
    }

    /// The URI.
    pub fn uri(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_and_without_scheme() {
        assert_eq!(Endpoint::parse(" localhost:50051 ").unwrap().uri(), "http://localhost:50051");
        assert_eq!(Endpoint::parse("http://10.0.0.1:1/").unwrap().uri(), "http://10.0.0.1:1");
        assert_eq!(Endpoint::parse("https://[::1]:443").unwrap().uri(), "https://[::1]:443");
        for wrong in ["", "host", "host:0", "host:99999", "ftp://host:1", "http://host:1/path", "http://host:1?q", "a b:1"] {
            let message = Endpoint::parse(wrong).unwrap_err().to_string();
            assert!(message.contains(wrong) && message.contains("host:port"), "{message}");
        }
    }
}
