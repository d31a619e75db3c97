//! Python's `json.dumps`, byte for byte, for template values.
//!
//! Owns separators, escapes and float spelling. Called by the `tojson` filter. Noncharacters U+FDD0 to U+FDEF are never escaped: they are the
//! guard's marks and leave the text before anyone sees it.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Deepest nesting that is written.
const MAX_DEPTH: usize = 128;

/// The keyword arguments of `json.dumps` that templates use.
pub(super) struct Style {
    pub(super) ensure_ascii: bool,
    pub(super) indent: Option<usize>,
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
}

struct Writer<'a> {
    out: String,
    style: &'a Style,
    item: &'a str,
    key: &'a str,
}

pub(super) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let (item, key) = match &style.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None if style.indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    let mut writer = Writer { out: String::new(), style, item, key };
    writer.value(value, 0)?;
    Ok(writer.out)
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.sequence(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            other => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: {other} is not JSON"))),
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) {
        if value.is_integer() {
            let _ = write!(self.out, "{value}");
        } else {
            let float = f64::try_from(value.clone()).unwrap_or(f64::NAN);
            self.out.push_str(&float_repr(float));
        }
    }

    fn sequence(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut empty = true;
        self.out.push('[');
        for item in value.try_iter()? {
            self.separate(&mut empty, depth + 1);
            self.value(&item, depth + 1)?;
        }
        self.close(']', empty, depth);
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<(String, Value)> = value.try_iter()?.map(|key| (key_text(&key), key)).collect();
        if self.style.sort_keys {
            keys.sort_by(|a, b| a.0.cmp(&b.0));
        }
        let mut empty = true;
        self.out.push('{');
        for (text, key) in keys {
            self.separate(&mut empty, depth + 1);
            self.string(&text);
            self.out.push_str(self.key);
            self.value(&value.get_item(&key)?, depth + 1)?;
        }
        self.close('}', empty, depth);
        Ok(())
    }

    fn separate(&mut self, empty: &mut bool, depth: usize) {
        if !*empty {
            self.out.push_str(self.item);
        }
        *empty = false;
        self.line(depth);
    }

    fn close(&mut self, bracket: char, empty: bool, depth: usize) {
        if !empty {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for symbol in text.chars() {
            match symbol {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                ' '..='~' | '\u{fdd0}'..='\u{fdef}' => self.out.push(symbol),
                '\0'..='\u{1f}' => self.escape(symbol),
                _ if self.style.ensure_ascii => self.escape(symbol),
                _ => self.out.push(symbol),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, symbol: char) {
        for unit in symbol.encode_utf16(&mut [0; 2]) {
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

fn key_text(key: &Value) -> String {
    match key.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        _ => key.to_string(),
    }
}

/// Python's `repr` of a float: shortest digits that read back, scientific below 1e-4 and from 1e16.
fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{value}");
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelled_as_python_does() {
        // Expected: `repr(x)` of CPython 3.11.
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (1234567890123456.0, "1234567890123456.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e300, "1e+300"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (value, expected) in cases {
            assert_eq!(float_repr(value), expected);
        }
    }
}
