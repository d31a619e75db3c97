//! Reads a JSON object member by member and names the one at fault.
//!
//! Owns the wording of type errors. `null` means absent, as the OpenAI API has it. What nobody took is unknown, and [`Fields::finish`]
//! refuses it: a misspelt member never silently changes nothing.

use crate::params::quoted;
use kvasir_core::Error;
use serde_json::{Map, Value};

/// The members of one JSON object that were not read yet.
pub(crate) struct Fields {
    path: String,
    members: Map<String, Value>,
}

/// Name of a JSON value's type, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a fraction",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A type error.
pub(crate) fn wrong(field: &str, value: &Value, wanted: &str) -> Error {
    Error::invalid(field, format!("`{field}` is {}; give {wanted}", kind(value)))
}

/// Reads an integer that may be written as `3` or `3.0`.
pub(crate) fn integer(field: &str, value: &Value) -> Result<i64, Error> {
    let exact = |number: f64| (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64);
    let found = match value {
        Value::Number(number) => number.as_i64().or_else(|| number.as_f64().and_then(exact)),
        _ => None,
    };
    found.ok_or_else(|| match value {
        Value::Number(number) => {
            Error::invalid(field, format!("`{field}` = {number} is not an integer that fits; give an integer"))
        }
        other => wrong(field, other, "an integer"),
    })
}

// === impl Fields ===

impl Fields {
    /// Starts on a value that has to be an object; `path` is empty for the body.
    pub(crate) fn new(path: &str, value: Value) -> Result<Self, Error> {
        match value {
            Value::Object(members) => Ok(Self { path: path.to_owned(), members }),
            other if path.is_empty() => {
                Err(Error::invalid("body", format!("the body is {}; give one JSON object", kind(&other))))
            }
            other => Err(wrong(path, &other, "an object")),
        }
    }

    /// Full name of a member.
    pub(crate) fn name(&self, member: &str) -> String {
        if self.path.is_empty() { member.to_owned() } else { format!("{}.{member}", self.path) }
    }

    /// Takes a member out; `None` when it is absent or null.
    pub(crate) fn take(&mut self, member: &str) -> Option<Value> {
        // Order of what is left matters to nobody but the message about the first unknown member.
        self.members.shift_remove(member).filter(|value| !value.is_null())
    }

    /// Takes a boolean.
    pub(crate) fn boolean(&mut self, member: &str) -> Result<Option<bool>, Error> {
        let Some(value) = self.take(member) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| wrong(&self.name(member), &value, "true or false"))
    }

    /// Takes an integer.
    pub(crate) fn integer(&mut self, member: &str) -> Result<Option<i64>, Error> {
        let Some(value) = self.take(member) else { return Ok(None) };
        integer(&self.name(member), &value).map(Some)
    }

    /// Takes a number.
    pub(crate) fn number(&mut self, member: &str) -> Result<Option<f64>, Error> {
        let Some(value) = self.take(member) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| wrong(&self.name(member), &value, "a number"))
    }

    /// Takes a string.
    pub(crate) fn string(&mut self, member: &str) -> Result<Option<String>, Error> {
        match self.take(member) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.name(member), &other, "a string")),
        }
    }

    /// Takes an array.
    pub(crate) fn array(&mut self, member: &str) -> Result<Option<Vec<Value>>, Error> {
        match self.take(member) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.name(member), &other, "an array")),
        }
    }

    /// Takes an object.
    pub(crate) fn object(&mut self, member: &str) -> Result<Option<Self>, Error> {
        let name = self.name(member);
        self.take(member).map(|value| Self::new(&name, value)).transpose()
    }

    /// Drops members that change nothing here.
    pub(crate) fn ignore(&mut self, members: &[&str]) {
        for member in members {
            self.members.shift_remove(*member);
        }
    }

    /// Refuses members that are part of the API, would change the output, and are not served; null is as good as absent.
    pub(crate) fn refuse(&mut self, members: &[(&str, &str)]) -> Result<(), Error> {
        for (member, hint) in members {
            if self.take(member).is_some() {
                let name = self.name(member);
                return Err(Error::invalid(&name, format!("`{name}` is not supported; {hint}")));
            }
        }
        Ok(())
    }

    /// Refuses whatever was not taken.
    pub(crate) fn finish(self) -> Result<(), Error> {
        match self.members.keys().next() {
            None => Ok(()),
            Some(member) => {
                let name = self.name(member);
                let shown = quoted(&name);
                Err(Error::invalid(
                    quoted_field(&name),
                    format!("the member {shown} is unknown; check its spelling or remove it"),
                ))
            }
        }
    }
}

/// The name of a member as a field, cut when it is absurdly long.
fn quoted_field(name: &str) -> String {
    const FIELD_MAX: usize = 80;
    name.chars().take(FIELD_MAX).collect()
}
