//! SHA-256 of weight files, remembered between starts.
//!
//! Owns the digest cache: one small file per weight file, keyed by path, size, modification and change time and inode, so that a replaced
//! file is read again. Refuses to know models. Called by [`super::ModelFile::weights_digest`]. A miss costs one pass over the bytes.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use kvasir_core::Digest;
use sha2::{Digest as _, Sha256};

/// A folder of remembered digests. A cache that cannot be read or written costs time, never correctness.
#[derive(Clone, Debug)]
pub struct DigestCache {
    folder: PathBuf,
}

impl DigestCache {
    /// Uses `folder`, which is created on the first write.
    pub const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn entry(&self, path: &Path) -> Option<(PathBuf, String)> {
        let path = fs::canonicalize(path).ok()?;
        let metadata = fs::metadata(&path).ok()?;
        let name = hex::encode(Sha256::digest(path.as_os_str().as_encoded_bytes()));
        let state = format!(
            "{} {}.{:09} {}.{:09} {}:{}",
            metadata.len(),
            metadata.mtime(),
            metadata.mtime_nsec(),
            metadata.ctime(),
            metadata.ctime_nsec(),
            metadata.dev(),
            metadata.ino()
        );
        Some((self.folder.join(name), state))
    }

    fn get(&self, path: &Path) -> Option<Digest> {
        let (entry, state) = self.entry(path)?;
        let text = fs::read_to_string(entry).ok()?;
        let (digest, known) = text.split_once('\n')?;
        (known == state).then(|| Digest::from_hex(digest)).flatten()
    }

    fn put(&self, path: &Path, digest: &Digest) -> Option<()> {
        let (entry, state) = self.entry(path)?;
        fs::create_dir_all(&self.folder).ok()?;
        let part = entry.with_extension(format!("part-{}", std::process::id()));
        let mut file = fs::File::create(&part).ok()?;
        write!(file, "{digest}\n{state}").ok()?;
        fs::rename(part, entry).ok()
    }
}

/// SHA-256 of bytes as a core digest.
pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    Digest::new(Sha256::digest(bytes).into())
}

/// Hash over (name, SHA-256) of the files, sorted by name.
pub(super) fn of_files<'a>(files: impl IntoIterator<Item = (&'a Path, &'a [u8])>, cache: Option<&DigestCache>) -> Digest {
    let mut digests: Vec<(String, Digest)> = files
        .into_iter()
        .map(|(path, bytes)| {
            let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
            (name, of_file(path, bytes, cache))
        })
        .collect();
    digests.sort_unstable();
    kvasir_core::weights_digest(digests.iter().map(|(name, digest)| (name.as_str(), *digest)))
}

fn of_file(path: &Path, bytes: &[u8], cache: Option<&DigestCache>) -> Digest {
    if let Some(known) = cache.and_then(|cache| cache.get(path)) {
        return known;
    }
    let digest = sha256(bytes);
    if let Some(cache) = cache
        && cache.put(path, &digest).is_none()
    {
        tracing::debug!(folder = %cache.folder.display(), "weight digest could not be remembered");
    }
    digest
}
