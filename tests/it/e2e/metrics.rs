//! The metrics of a fleet after known work.

use super::support::{metric, tiny, with_fleet};
use kvasir_cli::client::Client;
use serde_json::json;

#[test]
fn metrics_reconcile_with_the_replies() {
    let state = tempfile::tempdir().unwrap();
    with_fleet(&tiny(1, state.path()), state.path(), |fleet| async move {
        let client = Client::new(&format!("http://{}", fleet.http()), None).unwrap();
        let (mut prompt, mut cached, mut output) = (0, 0, 0);
        for round in 0..6u32 {
            let tokens: Vec<u32> = (0..100).map(|i| if i < 64 { i } else { (i * 7 + round * 13) % 250 }).collect();
            let body = json!({"model": fleet.model(), "prompt": tokens, "max_tokens": 5, "ignore_eos": true, "seed": 1});
            let answer = client.complete(body, |_| ()).await.unwrap();
            prompt += answer.prompt_tokens();
            cached += answer.cached_tokens();
            output += answer.usage["completion_tokens"].as_u64().unwrap();
        }
        assert!(cached >= 5 * 64, "follow-ups hit: {cached}");
        let refused = client.post("/v1/completions", &json!({"model": "nobody-1", "prompt": "x"})).await;
        assert!(refused.is_err());
        let (status, text) = client.get_text("/metrics").await.unwrap();
        assert_eq!(status, 200);
        let value = |name: &str, labels: &[&str]| metric(&text, name, labels) as u64;
        assert_eq!(value("kvasir_prompt_tokens_total", &["source=\"device\""]), cached);
        assert_eq!(value("kvasir_prompt_tokens_total", &["source=\"computed\""]), prompt - cached);
        assert_eq!(value("kvasir_output_tokens_total", &[]), output);
        assert_eq!(value("kvasir_reconcile_violations_total", &[]), 0);
        assert_eq!(value("kvasir_door_requests_total", &["outcome=\"ok\""]), 6);
        assert_eq!(value("kvasir_door_requests_total", &["model=\"other\"", "outcome=\"model_not_found\""]), 1);
        for gauge in
            ["kvasir_door_in_flight", "kvasir_router_leases", "kvasir_router_queued_requests", "kvasir_running_sequences"]
        {
            assert_eq!(value(gauge, &[]), 0, "{gauge} at rest");
        }
        let types: Vec<&str> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
        let unique: std::collections::BTreeSet<&&str> = types.iter().collect();
        assert_eq!(types.len(), unique.len(), "each family is described once");
        assert!(text.ends_with("# EOF\n"));
    });
}
