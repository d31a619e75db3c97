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
