use super::*;

#[test]
fn all_components_render_into_one_valid_exposition() {
    let registry = Registry::default();
    let door = DoorMetrics::new(&registry);
    let worker = WorkerMetrics::new(&registry);
    let router = RouterMetrics::new(&registry);
    door.opened("http");
    let request = FinishedRequest {
        door: "http",
        route: "chat",
        model: "m",
        outcome: "ok",
        ttft: Some(Duration::from_millis(20)),
        total: Duration::from_millis(120),
        output_tokens: 11,
        prompt_tokens: 100,
        cached_tokens: 96,
        tier: "device",
        judged: true,
    };
    door.finished(&request, [("prefill", Duration::from_millis(10))].into_iter());
    door.closed("http");
    worker.admitted(&AdmittedPrompt {
        prompt_tokens: 100,
        hits: &[("device", 96)],
        computed: 4,
        miss: Some("partial_block"),
        lookup: Duration::from_micros(3),
        queue: Duration::ZERO,
    });
    worker.totals(&WorkerTotals { steps: 5, evictions: &[("capacity", 2)], ..WorkerTotals::default() });
    worker.totals(&WorkerTotals { steps: 4, ..WorkerTotals::default() });
    router.decided("longest_match", Duration::from_micros(5));
    router.predicted(96, 96);
    router.predicted(96, 128);
    router.predicted(128, 96);
    let text = registry.render();
    for line in [
        "kvasir_door_requests_total{door=\"http\",route=\"chat\",model=\"m\",outcome=\"ok\"} 1",
        "kvasir_door_in_flight{door=\"http\"} 0",
        "kvasir_prompt_tokens_total{source=\"device\"} 96",
        "kvasir_prompt_tokens_total{source=\"computed\"} 4",
        "kvasir_prefix_misses_total{reason=\"partial_block\"} 1",
        "kvasir_engine_steps_total 5",
        "kvasir_evictions_total{cause=\"capacity\"} 2",
        "kvasir_router_decisions_total{branch=\"longest_match\"} 1",
        "kvasir_reconcile_violations_total 0",
    ] {
        assert!(text.lines().any(|have| have == line), "missing `{line}` in\n{text}");
    }
    for direction in ["exact", "over", "under"] {
        let count = format!("kvasir_router_prediction_error_tokens_count{{direction=\"{direction}\"}} 1");
        assert!(text.lines().any(|line| line == count), "missing `{count}` in\n{text}");
    }
    assert!(!text.contains("kvasir_slo_requests_total{"), "without an objective nothing is judged:\n{text}");
    // OpenMetrics: a histogram with a negative bucket has no sum, and readers refuse the whole page.
    assert!(!text.contains("le=\"-"), "{text}");
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn every_registered_name_is_listed_once() {
    let mut seen = std::collections::HashSet::new();
    for name in names::METRICS {
        assert!(seen.insert(name), "{name} twice");
        assert!(!name.ends_with("_total"), "{name}: the exposition adds _total");
    }
}

#[test]
fn a_request_is_good_when_it_keeps_both_times_and_what_its_client_did_is_not_judged() {
    let registry = Registry::default();
    let (ttft, tpot) = (Duration::from_millis(100), Duration::from_millis(10));
    let door = DoorMetrics::with_slo(&registry, Some(Slo { ttft, tpot, fraction: 0.9 }));
    let counts = || {
        let text = registry.render();
        let of = |within: &str| {
            let series = format!("kvasir_slo_requests_total{{within=\"{within}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&series)).unwrap().parse::<u32>().unwrap()
        };
        (of("yes"), of("no"))
    };
    assert_eq!(counts(), (0, 0), "both series are there before the first request");
    assert!(registry.render().contains("kvasir_slo_fraction 0.9\n"));
    let request = |outcome, ttft_ms: u64, total_ms: u64, output_tokens, judged| FinishedRequest {
        door: "http",
        route: "chat",
        model: "m",
        outcome,
        ttft: (ttft_ms > 0).then(|| Duration::from_millis(ttft_ms)),
        total: Duration::from_millis(total_ms),
        output_tokens,
        prompt_tokens: 100,
        cached_tokens: 0,
        tier: "none",
        judged,
    };
    for (request, wanted) in [
        (request("ok", 100, 200, 11, true), (1, 0)),
        (request("ok", 101, 201, 11, true), (1, 1)),
        (request("ok", 50, 161, 11, true), (1, 2)),
        // One token has no time per token; no output at all is judged by its end.
        (request("ok", 100, 900, 1, true), (2, 2)),
        (request("ok", 0, 90, 0, true), (3, 2)),
        (request("worker_lost", 10, 20, 2, true), (3, 3)),
        (request("invalid_argument", 0, 1, 0, false), (3, 3)),
    ] {
        door.finished(&request, std::iter::empty());
        assert_eq!(counts(), wanted, "{request:?}");
    }
}
