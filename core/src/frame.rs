//! Framed, domain-tagged hashing: the only way a hash is made in Kvasir.
//!
//! Knows the framing of `contracts` §1: a field is a u32-LE length followed by its bytes; integers are little-endian; an option is one byte,
//! then the field. Refuses to know what is hashed. Called by identity, block keys and digests.
//!
//! Invariants
//! 1. Two different field lists never give the same byte stream: each field is length-prefixed and each option is tagged.
//! 2. Each hash starts with its domain tag as a field, so equal fields under two tags never collide.
//!
//! Costs: one BLAKE3 pass over the framed bytes; about 100 ns for a 16-token block.

use std::fmt;

/// A 32-byte BLAKE3-256 or SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest([u8; 32]);

/// Builds one domain-tagged hash out of framed fields.
#[derive(Clone)]
pub struct Framer(blake3::Hasher);

// === impl Digest ===

impl Digest {
    /// Wraps 32 bytes that are already a digest.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads a digest out of exactly 32 bytes.
    pub fn from_slice(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads 64 lower-case or upper-case hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let mut out = [0u8; 32];
        for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
            let high = (pair[0] as char).to_digit(16)?;
            let low = (pair[1] as char).to_digit(16)?;
            *byte = (high * 16 + low) as u8;
        }
        Some(Self(out))
    }

    /// 64 lower-case hexadecimal digits.
    pub fn to_hex(&self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}…", &self.to_hex()[..12])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

// === impl Framer ===

impl Framer {
    /// Starts a plain hash under `tag`.
    pub fn new(tag: &str) -> Self {
        let mut framer = Self(blake3::Hasher::new());
        framer.bytes(tag.as_bytes());
        framer
    }

    /// Starts a keyed hash under `tag`.
    pub fn keyed(key: &[u8; 32], tag: &str) -> Self {
        let mut framer = Self(blake3::Hasher::new_keyed(key));
        framer.bytes(tag.as_bytes());
        framer
    }

    /// Adds one length-prefixed field.
    pub fn bytes(&mut self, field: &[u8]) -> &mut Self {
        // A field longer than 4 GiB cannot be framed; callers hash large contents first and pass the digest.
        let len = u32::try_from(field.len()).unwrap_or(u32::MAX);
        debug_assert_eq!(len as usize, field.len(), "a framed field is shorter than 4 GiB");
        self.0.update(&len.to_le_bytes());
        self.0.update(field);
        self
    }

    /// Adds one integer as four little-endian bytes.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.0.update(&value.to_le_bytes());
        self
    }

    /// Adds one integer as eight little-endian bytes.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.update(&value.to_le_bytes());
        self
    }

    /// Adds an absent (`00`) or present (`01` and the field) option.
    pub fn option(&mut self, field: Option<&[u8]>) -> &mut Self {
        match field {
            None => {
                self.0.update(&[0]);
            }
            Some(bytes) => {
                self.0.update(&[1]);
                self.bytes(bytes);
            }
        }
        self
    }

    /// Adds a run of integers, each four bytes little-endian, after their count.
    pub fn u32s(&mut self, values: &[u32]) -> &mut Self {
        self.u32(u32::try_from(values.len()).unwrap_or(u32::MAX));
        let mut buffer = [0u8; 256];
        for chunk in values.chunks(64) {
            for (slot, value) in buffer.chunks_exact_mut(4).zip(chunk) {
                slot.copy_from_slice(&value.to_le_bytes());
            }
            self.0.update(&buffer[..chunk.len() * 4]);
        }
        self
    }

    /// The digest of all fields so far.
    pub fn finish(&self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_concatenate_to_the_same_bytes_hash_differently() {
        let digest = |parts: &[&str]| {
            let mut framer = Framer::new("test/v1");
            for part in parts {
                framer.bytes(part.as_bytes());
            }
            framer.finish()
        };
        assert_ne!(digest(&["org_1", "2345"]), digest(&["org_12345", ""]));
        assert_ne!(digest(&["org_1", "2345"]), digest(&["org_12", "345"]));
        assert_ne!(digest(&["a"]), digest(&["a", ""]));
    }

    #[test]
    fn an_absent_option_differs_from_an_empty_one() {
        let absent = Framer::new("test/v1").option(None).finish();
        let empty = Framer::new("test/v1").option(Some(b"")).finish();
        assert_ne!(absent, empty);
    }

    #[test]
    fn the_tag_separates_equal_fields() {
        assert_ne!(Framer::new("a/v1").bytes(b"x").finish(), Framer::new("b/v1").bytes(b"x").finish());
    }

    #[test]
    fn long_runs_of_integers_are_framed_whole() {
        let values: Vec<u32> = (0..1000).collect();
        let mut plain = Framer::new("t");
        plain.u32(1000);
        for value in &values {
            plain.u32(*value);
        }
        assert_eq!(Framer::new("t").u32s(&values).finish(), plain.finish());
    }

    #[test]
    fn hexadecimal_goes_there_and_back() {
        let digest = Framer::new("t").finish();
        assert_eq!(Digest::from_hex(&digest.to_hex()).unwrap(), digest);
        assert!(Digest::from_hex("zz").is_none());
    }
}
