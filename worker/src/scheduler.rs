//! Who takes part in the next step: a pure function from a picture of all sequences to a schedule.
//!
//! Owns order, admission, chunking and the choice of victims. Refuses to know requests, keys and clocks. Called once per step.
//!
//! Invariants
//! 1. Order is by [`Rank`], fixed at submission: whoever is overtaken is so only by requests that came within a bounded time after it, so
//!    nobody starves.
//! 2. The best-ranked running sequence is never preempted for another, so some sequence always gets on.
//! 3. The first of the waiting that does not fit stops admission: a large request is not overtaken for ever by small ones.
//! 4. Decoding rows run in every step; prefill takes what the step's token budget leaves, and at least [`Budget::chunk_min`].
//!
//! Costs: O(running × log) plus the few waiting sequences that are shown to it.

use crate::plan::SequenceId;
use std::time::Duration;

/// A priority level is worth this head start.
pub const PRIORITY_WORTH: Duration = Duration::from_secs(10);
/// Priorities beyond this count as this.
pub const PRIORITY_MAX: i32 = 1000;

/// Place in the order: smaller is served first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Rank {
    virtual_arrival_ns: i128,
    sequence: SequenceId,
}

/// A sequence that holds blocks.
#[derive(Clone, Copy, Debug)]
pub struct Running {
    /// Whose.
    pub id: SequenceId,
    /// Whether it may have a row now (its reader keeps up).
    pub ready: bool,
    /// Positions without KV, at least 1.
    pub missing: u32,
    /// Further blocks that it needs to hold all its positions.
    pub blocks_needed: u32,
    /// Blocks that come back if it is preempted.
    pub blocks_exclusive: u32,
}

/// A sequence that waits for blocks.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// Whose.
    pub id: SequenceId,
    /// Positions without KV after the reuse that a lookup found.
    pub missing: u32,
    /// Blocks that it takes out of what is available: new ones, and reused ones that nobody holds.
    pub blocks_needed: u32,
    /// It waits for a prefix that another sequence is computing.
    pub joins: bool,
}

/// Limits of a step.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Most rows.
    pub rows_max: usize,
    /// Most tokens when decoding rows take part.
    pub tokens_mixed: u32,
    /// Most tokens in a step of prefill alone.
    pub tokens_alone: u32,
    /// Fewest prefill tokens that a step offers.
    pub chunk_min: u32,
    /// Free or evictable blocks.
    pub available: u32,
}

/// What to do in a step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// Give their blocks back and wait again, in this order, before anything else.
    pub preempt: Vec<SequenceId>,
    /// The pool cannot hold one position more for this sequence, which has it to itself.
    pub exhausted: Vec<SequenceId>,
    /// Hold blocks from now on, in this order.
    pub admit: Vec<SequenceId>,
    /// Rows: whose, and how many tokens.
    pub rows: Vec<(SequenceId, u32)>,
}

// === impl Rank ===

impl Rank {
    /// Place of a request that arrived at `arrival`.
    pub fn new(arrival: Duration, priority: i32, sequence: SequenceId) -> Self {
        let head_start = i128::from(priority.clamp(-PRIORITY_MAX, PRIORITY_MAX)) * PRIORITY_WORTH.as_nanos() as i128;
        Self { virtual_arrival_ns: arrival.as_nanos() as i128 - head_start, sequence }
    }

    /// Whose.
    pub fn sequence(&self) -> SequenceId {
        self.sequence
    }
}

/// Makes the schedule. `running` and `waiting` come in rank order.
pub fn schedule(running: &[Running], waiting: &[Waiting], budget: &Budget) -> Schedule {
    let mut schedule = Schedule::default();
    let mut available = budget.available;
    let mut end = running.len();
    let decoding = running.iter().filter(|sequence| sequence.ready && sequence.missing == 1).count() as u32;
    let limit = if decoding > 0 { budget.tokens_mixed } else { budget.tokens_alone };
    let mut prefill = limit.saturating_sub(decoding).max(budget.chunk_min);
    let mut index = 0;
    while index < end {
        let sequence = running[index];
        index += 1;
        if !sequence.ready {
            continue;
        }
        while sequence.blocks_needed > available && end > index {
            end -= 1;
            available += running[end].blocks_exclusive;
            schedule.preempt.push(running[end].id);
        }
        if sequence.blocks_needed > available {
            // Nobody behind it is left. Those before it hold the rest; alone, it has met the pool's size. If it is first and others were
            // just preempted, what they shared among themselves comes back only now: it tries again in the next step.
            if index > 1 {
                schedule.preempt.push(sequence.id);
            } else if schedule.preempt.is_empty() {
                schedule.exhausted.push(sequence.id);
            }
            break;
        }
        available -= sequence.blocks_needed;
        let tokens = if sequence.missing == 1 { 1 } else { sequence.missing.min(prefill) };
        if sequence.missing > 1 {
            prefill -= tokens;
        }
        if tokens > 0 && schedule.rows.len() < budget.rows_max {
            schedule.rows.push((sequence.id, tokens));
        }
    }
    if schedule.preempt.is_empty() && schedule.exhausted.is_empty() {
        admit(&mut schedule, running.len(), waiting, budget, available, prefill);
    }
    schedule
}

/// Fills what is left of the step with waiting sequences.
fn admit(schedule: &mut Schedule, running: usize, waiting: &[Waiting], budget: &Budget, mut available: u32, mut prefill: u32) {
    for sequence in waiting.iter().filter(|sequence| !sequence.joins) {
        let count = running + schedule.admit.len();
        // One block of headroom per running sequence keeps the next decode steps from preempting who was just let in.
        let headroom = if count == 0 { 0 } else { count as u32 };
        if count >= budget.rows_max || prefill == 0 || sequence.blocks_needed + headroom > available {
            break;
        }
        available -= sequence.blocks_needed;
        let tokens = sequence.missing.min(prefill);
        prefill -= tokens;
        schedule.admit.push(sequence.id);
        schedule.rows.push((sequence.id, tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(id: u64, missing: u32, blocks_needed: u32, blocks_exclusive: u32) -> Running {
        Running { id: SequenceId(id), ready: true, missing, blocks_needed, blocks_exclusive }
    }

    fn waiting(id: u64, missing: u32, blocks_needed: u32) -> Waiting {
        Waiting { id: SequenceId(id), missing, blocks_needed, joins: false }
    }

    fn budget(available: u32) -> Budget {
        Budget { rows_max: 8, tokens_mixed: 32, tokens_alone: 64, chunk_min: 8, available }
    }

    #[test]
    fn decodes_run_and_prefill_takes_the_rest_of_the_budget() {
        let plan = schedule(&[running(1, 1, 0, 4), running(2, 100, 0, 4), running(3, 100, 0, 4)], &[], &budget(9));
        assert_eq!(plan.rows, [(SequenceId(1), 1), (SequenceId(2), 31)]);
    }

    #[test]
    fn prefill_alone_has_its_own_budget() {
        let plan = schedule(&[running(2, 100, 0, 4)], &[], &budget(9));
        assert_eq!(plan.rows, [(SequenceId(2), 64)]);
    }

    #[test]
    fn the_last_in_rank_is_preempted_and_nobody_is_let_in() {
        let plan = schedule(&[running(1, 1, 1, 4), running(2, 1, 0, 4), running(3, 1, 0, 4)], &[waiting(4, 1, 1)], &budget(0));
        assert_eq!(plan.preempt, [SequenceId(3)]);
        assert_eq!(plan.rows, [(SequenceId(1), 1), (SequenceId(2), 1)]);
        assert!(plan.admit.is_empty());
    }

    #[test]
    fn a_sequence_alone_in_a_full_pool_is_exhausted_not_preempted() {
        let plan = schedule(&[running(1, 1, 1, 4)], &[], &budget(0));
        assert_eq!((plan.exhausted, plan.preempt), (vec![SequenceId(1)], vec![]));
    }

    #[test]
    fn the_first_that_does_not_fit_stops_admission_but_a_joiner_does_not() {
        let mut joiner = waiting(4, 9, 1);
        joiner.joins = true;
        let plan = schedule(&[], &[joiner, waiting(5, 9, 3), waiting(6, 9, 30), waiting(7, 1, 1)], &budget(10));
        assert_eq!(plan.admit, [SequenceId(5)]);
    }

    #[test]
    fn a_priority_is_a_bounded_head_start() {
        let late = PRIORITY_WORTH + Duration::from_millis(1);
        assert!(Rank::new(PRIORITY_WORTH / 2, 1, SequenceId(2)) < Rank::new(Duration::ZERO, 0, SequenceId(1)));
        assert!(Rank::new(late, 1, SequenceId(2)) > Rank::new(Duration::ZERO, 0, SequenceId(1)));
    }
}
