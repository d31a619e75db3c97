//! Stage 5: `top_k`, `top_p`, `min_p`. Survivors come out in any order; the set is what counts.

use super::{Candidate, scale};
use crate::plan::SampleParams;
use kvasir_kernels::{Isa, math, reduce};

/// Candidates sorted at first when looking for the nucleus; grows eightfold until it is inside.
const FIRST_NUCLEUS: usize = 64;

/// Drops the candidates that the parameters cut off; at least the best one stays.
pub(super) fn truncate(candidates: &mut Vec<Candidate>, scaled: &mut Vec<f32>, params: &SampleParams) {
    let k = params.top_k as usize;
    if k > 0 && k < candidates.len() {
        candidates.select_nth_unstable_by_key(k - 1, |candidate| candidate.rank());
        candidates.truncate(k);
        // The sums below run in this order, which must not depend on how the selection shuffled.
        candidates.sort_unstable_by_key(|candidate| candidate.id);
    }
    if params.top_p < 1.0 && candidates.len() > 1 {
        nucleus(candidates, scaled, params.temperature, params.top_p);
    }
    if params.min_p > 0.0 && candidates.len() > 1 {
        let largest = largest(candidates);
        // p ≥ min_p · p_max, in logarithms.
        let least = math::ln(params.min_p.min(1.0));
        candidates.retain(|candidate| scale(candidate.logit, largest, params.temperature) >= least);
    }
}

/// Keeps the smallest set of best candidates whose mass is at least `top_p` of the whole (Holtzman et al. 2020).
fn nucleus(candidates: &mut Vec<Candidate>, scaled: &mut Vec<f32>, temperature: f32, top_p: f32) {
    let largest = largest(candidates);
    scaled.clear();
    scaled.extend(candidates.iter().map(|candidate| scale(candidate.logit, largest, temperature)));
    let isa = Isa::detect();
    let total = reduce::log_sum_exp_on(isa, scaled);
    let mut sorted = 0;
    let mut mass = 0.0_f64;
    let mut size = FIRST_NUCLEUS;
    while sorted < candidates.len() {
        let end = size.min(candidates.len());
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by_key(end - sorted, |candidate| candidate.rank());
        }
        candidates[sorted..end].sort_unstable_by_key(|candidate| candidate.rank());
        scaled.clear();
        scaled.extend(candidates[sorted..end].iter().map(|candidate| scale(candidate.logit, largest, temperature) - total));
        math::exp_in_place(isa, scaled);
        for (index, probability) in (sorted..).zip(scaled.iter()) {
            mass += f64::from(*probability);
            if mass >= f64::from(top_p) {
                candidates.truncate(index + 1);
                return;
            }
        }
        sorted = end;
        size *= 8;
    }
}

fn largest(candidates: &[Candidate]) -> f32 {
    candidates
        .iter()
        .fold(f32::NEG_INFINITY, |largest, candidate| if candidate.logit > largest { candidate.logit } else { largest })
}
