//! The answers as tables for people and as JSON for programs.

use super::PluginError;
use super::explain::{Answer, State, last_seen};
use k8s_openapi::api::core::v1::Event;
use kube::ResourceExt as _;
use kvasir_operator::api::ServingPool;
use serde::Serialize;
use std::io::{self, Write};

/// One JSON value and a line end.
pub(super) fn json(out: &mut impl Write, value: &impl Serialize) -> Result<(), PluginError> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    Ok(writeln!(out)?)
}

/// What a pool is.
pub(super) fn status(out: &mut impl Write, pool: &ServingPool) -> io::Result<()> {
    let Some(status) = pool.told() else {
        return writeln!(out, "{}: the operator has not looked at it yet", pool.name_any());
    };
    let routers = status.routers.clone().unwrap_or_default();
    let mut rows = vec![
        row(["Pool", &pool.name_any(), status.reason.as_deref().unwrap_or_default()]),
        row([
            "Workers",
            &format!("{} of {} routable", status.routable_replicas, status.desired_replicas.unwrap_or(status.replicas)),
            &format!("{} ready, {} of the newest template", status.ready_replicas, status.updated_replicas),
        ]),
        row(["Routers", &format!("{} of {} ready", routers.ready, routers.desired), ""]),
    ];
    if let Some(model) = &status.model {
        let fetched = model.fetched_percent.map_or_else(String::new, |percent| format!("{percent} % fetched"));
        rows.push(row(["Model", &model.name, model.digest.as_deref().unwrap_or(&fetched)]));
    }
    if let Some(rollout) = &status.rollout {
        let hold = rollout.hold.as_ref().map_or_else(|| "moves".to_owned(), |hold| format!("{}: {}", hold.reason, hold.message));
        rows.push(row(["Rollout", &format!("{:?} to {}", rollout.mode, rollout.to), &hold]));
    }
    rows.extend(status.conditions.iter().map(|it| {
        let state = format!("{:?} {}", it.status, it.reason);
        row([&it.condition_type, &state, &it.message])
    }));
    table(out, &rows)
}

/// Why it is so.
pub(super) fn answers(out: &mut impl Write, answers: &[Answer]) -> io::Result<()> {
    let mut rows = Vec::new();
    for answer in answers {
        let state = match answer.state {
            State::Good => "ok",
            State::Waiting => "waits",
            State::Bad => "look",
            State::Unknown => "-",
        };
        for (at, line) in answer.lines.iter().enumerate() {
            rows.push(if at == 0 { row([answer.topic, state, line]) } else { row(["", "", line]) });
        }
    }
    table(out, &rows)
}

/// What happened.
pub(super) fn events(out: &mut impl Write, events: &[Event]) -> io::Result<()> {
    if events.is_empty() {
        return writeln!(out, "no events; the API server forgets them after an hour unless told otherwise");
    }
    let rows: Vec<[String; 3]> = events
        .iter()
        .map(|event| {
            let when = last_seen(event).map_or_else(|| "-".to_owned(), |time| time.to_string());
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            [when, format!("{} {}", text(&event.type_), text(&event.reason)), text(&event.message)]
        })
        .collect();
    table(out, &rows)
}

fn row(cells: [&str; 3]) -> [String; 3] {
    cells.map(str::to_owned)
}

/// Columns as wide as their widest cell, two blanks between them.
fn table(out: &mut impl Write, rows: &[[String; 3]]) -> io::Result<()> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (first, second) = (width(0), width(1));
    for [one, two, three] in rows {
        let line = format!("{one:first$}  {two:second$}  {three}");
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
