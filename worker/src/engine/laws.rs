//! The counter laws of `contracts` §4, checked after every step.
//!
//! A breach is counted and logged; in simulation the test that looks at the counter fails. The expensive laws run only when asked for.

use super::Engine;
use super::request::JobId;
use crate::plan::SequenceId;
use std::collections::HashSet;

impl Engine {
    /// Laws over the whole engine.
    pub(super) fn check_laws(&mut self) {
        let output = &self.stats.output;
        let whole = output.committed == output.sampled + output.accepted;
        self.law(whole, "committed = sampled + accepted");
        let listed = self.work.running.len() + self.work.waiting.len() == self.work.sequences.len();
        self.law(listed, "running + waiting = sequences");
        if !self.shared.settings.check_laws {
            return;
        }
        if let Err(breach) = self.pool.check() {
            self.law(false, &breach);
        }
        let tables = self.work.sequences.values();
        let held: HashSet<_> = tables
            .flat_map(|sequence| sequence.table.blocks.iter().chain(sequence.table.copy.iter().map(|copy| &copy.from)))
            .collect();
        let held = held.len() as u32 == self.pool.counts().held;
        self.law(held, "blocks in tables = blocks held");
        let lengths = self.work.sequences.values().all(|sequence| {
            let lengths = sequence.lengths;
            lengths.tokens_committed as usize == sequence.tokens.len()
                && lengths.kv_valid < lengths.tokens_committed
                && lengths.kv_valid <= lengths.kv_allocated
                && lengths.kv_allocated as usize == sequence.table.blocks.len() * self.pool.settings().block_size as usize
        });
        self.law(lengths, "kv_valid < committed, kv_valid <= allocated = blocks × size");
        let owners = self
            .work
            .pending
            .values()
            .all(|owner| self.work.sequences.get(owner).is_some_and(|owner| self.work.running.contains(&owner.rank)));
        self.law(owners, "a promised block is promised by a running sequence");
        let waiting: u32 = self.work.jobs.values().filter(|job| job.ticket.is_some()).map(|job| job.request.sampling.n).sum();
        let gate = self.shared.gate.sequences() >= waiting;
        self.law(gate, "queued choices are counted");
    }

    /// Laws of a choice that ends: each committed token is visible or trimmed.
    pub(super) fn check_choice(&mut self, id: SequenceId) {
        let Some(sequence) = self.work.sequences.get(&id) else { return };
        let output = &sequence.output;
        let open = output.held.len() as u32;
        // After a stop string the text trimmed what it had not given out; an end token never reached the text.
        let whole = output.visible + open <= output.tokens && output.tokens <= output.visible + open + 1;
        self.law(whole, "visible + trimmed = committed (choice)");
    }

    /// Laws of a request that ended well.
    pub(super) fn check_finished(&mut self, id: JobId) {
        let Some(job) = self.work.jobs.get(&id) else { return };
        let (usage, counters) = (job.ledger.usage, job.ledger.counters);
        let computed = job.ledger.started.as_ref().map_or(0, |started| started.computed);
        let prompt = usage.prompt_tokens == usage.cached_tokens + computed;
        let done = computed == job.ledger.prompt_computed + job.ledger.prompt_found_later;
        let visible = u64::from(usage.completion_tokens) == counters.sampled + counters.accepted - counters.trimmed;
        let drafts = counters.proposed == counters.accepted + counters.rejected + counters.unverified + counters.discarded;
        self.law(prompt, "prompt = hits + computed");
        self.law(done, "computed at admission = computed by rows");
        self.law(visible, "visible = committed - trimmed");
        self.law(drafts, "every draft has one outcome");
    }

    fn law(&mut self, holds: bool, law: &str) {
        if !holds {
            self.stats.reconcile_violations += 1;
            tracing::error!(law, epoch = self.epoch, "a counter law does not hold");
        }
    }
}
