//! Why a cluster could not be had: one variant per cause, each says what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

/// Failure of the harness; never of what is tested on it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system said no.
    #[error("cannot {what} `{path}`: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// A program is not where it should be.
    #[error("`{program}` is missing; {hint}")]
    Missing {
        /// Its name.
        program: String,
        /// How to get it.
        hint: String,
    },
    /// A short command failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// As one would type it.
        command: String,
        /// What it said, shortened.
        output: String,
    },
    /// A server ended by itself.
    #[error("{process} ended ({status}) before it was ready; its log ends with:\n{log}")]
    Ended {
        /// Which.
        process: String,
        /// How.
        status: ExitStatus,
        /// Last lines of its log.
        log: String,
    },
    /// A bound was passed.
    #[error("{what} did not come true within {} s; last answer: {last}", .limit.as_secs())]
    Late {
        /// What was waited for.
        what: String,
        /// How long.
        limit: Duration,
        /// The last reason why not.
        last: String,
    },
    /// A certificate could not be made.
    #[error("certificate of `{subject}`: {source}")]
    Certificate {
        /// For whom.
        subject: String,
        /// Why not.
        #[source]
        source: rcgen::Error,
    },
    /// The API server refused a call of the harness.
    #[error("{what}: {source}")]
    Api {
        /// Which call.
        what: String,
        /// Its answer.
        #[source]
        source: Box<kube::Error>,
    },
    /// The kubeconfig that the harness wrote cannot be used.
    #[error("kubeconfig `{path}`: {problem}")]
    Kubeconfig {
        /// Where it is.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Too many clusters at once.
    #[error("all {places} places under `{base}` are in use by running clusters; stop one")]
    Full {
        /// How many there are.
        places: u8,
        /// Where.
        base: PathBuf,
    },
    /// Nodes need namespaces, mounts and cgroups.
    #[error("layers with a node need root (namespaces, mounts, cgroups); run as root or start fewer layers")]
    NotRoot,
    /// Settings that cannot be.
    #[error("{0}")]
    Settings(String),
}

impl Error {
    /// For `map_err` on file operations.
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }

    /// For `map_err` on API calls.
    pub(crate) fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let what = what.into();
        move |source| Self::Api { what, source: Box::new(source) }
    }
}
