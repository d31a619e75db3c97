//! Third part of a step: what a result changes.
//!
//! Order matters: lengths, then tokens and text, then publishing, then forks, then the end of the choice.

use super::Engine;
use super::accept::{Kept, accept};
use super::emit::{Said, say};
use super::request::JobId;
use crate::kv::Published;
use crate::plan::{Row, RowOutput, SequenceId};
use kvasir_core::{Chunk, Error, FinishReason, Reason};

impl Engine {
    /// Judges one row's result and commits what is kept; a result whose sequence is gone or was restarted is dropped.
    pub(super) fn accept_row(&mut self, epoch: u64, row: &Row, output: RowOutput) {
        let Some(sequence) = self.work.sequences.get_mut(&row.sequence).filter(|sequence| sequence.in_flight == Some(epoch))
        else {
            self.stats.steps.stale_rows += 1;
            return;
        };
        sequence.in_flight = None;
        let job = sequence.job;
        match accept(row, output) {
            Ok(kept) => self.commit(job, row, kept),
            Err(misfit) => self.fail(job, &Error::new(Reason::Internal, misfit.to_string())),
        }
    }

    fn commit(&mut self, job_id: JobId, row: &Row, kept: Kept) {
        let id = row.sequence;
        self.advance(row, &kept);
        let now = self.now();
        let tokens_max = self.tokens_max();
        let said = {
            let (Some(sequence), Some(job)) = (self.work.sequences.get_mut(&id), self.work.jobs.get_mut(&job_id)) else { return };
            job.ledger.counters.steps += 1;
            job.take_scores(row.start, kept.scores);
            job.ledger.counters.proposed += u64::from(row.drafted);
            job.ledger.counters.rejected += u64::from(kept.rejected);
            job.ledger.counters.unverified += u64::from(kept.unverified);
            say(job, sequence, kept.tokens, kept.accepted, tokens_max, &*self.bytes)
        };
        let said = match said {
            Ok(said) => said,
            Err(error) => return self.fail(job_id, &error),
        };
        self.count(&said);
        self.publish_blocks(id);
        self.fork_if_first(job_id, row);
        let nothing_asked = self.work.jobs.get(&job_id).is_some_and(|job| job.request.stop.max_tokens == 0);
        if nothing_asked && self.work.sequences.get(&id).is_some_and(|sequence| sequence.missing() == 0) {
            return self.end_without_output(job_id);
        }
        if let Some(job) = self.work.jobs.get_mut(&job_id)
            && !said.tokens.ids.is_empty() | !said.tokens.text.is_empty() | !said.tokens.prompt_logprobs.is_empty()
        {
            self.stats.count_visible(&said.tokens);
            job.delivery.send(now, Chunk::Tokens(said.tokens));
        }
        if let Some(reason) = said.finish {
            self.end_choice(id, reason);
        }
    }

    /// Moves the lengths on and books the row's positions as first computed or recomputed.
    fn advance(&mut self, row: &Row, kept: &Kept) {
        let Some(sequence) = self.work.sequences.get_mut(&row.sequence) else { return };
        if let Some(copy) = sequence.table.copy.take() {
            self.pool.release(&[copy.from]);
        }
        let ever = sequence.lengths.kv_ever;
        sequence.lengths.kv_valid = kept.kv_valid;
        sequence.lengths.kv_ever = ever.max(kept.kv_valid);
        let again = row.end().min(ever).saturating_sub(row.start);
        let Some(job) = self.work.jobs.get_mut(&sequence.job) else { return };
        job.ledger.usage.recomputed_tokens += again;
        self.stats.prompt.recomputed += u64::from(again);
        if sequence.choice == 0 {
            job.ledger.prompt_computed += row.end().min(job.prompt_len()).saturating_sub(row.start.max(ever));
        }
    }

    /// Adds to the totals exactly what the request's own ledger got.
    fn count(&mut self, said: &Said) {
        let output = &mut self.stats.output;
        output.committed += said.committed;
        output.accepted += said.accepted;
        output.sampled += said.committed - said.accepted;
        output.trimmed += said.trimmed;
    }

    /// Tokens that a sequence may have: the context, or one more than the pool holds KV for (the last token needs none).
    fn tokens_max(&self) -> u32 {
        let settings = self.pool.settings();
        self.shared.spec.context.min(settings.blocks.saturating_mul(settings.block_size).saturating_add(1))
    }

    /// Makes every block visible whose KV is written and whose tokens are committed.
    fn publish_blocks(&mut self, id: SequenceId) {
        let settings = self.pool.settings();
        let size = settings.block_size as usize;
        let Some(sequence) = self.work.sequences.get_mut(&id) else { return };
        let Some(job) = self.work.jobs.get(&sequence.job) else { return };
        let full = sequence.lengths.kv_valid.min(sequence.lengths.tokens_committed) as usize / size;
        if !sequence.table.publishes || full <= sequence.table.published as usize {
            return;
        }
        sequence.table.extend_keys(settings.block_size, &sequence.tokens, self.shared.settings.key_map);
        for number in sequence.table.published as usize..full {
            let (key, tokens) = (sequence.table.keys[number], &sequence.tokens[number * size..(number + 1) * size]);
            if self.work.pending.get(&key) == Some(&id) {
                self.work.pending.remove(&key);
            }
            match self.pool.publish(&job.owner, &mut sequence.table.blocks, number, key, tokens) {
                Published::New | Published::Duplicate => sequence.table.published = number as u32 + 1,
                Published::Refused => {
                    sequence.table.publishes = false;
                    self.work.pending.retain(|_, owner| *owner != id);
                    return;
                }
            }
        }
    }

    /// After the first choice has its first token the others begin from the same prompt.
    fn fork_if_first(&mut self, job_id: JobId, row: &Row) {
        let Some(job) = self.work.jobs.get(&job_id) else { return };
        let more = job.request.sampling.n as usize > job.sequences.len() && job.request.stop.max_tokens > 0;
        if more && row.sample.is_some() {
            self.fork(row.sequence);
        }
    }

    /// A request for no output at all ends with its prompt.
    fn end_without_output(&mut self, id: JobId) {
        let now = self.now();
        if let Some(job) = self.work.jobs.get_mut(&id) {
            job.reasons.fill(Some(FinishReason::Length));
            for _ in 0..job.reasons.len() {
                self.stats.count_finish(FinishReason::Length);
            }
            let prompt_logprobs = if job.request.sampling.prompt_logprobs.is_some() { job.prompt_logprobs() } else { Vec::new() };
            if !prompt_logprobs.is_empty() {
                job.delivery.send(now, Chunk::Tokens(kvasir_core::Tokens { prompt_logprobs, ..Default::default() }));
            }
            for sequence in job.sequences.clone() {
                self.drop_sequence(sequence);
            }
        }
        self.finish_if_done(id);
    }

    /// Ends a sequence that has the whole pool and needs more.
    pub(super) fn end_at_capacity(&mut self, id: SequenceId) {
        let now = self.now();
        let Some(sequence) = self.work.sequences.get_mut(&id) else { return };
        let Some(job) = self.work.jobs.get_mut(&sequence.job) else { return };
        let said = Said::last(job, sequence);
        if !said.tokens.ids.is_empty() || !said.tokens.text.is_empty() {
            self.stats.count_visible(&said.tokens);
            job.delivery.send(now, Chunk::Tokens(said.tokens));
        }
        self.end_choice(id, FinishReason::Length);
    }

    fn end_choice(&mut self, id: SequenceId, reason: FinishReason) {
        let Some(sequence) = self.work.sequences.get(&id) else { return };
        let (job_id, choice) = (sequence.job, sequence.choice as usize);
        self.check_choice(id);
        self.drop_sequence(id);
        if let Some(slot) = self.work.jobs.get_mut(&job_id).and_then(|job| job.reasons.get_mut(choice)) {
            *slot = Some(reason);
            self.stats.count_finish(reason);
        }
        self.finish_if_done(job_id);
    }
}
