use super::*;
use kvasir_core::{CostPoint, Incarnation, TierLoad};
use proptest::prelude::*;

fn load() -> WorkerLoad {
    WorkerLoad {
        incarnation: Incarnation([1; 8]),
        seq: 1,
        running: 0,
        waiting: 0,
        tiers: vec![TierLoad { tier: Tier::Device, free: 1_000, cached: 0, held: 0 }],
        queued_prefill_tokens: 0,
        prefill_tokens_per_second: 1_000.0,
        decode_tokens_per_second: 50.0,
        cost: Vec::new(),
        acceptance: Vec::new(),
        draining: false,
    }
}

const WORK: Work = Work { prompt_tokens: 1_000, output_tokens: 100.0, choices: 1, block_size: 16 };
const COLD: Match = Match { blocks: [0; 3], confidence: 1.0 };

fn seen(load: &WorkerLoad) -> Seen<'_> {
    Seen { load, age_s: 0.0, own_then: OwnLoad::default(), own_now: OwnLoad::default() }
}

fn cost(load: &WorkerLoad, credit: Match) -> Terms {
    estimate(&WORK, &credit, &seen(load), &Factors::default())
}

#[test]
fn each_term_is_what_its_rate_says() {
    let terms = cost(&WorkerLoad { queued_prefill_tokens: 500, ..load() }, Match { blocks: [25, 25, 0], confidence: 1.0 });
    assert!((terms.wait_s - 0.5).abs() < 1e-9);
    assert!((terms.prefill_s - 0.2).abs() < 1e-9, "1000 − 800 tokens at 1000 a second");
    assert!((terms.restore_s - 400.0 * RESTORE_HOST_S).abs() < 1e-9);
    assert!((terms.decode_s - 2.0).abs() < 1e-9, "100 tokens at 50 a second");
}

#[test]
fn at_least_the_last_token_is_computed() {
    let terms = cost(&load(), Match { blocks: [63, 0, 0], confidence: 1.0 });
    assert!(terms.prefill_s > 0.0);
    let [device, ..] = reusable_tokens(&Work { prompt_tokens: 1_008, ..WORK }, &Match { blocks: [63, 0, 0], confidence: 1.0 });
    assert_eq!(device, 1_007.0);
}

#[test]
fn a_pool_without_room_costs_the_time_in_which_sequences_end() {
    let full = WorkerLoad { tiers: vec![TierLoad { tier: Tier::Device, free: 0, cached: 0, held: 1_000 }], ..load() };
    assert!(cost(&full, COLD).wait_s > 0.0);
    let cached = WorkerLoad { tiers: vec![TierLoad { tier: Tier::Device, free: 0, cached: 1_000, held: 0 }], ..load() };
    assert_eq!(cost(&cached, COLD).wait_s, 0.0, "cached blocks give way");
}

#[test]
fn own_requests_count_before_the_worker_reports_them_and_never_twice() {
    let own = OwnLoad { slots: 4, prefill_tokens: 3_000, blocks: 0 };
    let terms = |load: &WorkerLoad, own_then: OwnLoad, own_now: OwnLoad| {
        estimate(&WORK, &COLD, &Seen { load, age_s: 0.0, own_then, own_now }, &Factors::default())
    };
    let idle = OwnLoad::default();
    assert!((terms(&load(), idle, own).wait_s - 3.0).abs() < 1e-9, "sent since the report");
    let reported = WorkerLoad { queued_prefill_tokens: 3_000, running: 4, ..load() };
    assert!((terms(&reported, own, own).wait_s - 3.0).abs() < 1e-9, "sent and reported");
    assert_eq!(terms(&reported, own, idle).wait_s, 0.0, "done since the report");
    assert!((terms(&reported, idle, own).wait_s - 6.0).abs() < 1e-9, "others' and ours");
}

#[test]
fn others_queue_is_worked_on_while_the_report_ages() {
    let reported = WorkerLoad { queued_prefill_tokens: 3_000, ..load() };
    let aged = |age_s| estimate(&WORK, &COLD, &Seen { age_s, ..seen(&reported) }, &Factors::default()).wait_s;
    assert!((aged(0.0) - 3.0).abs() < 1e-9 && (aged(1.0) - 2.0).abs() < 1e-9 && aged(5.0) == 0.0);
}

#[test]
fn decode_slows_down_along_the_measured_curve() {
    let curve = vec![CostPoint { rows: 1, seconds: 0.01 }, CostPoint { rows: 9, seconds: 0.02 }];
    let at = |running| cost(&WorkerLoad { running, decode_tokens_per_second: 0.0, cost: curve.clone(), ..load() }, COLD).decode_s;
    assert!((at(0) - 1.0).abs() < 1e-6);
    assert!((at(8) - 2.0).abs() < 1e-6);
    assert!((at(16) - 3.0).abs() < 1e-6, "extended by the last slope");
}

#[test]
fn coefficients_converge_to_the_observed_times() {
    let (mut learned, now) = (Learned::default(), Instant::now());
    let raw = cost(&load(), COLD);
    for _ in 0..60 {
        learned.observe_ttft(raw.ttft_s(), 4.0, now);
        learned.observe_itl(raw.decode_s / WORK.output_tokens, 0.005, now);
    }
    let terms = estimate(&WORK, &COLD, &seen(&load()), &learned.factors(&learned, now));
    assert!((terms.prefill_s - 4.0).abs() < 0.04, "{terms:?}");
    assert!((terms.decode_s - 0.5).abs() < 0.005, "{terms:?}");
}

#[test]
fn noise_between_peers_costs_nothing_and_a_slow_worker_costs_more() {
    let now = Instant::now();
    let of = |seconds: f64| {
        let mut learned = Learned::default();
        (0..20).for_each(|_| learned.observe_ttft(1.0, seconds, now));
        learned
    };
    let peers = of(2.0);
    let ttft = |learned: Learned, at: Instant| learned.factors(&peers, at).ttft;
    assert_eq!(ttft(of(3.0), now), ttft(of(1.5), now), "half as much again is noise");
    assert_eq!(ttft(Learned::default(), now), ttft(peers, now), "a new worker is taken for one like its peers");
    assert!(ttft(of(8.0), now) >= 1.9 * ttft(peers, now));
    assert!(ttft(of(0.5), now) <= 0.6 * ttft(peers, now));
    let later = now + std::time::Duration::from_secs(20);
    assert!(ttft(of(8.0), later) < 1.01 * ttft(peers, later), "without news the difference is forgotten");
}

proptest! {
    #[test]
    fn terms_are_finite_not_negative_and_sum_to_the_score(
        running in 0u32..5_000, waiting in 0u32..5_000, queued in 0u64..100_000_000, rate in prop::num::f32::ANY, decode in prop::num::f32::ANY,
        points in prop::collection::vec((0u32..600, prop::num::f32::ANY), 0..5), tier in (0u32..2_000, 0u32..2_000, 0u32..2_000),
        blocks in [0u32..100, 0u32..100, 0u32..100], confidence in 0f32..=1.0, observed in prop::collection::vec(prop::num::f64::ANY, 0..4),
        prompt_tokens in 1u32..200_000, own in (0u64..5_000, 0u64..1_000_000, 0u64..5_000),
    ) {
        let load = WorkerLoad {
            running, waiting, queued_prefill_tokens: queued, prefill_tokens_per_second: rate, decode_tokens_per_second: decode,
            cost: points.into_iter().map(|(rows, seconds)| CostPoint { rows, seconds }).collect(),
            tiers: vec![TierLoad { tier: Tier::Device, free: tier.0, cached: tier.1, held: tier.2 }],
            ..load()
        };
        let mut learned = Learned::default();
        let now = Instant::now();
        for seconds in observed {
            learned.observe_ttft(1.0, seconds, now);
            learned.observe_itl(seconds, 1.0, now);
        }
        let own_now = OwnLoad { slots: own.0, prefill_tokens: own.1, blocks: own.2 };
        let own_then = OwnLoad { slots: own.2, prefill_tokens: own.0, blocks: own.1 };
        let of = |load| Seen { load, age_s: f64::from(running) / 1_000.0, own_then, own_now };
        let factors = learned.factors(&learned, now);
        let work = Work { prompt_tokens, ..WORK };
        let terms = estimate(&work, &Match { blocks, confidence }, &of(&load), &factors);
        let named = terms.named();
        prop_assert!(named.iter().all(|(_, seconds)| seconds.is_finite() && *seconds >= 0.0), "{:?}", terms);
        prop_assert_eq!(named.iter().map(|(_, seconds)| seconds).sum::<f64>(), terms.score_s());

        let colder = estimate(&work, &Match { blocks: [blocks[0] / 2, 0, 0], confidence }, &of(&load), &factors);
        prop_assert!(terms.score_s() <= colder.score_s() * (1.0 + 1e-9), "more credit cost more");
        let busier = WorkerLoad { queued_prefill_tokens: queued + 1_000, waiting: waiting + 1, ..load.clone() };
        let later = estimate(&work, &Match { blocks, confidence }, &of(&busier), &factors);
        prop_assert!(later.wait_s >= terms.wait_s);
    }
}
