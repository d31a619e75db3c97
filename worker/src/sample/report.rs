//! Log-probabilities of the model's own distribution.

use super::Candidate;
use crate::plan::Chosen;
use kvasir_core::TokenId;
use kvasir_kernels::reduce;

/// Above this many, selecting and sorting all is cheaper than inserting into a short list.
const SHORT_LIST: usize = 32;

/// Reports a given token: its log-probability and the `top` most likely tokens beside it. A token outside the vocabulary has probability 0.
pub fn score(logits: &[f32], target: TokenId, top: u32) -> Chosen {
    let total = reduce::log_sum_exp(logits);
    let logit = logits.get(target as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let top = most_likely(logits, top as usize).into_iter().map(|best| (best.id, best.logit - total)).collect();
    Chosen { id: target, logprob: logit - total, top, logits: None }
}

/// The `count` largest logits, best first, ties by id; NaN does not count.
fn most_likely(logits: &[f32], count: usize) -> Vec<Candidate> {
    let numbers = logits.iter().enumerate().filter(|(_, logit)| !logit.is_nan());
    let candidates = numbers.map(|(id, &logit)| Candidate { id: id as TokenId, logit });
    if count > SHORT_LIST {
        let mut all: Vec<_> = candidates.collect();
        if count < all.len() {
            all.select_nth_unstable_by_key(count, |candidate| candidate.rank());
            all.truncate(count);
        }
        all.sort_unstable_by_key(|candidate| candidate.rank());
        return all;
    }
    let mut best: Vec<Candidate> = Vec::with_capacity(count);
    if count == 0 {
        return best;
    }
    for candidate in candidates {
        if best.len() == count {
            // Ids ascend, so an equal logit stands behind.
            if best.last().is_some_and(|last| candidate.logit <= last.logit) {
                continue;
            }
            best.pop();
        }
        let place = best.partition_point(|other| other.logit >= candidate.logit);
        best.insert(place, candidate);
    }
    best
}
