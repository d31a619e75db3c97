//! From the residual stream to tokens: output norm, logits, choices and scores.
//!
//! Owns the buffers of logits. Only positions that are chosen or scored get logits, [`HEAD_ROWS`] at a time: prompt log-probabilities of a
//! long chunk would otherwise need a vocabulary per token. Choices of different positions run on different threads.

use super::batch::{Batch, Wanted};
use super::decoder::{Activations, Decoder, grow};
use crate::plan::{Chosen, Plan, RowOutput};
use crate::sample::{Sampler, score};
use kvasir_kernels::{KernelError, Scratch, matmul, norm};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Positions whose logits exist at the same time.
const HEAD_ROWS: usize = 32;

/// Buffers of the head.
pub(super) struct Head {
    x: Vec<f32>,
    delta: Vec<f32>,
    h: Vec<f32>,
    logits: Vec<f32>,
    matmul: Scratch,
    /// One per thread.
    samplers: Vec<Mutex<Sampler>>,
    /// One per position at work.
    results: Vec<Mutex<Answer>>,
}

/// What one position gave.
#[derive(Default)]
struct Answer {
    chosen: Option<Chosen>,
    score: Option<Chosen>,
}

// === impl Head ===

impl Head {
    /// Buffers for a pool of `threads` threads.
    pub(super) fn new(threads: usize) -> Self {
        Self {
            x: Vec::new(),
            delta: Vec::new(),
            h: Vec::new(),
            logits: Vec::new(),
            matmul: Scratch::new(),
            samplers: (0..threads.max(1)).map(|_| Mutex::default()).collect(),
            results: (0..HEAD_ROWS).map(|_| Mutex::default()).collect(),
        }
    }

    /// Computes logits where they are wanted and answers every row of the plan.
    pub(super) fn run(
        &mut self,
        decoder: &Decoder<'_>,
        activations: &Activations,
        batch: &Batch,
        plan: &Plan,
    ) -> Result<Vec<RowOutput>, KernelError> {
        let mut rows: Vec<RowOutput> = plan
            .rows
            .iter()
            .map(|row| RowOutput {
                chosen: Vec::new(),
                scores: if row.score.is_some() { vec![None; row.tokens.len()] } else { Vec::new() },
            })
            .collect();
        for wanted in batch.wanted.chunks(HEAD_ROWS) {
            self.logits(decoder, activations, wanted)?;
            let vocab = decoder.model.config().vocab;
            decoder.pool.run(wanted.len(), &|index| self.answer(plan, &wanted[index], index, vocab));
            for (wanted, result) in wanted.iter().zip(&mut self.results) {
                let answer = std::mem::take(result.get_mut().unwrap_or_else(PoisonError::into_inner));
                let row = &mut rows[wanted.row];
                row.chosen.extend(answer.chosen);
                if let Some(score) = answer.score {
                    row.scores[wanted.token] = Some(score);
                }
            }
        }
        Ok(rows)
    }

    fn logits(&mut self, decoder: &Decoder<'_>, activations: &Activations, wanted: &[Wanted]) -> Result<(), KernelError> {
        let (pool, isa, config) = (decoder.pool, decoder.isa, decoder.model.config());
        let (m, hidden) = (wanted.len(), config.hidden);
        for buffer in [&mut self.x, &mut self.delta, &mut self.h] {
            grow(buffer, m * hidden)?;
        }
        grow(&mut self.logits, m * config.vocab)?;
        let (x, delta, h) = (&mut self.x[..m * hidden], &mut self.delta[..m * hidden], &mut self.h[..m * hidden]);
        for (index, wanted) in wanted.iter().enumerate() {
            let (stream, last) = activations.residual(wanted.at, hidden);
            x[index * hidden..][..hidden].copy_from_slice(stream);
            delta[index * hidden..][..hidden].copy_from_slice(last);
        }
        norm::add_rms_norm(pool, isa, x, delta, &decoder.model.output_norm, config.rms_eps, h)?;
        matmul(pool, isa, &decoder.model.output, h, m, &mut self.matmul, &mut self.logits[..m * config.vocab])
    }

    /// Chooses and scores at one position.
    fn answer(&self, plan: &Plan, wanted: &Wanted, index: usize, vocab: usize) {
        let row = &plan.rows[wanted.row];
        let logits = &self.logits[index * vocab..][..vocab];
        let chosen = row.sample.as_ref().zip(wanted.choose).map(|(sample, verified)| {
            let drafted = &row.tokens[row.tokens.len() - row.drafted as usize..];
            self.sampler().choose(logits, sample, &drafted[..verified])
        });
        let score = wanted.target.zip(row.score).map(|(target, asked)| score(logits, target, asked.top));
        *self.results[index].lock().unwrap_or_else(PoisonError::into_inner) = Answer { chosen, score };
    }

    /// A sampler that no other thread uses: there is one per thread.
    fn sampler(&self) -> MutexGuard<'_, Sampler> {
        let free = self.samplers.iter().find_map(|sampler| match sampler.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        });
        free.unwrap_or_else(|| self.samplers[0].lock().unwrap_or_else(PoisonError::into_inner))
    }
}
