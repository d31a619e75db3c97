//! Second part of a step: from the state to a plan.
//!
//! Owns the picture that the scheduler sees, admission with its lookup, and the rows. Blocks are taken here and nowhere else.

use super::Engine;
use super::request::{Job, JobId};
use super::sequence::{Join, Lengths, Output, Sequence, Table};
use crate::kv::Pool;
use crate::plan::{BlockCopy, BlockId, Plan, Row, SampleRow, ScoreRow, SequenceId};
use crate::scheduler::{self, Budget, Rank, Running, Waiting};
use crate::text::Text;
use kvasir_core::{BlockKey, Chunk, Error, MissReason, Started, State, Tier, TierHit};
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Waiting sequences that are looked up in one step.
const LOOKAHEAD: usize = 16;
/// Waiting sequences looked at to find those, joiners included.
const LOOKAHEAD_JOINS: usize = 64;
/// A join is given up after this many times the predicted time of computing the prefix alone.
const JOIN_PATIENCE: u32 = 4;
/// How long a join may wait while nothing was measured yet.
const JOIN_UNMEASURED: Duration = Duration::from_secs(1);

/// Blocks found for each waiting sequence that was looked up.
type Found = BTreeMap<SequenceId, Vec<BlockId>>;

impl Engine {
    /// Makes the plan of this step and takes the blocks that it needs.
    pub(super) fn plan(&mut self) -> Plan {
        let (waiting, mut found) = self.view_waiting();
        let schedule = scheduler::schedule(&self.view_running(), &waiting, &self.budget());
        for id in schedule.preempt {
            self.preempt(id);
        }
        for id in schedule.exhausted {
            self.end_at_capacity(id);
        }
        for id in schedule.admit {
            self.admit(id, found.remove(&id).unwrap_or_default());
        }
        let mut plan = Plan { epoch: self.epoch, ..Plan::default() };
        for (id, tokens) in schedule.rows {
            if let Some(row) = self.row(id, tokens) {
                plan.copies.extend(self.work.sequences.get(&id).and_then(|sequence| sequence.table.copy));
                plan.rows.push(row);
            }
        }
        plan
    }

    /// Gives a new request its first sequence.
    pub(super) fn add_first_sequence(&mut self, id: JobId) {
        let settings = self.pool.settings();
        let Some(job) = self.work.jobs.get(&id) else { return };
        let active = self.work.active_epoch.is_none_or(|active| active == job.owner.secret_epoch);
        let mut table = Table::new(job.owner.prefix, settings.block_size, active && job.caches(self.shared.settings.cache));
        if table.publishes {
            table.extend_keys(settings.block_size, &job.request.prompt, self.shared.settings.key_map);
        }
        let sequence = self.new_sequence(id, 0, table);
        if let Some(sequence) = sequence {
            self.work.waiting.insert(self.work.sequences[&sequence].rank);
        }
    }

    /// Adds the other choices after the prompt is computed: they share its full blocks and copy the tail. Without room for that a
    /// choice waits and computes what it does not find in the cache.
    pub(super) fn fork(&mut self, first: SequenceId) {
        let block_size = self.pool.settings().block_size;
        let Some(origin) = self.work.sequences.get(&first) else { return };
        let Some(job) = self.work.jobs.get(&origin.job) else { return };
        let (id, choices) = (origin.job, job.request.sampling.n);
        // The last prompt position is computed by each choice for itself, because its logits are what the choice begins with.
        let valid = job.prompt_len() - 1;
        let shared = origin.table.blocks[..(valid / block_size) as usize].to_vec();
        let tail = origin.table.blocks[(valid / block_size) as usize];
        for choice in 1..choices {
            let table = Table::named_as(&self.work.sequences[&first].table);
            let Some(sequence) = self.new_sequence(id, choice, table) else { return };
            let room = self.work.running.len() < self.shared.settings.step.rows_max;
            let own = if room { self.pool.reserve(1).ok() } else { None };
            let Some(sequence) = self.work.sequences.get_mut(&sequence) else { return };
            sequence.lengths.kv_ever = valid;
            let Some(own) = own else {
                self.work.waiting.insert(sequence.rank);
                continue;
            };
            self.pool.acquire(&shared);
            sequence.table.blocks.clone_from(&shared);
            sequence.table.blocks.extend(&own);
            sequence.table.published = shared.len() as u32;
            if !valid.is_multiple_of(block_size) {
                self.pool.acquire(&[tail]);
                sequence.table.copy = Some(BlockCopy { from: tail, to: own[0], slots: valid % block_size });
            }
            sequence.lengths.kv_valid = valid;
            sequence.lengths.kv_allocated = sequence.table.blocks.len() as u32 * block_size;
            self.work.running.insert(sequence.rank);
        }
    }

    fn new_sequence(&mut self, job_id: JobId, choice: u32, table: Table) -> Option<SequenceId> {
        let job = self.work.jobs.get_mut(&job_id)?;
        self.work.next_sequence += 1;
        let id = SequenceId(self.work.next_sequence);
        job.sequences.push(id);
        let sequence = Sequence {
            id,
            job: job_id,
            choice,
            rank: Rank::new(job.timing.received_at, job.request.priority, id),
            tokens: job.request.prompt.to_vec(),
            lengths: Lengths { tokens_committed: job.prompt_len(), ..Lengths::default() },
            table,
            output: Output {
                tokens: 0,
                counts: Arc::default(),
                text: Text::new(Arc::clone(&job.stops)),
                held: VecDeque::new(),
                visible: 0,
                constraint: job.constraints.pop_front(),
            },
            join: Join::default(),
            in_flight: None,
            preempted: false,
        };
        self.work.sequences.insert(id, sequence);
        Some(id)
    }

    fn budget(&self) -> Budget {
        let limits = &self.shared.settings.step;
        let most = (limits.tokens_max >> self.pressure.halvings).max(1);
        let least = limits.chunk_min.min(most);
        Budget {
            rows_max: limits.rows_max,
            tokens_mixed: self.cost.tokens_within(limits.time_mixed, least, most),
            tokens_alone: self.cost.tokens_within(limits.time_alone, least, most),
            chunk_min: least,
            available: self.pool.available(),
        }
    }

    fn view_running(&self) -> Vec<Running> {
        let sequences = self.work.running.iter().filter_map(|rank| self.work.sequences.get(&rank.sequence()));
        let view = |sequence: &Sequence| Running {
            id: sequence.id,
            ready: self.work.jobs.get(&sequence.job).is_some_and(|job| job.delivery.is_clear()),
            missing: sequence.missing(),
            blocks_needed: self.blocks_needed(sequence),
            blocks_exclusive: sequence.table.blocks.iter().filter(|block| self.pool.is_exclusive(**block)).count() as u32,
        };
        sequences.map(view).collect()
    }

    /// Blocks that a sequence lacks for the positions it is about to compute.
    fn blocks_needed(&self, sequence: &Sequence) -> u32 {
        self.pool.blocks_for(sequence.lengths.tokens_committed).saturating_sub(sequence.table.blocks.len() as u32)
    }

    /// Looks up the first of the waiting.
    fn view_waiting(&mut self) -> (Vec<Waiting>, Found) {
        let (mut view, mut found) = (Vec::new(), Found::new());
        let mut beginning = HashSet::new();
        let ids: Vec<_> = self.work.waiting.iter().map(Rank::sequence).take(LOOKAHEAD_JOINS).collect();
        let mut shown = 0;
        for id in ids {
            if shown == LOOKAHEAD {
                break;
            }
            let now = self.now();
            let Some(sequence) = self.work.sequences.get_mut(&id) else { continue };
            let Some(job) = self.work.jobs.get_mut(&sequence.job) else { continue };
            if !job.delivery.is_clear() {
                continue;
            }
            let state = job.timing.meter.state();
            job.timing.meter.switch(now, State::Lookup);
            let blocks = lookup(&mut self.pool, job, sequence);
            let joins = self.joins(id, blocks.len(), &mut beginning, now);
            let unheld = blocks.iter().filter(|block| self.pool.is_unheld(**block)).count() as u32;
            let sequence = &self.work.sequences[&id];
            view.push(Waiting {
                id,
                missing: sequence.lengths.tokens_committed - blocks.len() as u32 * self.pool.settings().block_size,
                blocks_needed: self.pool.blocks_for(sequence.lengths.tokens_committed) - blocks.len() as u32 + unheld,
                joins,
            });
            found.insert(id, blocks);
            shown += usize::from(!joins);
            let (job, now) = (sequence.job, self.now());
            if let Some(job) = self.work.jobs.get_mut(&job) {
                job.timing.meter.switch(now, state);
            }
        }
        (view, found)
    }

    /// Whether a waiting sequence should wait for a prefix that another computes right now (or begins in this very step). The other is
    /// always a running one, so waiting cannot go round in a circle, and it ends when the other ends, however that is.
    fn joins(&mut self, id: SequenceId, found: usize, beginning: &mut HashSet<BlockKey>, now: Duration) -> bool {
        let block_size = self.pool.settings().block_size;
        let Some(sequence) = self.work.sequences.get(&id) else { return false };
        let usable = ((sequence.lengths.tokens_committed - 1) / block_size) as usize;
        let Some(key) = sequence.table.keys.get(found).filter(|_| found < usable && sequence.table.publishes) else {
            return false;
        };
        if self.work.jobs.get(&sequence.job).is_none_or(Job::wants_scores) || sequence.join.given_up {
            return false;
        }
        let cheaper = match self.work.pending.get(key) {
            Some(owner) => self.waiting_is_cheaper(sequence, *owner, found, usable),
            None => !beginning.insert(*key),
        };
        if !cheaper {
            return false;
        }
        let alone = self.cost.predict(sequence.lengths.tokens_committed).map_or(JOIN_UNMEASURED, |time| time * JOIN_PATIENCE);
        let Some(sequence) = self.work.sequences.get_mut(&id) else { return false };
        let until = *sequence.join.until.get_or_insert_with(|| {
            self.stats.steps.joins += 1;
            now + alone
        });
        if now > until {
            sequence.join.given_up = true;
            self.stats.steps.joins_given_up += 1;
        }
        now <= until
    }

    fn waiting_is_cheaper(&self, sequence: &Sequence, owner: SequenceId, found: usize, usable: usize) -> bool {
        let Some(other) = self.work.sequences.get(&owner) else { return false };
        if self.work.jobs.get(&other.job).is_none_or(|job| !job.delivery.is_clear()) {
            return false;
        }
        let block_size = self.pool.settings().block_size;
        let keys = sequence.table.keys[found..usable].iter();
        let common = keys.take_while(|key| self.work.pending.get(key) == Some(&owner)).count();
        let end = (found + common) as u32 * block_size;
        let (theirs, ours) = (end.saturating_sub(other.lengths.kv_valid), common as u32 * block_size);
        match (self.cost.predict(theirs), self.cost.predict(ours)) {
            (Some(theirs), Some(ours)) => theirs <= ours,
            _ => theirs <= ours,
        }
    }

    /// Lets a sequence hold blocks: those found, and soon those that it computes.
    fn admit(&mut self, id: SequenceId, found: Vec<BlockId>) {
        let block_size = self.pool.settings().block_size;
        self.pool.acquire(&found);
        let now = self.now();
        let Some(sequence) = self.work.sequences.get_mut(&id) else { return };
        let Some(job) = self.work.jobs.get_mut(&sequence.job) else { return };
        let reused = found.len() as u32 * block_size;
        if job.ledger.started.is_none() {
            let started = started(&self.pool, job, sequence, found.len(), &self.work.pending);
            self.stats.requests.started += 1;
            self.stats.prompt.tokens += u64::from(job.ledger.usage.prompt_tokens);
            self.stats.prompt.hit_device += u64::from(reused);
            self.stats.prompt.computed += u64::from(started.computed);
            if let Some(reason) = started.miss_reason {
                self.stats.prompt.misses[reason as usize] += 1;
            }
            job.ledger.usage.cached_tokens = reused;
            job.ledger.started = Some(started.clone());
            job.delivery.send(now, Chunk::Started(started));
            job.ticket = None;
        } else if sequence.choice == 0 {
            let prompt = job.prompt_len();
            job.ledger.prompt_found_later += reused.min(prompt).saturating_sub(sequence.lengths.kv_ever.min(prompt));
        }
        sequence.preempted = false;
        sequence.lengths.kv_valid = reused;
        sequence.lengths.kv_allocated = reused;
        sequence.lengths.kv_ever = sequence.lengths.kv_ever.max(reused);
        sequence.table.published = found.len() as u32;
        sequence.table.blocks = found;
        if sequence.table.publishes {
            let size = block_size as usize;
            let full = sequence.lengths.tokens_committed as usize / size;
            for key in sequence.table.keys[..full.min(sequence.table.keys.len())].iter().skip(sequence.table.blocks.len()) {
                self.work.pending.entry(*key).or_insert(id);
            }
        }
        self.work.waiting.remove(&sequence.rank);
        self.work.running.insert(sequence.rank);
    }

    /// A row of `tokens` tokens with the blocks it writes; `None` if the blocks cannot be had after all or the request just failed.
    fn row(&mut self, id: SequenceId, tokens: u32) -> Option<Row> {
        let needed = self.blocks_needed(self.work.sequences.get(&id)?);
        if needed > 0 {
            let Ok(blocks) = self.pool.reserve(needed) else {
                self.preempt(id);
                return None;
            };
            let block_size = self.pool.settings().block_size;
            let sequence = self.work.sequences.get_mut(&id)?;
            sequence.table.blocks.extend(blocks);
            sequence.lengths.kv_allocated = sequence.table.blocks.len() as u32 * block_size;
        }
        let sequence = self.work.sequences.get_mut(&id)?;
        let job = self.work.jobs.get(&sequence.job)?;
        let start = sequence.lengths.kv_valid;
        let end = start + tokens;
        let last = end == sequence.lengths.tokens_committed;
        let sample = if last && job.request.stop.max_tokens > 0 { Some(sample_row(job, sequence)) } else { None };
        let score = (sequence.choice == 0 && job.wants_scores()).then(|| ScoreRow {
            top: job.request.sampling.prompt_logprobs.unwrap_or(0),
            next_prompt_token: job.request.prompt.get(end as usize).copied(),
        });
        let row = Row {
            sequence: id,
            tokens: sequence.tokens[start as usize..end as usize].to_vec(),
            start,
            drafted: 0,
            blocks: sequence.table.blocks.as_slice().into(),
            sample: None,
            score,
        };
        match sample {
            None => {
                sequence.in_flight = Some(self.epoch);
                Some(row)
            }
            Some(Ok(sample)) => {
                sequence.in_flight = Some(self.epoch);
                Some(Row { sample: Some(sample), ..row })
            }
            Some(Err(error)) => {
                let job = sequence.job;
                self.fail(job, &error);
                None
            }
        }
    }
}

/// Everything that choosing the next token of a sequence needs.
fn sample_row(job: &Job, sequence: &mut Sequence) -> Result<SampleRow, Error> {
    let sampling = &job.request.sampling;
    let counted = sampling.repetition_penalty != 1.0 || sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0;
    let masks = match &mut sequence.output.constraint {
        Some(constraint) => vec![constraint.mask()?],
        None => Vec::new(),
    };
    Ok(SampleRow {
        params: Arc::clone(&job.params),
        choice: sequence.choice,
        position: sequence.lengths.tokens_committed,
        output_counts: if counted { Arc::clone(&sequence.output.counts) } else { Arc::default() },
        end_allowed_from: job.request.stop.min_tokens.saturating_sub(sequence.output.tokens),
        masks,
    })
}

/// The stored prefix of a waiting sequence, unless it may not use one.
fn lookup(pool: &mut Pool, job: &Job, sequence: &Sequence) -> Vec<BlockId> {
    if !sequence.table.publishes || job.wants_scores() {
        return Vec::new();
    }
    pool.lookup(&job.owner.prefix, &sequence.table.keys, &sequence.tokens)
}

/// What is reported at first admission.
fn started(
    pool: &Pool,
    job: &Job,
    sequence: &Sequence,
    found: usize,
    pending: &std::collections::HashMap<BlockKey, SequenceId>,
) -> Started {
    let block_size = pool.settings().block_size;
    let (prompt, reused) = (job.prompt_len(), found as u32 * block_size);
    let prefix = &job.owner.prefix;
    let own = found as u32 >= prefix.shared_blocks(block_size);
    let miss_reason = if job.wants_scores() {
        Some(MissReason::Bypass)
    } else if !sequence.table.publishes {
        Some(MissReason::Disabled)
    } else {
        match pool.miss_reason(prefix, &sequence.table.keys, prompt, found as u32) {
            Some(MissReason::Cold | MissReason::Diverged)
                if own && sequence.table.keys.get(found).is_some_and(|key| pending.contains_key(key)) =>
            {
                Some(MissReason::Pending)
            }
            reason => reason,
        }
    };
    let hits = if reused > 0 { vec![TierHit { tier: Tier::Device, tokens: reused }] } else { Vec::new() };
    Started { hits, computed: prompt - reused, miss_reason }
}
