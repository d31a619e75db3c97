//! First part of a step: messages, deadlines, readers that went or came back.

use super::Engine;
use super::emit::sample_params;
use super::handle::mismatch;
use super::lock;
use super::mailbox::Message;
use super::request::{Job, JobId, Submission};
use super::stats::Inspection;
use crate::kv::FlushScope;
use kvasir_core::{Error, ModelIdentity, Reason, State, TenantTag};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Engine {
    /// Takes everything that arrived, then ends who is out of time.
    pub(super) fn take(&mut self) {
        for message in self.shared.mailbox.take() {
            self.receive(message);
        }
        self.check_time();
    }

    fn receive(&mut self, message: Message) {
        match message {
            Message::Submit(submission) => self.submit(*submission),
            Message::Cancel(job) => self.cancel(job),
            Message::Resumed(job) => self.resume(job),
            Message::Snapshot => {}
            Message::Subscribe(reply) => {
                let mailbox = Arc::clone(&self.shared.mailbox);
                let stream = self.feed.subscribe(Arc::new(move || {
                    mailbox.signal(Message::Snapshot);
                }));
                // Events that happened before belong to the snapshot.
                self.publish_events();
                let _ = reply.send(stream);
            }
            Message::Flush(scope, reply) => {
                let _ = reply.send(self.flush(&scope));
            }
            Message::Inspect(reply) => {
                let _ = reply.send(self.inspect());
            }
            Message::Serve(identities, reply) => {
                self.serve(identities);
                let _ = reply.send(());
            }
            Message::Drained(reply) => self.reports.drained.push(reply),
            Message::Stop => self.reports.stopping = true,
        }
    }

    fn submit(&mut self, submission: Submission) {
        self.stats.requests.received += 1;
        let served = lock(&self.shared.identities).contains(&submission.request.identity);
        let params = sample_params(&submission.request, &self.shared.settings);
        let now = self.now();
        let mut job = Job::new(submission, params);
        let id = job.id;
        job.timing.meter.switch(now, State::Lookup);
        self.work.jobs.insert(id, job);
        if !served {
            self.fail(id, &mismatch());
            return;
        }
        self.add_first_sequence(id);
        let now = self.now();
        if let Some(job) = self.work.jobs.get_mut(&id) {
            job.timing.meter.switch(now, State::EngineWait);
        }
    }

    fn resume(&mut self, id: JobId) {
        let now = self.now();
        if let Some(job) = self.work.jobs.get_mut(&id) {
            job.delivery.flush(now);
        }
        self.finish_if_done(id);
    }

    /// Takes names away, from held blocks too. Who already computed under the scope publishes nothing more; who has not begun may, unless
    /// its secret is no longer the active one.
    fn flush(&mut self, scope: &FlushScope) -> u32 {
        if let FlushScope::SecretEpochNot(active) = scope {
            self.work.active_epoch = Some(*active);
        }
        for sequence in self.work.sequences.values_mut() {
            let begun = sequence.lengths.kv_ever > 0 || matches!(scope, FlushScope::SecretEpochNot(_));
            if begun && self.work.jobs.get(&sequence.job).is_some_and(|job| scope.covers_owner(&job.owner)) {
                sequence.table.publishes = false;
                self.work.pending.retain(|_, owner| *owner != sequence.id);
            }
        }
        self.pool.flush(scope)
    }

    fn serve(&mut self, identities: Vec<ModelIdentity>) {
        let other = |job: &&Job| !identities.contains(&job.request.identity);
        let gone: Vec<_> = self.work.jobs.values().filter(other).map(|job| job.id).collect();
        *lock(&self.shared.identities) = identities;
        for id in gone {
            self.fail(id, &mismatch());
        }
    }

    fn inspect(&self) -> Inspection {
        let mut requests: BTreeMap<TenantTag, u32> = BTreeMap::new();
        for job in self.work.jobs.values() {
            *requests.entry(job.owner.tenant.clone()).or_default() += 1;
        }
        Inspection {
            running: self.work.running.len() as u32,
            waiting: self.work.waiting.len() as u32,
            requests: self.work.jobs.len() as u32,
            blocks: self.pool.counts(),
            tenants: self.pool.by_tenant(),
            requests_by_tenant: requests.into_iter().collect(),
        }
    }

    fn check_time(&mut self) {
        let now = self.now();
        let stall_max = self.shared.settings.queue.stall_max;
        let mut late = Vec::new();
        for job in self.work.jobs.values() {
            if job.timing.deadline.is_some_and(|deadline| now >= deadline) {
                let waited = now.saturating_sub(job.timing.received_at);
                let text = format!("the deadline passed {} ms after the request arrived", waited.as_millis());
                late.push((job.id, Error::new(Reason::DeadlineExceeded, text)));
            } else if job.delivery.stalled_since().is_some_and(|since| now.saturating_sub(since) >= stall_max) {
                let text = format!("the stream was not read for {} ms; read faster or ask for less", stall_max.as_millis());
                late.push((job.id, Error::new(Reason::SlowConsumer, text)));
            }
        }
        for (id, error) in late {
            self.fail(id, &error);
        }
        if self.reports.stopping && !self.work.jobs.is_empty() {
            self.shared.draining.store(true, Ordering::Release);
            let all: Vec<_> = self.work.jobs.keys().copied().collect();
            for id in all {
                self.fail(id, &Error::new(Reason::Draining, "the worker is stopping; send the request to another one"));
            }
        }
    }
}
