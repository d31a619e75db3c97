//! Files behind HTTP addresses: resumable, verified, kept under what they were verified by.
//!
//! Owns the conversation with a server and the files in the cache. Refuses to know what the files are for. A download that broke off goes on where it
//! stood, in this process or the next one; what does not verify is thrown away.
//!
//! Blocking: a model is fetched by the thread that waits for it. Each read has a bound, so a server that falls silent is an error and not a wait.

use super::{FetchError, Progress, Scheme, Wanted, at, locked};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, http};

/// Longest wait for a connection, and for the next bytes of an answer.
const CONNECT_MAX: Duration = Duration::from_secs(15);
const SILENCE_MAX: Duration = Duration::from_mins(1);
/// Largest file, and largest answer that is no file.
const FILE_BYTES_MAX: u64 = 1 << 40;
const LIST_BYTES_MAX: u64 = 16 << 20;
const COPY_BYTES: usize = 1 << 20;
/// Ends of the files that make a model folder; nothing else of a repository is fetched.
const FOLDER_ENDS: [&str; 3] = [".safetensors", ".json", ".jinja"];
/// File that says that a folder is complete.
const COMPLETE: &str = ".complete";

/// By what a file is known to be the right one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Proof {
    /// SHA-256 of its bytes, hexadecimal.
    Sha256(String),
    /// Git's name for its bytes, hexadecimal.
    GitBlob(String),
}

struct Remote<'a> {
    agent: Agent,
    token: Option<&'a str>,
}

/// One file of a listing.
#[derive(Debug)]
struct Listed {
    path: String,
    proof: Proof,
}

/// A place on the hub.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct HubPlace<'a> {
    pub(super) repo: &'a str,
    pub(super) commit: &'a str,
    pub(super) file: Option<&'a str>,
}

/// Fetches one file known by its SHA-256.
pub(super) fn file(wanted: &Wanted<'_>, cache: &Path, progress: &mut dyn FnMut(Progress)) -> Result<PathBuf, FetchError> {
    let url = wanted.model;
    let sha256 = wanted.sha256.ok_or_else(|| FetchError::NoDigest { url: shown(url).to_owned() })?.to_ascii_lowercase();
    if sha256.len() != 64 || !sha256.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(FetchError::NoDigest { url: shown(url).to_owned() });
    }
    let folder = cache.join("models");
    let target = folder.join(format!("{sha256}.gguf"));
    locked(&folder, &sha256, progress, &mut |progress| {
        if !target.is_file() {
            Remote::new(wanted).download(url, &Proof::Sha256(sha256.clone()), &target, progress)?;
        }
        Ok(target.clone())
    })
}

/// Fetches one file, or the whole model folder, of a commit.
pub(super) fn hub(
    wanted: &Wanted<'_>,
    place: &HubPlace<'_>,
    cache: &Path,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, FetchError> {
    let name = format!("{}@{}", place.repo.replace('/', "--"), place.commit);
    let parent = cache.join("models/hub");
    let folder = parent.join(&name);
    let result = place.file.map_or_else(|| folder.clone(), |file| folder.join(file));
    let marker = place.file.map_or_else(|| folder.join(COMPLETE), |_| result.clone());
    locked(&parent, &name, progress, &mut |progress| {
        if marker.is_file() {
            return Ok(result.clone());
        }
        let remote = Remote::new(wanted);
        let files = remote.list(wanted.hub, place)?;
        for listed in &files {
            let target = folder.join(&listed.path);
            if !target.is_file() {
                let url = format!("{}/{}/resolve/{}/{}", wanted.hub.trim_end_matches('/'), place.repo, place.commit, listed.path);
                remote.download(&url, &listed.proof, &target, progress)?;
            }
        }
        if place.file.is_none() {
            File::create(&marker).map_err(at(&marker))?;
        }
        Ok(result.clone())
    })
}

/// Reads `OWNER/NAME@COMMIT` with an optional `/FILE`.
pub(super) fn parse_place<'a>(text: &'a str, model: &str) -> Result<HubPlace<'a>, FetchError> {
    let malformed = || FetchError::Address { model: model.to_owned() };
    let (repo, rest) = text.split_once('@').ok_or_else(malformed)?;
    let (commit, file) = rest.split_once('/').map_or((rest, None), |(commit, file)| (commit, Some(file)));
    let word = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    let is_commit = commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_repo = repo.split('/').count() == 2 && repo.split('/').all(|part| word(part) && !part.starts_with('.'));
    if !is_commit || !is_repo || file.is_some_and(|file| !file.split('/').all(|part| word(part) && !part.starts_with('.'))) {
        return Err(malformed());
    }
    Ok(HubPlace { repo, commit, file })
}

// === impl Remote ===

impl<'a> Remote<'a> {
    fn new(wanted: &Wanted<'a>) -> Self {
        let tls = TlsConfig::builder().root_certs(RootCerts::PlatformVerifier).build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_recv_response(Some(SILENCE_MAX))
            .timeout_per_read(Some(SILENCE_MAX))
            .user_agent(concat!("kvasir/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.into(), token: wanted.token }
    }

    /// What there is of a model at a commit, with proofs.
    fn list(&self, hub: &str, place: &HubPlace<'_>) -> Result<Vec<Listed>, FetchError> {
        let folder =
            place.file.and_then(|file| file.rsplit_once('/')).map_or_else(String::new, |(folder, _)| format!("/{folder}"));
        let url = format!("{}/api/models/{}/tree/{}{folder}", hub.trim_end_matches('/'), place.repo, place.commit);
        let problem = |problem: String| FetchError::Remote { url: shown(&url).to_owned(), problem };
        let mut answer = self.get(&url, 0)?;
        if !answer.status().is_success() {
            return Err(FetchError::Status { url: shown(&url).to_owned(), status: answer.status().as_u16() });
        }
        let text =
            answer.body_mut().with_config().limit(LIST_BYTES_MAX).read_to_string().map_err(|error| problem(error.to_string()))?;
        let entries: Vec<serde_json::Value> =
            serde_json::from_str(&text).map_err(|error| problem(format!("no list of files: {error}")))?;
        let listed: Vec<Listed> = entries.iter().filter_map(Listed::read).filter(|it| it.is_wanted(place.file)).collect();
        let has_weights = place.file.is_some() || listed.iter().any(|it| it.path.ends_with(".safetensors"));
        if listed.is_empty() || !has_weights {
            let what = place.file.unwrap_or("no file that ends in .safetensors; name a .gguf file instead");
            return Err(problem(format!("the repository does not have it at this commit: {what}")));
        }
        Ok(listed)
    }

    /// Brings one file to `target`. Whatever came of it stays beside it until it is whole.
    fn download(&self, url: &str, proof: &Proof, target: &Path, progress: &mut dyn FnMut(Progress)) -> Result<(), FetchError> {
        let mut part = target.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(at(parent))?;
        }
        loop {
            let before = length(&part);
            match self.pull(url, &part, progress) {
                Ok(()) => break,
                // A connection that brought something is taken up again at once; one that brought nothing is left to whoever restarts us.
                Err(FetchError::Broken { .. }) if length(&part) > before => {}
                Err(error) => return Err(error),
            }
        }
        let found = proof.of(&part).map_err(at(&part))?;
        if found != proof.expected() {
            fs::remove_file(&part).map_err(at(&part))?;
            return Err(FetchError::Verify { url: shown(url).to_owned(), found, expected: proof.expected().to_owned() });
        }
        fs::rename(&part, target).map_err(at(target))
    }

    /// Appends to `part` what it lacks.
    fn pull(&self, url: &str, part: &Path, progress: &mut dyn FnMut(Progress)) -> Result<(), FetchError> {
        let have = length(part);
        let mut answer = self.get(url, have)?;
        let status = answer.status().as_u16();
        let from = match status {
            206 => have,
            200 => 0,
            // Nothing lies behind what we have: it is whole, or it is not this file; its proof tells.
            416 if have > 0 => return Ok(()),
            _ => return Err(FetchError::Status { url: shown(url).to_owned(), status }),
        };
        let total = answer.body().content_length().map(|rest| rest + from);
        let mut file = OpenOptions::new().create(true).append(true).open(part).map_err(at(part))?;
        if from < have {
            file.set_len(from).map_err(at(part))?;
        }
        let broken = |error: io::Error| FetchError::Broken { url: shown(url).to_owned(), problem: error.to_string() };
        let mut body = answer.body_mut().with_config().limit(FILE_BYTES_MAX).reader();
        let mut buffer = vec![0; COPY_BYTES];
        let mut bytes = from;
        loop {
            let count = body.read(&mut buffer).map_err(broken)?;
            if count == 0 {
                break;
            }
            file.write_all(&buffer[..count]).map_err(at(part))?;
            bytes += count as u64;
            progress(Progress::Fetching { bytes, total });
        }
        file.sync_data().map_err(at(part))
    }

    fn get(&self, url: &str, from: u64) -> Result<http::Response<Body>, FetchError> {
        let mut request = self.agent.get(url);
        if from > 0 {
            request = request.header("range", format!("bytes={from}-"));
        }
        if let Some(token) = self.token {
            if Scheme::of(url) != Scheme::Https {
                return Err(FetchError::TokenInTheClear { url: shown(url).to_owned() });
            }
            request = request.header("authorization", format!("Bearer {token}"));
        }
        request.call().map_err(|error| FetchError::Remote { url: shown(url).to_owned(), problem: error.to_string() })
    }
}

// === impl Listed ===

impl Listed {
    fn read(entry: &serde_json::Value) -> Option<Self> {
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        if entry["type"] != "file" {
            return None;
        }
        let proof = match text(&entry["lfs"]["oid"]) {
            Some(sha256) => Proof::Sha256(sha256.trim_start_matches("sha256:").to_owned()),
            None => Proof::GitBlob(text(&entry["oid"])?),
        };
        Some(Self { path: text(&entry["path"])?, proof })
    }

    fn is_wanted(&self, file: Option<&str>) -> bool {
        if let Some(file) = file {
            return self.path == file;
        }
        // The name comes from outside and becomes a path: one plain component.
        let plain = !self.path.contains(['/', '\\']) && !self.path.starts_with('.');
        plain && FOLDER_ENDS.iter().any(|end| self.path.ends_with(end))
    }
}

// === impl Proof ===

impl Proof {
    fn expected(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }

    /// The same of a file.
    fn of(&self, path: &Path) -> io::Result<String> {
        let mut file = File::open(path)?;
        let mut buffer = vec![0; COPY_BYTES];
        let mut feed = |hash: &mut dyn FnMut(&[u8])| -> io::Result<()> {
            loop {
                match file.read(&mut buffer)? {
                    0 => return Ok(()),
                    count => hash(&buffer[..count]),
                }
            }
        };
        match self {
            Self::Sha256(_) => {
                let mut hash = Sha256::new();
                feed(&mut |bytes| hash.update(bytes))?;
                Ok(hex::encode(hash.finalize()))
            }
            Self::GitBlob(_) => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {}\0", length(path)));
                feed(&mut |bytes| hash.update(bytes))?;
                Ok(hex::encode(hash.finalize()))
            }
        }
    }
}

/// An address without its query, where credentials may stand.
fn shown(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |meta| meta.len())
}

#[cfg(test)]
mod tests;
