//! What the router bench says: every arm, and the rows that have a floor.

use super::prompts::{CHUNKS, FAMILIES, FRESH_BYTES, Form, SEEN, SHARED_BYTES, Tokenising};
use super::{ADDED_AIM_MS, ARMS, Arm, CLIENTS, Rig, Sample, Series, TEXT_MODEL, WORKERS};
use crate::args::BenchArgs;
use crate::bench::{BenchError, Report, Row, median};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

// === impl Series ===

impl Series {
    fn of(&self, clients: usize, figure: fn(&Sample) -> f64) -> f64 {
        let samples = if clients == 1 { &self.one } else { &self.many };
        median(&mut samples.iter().map(figure).collect::<Vec<_>>())
    }

    fn json(&self) -> Value {
        let side = |clients: usize| {
            let samples = if clients == 1 { &self.one } else { &self.many };
            let rounded = |value: f64| (value * 1e3).round() / 1e3;
            json!({
                "requests_per_second": rounded(self.of(clients, |sample| sample.figures.per_second)),
                "p50_ms": rounded(self.of(clients, |sample| sample.figures.p50_ms)),
                "p99_ms": rounded(self.of(clients, |sample| sample.figures.p99_ms)),
                "ttft_p50_ms": rounded(self.of(clients, |sample| sample.figures.ttft_p50_ms)),
                "router_cpu_us_per_request": rounded(self.of(clients, |sample| sample.cpu_us)),
                "router_cpu_us_each_repetition": samples.iter().map(|sample| rounded(sample.cpu_us)).collect::<Vec<_>>(),
                "rss_mib": rounded(self.of(clients, |sample| sample.rss_mib)),
            })
        };
        json!({"c1": side(1), "c32": side(CLIENTS)})
    }

    /// Medians over the reports of one client: where the time went, and what of the prompt was reused.
    fn states(&self) -> Value {
        let names =
            self.reports.first().and_then(|report| report["states_ms"].as_object()).into_iter().flat_map(|states| states.keys());
        let states: Map<String, Value> =
            names.map(|name| (name.clone(), json!(self.reported(&format!("/states_ms/{name}"))))).collect();
        json!({
            "states_ms": states, "cached_tokens": self.reported("/hits/device"),
            "predicted_cached_tokens": self.reported("/placement/predicted_cached_tokens"),
        })
    }

    /// Median of a member of the reports, in its own unit.
    fn reported(&self, pointer: &str) -> f64 {
        median(&mut self.reports.iter().filter_map(|report| report.pointer(pointer)?.as_f64()).collect::<Vec<_>>())
    }
}

/// Prints all arms, then the rows that are compared; the JSON has both.
pub(super) fn report(
    args: &BenchArgs,
    rig: &Rig<'_>,
    all: &BTreeMap<&'static str, Series>,
    tokenising: Tokenising,
    repetitions: usize,
) -> Result<(), BenchError> {
    let none = Series::default();
    let series = |arm: Arm| all.get(arm.name()).unwrap_or(&none);
    let smg = |form| series(Arm::Smg("cache_aware", form));
    let kvasir = |form| series(Arm::Kvasir(form));
    let direct = series(Arm::Direct);
    let (text, seen, ids) = (kvasir(Form::Chat), kvasir(Form::Seen), kvasir(Form::Ids));
    let cpu = |series: &Series| series.of(CLIENTS, |sample| sample.cpu_us);
    let p50 = |series: &Series| series.of(1, |sample| sample.figures.p50_ms);
    table(all);
    let mut report = Report::new(
        "router",
        json!({
            "workers": WORKERS, "chunks": CHUNKS, "prompt_shared_bytes": SHARED_BYTES, "prompt_fresh_bytes": FRESH_BYTES, "families": FAMILIES,
            "prompt_tokens": rig.prompts.tokens(), "tokeniser": TEXT_MODEL, "arrivals": "closed loop, 1 and 32 clients, streaming, keep-alive",
            "repetitions": repetitions, "stretch_s": rig.stretch.as_secs_f64(), "warm_up": "1 s with 32 clients, kept apart",
            "order": "every arm started anew in each repetition, rotated", "figures": "medians over repetitions",
            "comparison": "stack comparison: routers of other projects in front of HTTP engines, ours in front of gRPC workers",
            "build": if cfg!(debug_assertions) { "checked: opt-level 1, debug assertions" } else { "optimised, no assertions" },
            "cpu": "user + system time of the router's process, /proc/PID/stat",
            "tokenising": "out: the arms `seen` repeat prompts that the door has tokenised before, and their peer gets the same; its own price is measured in this process",
            "seen_prompts": SEEN, "p50_added_c1_ms_by_smg_cache_aware": p50(smg(Form::Seen)) - p50(direct),
            "tokenising_us_per_request": tokenising.cached_us, "tokenising_us_per_kib_of_prompt": tokenising.cached_us / 2.0,
            "tokenising_uncached_us_per_kib": tokenising.uncached_us_per_kib,
            "smg": version_of(&rig.args.smg, "smg"), "vllm_router": version_of(&rig.args.vllm_router, "vllm_router"),
            "reported_c1": text.states(), "reported_c1_seen": seen.states(), "reported_c1_token_ids": ids.states(),
        }),
    );
    let row = |name, unit, ours, peer, floor, aim| Row {
        name,
        unit,
        ours,
        peer,
        peer_name: if peer == 0.0 { "-" } else { "smg cache_aware" },
        floor,
        aim,
        lower_is_better: true,
    };
    report.push(row("CPU c=32, tokenising out", "us", cpu(seen), cpu(smg(Form::Seen)), Some(1.0), 0.5));
    report.push(row("CPU c=32, token ids", "us", cpu(ids), cpu(smg(Form::Chat)), Some(1.0), 0.5));
    report.push(row("p50 added c=1, tokenising out", "ms", p50(seen) - p50(direct), 0.0, None, ADDED_AIM_MS));
    report.push(row("p50 added c=1, token ids", "ms", p50(ids) - p50(direct), 0.0, None, ADDED_AIM_MS));
    report.detail(all.iter().map(|(name, series)| ((*name).to_owned(), series.json())).collect());
    report.finish(args)
}

/// The arms for people.
fn table(all: &BTreeMap<&'static str, Series>) {
    println!("\n{:<26} {:>3} {:>9} {:>9} {:>9} {:>12} {:>9}", "arm", "c", "req/s", "p50 ms", "p99 ms", "CPU us/req", "RSS MiB");
    for arm in ARMS {
        let Some(series) = all.get(arm.name()) else { continue };
        for clients in [1, CLIENTS] {
            println!(
                "{:<26} {clients:>3} {:>9.0} {:>9.3} {:>9.3} {:>12.1} {:>9.1}",
                arm.name(),
                series.of(clients, |sample| sample.figures.per_second),
                series.of(clients, |sample| sample.figures.p50_ms),
                series.of(clients, |sample| sample.figures.p99_ms),
                series.of(clients, |sample| sample.cpu_us),
                series.of(clients, |sample| sample.rss_mib),
            );
        }
    }
}

/// The version of a Python package in the environment that a program of it stands in.
fn version_of(program: &Path, package: &str) -> String {
    let entries =
        |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>();
    let library = program.parent().and_then(Path::parent).map(|environment| environment.join("lib")).unwrap_or_default();
    let prefix = format!("{package}-");
    let found = entries(&library).iter().flat_map(|python| entries(&python.join("site-packages"))).find_map(|path| {
        let name = path.file_name()?.to_str()?;
        Some(name.strip_prefix(&prefix)?.strip_suffix(".dist-info")?.to_owned())
    });
    found.unwrap_or_else(|| format!("unknown ({})", program.display()))
}
