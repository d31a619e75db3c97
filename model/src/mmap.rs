//! Bytes of one weight file: mapped read-only, or owned by a test.
//!
//! Owns the only `unsafe` of this crate. Refuses to know what the bytes mean. Called by the file readers. Mapping costs no read; pages come in
//! as the first step touches them.
//!
//! Invariants
//! 1. A mapping is read-only and private: nothing in this process writes through it.
//! 2. An empty file is refused before it is mapped.
#![allow(unsafe_code, reason = "memory mapping is unsafe by nature; this is the one file of the crate that may hold it")]

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// Read-only bytes of a weight file, shared by `Arc`.
pub struct Mapping(Bytes);

enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Mapping {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// The operating system's error, or `InvalidData` when the path is no regular file or the file is empty.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a regular file"));
        }
        if metadata.len() == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is empty (0 bytes)"));
        }
        // SAFETY: the mapping is read-only and private. The remaining obligation is that nobody truncates or rewrites the file while it is
        // mapped: weight files come from a content-addressed cache that replaces by rename only, and the documentation asks the same of
        // files that users name.
        let mapped = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self(Bytes::Mapped(mapped)))
    }

    /// Wraps bytes that are already in memory, for tests and tools.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        Self(Bytes::Owned(bytes))
    }
}

impl std::fmt::Debug for Mapping {
    /// Length only: the content is hundreds of megabytes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mapping({} bytes)", self.len())
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Bytes::Mapped(mapped) => mapped,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        self
    }
}
