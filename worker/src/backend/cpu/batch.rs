//! A plan as the kernels want it: all rows' tokens in one list, with positions, slots and block tables.
//!
//! Owns the checks that make a plan safe to compute. Refuses to know weights. A plan that breaks the contract is refused before anything is
//! written.

use crate::backend::BackendError;
use crate::plan::{Plan, Row};
use kvasir_core::TokenId;
use kvasir_kernels::attention::{AttentionRow, KvSlot};

/// What a plan must stay within.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Blocks of the KV pool.
    pub(super) blocks: u32,
    /// Tokens per block.
    pub(super) block_size: u32,
    /// Entries of the vocabulary.
    pub(super) vocab: u32,
    /// Longest sequence.
    pub(super) context: u32,
}

/// The gathered rows of one plan; buffers are kept from step to step.
#[derive(Default)]
pub(super) struct Batch {
    /// Tokens of all rows, row after row.
    pub(super) tokens: Vec<TokenId>,
    /// Their absolute positions.
    pub(super) positions: Vec<u32>,
    /// Where their keys and values go.
    pub(super) slots: Vec<KvSlot>,
    /// Block tables of all rows.
    pub(super) tables: Vec<u32>,
    /// Rows of the attention, in the plan's order.
    pub(super) rows: Vec<AttentionRow>,
    /// Positions whose logits are wanted, ascending.
    pub(super) wanted: Vec<Wanted>,
    /// Blocks that rows write to, with the row.
    written: Vec<(u32, usize)>,
}

/// A position whose logits are wanted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// Index of the row in the plan.
    pub(super) row: usize,
    /// Index of the token in the row.
    pub(super) token: usize,
    /// Index of the token in the batch.
    pub(super) at: usize,
    /// Which verified position is chosen here.
    pub(super) choose: Option<usize>,
    /// Which token is scored here.
    pub(super) target: Option<TokenId>,
}

// === impl Batch ===

impl Batch {
    /// Checks a plan and gathers its rows.
    pub(super) fn gather(&mut self, plan: &Plan, limits: Limits) -> Result<(), BackendError> {
        self.clear();
        for copy in &plan.copies {
            if copy.from >= limits.blocks || copy.to >= limits.blocks || copy.slots > limits.block_size {
                return Err(BackendError::InvalidPlan(format!("{copy:?} does not fit {limits:?}")));
            }
        }
        for (index, row) in plan.rows.iter().enumerate() {
            check(row, limits)
                .map_err(|problem| BackendError::InvalidPlan(format!("row {index} (sequence {}): {problem}", row.sequence.0)))?;
            self.push(index, row, limits.block_size);
        }
        self.written.sort_unstable();
        self.written.dedup();
        match self.written.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => {
                let [(block, one), (_, other)] = [pair[0], pair[1]];
                Err(BackendError::InvalidPlan(format!("rows {one} and {other} both write to block {block}")))
            }
            None => Ok(()),
        }
    }

    /// Positions of the longest sequence after this step.
    pub(super) fn longest(&self) -> u32 {
        self.rows.iter().map(|row| row.start + row.queries).max().unwrap_or(0)
    }

    fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.tables.clear();
        self.rows.clear();
        self.wanted.clear();
        self.written.clear();
    }

    fn push(&mut self, index: usize, row: &Row, block_size: u32) {
        let first = self.tokens.len();
        let blocks = row.end().div_ceil(block_size) as usize;
        self.rows.push(AttentionRow { table: self.tables.len(), blocks, start: row.start, queries: row.tokens.len() as u32 });
        self.tables.extend(&row.blocks[..blocks]);
        self.tokens.extend(&row.tokens);
        self.positions.extend(row.start..row.end());
        self.slots.extend(
            (row.start..row.end())
                .map(|position| KvSlot { block: row.blocks[(position / block_size) as usize], slot: position % block_size }),
        );
        self.written.extend(row.blocks[(row.start / block_size) as usize..blocks].iter().map(|block| (*block, index)));
        let first_verified = row.tokens.len() - 1 - row.drafted as usize;
        for token in 0..row.tokens.len() {
            let choose = row.sample.as_ref().and_then(|_| token.checked_sub(first_verified));
            let target = row.score.and_then(|score| row.tokens.get(token + 1).copied().or(score.next_prompt_token));
            if choose.is_some() || target.is_some() {
                self.wanted.push(Wanted { row: index, token, at: first + token, choose, target });
            }
        }
    }
}

/// What is wrong with a row.
fn check(row: &Row, limits: Limits) -> Result<(), String> {
    let count = row.tokens.len();
    if count == 0 {
        return Err("it has no tokens".to_owned());
    }
    if row.drafted as usize >= count {
        return Err(format!("{} drafted tokens leave none of {count} to verify from", row.drafted));
    }
    let end = u64::from(row.start) + count as u64;
    if end > u64::from(limits.context) {
        return Err(format!("it ends at position {end}, beyond the context of {}", limits.context));
    }
    if row.blocks.len() as u64 * u64::from(limits.block_size) < end {
        return Err(format!("{} blocks of {} do not cover {end} positions", row.blocks.len(), limits.block_size));
    }
    if let Some(block) = row.blocks.iter().find(|block| **block >= limits.blocks) {
        return Err(format!("block {block} is not one of {}", limits.blocks));
    }
    let next = row.score.and_then(|score| score.next_prompt_token);
    if let Some(token) = row.tokens.iter().chain(&next).find(|token| **token >= limits.vocab) {
        return Err(format!("token {token} is not one of {}", limits.vocab));
    }
    Ok(())
}
