//! What a router counts, read from its metrics text.
//!
//! Owns which series are read and what makes them trustworthy: finite, not negative, and never falling. Whatever else stands in the text is
//! skipped.

use kvasir_telemetry::names;

/// Reused share that a label of hits stands for.
const HITS: [(&str, f64); 4] = [("0", 0.0), ("0-50", 0.25), ("50-90", 0.7), ("90-100", 0.95)];

/// What one router has counted since it started.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Sample {
    /// Requests that wait now.
    pub(super) queued: f64,
    /// Requests refused before any attempt.
    pub(super) shed: f64,
    /// Times to the first output: upper bounds with how many are not above.
    pub(super) ttft: Vec<(f64, f64)>,
    /// Requests within the slo, and all that were judged by one; absent where the router knows none.
    pub(super) judged: Option<(f64, f64)>,
    /// First outputs, each weighted by the reused share of its prompt.
    pub(super) warm: f64,
}

// === impl Sample ===

impl Sample {
    /// Reads a metrics text.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut sample = Self::default();
        let mut queued = None;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let (name, labels) = series.split_once('{').map_or((series, ""), |(name, rest)| (name, rest.trim_end_matches('}')));
            let Some(name) = name.strip_prefix(names::PREFIX).and_then(|name| name.strip_prefix('_')) else { continue };
            let number = || match value.parse::<f64>() {
                Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
                _ => Err(format!("{name} is {value}, which is no count")),
            };
            let part = |of: &str, suffix: &str| name.strip_prefix(of) == Some(suffix);
            if name == names::ROUTER_QUEUED {
                *queued.get_or_insert(0.0) += number()?;
            } else if part(names::ROUTER_SHED, "_total") {
                sample.shed += number()?;
            } else if part(names::TTFT_SECONDS, "_bucket") {
                bucket(&mut sample.ttft, labels, number()?);
            } else if part(names::SLO_REQUESTS, "_total") {
                let (count, within) = (number()?, label(labels, "within") == Some("yes"));
                let (good, all) = sample.judged.get_or_insert((0.0, 0.0));
                (*good, *all) = (*good + if within { count } else { 0.0 }, *all + count);
            } else if part(names::TTFT_SECONDS, "_count") {
                let share = HITS.iter().find(|(hit, _)| label(labels, "hit") == Some(hit)).map_or(0.0, |(_, share)| *share);
                sample.warm += share * number()?;
            }
        }
        sample.queued = queued.ok_or_else(|| format!("its metrics have no {}_{}", names::PREFIX, names::ROUTER_QUEUED))?;
        Ok(sample)
    }

    /// What was counted since `old`; `None` if this does not continue it.
    pub(super) fn since(&self, old: &Self) -> Option<Self> {
        let less = |new: &[(f64, f64)], old: &[(f64, f64)]| {
            let left = new.iter().map(|(bound, count)| {
                let before = old.iter().find(|(at, _)| at == bound).map_or(0.0, |(_, count)| *count);
                (*count >= before).then_some((*bound, count - before))
            });
            left.collect::<Option<Vec<_>>>().filter(|_| new.len() >= old.len())
        };
        let judged = match (self.judged, old.judged) {
            (Some((good, all)), Some((good_before, all_before))) => {
                (good >= good_before && all >= all_before).then_some(())?;
                Some((good - good_before, all - all_before))
            }
            (now, _) => now,
        };
        let falls = self.shed < old.shed || self.warm < old.warm;
        (!falls).then_some(())?;
        Some(Self {
            queued: self.queued,
            shed: self.shed - old.shed,
            ttft: less(&self.ttft, &old.ttft)?,
            judged,
            warm: self.warm - old.warm,
        })
    }

    /// Requests that got a first output.
    pub(super) fn answered(&self) -> f64 {
        self.ttft.last().map_or(0.0, |(_, count)| *count)
    }
}

fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    labels
        .split(',')
        .filter_map(|pair| pair.split_once('='))
        .find(|(at, _)| *at == name)
        .map(|(_, value)| value.trim_matches('"'))
}

fn bucket(buckets: &mut Vec<(f64, f64)>, labels: &str, count: f64) {
    let bound = match label(labels, "le") {
        Some("+Inf") => f64::INFINITY,
        Some(bound) => bound.parse().unwrap_or(f64::INFINITY),
        None => return,
    };
    match buckets.binary_search_by(|(at, _)| at.total_cmp(&bound)) {
        Ok(at) => buckets[at].1 += count,
        Err(at) => buckets.insert(at, (bound, count)),
    }
}

/// The value below which a share of what was counted lies, interpolated; `None` if nothing was counted.
pub(super) fn quantile(buckets: &[(f64, f64)], share: f64) -> Option<f64> {
    let total = buckets.last().map(|(_, count)| *count).filter(|count| *count > 0.0)?;
    let rank = total * share;
    let (mut below, mut seen) = (0.0, 0.0);
    for (bound, count) in buckets {
        if *count >= rank {
            // Beyond the last bound nothing is known but that it is more.
            return Some(if bound.is_infinite() {
                below * 2.0
            } else {
                below + (bound - below) * (rank - seen) / (count - seen).max(1.0)
            });
        }
        (below, seen) = (*bound, *count);
    }
    Some(below)
}
