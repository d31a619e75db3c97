//! A checked reader over the header bytes.
//!
//! Owns position and bounds. Refuses to know the format. Called by the metadata and directory readers. No operation allocates unless it fails.

use super::GgufError;

/// Reads little-endian fields; each read names the field, so that an error can.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) const fn position(&self) -> usize {
        self.at
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    pub(super) const fn file_len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn take(&mut self, need: u64, field: impl FnOnce() -> String) -> Result<&'a [u8], GgufError> {
        let rest = self.rest();
        let cut = || GgufError::Truncated { field: field(), offset: self.at as u64, need, have: rest.len() as u64 };
        let len = usize::try_from(need).ok().filter(|len| *len <= rest.len());
        let Some(len) = len else { return Err(cut()) };
        self.at += len;
        Ok(&rest[..len])
    }

    pub(super) fn u32(&mut self, field: impl FnOnce() -> String) -> Result<u32, GgufError> {
        let mut buffer = [0; 4];
        buffer.copy_from_slice(self.take(4, field)?);
        Ok(u32::from_le_bytes(buffer))
    }

    pub(super) fn u64(&mut self, field: impl FnOnce() -> String) -> Result<u64, GgufError> {
        let mut buffer = [0; 8];
        buffer.copy_from_slice(self.take(8, field)?);
        Ok(u64::from_le_bytes(buffer))
    }

    /// Reads a length-prefixed string and returns it with its offset in the file.
    pub(super) fn string(&mut self, limit: u64, field: impl Fn() -> String) -> Result<&'a str, GgufError> {
        let len = self.u64(|| format!("length of {}", field()))?;
        let have = self.rest().len() as u64;
        if len > have {
            return Err(GgufError::Truncated { field: field(), offset: self.at as u64, need: len, have });
        }
        if len > limit {
            return Err(GgufError::Count { field: format!("length of {}", field()), count: len, limit });
        }
        let raw = self.take(len, &field)?;
        std::str::from_utf8(raw).map_err(|_| GgufError::Utf8 { field: field() })
    }

    /// Refuses a count that the rest of the file cannot hold.
    pub(super) fn check_count(&self, field: &str, count: u64, least_bytes: u64, limit: u64) -> Result<(), GgufError> {
        let limit = limit.min(self.rest().len() as u64 / least_bytes);
        if count > limit {
            return Err(GgufError::Count { field: field.to_owned(), count, limit });
        }
        Ok(())
    }
}
