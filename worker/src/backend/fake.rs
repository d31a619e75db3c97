//! The hash-model: a backend for simulation whose output depends on every stored slot it reads.
//!
//! A position's KV is a hash of its token, its place and all KV before it *as stored in the pool*; logits are a hash of that. So a stale,
//! foreign, unwritten or misplaced block changes the output, and the tests that compare outputs see it. Time is a cost model on a virtual
//! clock. Refuses what a real device would silently get wrong: reading poison, two rows writing one block.
//!
//! Costs: O(positions read + vocabulary) per row.

use super::{Backend, BackendError, BackendSpec, TokenBytes};
use crate::engine::VirtualClock;
use crate::plan::{BlockId, Plan, Row, RowOutput, StepOutput};
use crate::sample::{choose, score};
use kvasir_core::{NumericsMode, NumericsParts, TokenId};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Content of a slot that must not be read.
const POISON: u64 = u64::MAX;

/// Size of the hash-model.
#[derive(Clone, Copy, Debug)]
pub struct FakeModel {
    /// Entries of the logits.
    pub vocab: u32,
    /// Longest sequence.
    pub context: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Time of a step.
    pub cost: FakeCost,
}

/// Time of a step: `step + tokens × token`.
#[derive(Clone, Copy, Debug)]
pub struct FakeCost {
    /// Of any step.
    pub step: Duration,
    /// Of each token in it.
    pub token: Duration,
}

/// What a test changes while the engine runs; clones share it.
#[derive(Clone, Debug, Default)]
pub struct FakeControl(Arc<Mutex<ControlState>>);

#[derive(Debug, Default)]
struct ControlState {
    weights: u64,
    runs: u64,
    out_of_memory_at: Option<u64>,
    device_lost_at: Option<u64>,
    poison_reads: u64,
}

/// The backend.
pub struct FakeBackend {
    spec: BackendSpec,
    cost: FakeCost,
    clock: VirtualClock,
    control: FakeControl,
    slots: Vec<u64>,
}

/// Bytes of the hash-model's tokens: one letter each, from `a` on, with a space as every 27th.
#[derive(Clone, Debug)]
pub struct FakeBytes(Vec<[u8; 1]>);

// === impl FakeModel ===

impl Default for FakeModel {
    fn default() -> Self {
        let cost = FakeCost { step: Duration::from_millis(1), token: Duration::from_micros(100) };
        Self { vocab: 64, context: 512, block_size: 4, cost }
    }
}

// === impl FakeControl ===

impl FakeControl {
    /// Exchanges the weights, as loading another adapter or model in place would.
    pub fn set_weights(&self, weights: u64) {
        self.lock().weights = weights;
    }

    /// Steps run so far.
    pub fn runs(&self) -> u64 {
        self.lock().runs
    }

    /// Makes the step with this number (counted from 1) run out of memory.
    pub fn out_of_memory_at(&self, run: u64) {
        self.lock().out_of_memory_at = Some(run);
    }

    /// Makes the device disappear at the step with this number.
    pub fn device_lost_at(&self, run: u64) {
        self.lock().device_lost_at = Some(run);
    }

    /// Slots that were read although they held poison.
    pub fn poison_reads(&self) -> u64 {
        self.lock().poison_reads
    }

    fn lock(&self) -> MutexGuard<'_, ControlState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl FakeBackend ===

impl FakeBackend {
    /// A hash-model on a clock.
    pub fn new(model: FakeModel, clock: VirtualClock, control: FakeControl) -> Self {
        let spec = BackendSpec {
            name: "fake",
            device: "hash-model".to_owned(),
            vocab: model.vocab,
            context: model.context,
            block_size: model.block_size,
            block_bytes: u64::from(model.block_size) * 8,
            numerics: NumericsParts {
                mode: NumericsMode::Fake,
                revision: 1,
                kv_dtype: "u64".to_owned(),
                kv_layout: "slots".to_owned(),
                parallel_degree: 1,
                block_size: model.block_size,
            },
        };
        Self { spec, cost: model.cost, clock, control, slots: Vec::new() }
    }

    fn slot(&self, blocks: &[BlockId], position: u32) -> Result<usize, BackendError> {
        let size = self.spec.block_size;
        let block = blocks.get((position / size) as usize).ok_or_else(|| {
            BackendError::InvalidPlan(format!("position {position} lies beyond a table of {} blocks", blocks.len()))
        })?;
        let slot = (*block * size + position % size) as usize;
        if slot < self.slots.len() { Ok(slot) } else { Err(BackendError::InvalidPlan(format!("block {block} does not exist"))) }
    }

    fn read(&self, slot: usize, why: &str) -> Result<u64, BackendError> {
        match self.slots[slot] {
            POISON => {
                self.control.lock().poison_reads += 1;
                Err(BackendError::InvalidPlan(format!("{why} reads slot {slot}, which nobody wrote")))
            }
            value => Ok(value),
        }
    }

    fn run_row(&mut self, row: &Row, weights: u64) -> Result<RowOutput, BackendError> {
        if row.tokens.is_empty() || row.drafted as usize >= row.tokens.len().max(1) {
            return Err(BackendError::InvalidPlan("a row without a verified token".to_owned()));
        }
        let mut state = weights;
        for position in 0..row.start {
            let slot = self.slot(&row.blocks, position)?;
            state = mix(state, self.read(slot, "a row")?, u64::from(position));
        }
        let verified = row.tokens.len() - row.drafted as usize - 1;
        let mut output = RowOutput::default();
        for (index, &token) in row.tokens.iter().enumerate() {
            if token >= self.spec.vocab {
                return Err(BackendError::InvalidPlan(format!("token {token} is outside the vocabulary")));
            }
            let position = row.start + index as u32;
            let value = mix(state, u64::from(token), u64::from(position) ^ weights) >> 1;
            let slot = self.slot(&row.blocks, position)?;
            self.slots[slot] = value;
            state = mix(state, value, u64::from(position));
            let wanted = row.score.is_some() || (row.sample.is_some() && index >= verified);
            let logits = if wanted { self.logits(state) } else { Vec::new() };
            if let Some(ask) = row.score {
                let next = row.tokens.get(index + 1).copied().or(ask.next_prompt_token);
                output.scores.push(next.map(|next| score(&logits, next, ask.top)));
            }
            if let Some(sample) = row.sample.as_ref().filter(|_| index >= verified) {
                output.chosen.push(choose(&logits, sample, &row.tokens[verified + 1..=index]));
            }
        }
        Ok(output)
    }

    fn logits(&self, state: u64) -> Vec<f32> {
        (0..self.spec.vocab).map(|id| (mix(state, u64::from(id), 0) >> 40) as f32 / f32::from(1u16 << 14) / 64.0 - 8.0).collect()
    }

    /// Blocks that a row writes must be its own.
    fn check_writes(&self, plan: &Plan) -> Result<(), BackendError> {
        let size = self.spec.block_size;
        let mut written = HashSet::new();
        for row in &plan.rows {
            for number in row.start / size..row.end().div_ceil(size) {
                let block = row.blocks.get(number as usize);
                if block.is_some_and(|block| !written.insert(*block)) {
                    return Err(BackendError::InvalidPlan(format!("two rows write block {block:?}")));
                }
            }
        }
        Ok(())
    }
}

impl Backend for FakeBackend {
    fn spec(&self) -> &BackendSpec {
        &self.spec
    }

    fn allocate(&mut self, blocks: u32) -> Result<(), BackendError> {
        self.slots = vec![0; (blocks * self.spec.block_size) as usize];
        Ok(())
    }

    fn run(&mut self, plan: &Plan) -> Result<StepOutput, BackendError> {
        let weights = {
            let mut control = self.control.lock();
            control.runs += 1;
            if control.device_lost_at.is_some_and(|run| control.runs >= run) {
                return Err(BackendError::DeviceLost("injected".to_owned()));
            }
            if control.out_of_memory_at == Some(control.runs) {
                return Err(BackendError::OutOfMemory { what: "workspace".to_owned(), bytes: 1 });
            }
            control.weights
        };
        self.check_writes(plan)?;
        for copy in &plan.copies {
            for offset in 0..copy.slots {
                let from = self.slot(&[copy.from], offset)?;
                let to = self.slot(&[copy.to], offset)?;
                self.slots[to] = self.read(from, "a copy")?;
            }
        }
        let rows = plan.rows.iter().map(|row| self.run_row(row, weights)).collect::<Result<_, _>>()?;
        self.clock.advance(self.cost.step + self.cost.token * plan.tokens() as u32);
        Ok(StepOutput { epoch: plan.epoch, rows })
    }

    fn poison(&mut self, blocks: &[BlockId]) {
        let size = self.spec.block_size as usize;
        for &block in blocks {
            self.slots[block as usize * size..(block as usize + 1) * size].fill(POISON);
        }
    }

    fn fingerprint(&self, block: BlockId, slots: u32) -> u64 {
        let first = (block * self.spec.block_size) as usize;
        self.slots[first..first + slots as usize].iter().fold(0, |state, slot| mix(state, *slot, 1))
    }
}

// === impl FakeBytes ===

impl FakeBytes {
    /// Bytes for a vocabulary.
    pub fn new(vocab: u32) -> Self {
        Self((0..vocab).map(|id| if id % 27 == 26 { *b" " } else { [b'a' + (id % 27) as u8] }).collect())
    }
}

impl TokenBytes for FakeBytes {
    fn bytes(&self, id: TokenId) -> &[u8] {
        self.0.get(id as usize).map_or(&[], |bytes| bytes)
    }
}

/// Mixes three words into one (finaliser of SplitMix64, Steele et al. 2014).
fn mix(a: u64, b: u64, c: u64) -> u64 {
    let mut state = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ c.wrapping_mul(0xd6e8_feb8_6659_fd93);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
}
