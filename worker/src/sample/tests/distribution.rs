//! Joint samples against exact enumeration, with mutants that must fail.

use super::reference::distribution;
use super::{mask, params, row, scramble};
use crate::plan::{SampleParams, SampleRow, TokenCounts};
use crate::sample::{CHOICE_NOISE, Sampler};
use kvasir_core::{LogitBias, TokenId};
use kvasir_kernels::noise::gumbel;
use std::sync::Arc;

const VOCAB: usize = 6;
const POSITIONS: usize = 3;
const SAMPLES: u64 = 30_000;
/// Standard normal quantile of α = 1e-6.
const Z: f64 = 4.7534;

type Chooser<'a> = &'a mut dyn FnMut(&[f32], &SampleRow, &[TokenId]) -> TokenId;

/// Logits that depend on the position and on what stands before it, as a model's do.
fn logits(ahead: &[TokenId]) -> Vec<f32> {
    let context = ahead.iter().fold(ahead.len() as u64, |context, id| context * 7 + u64::from(*id));
    (0..VOCAB as u64).map(|id| (scramble(&[context, id]) % 400) as f32 / 100.0 - 2.0).collect()
}

/// Chi-square of joint outcomes over its critical value; more than 1 is a failure, and so is an outcome of probability 0.
fn excess(observed: &[u64], expected: &[f64]) -> f64 {
    let total: u64 = observed.iter().sum();
    let (mut chi, mut bins, mut rest) = (0.0, 0.0, (0.0, 0.0));
    for (&seen, &probability) in observed.iter().zip(expected) {
        let (seen, mean) = (seen as f64, probability * total as f64);
        if probability == 0.0 && seen > 0.0 {
            return f64::INFINITY;
        }
        if mean < 10.0 {
            rest = (rest.0 + seen, rest.1 + mean);
        } else {
            chi += (seen - mean).powi(2) / mean;
            bins += 1.0;
        }
    }
    if rest.1 >= 10.0 {
        chi += (rest.0 - rest.1).powi(2) / rest.1;
        bins += 1.0;
    }
    let freedom: f64 = bins - 1.0;
    // Wilson and Hilferty 1931.
    let critical = freedom * (1.0 - 2.0 / (9.0 * freedom) + Z * (2.0 / (9.0 * freedom)).sqrt()).powi(3);
    chi / critical
}

/// Samples three verified positions under many seeds and compares with the exact joint distribution.
fn joint_excess(base: &SampleRow, chooser: Chooser) -> f64 {
    let mut expected = vec![0.0; VOCAB.pow(POSITIONS as u32)];
    enumerate(base, &mut Vec::new(), 1.0, &mut expected);
    assert!((expected.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    let mut observed = vec![0; expected.len()];
    for seed in 0..SAMPLES {
        let row = SampleRow { params: Arc::new(SampleParams { seed, ..(*base.params).clone() }), ..base.clone() };
        let mut ahead = Vec::new();
        for _ in 0..POSITIONS {
            let id = chooser(&logits(&ahead), &row, &ahead);
            ahead.push(id);
        }
        observed[index(&ahead)] += 1;
    }
    excess(&observed, &expected)
}

fn enumerate(row: &SampleRow, ahead: &mut Vec<TokenId>, mass: f64, expected: &mut [f64]) {
    if ahead.len() == POSITIONS {
        expected[index(ahead)] = mass;
        return;
    }
    let (probabilities, margin) = distribution(&logits(ahead), row, ahead);
    assert!(margin > 1e-5, "a cut of the case is too close to call");
    for (id, probability) in probabilities.into_iter().enumerate().filter(|(_, probability)| *probability > 0.0) {
        ahead.push(id as TokenId);
        enumerate(row, ahead, mass * probability, expected);
        ahead.pop();
    }
}

fn index(ids: &[TokenId]) -> usize {
    ids.iter().fold(0, |index, id| index * VOCAB + *id as usize)
}

/// Every option on its own, and all together.
fn cases() -> Vec<(&'static str, SampleRow)> {
    let counts = Arc::new(TokenCounts(vec![(1, 2), (3, 1)]));
    let penalised = |params| SampleRow { output_counts: counts.clone(), ..row(params) };
    let bias = vec![LogitBias { token: 2, bias: 1.5 }, LogitBias { token: 5, bias: -2.0 }];
    let masks = vec![mask(VOCAB, &[0, 2, 3]), mask(VOCAB, &[1, 2, 3, 4, 5]), mask(VOCAB, &[0, 5])];
    vec![
        ("plain", row(params())),
        ("temperature", row(SampleParams { temperature: 0.6, ..params() })),
        ("hot", row(SampleParams { temperature: 1.7, ..params() })),
        ("top_k", row(SampleParams { top_k: 3, ..params() })),
        ("top_p", row(SampleParams { top_p: 0.8, ..params() })),
        ("min_p", row(SampleParams { min_p: 0.2, ..params() })),
        ("bias", row(SampleParams { logit_bias: bias.clone(), ..params() })),
        ("repetition", penalised(SampleParams { repetition_penalty: 1.5, prompt_tokens: vec![0, 3], ..params() })),
        ("presence", penalised(SampleParams { presence_penalty: 0.8, ..params() })),
        ("frequency", penalised(SampleParams { frequency_penalty: 0.7, ..params() })),
        ("grammar", SampleRow { masks: masks.clone(), ..row(params()) }),
        ("min_tokens", SampleRow { end_allowed_from: 2, ..row(SampleParams { end_tokens: vec![1, 4], ..params() }) }),
        ("never", row(SampleParams { never: Arc::new([0, 3]), ..params() })),
        (
            "all",
            SampleRow {
                masks,
                end_allowed_from: 1,
                ..penalised(SampleParams {
                    temperature: 0.9,
                    top_k: 4,
                    top_p: 0.93,
                    min_p: 0.04,
                    repetition_penalty: 1.2,
                    presence_penalty: 0.3,
                    frequency_penalty: 0.2,
                    logit_bias: bias,
                    prompt_tokens: vec![0, 3],
                    end_tokens: vec![4],
                    ..params()
                })
            },
        ),
    ]
}

fn case(name: &str) -> SampleRow {
    cases().into_iter().find(|(other, _)| *other == name).unwrap().1
}

#[test]
fn joint_samples_follow_the_exact_distribution_under_every_option() {
    let mut sampler = Sampler::default();
    for (name, row) in cases() {
        let excess = joint_excess(&row, &mut |logits, row, ahead| sampler.choose(logits, row, ahead).id);
        assert!(excess < 1.0, "{name}: {excess} times the critical value");
    }
}

/// Gumbel-max over the true distribution with another noise.
fn with_noise(logits: &[f32], row: &SampleRow, ahead: &[TokenId], noise: impl Fn(usize) -> f32) -> TokenId {
    let (probabilities, _) = distribution(logits, row, ahead);
    let score = |id: usize| probabilities[id].ln() as f32 + noise(id);
    (0..VOCAB).filter(|id| probabilities[*id] > 0.0).max_by(|a, b| score(*a).total_cmp(&score(*b))).unwrap() as TokenId
}

#[test]
fn mutants_of_the_noise_are_red() {
    let row = case("plain");
    let at = |row: &SampleRow, ahead: &[TokenId], id: usize| {
        gumbel(row.params.seed, row.choice, row.position + ahead.len() as u32, CHOICE_NOISE, id as u32)
    };
    // The harness itself is green with the right noise.
    assert!(joint_excess(&row, &mut |l, row, ahead| with_noise(l, row, ahead, |id| at(row, ahead, id))) < 1.0);
    // A uniform that is biased by 5 %: u^0.95 moves −ln(−ln u) by a constant, so the bias must depend on the token.
    let biased = |row: &SampleRow, ahead: &[TokenId], id: usize| {
        at(row, ahead, id) - if id.is_multiple_of(2) { 0.95_f32.ln() * 2.0 } else { 0.0 }
    };
    assert!(joint_excess(&row, &mut |l, row, ahead| with_noise(l, row, ahead, |id| biased(row, ahead, id))) > 1.0);
    // Noise that ignores the position.
    assert!(joint_excess(&row, &mut |l, row, ahead| with_noise(l, row, ahead, |id| at(row, &[], id))) > 1.0);
    // Uniform noise in place of Gumbel noise.
    let flat = |row: &SampleRow, ahead: &[TokenId], id: usize| (-(-at(row, ahead, id)).exp()).exp() * 3.0;
    assert!(joint_excess(&row, &mut |l, row, ahead| with_noise(l, row, ahead, |id| flat(row, ahead, id))) > 1.0);
}

#[test]
fn mutants_of_the_pipeline_are_red() {
    let mut sampler = Sampler::default();
    let mut mutant = |name: &str, change: &dyn Fn(&mut SampleParams), verify: &dyn Fn(&mut SampleRow)| {
        joint_excess(&case(name), &mut |logits, row, ahead| {
            let mut params = (*row.params).clone();
            change(&mut params);
            let mut row = SampleRow { params: Arc::new(params), ..row.clone() };
            verify(&mut row);
            sampler.choose(logits, &row, ahead).id
        })
    };
    let same = |_: &mut SampleRow| {};
    assert!(mutant("top_k", &|_| {}, &same) < 1.0);
    assert!(mutant("top_k", &|params| params.top_k = 0, &same) > 1.0);
    assert!(mutant("top_p", &|params| params.top_p = 1.0, &same) > 1.0);
    assert!(mutant("min_p", &|params| params.min_p = 0.0, &same) > 1.0);
    assert!(mutant("temperature", &|params| params.temperature = 1.0, &same) > 1.0);
    assert!(mutant("bias", &|params| params.logit_bias.clear(), &same) > 1.0);
    assert!(mutant("repetition", &|params| params.prompt_tokens.clear(), &same) > 1.0);
    assert!(mutant("grammar", &|_| {}, &|row| row.masks.clear()) > 1.0);
    assert!(mutant("min_tokens", &|_| {}, &|row| row.end_allowed_from = 0) > 1.0);
    assert!(mutant("presence", &|_| {}, &|row| row.output_counts = Arc::default()) > 1.0);
}

#[test]
fn penalties_that_forget_the_drafted_tokens_are_red() {
    let mut sampler = Sampler::default();
    for name in ["repetition", "presence", "frequency"] {
        let forgetful = joint_excess(&case(name), &mut |logits, row, ahead| {
            let here = SampleRow { position: row.position + ahead.len() as u32, ..row.clone() };
            sampler.choose(logits, &here, &[]).id
        });
        assert!(forgetful > 1.0, "{name}: {forgetful}");
    }
}

/// Joint counts of two draws at one position.
fn pair_excess(mut draw: impl FnMut(u64, u32) -> TokenId) -> f64 {
    let (probabilities, _) = distribution(&logits(&[]), &row(params()), &[]);
    let expected: Vec<f64> = (0..VOCAB * VOCAB).map(|pair| probabilities[pair / VOCAB] * probabilities[pair % VOCAB]).collect();
    let mut observed = vec![0; VOCAB * VOCAB];
    for seed in 0..SAMPLES {
        observed[draw(seed, 0) as usize * VOCAB + draw(seed, 1) as usize] += 1;
    }
    excess(&observed, &expected)
}

#[test]
fn choices_and_neighbouring_seeds_are_independent_and_equal_keys_repeat() {
    let mut sampler = Sampler::default();
    let mut draw = |seed: u64, choice: u32| {
        let row = SampleRow { choice, ..row(SampleParams { seed, ..params() }) };
        sampler.choose(&logits(&[]), &row, &[]).id
    };
    assert!(pair_excess(&mut draw) < 1.0);
    assert!(pair_excess(|seed, which| draw(seed + u64::from(which), 0)) < 1.0);
    // The mutant without the choice in its key.
    assert!(pair_excess(|seed, _| draw(seed, 0)) > 1.0);
    for seed in 0..200 {
        assert_eq!(draw(seed, 3), draw(seed, 3));
    }
}

/// Share of seeds for which draft and target choose the same token, with noise keyed by `key(rank, id)`.
fn agreement(draft: &[f32], target: &[f32], key: impl Fn(usize, usize) -> u32) -> f64 {
    let choose = |logits: &[f32], seed: u64| {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let score = |rank: usize| logits[order[rank]] + gumbel(seed, 0, 0, CHOICE_NOISE, key(rank, order[rank]));
        order[(0..order.len()).max_by(|a, b| score(*a).total_cmp(&score(*b))).unwrap()]
    };
    (0..5_000).filter(|seed| choose(draft, *seed) == choose(target, *seed)).count() as f64 / 5_000.0
}

#[test]
fn draft_and_target_share_noise_by_token_and_not_by_rank() {
    // Two tokens change places by a hair: the total variation is 1 %.
    let (draft, target) = ([1.00_f32, 1.02, 0.0], [1.02_f32, 1.00, 0.0]);
    let mut sampler = Sampler::default();
    let mut pick = |logits: &[f32], seed| sampler.choose(logits, &row(SampleParams { seed, ..params() }), &[]).id;
    let equal = (0..5_000).filter(|seed| pick(&draft, *seed) == pick(&target, *seed)).count() as f64 / 5_000.0;
    // Bound of Daliri et al. 2024: (1 − TV) / (1 + TV).
    assert!(equal > 0.97, "{equal}");
    assert!((agreement(&draft, &target, |_, id| id as u32) - equal).abs() < 0.002);
    assert!(agreement(&draft, &target, |rank, _| rank as u32) < 0.5);
}
