//! The one way out: how a sequence gives its blocks back, and how a request ends.
//!
//! Guarantees: each function may be called again, or for something that is already gone, without effect.

use super::Engine;
use super::request::JobId;
use crate::backend::BackendError;
use crate::plan::{Plan, SequenceId};
use kvasir_core::{Chunk, Error, Reason};
use std::sync::atomic::Ordering;

/// Consecutive steps without memory after which requests fail instead of trying again.
const OUT_OF_MEMORY_MAX: u32 = 3;
/// Halvings of the step's token budget under memory pressure.
const HALVINGS_MAX: u32 = 6;

impl Engine {
    /// The reader went away.
    pub(super) fn cancel(&mut self, id: JobId) {
        if self.work.jobs.get(&id).is_some_and(|job| job.delivery.stream.is_cancelled()) {
            self.release(id);
            self.stats.requests.cancelled += 1;
        }
    }

    /// Ends a request in a failure; the reader learns it even if its queue is full.
    pub(super) fn fail(&mut self, id: JobId, error: &Error) {
        let now = self.now();
        if let Some(job) = self.work.jobs.get_mut(&id) {
            job.timing.meter.settle(now);
            let (usage, states) = (job.ledger.usage, job.timing.meter.times());
            job.delivery.stream.end(Chunk::Failed { error: error.clone(), usage, states });
            self.release(id);
            self.stats.count_failure(error.reason);
        }
    }

    /// Ends a request well, once all its choices are done and everything was handed over.
    pub(super) fn finish_if_done(&mut self, id: JobId) {
        let now = self.now();
        let Some(job) = self.work.jobs.get_mut(&id) else { return };
        if !job.is_done() || !job.delivery.is_clear() {
            return;
        }
        job.timing.meter.settle(now);
        job.delivery.stream.end(job.finished());
        self.check_finished(id);
        self.release(id);
        self.stats.requests.finished += 1;
    }

    /// Takes a request out with everything it holds.
    fn release(&mut self, id: JobId) {
        if let Some(job) = self.work.jobs.remove(&id) {
            for sequence in job.sequences {
                self.drop_sequence(sequence);
            }
        }
    }

    /// Takes a sequence out with everything it holds.
    pub(super) fn drop_sequence(&mut self, id: SequenceId) {
        self.vacate(id);
        if let Some(sequence) = self.work.sequences.remove(&id) {
            self.work.waiting.remove(&sequence.rank);
        }
    }

    /// Takes a sequence's blocks away; it waits to compute again what is not in the cache.
    pub(super) fn preempt(&mut self, id: SequenceId) {
        self.vacate(id);
        if let Some(sequence) = self.work.sequences.get_mut(&id) {
            sequence.preempted = true;
            self.work.waiting.insert(sequence.rank);
            self.stats.steps.preemptions += 1;
        }
    }

    /// Gives back a sequence's blocks, its promise of blocks to come, and its place among the running.
    fn vacate(&mut self, id: SequenceId) {
        let Some(sequence) = self.work.sequences.get_mut(&id) else { return };
        let blocks = std::mem::take(&mut sequence.table.blocks);
        let copy = sequence.table.copy.take();
        sequence.reset();
        self.work.running.remove(&sequence.rank);
        self.pool.release(&blocks);
        if let Some(copy) = copy {
            self.pool.release(&[copy.from]);
        }
        self.work.pending.retain(|_, owner| *owner != id);
    }

    /// The backend could not do a step: nothing of it is kept.
    pub(super) fn step_failed(&mut self, plan: &Plan, error: &BackendError) {
        tracing::error!(error = %error, epoch = plan.epoch, rows = plan.rows.len(), "a step failed");
        match error {
            BackendError::OutOfMemory { .. } => {
                self.stats.steps.out_of_memory += 1;
                self.pressure.streak += 1;
                self.pressure.halvings = (self.pressure.halvings + 2).min(HALVINGS_MAX);
                if self.pressure.streak >= OUT_OF_MEMORY_MAX {
                    self.pressure.streak = 0;
                    self.fail_rows(plan, &Error::new(Reason::OutOfMemory, error.to_string()));
                } else {
                    plan.rows.iter().for_each(|row| self.preempt_in_flight(plan.epoch, row.sequence));
                }
            }
            BackendError::InvalidPlan(_) => self.fail_rows(plan, &Error::new(Reason::Internal, error.to_string())),
            BackendError::DeviceLost(_) => {
                self.shared.down.store(true, Ordering::Release);
                let all: Vec<_> = self.work.jobs.keys().copied().collect();
                for id in all {
                    self.fail(id, &Error::new(Reason::DeviceLost, error.to_string()));
                }
                self.pool.clear();
            }
        }
    }

    /// Fails the requests whose rows a plan holds.
    pub(super) fn fail_rows(&mut self, plan: &Plan, error: &Error) {
        for row in &plan.rows {
            if let Some(job) = self.work.sequences.get(&row.sequence).map(|sequence| sequence.job) {
                self.fail(job, error);
            }
        }
    }

    fn preempt_in_flight(&mut self, epoch: u64, id: SequenceId) {
        if self.work.sequences.get(&id).is_some_and(|sequence| sequence.in_flight == Some(epoch)) {
            self.preempt(id);
        }
    }
}
