//! Stop strings, prepared for matching byte by byte.
//!
//! Owns the failure tables (Knuth, Morris, Pratt 1977). Refuses to know the output. Made once per request and shared by its choices.

use kvasir_core::{Error, Reason};

/// Most stop strings of one request; the doors may allow fewer.
pub const MAX_STOP_STRINGS: usize = 16;

/// Longest stop string: 1,000 characters of four bytes, and some.
pub const MAX_STOP_BYTES: usize = 4096;

/// The stop strings of a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stops(Vec<Pattern>);

/// Why stop strings were refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum StopError {
    /// An empty string would match before the first token.
    #[error("stop[{index}] is empty; leave it out")]
    Empty {
        /// Which.
        index: usize,
    },
    /// Too many strings.
    #[error("stop has {count} strings, at most {MAX_STOP_STRINGS} are allowed")]
    TooMany {
        /// How many.
        count: usize,
    },
    /// A string is too long.
    #[error("stop[{index}] has {bytes} bytes, at most {MAX_STOP_BYTES} are allowed")]
    TooLong {
        /// Which.
        index: usize,
        /// Its length.
        bytes: usize,
    },
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// Entry i: length of the longest proper prefix of `bytes[..=i]` that is also its suffix.
    borders: Vec<usize>,
}

// === impl Stops ===

impl Stops {
    /// Prepares stop strings.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Result<Self, StopError> {
        if strings.len() > MAX_STOP_STRINGS {
            return Err(StopError::TooMany { count: strings.len() });
        }
        let pattern = |(index, string): (usize, &S)| match string.as_ref().len() {
            0 => Err(StopError::Empty { index }),
            bytes if bytes > MAX_STOP_BYTES => Err(StopError::TooLong { index, bytes }),
            _ => Ok(Pattern::new(string.as_ref().as_bytes())),
        };
        strings.iter().enumerate().map(pattern).collect::<Result<_, _>>().map(Self)
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of one of them.
    pub(super) fn bytes(&self, index: usize) -> &[u8] {
        &self.0[index].bytes
    }

    /// Moves every pattern on by one byte; the longest that this byte completes.
    pub(super) fn advance(&self, progress: &mut [usize], byte: u8) -> Option<usize> {
        let mut found: Option<usize> = None;
        for (index, (pattern, matched)) in self.0.iter().zip(progress).enumerate() {
            *matched = pattern.advance(*matched, byte);
            let complete = *matched == pattern.bytes.len();
            if complete && found.is_none_or(|best| self.0[best].bytes.len() < pattern.bytes.len()) {
                found = Some(index);
            }
        }
        found
    }
}

// === impl Pattern ===

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut pattern = Self { bytes: bytes.to_vec(), borders: vec![0] };
        let mut matched = 0;
        for &byte in &bytes[1..] {
            matched = pattern.advance(matched, byte);
            pattern.borders.push(matched);
        }
        pattern
    }

    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        while matched > 0 && self.bytes[matched] != byte {
            matched = self.borders[matched - 1];
        }
        if self.bytes[matched] == byte { matched + 1 } else { 0 }
    }
}

// === impl StopError ===

impl StopError {
    /// The public word for this refusal.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Empty { .. } | Self::TooMany { .. } | Self::TooLong { .. } => Reason::InvalidArgument,
        }
    }
}

impl From<StopError> for Error {
    fn from(error: StopError) -> Self {
        Self::new(error.reason(), error.to_string()).with_field("stop")
    }
}
