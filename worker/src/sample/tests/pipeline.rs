//! Stages one by one against naive references, and the edges: ties, NaN, nothing left, ids outside the vocabulary.

use super::reference::{adjusted, distribution};
use super::{mask, params, row, scramble};
use crate::plan::{SampleParams, SampleRow, TokenCounts};
use crate::sample::{CHOICE_NOISE, Sampler, choose, score};
use kvasir_core::{LogitBias, TokenId};
use kvasir_kernels::noise::gumbel;
use proptest::prelude::*;
use std::sync::Arc;

/// Logits on a coarse grid, so that ties are common.
fn grid(vocab: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec((-24_i8..24).prop_map(|step| f32::from(step) / 4.0), vocab)
}

fn sparse_counts(vocab: u32) -> impl Strategy<Value = Arc<TokenCounts>> {
    prop::collection::btree_map(0..vocab, 1..5_u32, 0..6).prop_map(|counts| Arc::new(TokenCounts(counts.into_iter().collect())))
}

fn any_row(vocab: u32) -> impl Strategy<Value = SampleRow> {
    let numbers = (0..4_u32, 0..12_u32, 0.3..1.0_f32, prop::sample::select(vec![0.0_f32, 0.02, 0.3]), 0.3..2.0_f32);
    let penalties = (prop::sample::select(vec![1.0_f32, 0.7, 1.3]), -1.0..1.0_f32, -1.0..1.0_f32);
    let lists = (
        prop::collection::vec((0..vocab, -3.0..3.0_f32), 0..4),
        prop::collection::btree_set(0..vocab, 0..6),
        prop::collection::btree_set(0..vocab, 0..3),
        sparse_counts(vocab),
        prop::collection::vec(prop::collection::vec(0..vocab, 3..20), 4),
        any::<bool>(),
    );
    (numbers, penalties, lists, any::<u64>(), 0..3_u32).prop_map(move |(numbers, penalties, lists, seed, position)| {
        let (end_allowed_from, top_k, top_p, min_p, temperature) = numbers;
        let (repetition_penalty, presence_penalty, frequency_penalty) = penalties;
        let (bias, prompt, ends, output_counts, masks, masked) = lists;
        let params = SampleParams {
            seed,
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias: bias.into_iter().map(|(token, bias)| LogitBias { token, bias }).collect(),
            prompt_tokens: prompt.into_iter().collect(),
            end_tokens: ends.into_iter().collect(),
            top_logprobs: Some(3),
            ..params()
        };
        let masks = masks.iter().filter(|_| masked).map(|ids| mask(vocab as usize, ids)).collect();
        SampleRow { position, output_counts, end_allowed_from, masks, ..row(params) }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn bias_masks_and_penalties_agree_with_the_naive_pipeline(
        logits in grid(40..41), row in any_row(40), ahead in prop::collection::vec(0..40_u32, 0..4),
    ) {
        let naive = adjusted(&logits, &row, &ahead);
        prop_assume!(naive.iter().any(|logit| logit.is_finite()));
        let mut sampler = Sampler::default();
        sampler.adjust(&logits, &row, &ahead);
        for (id, (ours, naive)) in sampler.adjusted.iter().zip(&naive).enumerate() {
            let equal = f64::from(*ours) == *naive || (f64::from(*ours) - naive).abs() < 1e-5;
            prop_assert!(equal, "token {id}: {ours} {naive}");
        }
    }

    #[test]
    fn the_kept_set_is_the_naive_one(
        logits in grid(2..700), top_k in 0..90_u32, top_p in 0.05..1.0_f32, min_p in prop::sample::select(vec![0.0_f32, 0.01, 0.1, 0.5]),
        temperature in 0.2..3.0_f32,
    ) {
        let row = row(SampleParams { temperature, top_k, top_p, min_p, ..params() });
        let (probabilities, margin) = distribution(&logits, &row, &[]);
        prop_assume!(margin > 1e-5);
        let mut sampler = Sampler::default();
        let chosen = sampler.choose(&logits, &row, &[]);
        prop_assert!(probabilities[chosen.id as usize] > 0.0);
        if top_k != 1 {
            let mut kept: Vec<TokenId> = sampler.candidates.iter().map(|candidate| candidate.id).collect();
            kept.sort_unstable();
            let naive: Vec<TokenId> = (0..logits.len() as u32).filter(|id| probabilities[*id as usize] > 0.0).collect();
            prop_assert_eq!(kept, naive);
        }
    }

    #[test]
    fn a_verified_position_is_the_step_that_it_stands_for(
        logits in grid(40..41), row in any_row(40), ahead in prop::collection::vec(0..40_u32, 0..4),
    ) {
        let index = ahead.len();
        let mut counts = (*row.output_counts).clone();
        for id in &ahead {
            counts.add(*id);
        }
        let step = SampleRow {
            position: row.position + index as u32,
            output_counts: Arc::new(counts),
            end_allowed_from: row.end_allowed_from.saturating_sub(index as u32),
            masks: row.masks.iter().skip(index).cloned().collect(),
            ..row.clone()
        };
        prop_assume!(row.masks.is_empty() || index < row.masks.len());
        let mut used = Sampler::default();
        used.choose(&logits, &step, &[3, 3, 5]);
        prop_assert_eq!(used.choose(&logits, &row, &ahead), choose(&logits, &step, &[]));
    }

    #[test]
    fn log_probabilities_are_those_of_the_raw_logits(logits in grid(1..200), row in any_row(40), top in 0..60_u32) {
        let total = logits.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>().ln();
        let params = SampleParams { top_logprobs: Some(top), want_logits: true, ..(*row.params).clone() };
        let chosen = choose(&logits, &SampleRow { params: Arc::new(params), ..row }, &[]);
        prop_assert!((chosen.id as usize) < logits.len());
        prop_assert!((f64::from(chosen.logprob) - (f64::from(logits[chosen.id as usize]) - total)).abs() < 1e-5);
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        order.truncate(top as usize);
        prop_assert_eq!(chosen.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), order);
        prop_assert!(chosen.top.iter().all(|(id, logprob)| *logprob == score(&logits, *id, 0).logprob));
        prop_assert_eq!(chosen.logits, Some(logits));
    }
}

#[test]
fn skipping_hopeless_tokens_changes_no_choice() {
    let vocab = 5_000_u32;
    for seed in 0..60 {
        let spread = [1.0, 12.0, 60.0][seed as usize % 3];
        let logits: Vec<f32> =
            (0..u64::from(vocab)).map(|id| (scramble(&[seed, id]) % 10_000) as f32 / 10_000.0 * spread).collect();
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = |id: u32| (logits[id as usize] - largest) / 0.8 + gumbel(seed, 2, 9, CHOICE_NOISE, id);
        let naive = (0..vocab).reduce(|best, id| if total(id) > total(best) { id } else { best }).unwrap();
        let row = SampleRow { choice: 2, position: 9, ..row(SampleParams { seed, temperature: 0.8, ..params() }) };
        assert_eq!(choose(&logits, &row, &[]).id, naive);
    }
}

#[test]
fn temperature_zero_and_top_k_one_are_argmax_with_ties_to_the_lowest_id() {
    let logits = [0.5, 2.0, f32::NAN, 2.0, -1.0];
    for seed in 0..50 {
        for temperature in [0.0, -0.0, f32::NAN, -1.0] {
            assert_eq!(choose(&logits, &row(SampleParams { seed, temperature, ..params() }), &[]).id, 1);
        }
        for temperature in [1e-6, 1.0, 50.0] {
            assert_eq!(choose(&logits, &row(SampleParams { seed, temperature, top_k: 1, ..params() }), &[]).id, 1);
        }
    }
}

#[test]
fn the_smallest_temperatures_choose_the_largest_logit_without_nan() {
    let logits = [0.5, 2.0, 1.999, f32::NEG_INFINITY, -300.0];
    for seed in 0..50 {
        for temperature in [1e-6, 1e-20, f32::MIN_POSITIVE, f32::from_bits(1)] {
            for top_p in [0.3, 1.0] {
                let chosen = choose(&logits, &row(SampleParams { seed, temperature, top_p, min_p: 0.1, ..params() }), &[]);
                assert_eq!(chosen.id, 1);
                assert!(chosen.logprob.is_finite());
            }
        }
    }
}

#[test]
fn infinite_and_missing_logits_have_a_defined_choice() {
    let inf = f32::INFINITY;
    let of =
        |logits: &[f32], temperature| choose(logits, &row(SampleParams { temperature, top_p: 0.9, min_p: 0.1, ..params() }), &[]);
    for temperature in [0.0, 1.0] {
        assert_eq!(of(&[0.0, inf, 3.0], temperature).id, 1);
        assert_eq!(of(&[-inf, -inf, -inf], temperature).id, 0);
        let broken = of(&[f32::NAN, 1.0, f32::NAN], temperature);
        assert_eq!(broken.id, 1);
        // A poisoned read must show.
        assert!(broken.logprob.is_nan());
        assert!(of(&[f32::NAN; 3], temperature).logprob.is_nan());
        assert_eq!(of(&[f32::NAN; 3], temperature).id, 0);
        assert_eq!(of(&[], temperature).id, 0);
    }
}

#[test]
fn ids_outside_the_vocabulary_are_ignored() {
    let far = [7, 999_999, u32::MAX];
    let params = SampleParams {
        logit_bias: far.map(|token| LogitBias { token, bias: 5.0 }).to_vec(),
        never: Arc::new(far),
        end_tokens: far.to_vec(),
        prompt_tokens: far.to_vec(),
        repetition_penalty: 1.5,
        temperature: 0.0,
        ..params()
    };
    let output_counts = Arc::new(TokenCounts(far.map(|id| (id, 1)).to_vec()));
    let row = SampleRow { output_counts, end_allowed_from: 5, ..row(params) };
    assert_eq!(choose(&[0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0], &row, &[999_999]).id, 2);
    assert_eq!(score(&[0.0, 0.0], 9, 0).logprob, f32::NEG_INFINITY);
}

#[test]
fn a_bias_of_100_decides_and_the_last_real_id_counts() {
    let biased = |token, bias| {
        let params = SampleParams { temperature: 1.0, logit_bias: vec![LogitBias { token, bias }], ..params() };
        choose(&[5.0, 4.0, 0.0, -30.0], &row(params), &[]).id
    };
    assert_eq!(biased(3, 100.0), 3);
    assert_ne!(biased(0, -100.0), 0);
}

#[test]
fn a_constrained_row_without_a_mask_for_its_position_is_not_free() {
    let params = SampleParams { end_tokens: vec![3], temperature: 0.0, ..params() };
    let row = SampleRow { masks: vec![mask(5, &[1, 2])], ..row(params) };
    let logits = [9.0, 1.0, 2.0, 0.0, 5.0];
    assert_eq!(choose(&logits, &row, &[]).id, 2);
    assert_eq!(choose(&logits, &row, &[2]).id, 3);
}

#[test]
fn a_complete_grammar_may_end_before_min_tokens_but_prefers_to_go_on() {
    let row = |ids: &[TokenId]| SampleRow {
        masks: vec![mask(5, ids)],
        end_allowed_from: 4,
        ..row(SampleParams { end_tokens: vec![3, 3], temperature: 0.0, ..params() })
    };
    let logits = [9.0, 1.0, 2.0, 8.0, 5.0];
    assert_eq!(choose(&logits, &row(&[3]), &[]).id, 3);
    assert_eq!(choose(&logits, &row(&[1, 3]), &[]).id, 1);
}

#[test]
fn what_is_left_when_nothing_is_stays_inside_the_mask() {
    let params = SampleParams { never: Arc::new([0, 1]), ..params() };
    let row = SampleRow { masks: vec![mask(5, &[1, 4])], ..row(params) };
    assert_eq!(choose(&[f32::NAN; 5], &row, &[]).id, 4);
    assert_eq!(choose(&[1.0, 2.0, 3.0, 4.0, f32::NEG_INFINITY], &row, &[]).id, 4);
}

#[test]
fn logits_come_back_only_when_asked() {
    let logits = [1.0, 2.0];
    assert_eq!(choose(&logits, &row(params()), &[]).logits, None);
    assert!(choose(&logits, &row(params()), &[]).top.is_empty());
}
