//! Numbers of workers: who decides, and what a pool without any says.

use super::*;
use kvasir_telemetry::names;

fn metrics(queued: u32, answered: u32) -> String {
    let (prefix, ttft) = (names::PREFIX, names::TTFT_SECONDS);
    format!(
        "{prefix}_{} {queued}\n{prefix}_{ttft}_bucket{{hit=\"0\",le=\"1.0\"}} {answered}\n{prefix}_{ttft}_bucket{{hit=\"0\",le=\"+Inf\"}} {answered}\n{prefix}_{ttft}_count{{hit=\"0\"}} {answered}\n",
        names::ROUTER_QUEUED
    )
}

/// R58, cases 16 and 19: whoever writes the scale is followed, and the operator never writes it.
#[tokio::test(start_paused = true)]
async fn r58_the_scale_is_whoever_writes_it_and_the_operator_never_does() {
    let mut run = Run::new(8);
    run.create("p", |_| {});
    for replicas in [4, 1, 0, 2] {
        run.edit("p", |spec| spec["replicas"] = json!(replicas));
        run.until_settled("p").await;
        sleep(Duration::from_secs(20)).await;
        run.restart(true).await;
        sleep(Duration::from_secs(20)).await;
        assert_eq!((run.workers().len(), &run.pool("p")["spec"]["replicas"]), (replicas, &json!(replicas)));
    }
    assert!(run.cluster.api.writes().iter().all(|call| call.resource != "servingpools"), "only the status is written");
    assert_eq!(run.cluster.fleet.cut(), 0);
}

/// R52, case 14: no replicas is a state like any other.
#[tokio::test(start_paused = true)]
async fn r52_a_pool_without_replicas_has_a_status_and_rests() {
    let run = Run::new(8);
    run.create("p", |spec| spec["replicas"] = json!(0));
    run.until_settled("p").await;
    let is_there = |run: &Run| run.is("p", ConditionType::Ready, ConditionStatus::True, ConditionReason::ScaledToZero);
    run.until("a router that refuses", is_there).await;
    sleep(Duration::from_secs(10)).await;
    let (writes, events) = (run.cluster.api.writes().len(), run.cluster.api.all("events").len());
    sleep(Duration::from_mins(1)).await;
    assert_eq!((run.cluster.api.writes().len(), run.cluster.api.all("events").len()), (writes, events));
    assert!(!run.registry.render().contains("outcome=\"fault\""));
    run.edit("p", |spec| spec["replicas"] = json!(2));
    run.until_settled("p").await;
    run.edit("p", |spec| spec["replicas"] = json!(0));
    run.until("gone", |run| run.workers().is_empty() && run.settled("p")).await;
    assert_eq!(run.cluster.fleet.cut(), 0);
}

fn scaled(spec: &mut Value) {
    spec["scaling"] =
        json!({"owner": "Operator", "min": 1, "max": 5, "targets": {"queue": 2}, "windows": {"up": "20s", "down": "60s"}});
}

#[tokio::test(start_paused = true)]
async fn the_pools_own_scaler_follows_the_queue_in_status_and_holds_without_figures() {
    let run = Run::new(8);
    run.cluster.fleet.set_metrics(metrics(0, 0));
    run.create("p", scaled);
    run.until_settled("p").await;
    assert_eq!(run.pool("p")["status"]["desiredReplicas"], 2);
    // Two routers with four waiting each: eight on two workers, where two per worker may wait.
    for answered in 1..8 {
        run.cluster.fleet.set_metrics(metrics(4, answered * 10));
        sleep(Duration::from_secs(10)).await;
    }
    run.until("scaled out", |run| run.pool("p")["status"]["desiredReplicas"].as_i64() >= Some(4)).await;
    assert_eq!(run.pool("p")["spec"]["replicas"], 2);
    run.cluster.fleet.set_metrics("nonsense".to_owned());
    run.until("said", |run| run.is("p", ConditionType::Degraded, ConditionStatus::True, ConditionReason::MissingMetrics)).await;
    let held = run.pool("p")["status"]["desiredReplicas"].clone();
    sleep(Duration::from_secs(100)).await;
    assert_eq!(run.pool("p")["status"]["desiredReplicas"], held);
    run.cluster.fleet.set_metrics(metrics(0, 70));
    run.until("scaled in", |run| run.pool("p")["status"]["desiredReplicas"] == 1 && run.settled("p")).await;
    assert_eq!(run.cluster.fleet.cut(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_autoscaler_beside_the_pools_own_scaler_is_a_condition() {
    let run = Run::new(8);
    run.cluster.fleet.set_metrics(metrics(0, 0));
    run.cluster.api.put(
        "horizontalpodautoscalers",
        json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "rival", "namespace": NS},
            "spec": {"maxReplicas": 9, "scaleTargetRef": {"apiVersion": "kvasir.dev/v1alpha1", "kind": "ServingPool", "name": "p"}}}),
    );
    run.create("p", scaled);
    run.until("said", |run| run.is("p", ConditionType::Degraded, ConditionStatus::True, ConditionReason::AutoscalerConflict))
        .await;
    assert!(run.pool("p")["status"]["conditions"].to_string().contains("rival"));
}
