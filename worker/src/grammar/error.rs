//! Why a grammar was refused or could not go on.

use kvasir_core::{Error, Reason, TokenId};

/// Longest cause that is passed on to a client.
const MAX_CAUSE_CHARS: usize = 400;

/// Failures of compiling and of stepping.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GrammarError {
    /// The text is longer than allowed.
    #[error("{field} has {bytes} bytes, at most {limit} are allowed")]
    TooLong {
        /// Parameter at fault.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The grammar cannot be compiled.
    #[error("{field} cannot be used: {cause}")]
    Invalid {
        /// Parameter at fault.
        field: &'static str,
        /// What is wrong with it.
        cause: String,
    },
    /// Computing a mask ran out of fuel, or no token can write what the grammar asks for.
    #[error("the grammar cannot go on after {tokens} tokens: {cause}; simplify it")]
    Stuck {
        /// Committed tokens.
        tokens: usize,
        /// What the matcher said.
        cause: String,
    },
    /// A token was committed that the mask does not hold; a defect of the engine.
    #[error("token {id} is not allowed by the grammar after {tokens} tokens")]
    NotAllowed {
        /// The token.
        id: TokenId,
        /// Committed tokens.
        tokens: usize,
    },
    /// More tokens were to be taken back than committed; a defect of the engine.
    #[error("cannot take back {asked} of {committed} committed tokens")]
    Rollback {
        /// Tokens to take back.
        asked: usize,
        /// Tokens there are.
        committed: usize,
    },
    /// The vocabulary cannot carry grammars.
    #[error("this vocabulary cannot be constrained: {cause}")]
    Vocabulary {
        /// Why.
        cause: String,
    },
    /// The library failed where it must not.
    #[error("the grammar matcher failed: {cause}")]
    Broken {
        /// What it said.
        cause: String,
    },
}

// === impl GrammarError ===

impl GrammarError {
    /// The public word for this failure.
    pub fn reason(&self) -> Reason {
        match self {
            Self::TooLong { .. } | Self::Invalid { .. } | Self::Stuck { .. } => Reason::InvalidArgument,
            Self::Vocabulary { .. } => Reason::UnsupportedCombination,
            Self::NotAllowed { .. } | Self::Rollback { .. } | Self::Broken { .. } => Reason::Internal,
        }
    }

    /// The parameter at fault, if it is the client's.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            Self::TooLong { field, .. } | Self::Invalid { field, .. } => Some(field),
            Self::Stuck { .. } | Self::Vocabulary { .. } => Some("response_format"),
            Self::NotAllowed { .. } | Self::Rollback { .. } | Self::Broken { .. } => None,
        }
    }

    pub(super) fn vocabulary(error: &impl ToString) -> Self {
        Self::Vocabulary { cause: brief(&error.to_string()) }
    }
}

impl From<GrammarError> for Error {
    fn from(error: GrammarError) -> Self {
        let public = Self::new(error.reason(), error.to_string());
        match error.field() {
            Some(field) => public.with_field(field),
            None => public,
        }
    }
}

/// A library's message on one line, without the dumps that follow it in angle brackets.
pub(super) fn brief(cause: &str) -> String {
    let lines = cause.lines().map(str::trim).take_while(|line| !line.starts_with('<')).filter(|line| !line.is_empty());
    let text: String = lines.collect::<Vec<_>>().join(" ").chars().take(MAX_CAUSE_CHARS).collect();
    if text.is_empty() { "unknown cause".into() } else { text }
}
