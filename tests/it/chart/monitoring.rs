//! Alerts and dashboard name metrics that the programs have.

use super::helm::{Helm, chart, one};
use kvasir_telemetry::{DoorMetrics, OperatorMetrics, Registry, RouterMetrics, Slo, WorkerLevels, WorkerMetrics, names};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

/// Names of ours in a query.
fn metrics(query: &str) -> impl Iterator<Item = &str> {
    query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').filter(|word| word.starts_with("kvasir_"))
}

/// Names of gauges, as the programs expose them.
fn gauges() -> BTreeSet<String> {
    let registry = Registry::default();
    let slo = Slo { ttft: Duration::from_secs(1), tpot: Duration::from_secs(1), fraction: 0.9 };
    DoorMetrics::with_slo(&registry, Some(slo)).opened("http");
    WorkerMetrics::new(&registry).levels(&WorkerLevels::default());
    RouterMetrics::new(&registry).index(&[("exact", 1)], 1);
    OperatorMetrics::new(&registry).pools("ready", 1);
    let text = registry.render();
    let kinds = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    kinds.filter(|(_, kind)| *kind == "gauge").map(|(name, _)| name.to_owned()).collect()
}

/// Why a name in a query means nothing.
fn problem(name: &str, gauges: &BTreeSet<String>) -> Option<String> {
    let known = |base: &str| base.strip_prefix("kvasir_").is_some_and(|base| names::METRICS.contains(&base));
    if gauges.contains(name) {
        return None;
    }
    let bases: Vec<&str> =
        ["_total", "_bucket", "_sum", "_count"].iter().filter_map(|suffix| name.strip_suffix(suffix)).collect();
    match bases.first() {
        Some(base) if gauges.contains(*base) => Some(format!("{name}: {base} is a gauge and has no parts")),
        Some(base) if known(base) => None,
        _ if known(name) => Some(format!("{name}: a counter ends in _total, a histogram in _bucket, _sum or _count")),
        _ => Some(format!("{name}: no such metric in telemetry/src/names.rs")),
    }
}

#[test]
fn the_finder_of_wrong_names_finds_them() {
    let gauges = gauges();
    assert!(gauges.contains("kvasir_running_sequences") && gauges.len() > 8, "{gauges:?}");
    for right in ["kvasir_door_requests_total", "kvasir_ttft_seconds_bucket", "kvasir_router_leases"] {
        assert_eq!(problem(right, &gauges), None);
    }
    for wrong in ["kvasir_door_requests", "kvasir_ttft_seconds", "kvasir_router_leases_total", "kvasir_nonsense_total"] {
        assert!(problem(wrong, &gauges).is_some(), "{wrong}");
    }
}

#[test]
fn every_alert_names_metrics_that_exist_and_says_what_to_do() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&["--set", "metrics.rules.enabled=true"]);
    let groups = one(&objects, "PrometheusRule", "kvasir")["spec"]["groups"].as_array().unwrap().clone();
    let rules: Vec<&Value> = groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).collect();
    let gauges = gauges();
    let mut alerts = BTreeSet::new();
    for rule in &rules {
        let alert = rule["alert"].as_str().unwrap();
        assert!(alerts.insert(alert), "{alert} twice");
        let query = rule["expr"].as_str().unwrap();
        assert!(metrics(query).count() > 0, "{alert} asks for nothing of ours");
        let problems: Vec<String> = metrics(query).filter_map(|name| problem(name, &gauges)).collect();
        assert!(problems.is_empty(), "{alert}: {problems:?}");
        assert_eq!(query.matches('(').count(), query.matches(')').count(), "{alert}");
        assert!(matches!(rule["labels"]["severity"].as_str(), Some("critical" | "warning")), "{alert}");
        for text in ["summary", "description"] {
            let text = rule["annotations"][text].as_str().unwrap();
            assert!(text.ends_with('.') && !text.contains("{{`"), "{alert}: {text}");
        }
    }
    let failing = rules.iter().find(|rule| rule["alert"] == "KvasirRequestsFail").unwrap();
    let codes: Vec<&str> = failing["expr"].as_str().unwrap().split('"').nth(1).unwrap().split('|').collect();
    for code in codes {
        let reason = kvasir_core::Reason::from_code(code).unwrap_or_else(|| panic!("{code} is no outcome"));
        assert!(reason.http_status() >= 500, "{code} is not the service's fault");
    }
}

#[test]
fn every_panel_names_metrics_that_exist_and_keeps_to_the_chosen_namespaces() {
    let text = fs::read_to_string(chart().join("files/dashboards/kvasir.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let gauges = gauges();
    let mut ids = BTreeSet::new();
    let mut shown = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is taken");
        if panel["type"] == "row" {
            continue;
        }
        assert!(panel["description"].as_str().unwrap().len() > 10, "{title}: no description");
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let problems: Vec<String> = metrics(query).filter_map(|name| problem(name, &gauges)).collect();
            assert!(problems.is_empty(), "{title}: {problems:?}");
            // The operator's own namespace is another choice than the pools'.
            let filter = if query.contains("kvasir_operator_") { "$operator\"" } else { "$namespace\"" };
            assert_eq!(query.matches(filter).count(), metrics(query).count(), "{title}: {query}");
            assert_eq!(query.matches('(').count(), query.matches(')').count(), "{title}: {query}");
            shown.extend(metrics(query).map(str::to_owned));
        }
    }
    assert!(shown.len() > 25, "{}", shown.len());
}

#[test]
fn the_dashboard_reaches_grafana_unchanged_under_the_label_that_it_looks_for() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&["--set", "metrics.dashboard.enabled=true"]);
    let map = one(&objects, "ConfigMap", "kvasir-dashboard");
    let text = fs::read_to_string(chart().join("files/dashboards/kvasir.json")).unwrap();
    assert_eq!(map["data"]["kvasir.json"].as_str().unwrap(), text.trim_end());
    assert_eq!(map["metadata"]["labels"]["grafana_dashboard"], "1");
    assert!(helm.objects(&[]).iter().all(|object| object["kind"] != "ConfigMap"), "off unless asked for");
}

#[test]
fn the_monitor_scrapes_a_port_that_the_service_and_the_pods_have() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&["--set", "metrics.serviceMonitor.enabled=true,networkPolicy.enabled=true"]);
    let endpoint = &one(&objects, "ServiceMonitor", "kvasir-operator")["spec"]["endpoints"][0];
    let port = &one(&objects, "Service", "kvasir-operator")["spec"]["ports"][0];
    let container = &one(&objects, "Deployment", "kvasir-operator")["spec"]["template"]["spec"]["containers"][0];
    let policy = &one(&objects, "NetworkPolicy", "kvasir-operator")["spec"]["ingress"][0]["ports"][0];
    assert_eq!(endpoint["port"], port["name"]);
    assert_eq!(port["targetPort"], container["ports"][0]["name"]);
    assert_eq!(policy["port"], container["ports"][0]["name"]);
    for probe in ["readinessProbe", "livenessProbe"] {
        assert_eq!(container[probe]["httpGet"]["port"], container["ports"][0]["name"]);
    }
    assert!(
        container["readinessProbe"]["httpGet"]["path"] != container["livenessProbe"]["httpGet"]["path"],
        "ready is not alive"
    );
}
