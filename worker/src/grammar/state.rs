//! How far one choice has got in its grammar.
//!
//! Owns the position and its rollback. Refuses to choose. Lives on the engine thread.
//!
//! Invariants
//! 1. `commit` of what `mask` allows succeeds, and of anything else fails and changes nothing.
//! 2. `rollback(n)` undoes the last n commits, end tokens included; masks afterwards equal those before.
//! 3. After an end token, and where nothing but the end can follow, masks hold exactly the end tokens.

use super::GrammarError;
use super::error::brief;
use super::vocabulary::Vocabulary;
use crate::plan::TokenMask;
use kvasir_core::TokenId;
use llguidance::Matcher;
use std::sync::Arc;

/// Position of one choice in its grammar.
pub struct GrammarState {
    template: Arc<Matcher>,
    vocabulary: Arc<Vocabulary>,
    matcher: Matcher,
    /// Committed tokens without the end tokens.
    tokens: Vec<TokenId>,
    /// Committed end tokens.
    ends: usize,
    /// Mask of the current position, once computed.
    mask: Option<Arc<TokenMask>>,
}

/// Masks of the verified positions of one row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerifyMasks {
    /// One mask per position: `allowed + 1` of them.
    pub masks: Vec<Arc<TokenMask>>,
    /// How many of the drafted tokens the grammar allows, from the first on; the rest must not be verified.
    pub allowed: usize,
}

// === impl GrammarState ===

impl GrammarState {
    pub(super) fn new(template: Arc<Matcher>, vocabulary: Arc<Vocabulary>) -> Self {
        let matcher = template.deep_clone();
        Self { template, vocabulary, matcher, tokens: Vec::new(), ends: 0, mask: None }
    }

    /// Tokens allowed next.
    pub fn mask(&mut self) -> Result<Arc<TokenMask>, GrammarError> {
        if self.complete() {
            return Ok(self.vocabulary.end_mask());
        }
        if let Some(mask) = &self.mask {
            return Ok(mask.clone());
        }
        let bits = self.matcher.compute_mask().map_err(|error| self.stuck(&error))?;
        let mask = self.vocabulary.mask(bits.as_slice()).ok_or_else(|| self.stuck(&"no token can write what must follow"))?;
        let mask = Arc::new(mask);
        self.mask = Some(mask.clone());
        Ok(mask)
    }

    /// Masks of the position now and after each drafted token, as far as the grammar allows them. The state does not move, whatever is
    /// drafted.
    pub fn masks(&mut self, drafted: &[TokenId]) -> Result<VerifyMasks, GrammarError> {
        let here = self.committed();
        let first = self.mask()?;
        let mut masks = vec![first.clone()];
        let mut walk = || -> Result<(), GrammarError> {
            for &id in drafted {
                let allowed = masks.last().is_some_and(|mask| mask.allows(id));
                if !allowed {
                    break;
                }
                self.commit(id)?;
                masks.push(self.mask()?);
            }
            Ok(())
        };
        // A draft that leads where the matcher gives up is only cut short: the output fails there if it really gets there.
        let _ = walk();
        self.rollback(self.committed() - here)?;
        // The same position as before, so its mask need not be computed again.
        self.mask = (!self.complete()).then_some(first);
        Ok(VerifyMasks { allowed: masks.len() - 1, masks })
    }

    /// Moves on by a committed token.
    pub fn commit(&mut self, id: TokenId) -> Result<(), GrammarError> {
        if self.vocabulary.ends_with(id) {
            if !self.accepting() {
                return Err(self.not_allowed(id));
            }
            self.ends += 1;
            return Ok(());
        }
        if self.ends > 0 || !self.vocabulary.writes(id) {
            return Err(self.not_allowed(id));
        }
        match self.matcher.try_consume_tokens(&[id]) {
            Ok(1) => {
                self.tokens.push(id);
                self.mask = None;
                Ok(())
            }
            Ok(_) => Err(self.not_allowed(id)),
            Err(error) => Err(self.stuck(&error)),
        }
    }

    /// Takes back the last `count` commits.
    pub fn rollback(&mut self, count: usize) -> Result<(), GrammarError> {
        if count > self.committed() {
            return Err(GrammarError::Rollback { asked: count, committed: self.committed() });
        }
        let ends = count.min(self.ends);
        self.ends -= ends;
        let back = count - ends;
        if back == 0 {
            return Ok(());
        }
        self.mask = None;
        self.tokens.truncate(self.tokens.len() - back);
        if !self.matcher.is_error() && self.matcher.rollback(back).is_ok() {
            return Ok(());
        }
        // A matcher that ran out of fuel cannot step back: start over and walk here.
        self.matcher = self.template.deep_clone();
        self.matcher.consume_tokens(&self.tokens).map_err(|error| self.stuck(&error))
    }

    /// Whether the output may end here.
    pub fn accepting(&mut self) -> bool {
        self.complete() || self.matcher.is_accepting().unwrap_or(false)
    }

    /// Whether the output has ended: an end token is committed, or nothing else can follow.
    pub fn finished(&self) -> bool {
        self.complete()
    }

    /// Committed tokens, end tokens included.
    pub fn committed(&self) -> usize {
        self.tokens.len() + self.ends
    }

    fn complete(&self) -> bool {
        self.ends > 0 || (self.matcher.is_stopped() && !self.matcher.is_error())
    }

    fn not_allowed(&self, id: TokenId) -> GrammarError {
        GrammarError::NotAllowed { id, tokens: self.committed() }
    }

    fn stuck(&self, cause: &impl ToString) -> GrammarError {
        GrammarError::Stuck { tokens: self.committed(), cause: brief(&cause.to_string()) }
    }
}
