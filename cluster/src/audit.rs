//! The API server's audit log as data: who asked what, and the answer. Tests count writes with it.
//!
//! Blocking mode: a request's line is in the file before its answer arrives, so reading after an answer misses nothing.

use crate::Error;
use serde::Deserialize;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;

/// The log of one cluster.
#[derive(Clone, Debug)]
pub struct AuditLog {
    path: PathBuf,
}

/// A place in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark(u64);

/// One answered request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEvent {
    /// Who, after impersonation: `system:serviceaccount:NAMESPACE:NAME`, `admin`, …
    pub user: String,
    /// `create`, `patch`, `list`, …
    pub verb: String,
    /// Plural, such as `pods`; empty for paths such as `/readyz`.
    pub resource: String,
    /// Such as `status`; may be empty.
    pub subresource: String,
    /// Empty for the core group.
    pub group: String,
    /// Empty for cluster-scoped objects.
    pub namespace: String,
    /// Empty for lists.
    pub name: String,
    /// HTTP status of the answer.
    pub code: u16,
    /// Path and query.
    pub uri: String,
    /// What the client calls itself.
    pub user_agent: String,
}

// === impl AuditLog ===

impl AuditLog {
    pub(crate) const fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// The end of the log as of now.
    pub fn mark(&self) -> Result<Mark, Error> {
        self.path.metadata().map(|meta| Mark(meta.len())).map_err(Error::io("read", &self.path))
    }

    /// Every request that was answered after `mark`, in the order of the answers.
    pub fn since(&self, mark: Mark) -> Result<Vec<AuditEvent>, Error> {
        let mut text = String::new();
        let mut file = File::open(&self.path).map_err(Error::io("read", &self.path))?;
        file.seek(SeekFrom::Start(mark.0)).and_then(|_| file.read_to_string(&mut text)).map_err(Error::io("read", &self.path))?;
        Ok(events(&text))
    }

    /// Every request so far.
    pub fn all(&self) -> Result<Vec<AuditEvent>, Error> {
        self.since(Mark::default())
    }
}

// === impl AuditEvent ===

impl AuditEvent {
    /// Whether it asked for a change, granted or not.
    pub fn is_mutation(&self) -> bool {
        matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection")
    }

    /// Whether a controller's standing business made it: leases, and reviews of who may do what.
    pub fn is_housekeeping(&self) -> bool {
        matches!(self.resource.as_str(), "leases" | "tokenreviews" | "subjectaccessreviews")
    }
}

/// A last line without an end is still being written and is left for the next reading.
fn events(text: &str) -> Vec<AuditEvent> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()).map(AuditEvent::from).collect()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    verb: String,
    #[serde(rename = "requestURI")]
    uri: String,
    #[serde(default)]
    user_agent: String,
    user: User,
    impersonated_user: Option<User>,
    object_ref: Option<ObjectRef>,
    response_status: Option<ResponseStatus>,
}

#[derive(Deserialize)]
struct User {
    #[serde(default)]
    username: String,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ObjectRef {
    resource: String,
    subresource: String,
    api_group: String,
    namespace: String,
    name: String,
}

#[derive(Deserialize)]
struct ResponseStatus {
    #[serde(default)]
    code: u16,
}

impl From<Line> for AuditEvent {
    fn from(line: Line) -> Self {
        let object = line.object_ref.unwrap_or_default();
        Self {
            user: line.impersonated_user.unwrap_or(line.user).username,
            verb: line.verb,
            resource: object.resource,
            subresource: object.subresource,
            group: object.api_group,
            namespace: object.namespace,
            name: object.name,
            code: line.response_status.map_or(0, |status| status.code),
            uri: line.uri,
            user_agent: line.user_agent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATCH: &str = r#"{"kind":"Event","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/a/pods/b/status","verb":"patch","user":{"username":"admin"},"impersonatedUser":{"username":"alice"},"objectRef":{"resource":"pods","namespace":"a","name":"b","apiVersion":"v1","subresource":"status"},"responseStatus":{"code":200}}"#;

    #[test]
    fn a_line_tells_who_did_what_to_which_object() {
        let found = events(&format!("{PATCH}\n"));
        assert_eq!(found.len(), 1);
        let event = &found[0];
        assert_eq!((event.user.as_str(), event.verb.as_str(), event.code), ("alice", "patch", 200));
        assert_eq!((event.resource.as_str(), event.subresource.as_str(), event.name.as_str()), ("pods", "status", "b"));
        assert!(event.is_mutation() && !event.is_housekeeping());
    }

    #[test]
    fn a_line_that_is_still_being_written_is_left_for_later() {
        assert_eq!(events(&format!("{PATCH}\n{}", &PATCH[..40])).len(), 1);
        assert_eq!(events(&PATCH[..40]).len(), 0);
    }
}
