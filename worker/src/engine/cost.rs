//! The measured cost curve c(m): seconds of a step over m tokens, learned online.
//!
//! Owns an estimate per power of two with exponential decay. Refuses to know what the tokens are. The scheduler's token budget and the
//! reported load follow from it. Costs: O(1) per observation.

use kvasir_core::CostPoint;
use std::time::Duration;

/// Powers of two that are told apart: 1 to 32,768 tokens.
const BUCKETS: usize = 16;
/// Weight of a new observation.
const GAIN: f64 = 0.2;

/// The curve.
#[derive(Clone, Debug, Default)]
pub struct CostCurve {
    points: [Option<Point>; BUCKETS],
}

/// Mean size and time of the steps of a bucket.
#[derive(Clone, Copy, Debug)]
struct Point {
    tokens: f64,
    seconds: f64,
}

// === impl CostCurve ===

impl CostCurve {
    /// Learns from a step.
    pub fn observe(&mut self, tokens: u32, time: Duration) {
        if tokens == 0 {
            return;
        }
        let point = &mut self.points[(tokens.ilog2() as usize).min(BUCKETS - 1)];
        let (tokens, seconds) = (f64::from(tokens), time.as_secs_f64());
        *point = Some(point.map_or(Point { tokens, seconds }, |old| Point {
            tokens: old.tokens + GAIN * (tokens - old.tokens),
            seconds: old.seconds + GAIN * (seconds - old.seconds),
        }));
    }

    /// Predicted time of a step; `None` while nothing was measured. Between points linear, beyond them proportional.
    pub fn predict(&self, tokens: u32) -> Option<Duration> {
        let tokens = f64::from(tokens);
        let mut below: Option<Point> = None;
        for point in self.points.iter().flatten() {
            if point.tokens >= tokens {
                let seconds = match below {
                    Some(low) if point.tokens > low.tokens => {
                        low.seconds + (point.seconds - low.seconds) * (tokens - low.tokens) / (point.tokens - low.tokens)
                    }
                    _ => point.seconds,
                };
                return Some(Duration::from_secs_f64(seconds.max(0.0)));
            }
            below = Some(*point);
        }
        below.map(|last| Duration::from_secs_f64(last.seconds * tokens / last.tokens))
    }

    /// Most tokens, from `least` to `most`, whose step is predicted to take at most `time`; `most` while nothing was measured.
    pub fn tokens_within(&self, time: Duration, least: u32, most: u32) -> u32 {
        let (mut low, mut high) = (least, most.max(least));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.predict(middle).is_none_or(|predicted| predicted <= time) { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// The curve as reported.
    pub fn points(&self) -> Vec<CostPoint> {
        let report = |point: &Point| CostPoint { rows: point.tokens.round() as u32, seconds: point.seconds as f32 };
        self.points.iter().flatten().map(report).collect()
    }

    /// Tokens per second of the largest steps measured; 0 while unknown.
    pub fn prefill_rate(&self) -> f32 {
        self.points.iter().flatten().next_back().map_or(0.0, |point| (point.tokens / point.seconds.max(1e-9)) as f32)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests state their assumptions")]
    use super::*;

    #[test]
    fn a_linear_backend_is_learned() {
        let mut curve = CostCurve::default();
        for tokens in [1, 2, 4, 8, 16, 32, 64, 128] {
            curve.observe(tokens, Duration::from_micros(100 + 10 * u64::from(tokens)));
        }
        assert!((curve.predict(48).unwrap().as_secs_f64() - 580e-6).abs() < 1e-9);
        assert_eq!(curve.tokens_within(Duration::from_micros(500), 1, 128), 40);
        assert_eq!(curve.tokens_within(Duration::from_micros(1), 16, 128), 16);
    }

    #[test]
    fn nothing_measured_limits_nothing() {
        let curve = CostCurve::default();
        assert_eq!(curve.predict(4), None);
        assert_eq!(curve.tokens_within(Duration::from_micros(1), 16, 128), 128);
        assert_eq!(curve.prefill_rate(), 0.0);
    }

    #[test]
    fn a_change_of_speed_is_followed() {
        let mut curve = CostCurve::default();
        curve.observe(8, Duration::from_millis(1));
        for _ in 0..40 {
            curve.observe(8, Duration::from_millis(3));
        }
        assert!((curve.predict(8).unwrap().as_secs_f64() - 3e-3).abs() < 1e-5);
    }
}
