//! The way to the API server of the cluster: a client with the limits that watching needs, names of objects, and what went wrong in plain words.
//!
//! Owns how long a silent connection is believed in. Refuses to know what is watched. Used by discovery and by the secrets.

use kube::{Client, Config};
use std::fmt;
use std::time::Duration;

/// Namespace and name of one object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ObjectName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// Why a text names no object.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{text}` names no object: {problem}; write `NAMESPACE/NAME`")]
pub struct ObjectNameError {
    text: String,
    problem: &'static str,
}

/// Why the cluster cannot be reached at all.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// Neither a kubeconfig nor a service account.
    #[error("no way to the cluster's API server: {0}; run in a pod with a service account, or set KUBECONFIG")]
    Config(#[source] Box<kube::config::InferConfigError>),
    /// The configuration cannot be used.
    #[error("the way to the cluster's API server cannot be used: {0}; check certificates and proxy settings")]
    Client(#[source] Box<kube::Error>),
}

/// What the API server, or the way to it, said.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Complaint {
    /// One word, for metrics.
    pub(crate) code: &'static str,
    /// For people.
    pub(crate) message: String,
}

/// How long the API server may stay silent before it ends a watch itself, in seconds. A connection that is cut without a word is noticed soon after.
pub(crate) const WATCH_SECONDS: u32 = 30;
/// Silence after which a connection is given up: longer than any watch is silent.
const READ_MAX: Duration = Duration::from_secs(45);
/// Longest time for connecting and for sending a request.
const REACH_MAX: Duration = Duration::from_secs(5);
/// Longest namespace or label, in bytes.
const LABEL_BYTES_MAX: usize = 63;
/// Longest name of an object, in bytes.
const NAME_BYTES_MAX: usize = 253;

/// A client by kubeconfig or service account.
pub(crate) async fn client() -> Result<Client, ClusterError> {
    let mut config = Config::infer().await.map_err(|error| ClusterError::Config(Box::new(error)))?;
    // Retries inside the client hide failures; whoever watches backs off itself and says so.
    config.default_retry = false;
    config.connect_timeout = Some(REACH_MAX);
    config.write_timeout = Some(REACH_MAX);
    config.read_timeout = Some(READ_MAX);
    Client::try_from(config).map_err(|error| ClusterError::Client(Box::new(error)))
}

// === impl ObjectName ===

impl ObjectName {
    /// Reads `NAMESPACE/NAME`.
    pub fn parse(text: &str) -> Result<Self, ObjectNameError> {
        let refuse = |problem| ObjectNameError { text: text.to_owned(), problem };
        let (namespace, name) = text.split_once('/').ok_or_else(|| refuse("the `/` is missing"))?;
        if !is_label(namespace) {
            return Err(refuse("the namespace is not 1 to 63 characters out of a-z, 0-9 and `-`"));
        }
        if name.len() > NAME_BYTES_MAX || !name.split('.').all(is_label) {
            return Err(refuse("the name is not made of a-z, 0-9, `-` and `.`"));
        }
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }

    /// Reads the name of a Service, which is one label.
    pub fn parse_service(text: &str) -> Result<Self, ObjectNameError> {
        let name = Self::parse(text)?;
        if is_label(&name.name) {
            return Ok(name);
        }
        Err(ObjectNameError { text: text.to_owned(), problem: "a Service's name is 1 to 63 characters out of a-z, 0-9 and `-`" })
    }
}

fn is_label(text: &str) -> bool {
    let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    let ends = |byte: Option<&u8>| byte.is_some_and(|byte| *byte != b'-');
    let bytes = text.as_bytes();
    bytes.len() <= LABEL_BYTES_MAX && bytes.iter().all(plain) && ends(bytes.first()) && ends(bytes.last())
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

// === impl Complaint ===

impl Complaint {
    pub(crate) fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// Of one request. Says nothing of the content of an answer that cannot be read: it may have been a secret.
    pub(crate) fn of(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => Self::malformed(),
            other => Self::new("unreachable", format!("the API server cannot be reached: {}", root(other))),
        }
    }

    /// Of an answer that cannot be read.
    pub(crate) fn malformed() -> Self {
        Self::new("malformed", "the API server's answer cannot be read")
    }

    /// Of a refusal.
    pub(crate) fn of_status(status: &kube::core::Status) -> Self {
        let code = match status.code {
            401 | 403 => "forbidden",
            404 => "not_found",
            410 => "expired",
            _ => "refused",
        };
        Self::new(code, format!("the API server refused: {} ({} {})", status.message, status.code, status.reason))
    }
}

/// The innermost cause: the outer ones only say that a service failed.
fn root(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_named_by_namespace_and_name() {
        let name = ObjectName::parse("default/pool-a.keys").unwrap();
        assert_eq!((name.namespace.as_str(), name.name.as_str()), ("default", "pool-a.keys"));
        assert_eq!(ObjectName::parse_service("n/workers").unwrap().to_string(), "n/workers");
        let long = format!("n/{}", "a".repeat(64));
        for wrong in ["", "a", "/a", "a/", "A/b", "a/b c", "a/b/c", "-a/b", "a/b-", "a/.b", "a/b..c", &long] {
            let message = ObjectName::parse(wrong).unwrap_err().to_string();
            assert!(message.contains(wrong) && message.contains("NAMESPACE/NAME"), "{message}");
        }
        assert!(ObjectName::parse("a/b.c").is_ok() && ObjectName::parse_service("a/b.c").is_err());
    }

    #[test]
    fn an_answer_that_cannot_be_read_is_not_repeated() {
        let error = serde_json::from_str::<u32>("\"a secret\"").unwrap_err();
        let complaint = Complaint::of(&kube::Error::SerdeError(error));
        assert_eq!(complaint.code, "malformed");
        assert!(!complaint.message.contains("a secret"));
    }
}
