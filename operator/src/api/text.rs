//! Texts that stand for a number with a unit: durations, sizes, percentages.
//!
//! Owns how such a text is written in a pool and how it is read. Strings and not numbers, because API conventions ask for units in values and
//! advise against floats. Refuses to know which field holds one.
//!
//! Invariant: what the schema admits, `parse` reads (a duration out of its bounds is refused by both); a test draws texts from the patterns.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

/// Longest text of any kind here, in bytes.
const TEXT_BYTES_MAX: usize = 32;

/// Longest duration: a week, in milliseconds.
const DURATION_MS_MAX: u64 = 7 * 24 * 3600 * 1000;

const DURATION_PATTERN: &str = "^([0-9]{1,9}(ms|s|m|h)){1,8}$";
const SIZE_PATTERN: &str = "^([1-9][0-9]{0,14}|[1-9][0-9]{0,8}(k|Ki|M|Mi)|[1-9][0-9]{0,5}(G|Gi|T|Ti))$";
const PERCENT_PATTERN: &str = "^(100(\\.0{1,3})?|[0-9]{1,2}(\\.[0-9]{1,3})?)%$";
const CPU_PATTERN: &str = "^([1-9][0-9]{0,6}m|[1-9][0-9]{0,3}(\\.[0-9]{1,3})?|0\\.([1-9][0-9]{0,2}|0[1-9][0-9]?|00[1-9]))$";

/// A duration such as `30s`, `10m`, `1h30m` or `250ms`; from 1 ms to 168 h.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DurationText(pub String);

/// An amount of memory or disk such as `512Mi`, `16Gi` or `2Ti`; 1 byte at least.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SizeText(pub String);

/// A share such as `80%` or `0.5%`, from 0 to 100.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PercentText(pub String);

/// A number of CPU cores such as `2`, `1.5` or `500m`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuText(pub String);

/// Why a text cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{text}` is no {what}; write for example {example}")]
pub struct TextError {
    text: String,
    what: &'static str,
    example: &'static str,
}

// === impl DurationText ===

impl DurationText {
    /// Reads it.
    pub fn parse(&self) -> Result<Duration, TextError> {
        let refuse = || TextError { text: clip(&self.0), what: "duration from 1ms to 168h", example: "`30s`, `10m` or `1h30m`" };
        let mut total_ms: u64 = 0;
        let mut rest = self.0.as_str();
        if rest.is_empty() || rest.len() > TEXT_BYTES_MAX {
            return Err(refuse());
        }
        while !rest.is_empty() {
            let digits = rest.find(|letter: char| !letter.is_ascii_digit()).ok_or_else(refuse)?;
            let number: u64 = rest[..digits].parse().map_err(|_| refuse())?;
            rest = &rest[digits..];
            let unit = rest.find(|letter: char| letter.is_ascii_digit()).unwrap_or(rest.len());
            let unit_ms = match &rest[..unit] {
                "ms" => 1,
                "s" => 1_000,
                "m" => 60_000,
                "h" => 3_600_000,
                _ => return Err(refuse()),
            };
            rest = &rest[unit..];
            total_ms = number.checked_mul(unit_ms).and_then(|ms| ms.checked_add(total_ms)).ok_or_else(refuse)?;
        }
        if (1..=DURATION_MS_MAX).contains(&total_ms) { Ok(Duration::from_millis(total_ms)) } else { Err(refuse()) }
    }
}

// === impl SizeText ===

impl SizeText {
    /// Bytes.
    pub fn parse(&self) -> Result<u64, TextError> {
        let refuse = || TextError { text: clip(&self.0), what: "size of at least one byte", example: "`512Mi` or `16Gi`" };
        if self.0.len() > TEXT_BYTES_MAX {
            return Err(refuse());
        }
        let digits = self.0.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(self.0.len());
        let (number, unit) = self.0.split_at(digits);
        let number: u64 = number.parse().map_err(|_| refuse())?;
        let factor: u64 = match unit {
            "" => 1,
            "k" => 1_000,
            "M" => 1_000_000,
            "G" => 1_000_000_000,
            "T" => 1_000_000_000_000,
            "Ki" => 1 << 10,
            "Mi" => 1 << 20,
            "Gi" => 1 << 30,
            "Ti" => 1 << 40,
            _ => return Err(refuse()),
        };
        number.checked_mul(factor).filter(|bytes| *bytes > 0 && i64::try_from(*bytes).is_ok()).ok_or_else(refuse)
    }
}

// === impl PercentText ===

impl PercentText {
    /// Share from 0 to 1.
    pub fn parse(&self) -> Result<f64, TextError> {
        let refuse = || TextError { text: clip(&self.0), what: "percentage from 0% to 100%", example: "`80%` or `0.5%`" };
        let number = self.0.strip_suffix('%').ok_or_else(refuse)?;
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str, most: usize| (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
        if !digits(whole, 3) || !digits(part, 3) {
            return Err(refuse());
        }
        match number.parse::<f64>() {
            Ok(percent) if percent <= 100.0 => Ok(percent / 100.0),
            _ => Err(refuse()),
        }
    }
}

// === impl CpuText ===

impl CpuText {
    /// Thousandths of a core.
    pub fn parse_millis(&self) -> Result<u64, TextError> {
        let refuse = || TextError { text: clip(&self.0), what: "number of CPU cores above 0", example: "`2`, `1.5` or `500m`" };
        if self.0.len() > TEXT_BYTES_MAX {
            return Err(refuse());
        }
        let millis = if let Some(millis) = self.0.strip_suffix('m') {
            plain(millis)
        } else {
            let (whole, part) = self.0.split_once('.').unwrap_or((&self.0, "0"));
            let padded = format!("{part:0<3}");
            match (plain(whole), plain(part), part.len()) {
                (Some(cores), Some(_), 1..=3) => plain(&padded).and_then(|part| cores.checked_mul(1_000)?.checked_add(part)),
                _ => None,
            }
        };
        millis.filter(|millis| (1..=MILLICORES_MAX).contains(millis)).ok_or_else(refuse)
    }
}

/// Most thousandths of a core that one pod may ask for: more than any machine has.
const MILLICORES_MAX: u64 = 9_999_999;

fn plain(digits: &str) -> Option<u64> {
    let only_digits = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    only_digits.then(|| digits.parse().ok()).flatten()
}

/// The beginning of a text that a user wrote, for a message.
fn clip(text: &str) -> String {
    text.chars().take(TEXT_BYTES_MAX + 8).collect()
}

// === impl JsonSchema ===

impl JsonSchema for DurationText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "DurationText".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "format": "duration",
            "maxLength": TEXT_BYTES_MAX,
            "pattern": DURATION_PATTERN,
            "description": "A duration such as 30s, 10m, 1h30m or 250ms.",
            "x-kubernetes-validations": [{
                "rule": "self >= duration('1ms') && self <= duration('168h')",
                "message": "the duration must lie between 1ms and 168h; write for example 30s, 10m or 1h30m",
            }],
        })
    }
}

macro_rules! plain_text_schema {
    ($type:ident, $pattern:ident, $description:literal) => {
        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({
                    "type": "string",
                    "maxLength": TEXT_BYTES_MAX,
                    "pattern": $pattern,
                    "description": $description,
                })
            }
        }
    };
}

plain_text_schema!(SizeText, SIZE_PATTERN, "An amount such as 512Mi or 16Gi.");
plain_text_schema!(PercentText, PERCENT_PATTERN, "A share such as 80% or 0.5%.");
plain_text_schema!(CpuText, CPU_PATTERN, "A number of CPU cores such as 2, 1.5 or 500m.");

// === impl Display and From ===

macro_rules! text_conversions {
    ($($type:ident),*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $type {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }
    )*};
}

text_conversions!(DurationText, SizeText, PercentText, CpuText);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_with_their_units() {
        let parse = |text: &str| DurationText::from(text).parse();
        assert_eq!(parse("1h30m"), Ok(Duration::from_mins(90)));
        assert_eq!(parse("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse("168h"), Ok(Duration::from_hours(168)));
        for wrong in ["", "0s", "5", "s", "1.5h", "-1s", "169h", "1d", "99999999999999999999s", "1h-3m"] {
            let message = parse(wrong).unwrap_err().to_string();
            assert!(message.contains(wrong) && message.contains("`10m`"), "{message}");
        }
    }

    /// Texts of a pattern; what is drawn is whole, so its anchors say nothing.
    fn texts(pattern: &str) -> impl proptest::strategy::Strategy<Value = String> {
        proptest::string::string_regex(pattern.trim_start_matches('^').trim_end_matches('$')).unwrap()
    }

    proptest::proptest! {
        #[test]
        fn what_the_schema_admits_is_read(size in texts(SIZE_PATTERN), percent in texts(PERCENT_PATTERN), cpu in texts(CPU_PATTERN)) {
            SizeText(size).parse()?;
            PercentText(percent).parse()?;
            CpuText(cpu).parse_millis()?;
        }
    }

    #[test]
    fn sizes_percentages_and_cores_are_read() {
        assert_eq!(SizeText::from("16Gi").parse(), Ok(16 << 30));
        assert_eq!(SizeText::from("1500M").parse(), Ok(1_500_000_000));
        assert_eq!(PercentText::from("80%").parse(), Ok(0.8));
        assert_eq!(PercentText::from("0.5%").parse(), Ok(0.005));
        assert_eq!(CpuText::from("1.5").parse_millis(), Ok(1_500));
        assert_eq!(CpuText::from("500m").parse_millis(), Ok(500));
        assert_eq!(CpuText::from("0.05").parse_millis(), Ok(50));
        for wrong in ["", "0", "Gi", "1.5Gi", "-1", "10000000000Ti"] {
            assert!(SizeText::from(wrong).parse().is_err(), "{wrong}");
        }
        for wrong in ["", "%", "101%", "5", "1.2345%", "-1%", "NaN%", "+5%"] {
            assert!(PercentText::from(wrong).parse().is_err(), "{wrong}");
        }
        for wrong in ["", "0", "0m", "m", "1.", "1e3", "99999"] {
            assert!(CpuText::from(wrong).parse_millis().is_err(), "{wrong}");
        }
    }
}
