//! The oracle matrix (`contracts` §7.2 without speculation and lower tiers) on the real CPU backend.
//!
//! A request is run alone, cold, in one chunk: that is the truth. Then it runs on every other road: {cold, warm, half warm, cache off} ×
//! {undisturbed, preempted again and again, neighbours cancelled, itself cancelled and sent again} × every sampler, in full; chunk sizes,
//! neighbours and instruction sets rotate over that product so that each pair of values meets. Ids, log-probability bits, alternatives, text
//! and finish reasons must be equal. Each road also proves that it was taken: hits, preemptions and cancellations are counted.

use super::rig::{Bench, Collector, INTERRUPTIONS, Proof, REUSES, Road, Scene, Wish, run_to_end};
use kvasir_core::{CacheMode, Digest, Framer, Grammar, LogitBias, Sampling, Stop, TokenId};
use kvasir_kernels::Isa;
use kvasir_model::synth::TinyModel;
use kvasir_model::{Arch, ModelFile};

const PROMPT_TOKENS: usize = 53;
const OUTPUT_TOKENS: u32 = 14;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Sampler {
    Greedy,
    Seeded,
    Penalties,
    Truncated,
    Grammar,
    Logprobs,
    StopString,
    Choices,
}

const SAMPLERS: [Sampler; 8] = [
    Sampler::Greedy,
    Sampler::Seeded,
    Sampler::Penalties,
    Sampler::Truncated,
    Sampler::Grammar,
    Sampler::Logprobs,
    Sampler::StopString,
    Sampler::Choices,
];
const CHUNKS: [u32; 3] = [3, 16, 256];
const NEIGHBOURS: [usize; 3] = [0, 1, 4];
/// Offsets into the rotating axes; with them each pair of values of any two axes meets.
const ROTATIONS: usize = 9;

fn bench(arch: Arch) -> Bench {
    let tiny = TinyModel { arch, tied: arch == Arch::Llama, ..TinyModel::default() };
    Bench::new(&ModelFile::from_gguf_bytes("tiny.gguf", tiny.to_gguf().unwrap()).unwrap())
}

fn wish(sampler: Sampler) -> Wish {
    let base = Sampling { seed: 11, temperature: 0.9, logprobs: Some(2), ..Sampling::default() };
    let stop = Stop { max_tokens: OUTPUT_TOKENS, ignore_eos: true, ..Stop::default() };
    let plain = Wish { sampling: base.clone(), stop: stop.clone(), grammar: None };
    match sampler {
        Sampler::Greedy => Wish { sampling: Sampling { temperature: 0.0, ..base }, ..plain },
        Sampler::Seeded => plain,
        Sampler::Penalties => {
            let sampling = Sampling {
                repetition_penalty: 1.3,
                presence_penalty: 0.5,
                frequency_penalty: 0.4,
                logit_bias: vec![LogitBias { token: 65, bias: 2.5 }],
                ..base
            };
            Wish { sampling, ..plain }
        }
        Sampler::Truncated => Wish {
            sampling: Sampling { top_k: 40, top_p: 0.9, min_p: 0.01, ..base },
            stop: Stop { min_tokens: 5, ignore_eos: false, ..stop },
            ..plain
        },
        Sampler::Grammar => {
            Wish { stop: Stop { ignore_eos: false, ..stop }, grammar: Some(Grammar::Regex("[a-f0-9]{4,12}".into())), ..plain }
        }
        Sampler::Logprobs => Wish { sampling: Sampling { logprobs: Some(5), prompt_logprobs: Some(1), ..base }, ..plain },
        Sampler::StopString => Wish {
            sampling: Sampling { temperature: 1.2, ..base },
            stop: Stop { strings: vec!["a".into(), "er".into()], ..stop },
            ..plain
        },
        Sampler::Choices => Wish { sampling: Sampling { n: 3, ..base }, ..plain },
    }
}

/// Distinct, reproducible prompts of ordinary byte tokens.
fn prompt(seed: u32) -> Vec<TokenId> {
    (0..PROMPT_TOKENS as u32).map(|i| (seed.wrapping_mul(97).wrapping_add(i * i * 31 + i * 7)) % 250).collect()
}

fn scene(sampler: Sampler) -> Scene {
    let mut relative = prompt(1);
    relative[PROMPT_TOKENS / 2..].iter_mut().for_each(|token| *token = (*token + 1) % 250);
    Scene {
        prompt: prompt(1),
        wish: wish(sampler),
        relative,
        neighbours: (50..54).map(prompt).collect(),
        neighbours_wish: wish(Sampler::Seeded),
    }
}

fn matrix(arch: Arch) -> usize {
    let bench = bench(arch);
    let isas = Isa::available();
    let mut proof = Proof::default();
    let mut runs = 0;
    for sampler in SAMPLERS {
        let scene = scene(sampler);
        let truth = bench.run_solo(&scene, isas[0]);
        assert!(truth.choices.iter().all(|choice| !choice.ids.is_empty()));
        for isa in &isas {
            assert_eq!(bench.run_solo(&scene, *isa), truth, "{sampler:?} alone on {isa:?}");
        }
        for rotation in 0..ROTATIONS {
            for (i, reuse) in REUSES.into_iter().enumerate() {
                for (j, interruption) in INTERRUPTIONS.into_iter().enumerate() {
                    let road = Road {
                        reuse,
                        interruption,
                        chunk: CHUNKS[rotation % 3],
                        neighbours: NEIGHBOURS[(rotation / 3 + i + j) % 3],
                        isa: isas[(rotation + rotation / 3 + i) % isas.len()],
                    };
                    assert_eq!(bench.run_road(&scene, &road, &mut proof), truth, "{sampler:?} {road:?}");
                    runs += 1;
                }
            }
        }
    }
    assert!(proof.warm_hits > 1000 && proof.half_hits > 500 && proof.preemptions > 500 && proof.cancelled > 200, "{proof:?}");
    assert!(proof.preempted > 100 && proof.shared_rows > 1000, "{proof:?}");
    runs
}

#[test]
fn every_road_gives_the_same_bits_on_a_llama() {
    assert_eq!(matrix(Arch::Llama), SAMPLERS.len() * ROTATIONS * REUSES.len() * INTERRUPTIONS.len());
}

#[test]
fn every_road_gives_the_same_bits_on_a_qwen2() {
    assert_eq!(matrix(Arch::Qwen2), SAMPLERS.len() * ROTATIONS * REUSES.len() * INTERRUPTIONS.len());
}

#[test]
fn the_oracle_sees_a_difference() {
    let bench = bench(Arch::Llama);
    let isa = Isa::detect();
    let scene = scene(Sampler::Seeded);
    let truth = bench.run_solo(&scene, isa);
    let (mut engine, handle) = bench.engine(isa, 256);
    let mut request = bench.request(1, &scene.prompt, &scene.wish, CacheMode::On);
    request.sampling.seed += 1;
    let mut other = Collector::new(handle.submit(request).unwrap());
    run_to_end(&mut engine, &mut other, |_, _| ());
    assert_ne!(other.output, truth, "another seed gives another output");
    let digest: Digest = Framer::new("x").finish();
    assert_ne!(bench.identity.0, digest);
}
