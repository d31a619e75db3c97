//! Scale: how many workers a pool wants whose `scaling.owner` is Operator.
//!
//! Owns the decision, from what routers count to a number and a sentence. Refuses to read or write anything and to know pods: figures come
//! from routers alone, so a worker that hangs or never starts cannot spoil them. Pure; time is handed in.
//!
//! Invariants (held by `tests.rs`)
//! 1. The number stays within min and max, and moves only after a wish has held for its whole window.
//! 2. Figures that are missing, nonsense, or do not continue the former ones hold the number and end every wish; idleness is a figure.
//! 3. Taking workers away counts what is lost with them: of `n` workers each holds about one `n`-th of what is warm, and what is no longer
//!    warm is computed again.
//! 4. The target that asks for most workers decides.
//!
//! Goodput is what routers judged: the share of requests that kept both times of the pool's slo, failures of the service's own making counted as
//! missed.

mod exposition;
#[cfg(test)]
mod tests;

pub use exposition::Sample;

use crate::api::{ScalingOwner, ServingPoolSpec, TextError};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Time between two looks at figures.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// Part by which a target may be missed before anyone is added.
const TOLERANCE: f64 = 0.1;
/// Part of a target that has to stay free after workers were taken away.
const RESERVE: f64 = 0.2;
/// Reused share of prompts beyond which the estimate of what is lost no longer grows.
const HIT_SHARE_MAX: f64 = 0.95;
/// Most pressure that one look can show, in targets.
const PRESSURE_MAX: f64 = 8.0;

/// What to keep, from a pool's spec.
#[derive(Clone, PartialEq, Debug)]
pub struct Rules {
    /// Fewest and most workers.
    pub bounds: (u32, u32),
    /// Smallest share of requests within the pool's slo.
    pub goodput: Option<f64>,
    /// Longest time to the first token at the 95th percentile, in seconds.
    pub ttft: Option<f64>,
    /// Most requests that wait per worker.
    pub queue: Option<u32>,
    /// How long a wish for more must hold.
    pub up: Duration,
    /// How long a wish for fewer must hold.
    pub down: Duration,
}

/// What was decided.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// Wished workers.
    pub desired: u32,
    /// From what.
    pub message: String,
    /// Which way.
    pub course: Course,
}

/// Which way a decision went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Course {
    /// Nothing changed.
    Kept,
    /// Workers are added.
    Out,
    /// Workers are taken away.
    In,
    /// There are no trustworthy figures.
    Held,
}

/// The scaler of one pool: what it counted last, and which wish holds since when.
#[derive(Clone, Debug, Default)]
pub struct Scaler {
    samples: BTreeMap<String, Sample>,
    more: Option<Wish>,
    fewer: Option<Wish>,
    looked: Option<(Instant, Decision)>,
}

/// A number that was wished for all the time.
#[derive(Clone, Copy, Debug)]
struct Wish {
    since: Instant,
    number: u32,
}

/// What happened between two looks.
#[derive(Clone, PartialEq, Debug)]
struct Figures {
    /// Requests that got a first output.
    answered: f64,
    /// Requests that wait now.
    queued: f64,
    /// Requests that were refused before any attempt.
    shed: f64,
    ttft: Vec<(f64, f64)>,
    /// Requests within the slo, and all that were judged by one; absent where routers know none.
    judged: Option<(f64, f64)>,
    /// Reused share of prompts.
    hit_share: f64,
}

// === impl Rules ===

impl Rules {
    /// From a spec; `None` if somebody else scales the pool.
    pub fn read(spec: &ServingPoolSpec) -> Result<Option<Self>, TextError> {
        let scaling = &spec.scaling;
        if scaling.owner != ScalingOwner::Operator {
            return Ok(None);
        }
        let number = |value: Option<i32>, or: i32| u32::try_from(value.unwrap_or(or)).unwrap_or(0);
        let (min, targets) = (number(scaling.min, spec.replicas), scaling.targets.clone().unwrap_or_default());
        let seconds = |text: &crate::api::DurationText| text.parse().map(|it| it.as_secs_f64());
        Ok(Some(Self {
            bounds: (min, number(scaling.max, spec.replicas).max(min)),
            goodput: targets.goodput.as_ref().map(crate::api::PercentText::parse).transpose()?,
            ttft: targets.ttft.as_ref().map(seconds).transpose()?,
            queue: targets.queue.and_then(|queue| u32::try_from(queue).ok()),
            up: scaling.windows.up.parse()?,
            down: scaling.windows.down.parse()?,
        }))
    }
}

// === impl Scaler ===

impl Scaler {
    /// Whether it is time for another look at figures.
    pub fn is_due(&self, now: Instant) -> bool {
        self.looked.as_ref().is_none_or(|(at, _)| now.duration_since(*at) >= INTERVAL)
    }

    /// What was decided at the last look.
    pub fn last(&self) -> Option<&Decision> {
        self.looked.as_ref().map(|(_, decision)| decision)
    }

    /// Decides from what each Ready router counts. `current` workers are wished, `routable` serve.
    pub fn decide(
        &mut self,
        rules: &Rules,
        (current, routable): (u32, u32),
        answers: &BTreeMap<String, Result<Sample, String>>,
        now: Instant,
    ) -> Decision {
        let current = current.clamp(rules.bounds.0, rules.bounds.1);
        let wanted = self.figures(answers).and_then(|figures| want(rules, (current, routable), &figures));
        let decision = match wanted {
            Ok((wanted, why)) => self.follow(rules, current, wanted, &why, now),
            Err(why) => {
                (self.more, self.fewer) = (None, None);
                Decision { desired: current, message: format!("held at {current}: {why}"), course: Course::Held }
            }
        };
        self.looked = Some((now, decision.clone()));
        decision
    }

    fn follow(&mut self, rules: &Rules, current: u32, wanted: u32, why: &str, now: Instant) -> Decision {
        let wish = |old: Option<Wish>, number: u32| Wish { since: old.map_or(now, |it| it.since), number };
        self.more = (wanted > current).then(|| wish(self.more, self.more.map_or(wanted, |it| it.number.min(wanted))));
        self.fewer = (wanted < current).then(|| wish(self.fewer, self.fewer.map_or(wanted, |it| it.number.max(wanted))));
        let ripe =
            |wish: Option<Wish>, window: Duration| wish.filter(|it| now.duration_since(it.since) >= window).map(|it| it.number);
        let (desired, course) = match (ripe(self.more, rules.up), ripe(self.fewer, rules.down)) {
            (Some(number), _) => (number, Course::Out),
            (_, Some(number)) => (number, Course::In),
            (None, None) => (current, Course::Kept),
        };
        if course != Course::Kept {
            (self.more, self.fewer) = (None, None);
        }
        let message = match wanted.cmp(&current) {
            _ if course != Course::Kept => format!("from {current} to {desired}: {why}"),
            std::cmp::Ordering::Equal => why.to_owned(),
            std::cmp::Ordering::Greater => format!("{wanted} would be better, if that lasts: {why}"),
            std::cmp::Ordering::Less => format!("{wanted} would do, if that lasts: {why}"),
        };
        Decision { desired, message, course }
    }

    /// What happened since the last look, over all routers.
    fn figures(&mut self, answers: &BTreeMap<String, Result<Sample, String>>) -> Result<Figures, String> {
        let before = std::mem::take(&mut self.samples);
        if answers.is_empty() {
            return Err("no router is Ready, so there are no figures".to_owned());
        }
        let mut sum = Figures { answered: 0.0, queued: 0.0, shed: 0.0, ttft: Vec::new(), judged: None, hit_share: 0.0 };
        let (mut problem, mut warm) = (None, 0.0);
        for (router, answer) in answers {
            let sample = match answer {
                Ok(sample) => sample,
                Err(why) => {
                    problem.get_or_insert_with(|| format!("router {router}: {why}"));
                    continue;
                }
            };
            self.samples.insert(router.clone(), sample.clone());
            let Some(since) = before.get(router).and_then(|old| sample.since(old)) else {
                problem.get_or_insert_with(|| format!("router {router} has only begun to count"));
                continue;
            };
            sum.queued += sample.queued;
            sum.shed += since.shed;
            add(&mut sum.ttft, &since.ttft);
            // A router without an objective (an older one, in a rollout) judges nothing; the others speak for all.
            if let Some((good, all)) = since.judged {
                let sum = sum.judged.get_or_insert((0.0, 0.0));
                *sum = (sum.0 + good, sum.1 + all);
            }
            sum.answered += since.answered();
            warm += since.warm;
        }
        if let Some(problem) = problem {
            return Err(problem);
        }
        sum.hit_share = if sum.answered > 0.0 { (warm / sum.answered).clamp(0.0, HIT_SHARE_MAX) } else { 0.0 };
        Ok(sum)
    }
}

fn add(sum: &mut Vec<(f64, f64)>, more: &[(f64, f64)]) {
    if sum.len() == more.len() {
        for (sum, more) in sum.iter_mut().zip(more) {
            sum.1 += more.1;
        }
    } else {
        *sum = more.to_vec();
    }
}

/// How many workers the figures ask for, and why.
fn want(rules: &Rules, (current, routable): (u32, u32), figures: &Figures) -> Result<(u32, String), String> {
    let (min, max) = rules.bounds;
    let idle = figures.answered == 0.0 && figures.queued == 0.0 && figures.shed == 0.0;
    if idle {
        return Ok((min, "no requests".to_owned()));
    }
    if current == 0 {
        return Ok((1.clamp(min, max.max(1)).min(max), "requests come in and there is no worker".to_owned()));
    }
    let workers = f64::from(routable.max(1));
    let (pressure, why) = pressure(rules, figures, workers)?;
    if pressure > 1.0 + TOLERANCE {
        let wanted = (workers * pressure).ceil() as u32;
        return Ok((wanted.max(current).clamp(min, max), why));
    }
    // The fewest that keep the reserve with what is lost on the way.
    let most = routable.clamp(1, current.max(1));
    let keeps = |fewer: u32| {
        let (kept, warm) = (f64::from(fewer) / workers, figures.hit_share);
        let again = (1.0 - warm + warm * (1.0 - kept).max(0.0)) / (1.0 - warm);
        pressure / kept * again <= 1.0 - RESERVE
    };
    let fewest = (min.max(1)..most).find(|fewer| keeps(*fewer)).unwrap_or(current);
    let lost = format!("{why}; {:.0} % of prompts are warm", figures.hit_share * 100.0);
    Ok((fewest.clamp(min, max), if fewest < current { lost } else { why }))
}

/// How far the most pressing target is used up: 1 is just kept.
fn pressure(rules: &Rules, figures: &Figures, workers: f64) -> Result<(f64, String), String> {
    let mut all: Vec<(f64, String)> = Vec::new();
    if let Some(most) = rules.queue {
        let waiting = figures.queued / workers;
        all.push((waiting / f64::from(most).max(0.5), format!("{waiting:.1} requests wait per worker, at most {most} should")));
    }
    let silent = figures.answered == 0.0;
    if silent && all.is_empty() {
        return Err("requests came in and none was answered, so there is no time to the first token".to_owned());
    }
    if let Some(longest) = rules.ttft.filter(|_| !silent) {
        let p95 = exposition::quantile(&figures.ttft, 0.95).ok_or("routers count no times to the first token")?;
        all.push((p95 / longest, format!("95 % of first tokens come within {p95:.1} s, they should within {longest:.1} s")));
    }
    if let Some(share) = rules.goodput.filter(|_| !silent) {
        let (good, judged) =
            figures.judged.ok_or("routers judge no request: scaling.targets.goodput needs the pool's slo to say what is good")?;
        let good = if judged > 0.0 { good / judged } else { 1.0 };
        let pressed = (1.0 - good) / (1.0 - share).max(0.001);
        all.push((pressed, format!("{:.0} % of requests are within the slo, {:.0} % should", good * 100.0, share * 100.0)));
    }
    let worst =
        all.into_iter().max_by(|left, right| left.0.total_cmp(&right.0)).ok_or("scaling.targets names nothing to keep")?;
    Ok((worst.0.clamp(0.0, PRESSURE_MAX), worst.1))
}
