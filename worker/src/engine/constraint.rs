//! Structured output as the engine sees it: an automaton per choice.
//!
//! Owns the seam: the engine knows masks and commits, and no grammar library; simulation brings automata of its own.

use crate::grammar::{GrammarFactory, GrammarState};
use crate::plan::TokenMask;
use kvasir_core::{Digest, Error, Grammar, TokenId};
use std::sync::Arc;

/// A structured-output automaton of one choice.
pub trait Constraint: Send {
    /// Tokens allowed next.
    fn mask(&mut self) -> Result<Arc<TokenMask>, Error>;
    /// Takes a committed token; not called for the token that ends the output.
    fn commit(&mut self, id: TokenId) -> Result<(), Error>;
}

/// Makes automata; called by the submitting thread, because compiling may take long.
pub trait ConstraintFactory: Send + Sync {
    /// A fresh automaton of the grammar, one call per choice; `partition` keeps tenants' caches apart.
    fn compile(&self, partition: Digest, grammar: &Grammar) -> Result<Box<dyn Constraint>, Error>;
}

impl Constraint for GrammarState {
    fn mask(&mut self) -> Result<Arc<TokenMask>, Error> {
        Ok(Self::mask(self)?)
    }

    fn commit(&mut self, id: TokenId) -> Result<(), Error> {
        Ok(Self::commit(self, id)?)
    }
}

impl ConstraintFactory for GrammarFactory {
    fn compile(&self, partition: Digest, grammar: &Grammar) -> Result<Box<dyn Constraint>, Error> {
        Ok(Box::new(Self::compile(self, partition, grammar)?))
    }
}
