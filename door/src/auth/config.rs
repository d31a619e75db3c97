//! The tenants file: TOML that names tenants and the SHA-256 of their keys.
//!
//! ```toml
//! [[tenant]]
//! name = "team-a"
//! key_sha256 = ["<64 hexadecimal digits>"]   # one or several
//! weight = 2            # share under load, 1 to 1000; 1 if absent
//! priority = 0          # -100 to 100; 0 if absent
//! priority_max = 10     # highest `kvasir.priority` of its requests; 0 if absent
//! cache_epoch = 0       # raise it to make everything that is cached for the tenant unreachable
//! ```
//!
//! Two files without tenants are meant: `tenant = []` lets nobody in, and `open = true` lets everyone in as the tenant `default`. Neither can come
//! about by leaving something out.
//!
//! Errors name the place and never what stands there: someone may have pasted a key.

use super::{Entry, Scope, Tenant, TenantTable};
use crate::params::PRIORITY_MAX;
use kvasir_core::{Digest, PoolSecret, SharedDomain, TenantTag};
use serde::Deserialize;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Longest tenant name, in bytes; it becomes a metric label.
const NAME_BYTES_MAX: usize = 63;

/// Largest weight.
const WEIGHT_MAX: u32 = 1000;

/// Who may reuse whose state.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Isolation {
    /// Each tenant has a domain of its own.
    #[default]
    PerTenant,
    /// All tenants of the pool share one domain; the string is the pool's uid.
    Pool(String),
}

/// Why a tenants file was refused.
#[derive(Debug, thiserror::Error)]
pub enum TenantFileError {
    /// Not the TOML that is expected.
    #[error("the tenants file is not valid, line {line}: {problem}")]
    Syntax {
        /// Counted from 1.
        line: usize,
        /// What is wrong, without what stands there.
        problem: String,
    },
    /// No tenant in it.
    #[error(
        "the tenants file lists no tenant; add one `[[tenant]]`, write `tenant = []` to refuse everyone, or `open = true` for one open tenant"
    )]
    Empty,
    /// Open to everyone, and yet with keys.
    #[error("the tenants file says `open = true` and lists tenants; remove one of them")]
    OpenWithTenants,
    /// More keys than one table holds.
    #[error("the tenants file lists more than {max} keys; remove some", max = TenantTable::KEYS_MAX)]
    TooManyKeys,
    /// A name that cannot be a tenant's.
    #[error(
        "tenant {number} of the file: a name of {len} characters is not 1 to {NAME_BYTES_MAX} characters out of a-z, A-Z, 0-9, '-', '_', '.'"
    )]
    Name {
        /// Counted from 1, in the order of the file.
        number: usize,
        /// Length of what was written.
        len: usize,
    },
    /// A name that is used twice.
    #[error("tenant {0:?} is listed twice; give each tenant one entry with several keys")]
    DuplicateName(String),
    /// A key digest that is not one.
    #[error("tenant {tenant:?}: a key_sha256 of {len} characters is not 64 hexadecimal digits; use `printf %s KEY | sha256sum`")]
    KeyDigest {
        /// Whose.
        tenant: String,
        /// Length of what was written.
        len: usize,
    },
    /// A tenant that nobody can be.
    #[error("tenant {0:?} has no key_sha256; list at least one")]
    NoKey(String),
    /// One key for two tenants.
    #[error("tenant {0:?} lists a key that is already listed; a key belongs to one tenant, once")]
    DuplicateKey(String),
    /// A number out of range.
    #[error("tenant {tenant:?}: {field} = {value} is not between {min} and {max}")]
    Range {
        /// Whose.
        tenant: String,
        /// Which.
        field: &'static str,
        /// What was written.
        value: i64,
        /// Smallest.
        min: i64,
        /// Largest.
        max: i64,
    },
    /// The system gives no random bytes.
    #[error("the system's random source failed: {0}")]
    Random(getrandom::Error),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    open: bool,
    tenant: Option<Vec<FileTenant>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTenant {
    name: String,
    key_sha256: OneOrMany,
    #[serde(default = "one")]
    weight: i64,
    #[serde(default)]
    priority: i64,
    #[serde(default)]
    priority_max: i64,
    #[serde(default)]
    cache_epoch: u64,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

fn one() -> i64 {
    1
}

/// The place and kind of a mistake. The parser's own text shows the line, and a value of the wrong type is quoted in its message.
fn syntax(text: &str, error: &toml::de::Error) -> TenantFileError {
    let at = error.span().map_or(0, |span| span.start);
    let line = 1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count();
    let message = error.message();
    let quotes = message.starts_with("invalid type") || message.starts_with("invalid value");
    let problem = if quotes {
        "a value of the wrong type or out of range".to_owned()
    } else if message.starts_with("unknown field") && !message.split('`').nth(1).is_some_and(is_field_like) {
        "an unknown field; the fields of a tenant are name, key_sha256, weight, priority, priority_max and cache_epoch".to_owned()
    } else {
        message.to_owned()
    };
    TenantFileError::Syntax { line, problem }
}

fn check_name(number: usize, name: &str) -> Result<(), TenantFileError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(plain) {
        return Err(TenantFileError::Name { number, len: name.chars().count() });
    }
    Ok(())
}

/// Whether a text is spelled as fields are, so that it may be repeated: a slip of the pen is, a key is not.
fn is_field_like(text: &str) -> bool {
    const FIELD_BYTES_MAX: usize = 16;
    text.len() <= FIELD_BYTES_MAX && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
}

// === impl TenantTable ===

impl TenantTable {
    /// Reads a tenants file. Nothing of a file with an error is used.
    pub fn parse(text: &str, secret: &PoolSecret, isolation: &Isolation) -> Result<Self, TenantFileError> {
        let file: File = toml::from_str(text).map_err(|error| syntax(text, &error))?;
        let entries = match (file.open, file.tenant) {
            (true, None) => return Ok(Self::open(secret.clone())),
            (true, Some(_)) => return Err(TenantFileError::OpenWithTenants),
            (false, None) => return Err(TenantFileError::Empty),
            (false, Some(entries)) => entries,
        };
        let shared = match isolation {
            Isolation::PerTenant => None,
            Isolation::Pool(uid) => Some(SharedDomain::derive(secret, uid)),
        };
        let scope = Arc::new(Scope { secret: secret.clone(), shared });
        let mut lookup_key = [0u8; 32];
        getrandom::fill(&mut lookup_key).map_err(TenantFileError::Random)?;
        let mut table = Self { awaited: false, open: None, by_key: HashMap::new(), lookup_key, tenants: Vec::new() };
        let mut names = HashSet::with_capacity(entries.len());
        for (index, entry) in entries.into_iter().enumerate() {
            check_name(index + 1, &entry.name)?;
            if !names.insert(entry.name.clone()) {
                return Err(TenantFileError::DuplicateName(entry.name));
            }
            table.add(entry, &scope)?;
        }
        Ok(table)
    }

    fn add(&mut self, entry: FileTenant, scope: &Arc<Scope>) -> Result<(), TenantFileError> {
        let name = entry.name;
        let in_range = |field, value: i64, min: i64, max: i64| {
            if (min..=max).contains(&value) {
                Ok(value)
            } else {
                Err(TenantFileError::Range { tenant: name.clone(), field, value, min, max })
            }
        };
        let priority_bound = i64::from(PRIORITY_MAX);
        let tenant = Arc::new(Tenant {
            tag: TenantTag(name.as_str().into()),
            weight: in_range("weight", entry.weight, 1, i64::from(WEIGHT_MAX))? as u32,
            priority: in_range("priority", entry.priority, -priority_bound, priority_bound)? as i32,
            priority_max: in_range("priority_max", entry.priority_max, 0, priority_bound)? as i32,
            cache_epoch: entry.cache_epoch,
            scope: scope.clone(),
        });
        let keys = match entry.key_sha256 {
            OneOrMany::One(key) => vec![key],
            OneOrMany::Many(keys) => keys,
        };
        if keys.is_empty() {
            return Err(TenantFileError::NoKey(name));
        }
        for key in keys {
            let digest = Digest::from_hex(key.trim())
                .ok_or_else(|| TenantFileError::KeyDigest { tenant: name.clone(), len: key.trim().chars().count() })?;
            let slot = self.lookup(digest.as_bytes());
            let entry = Entry { key_sha256: *digest.as_bytes(), tenant: tenant.clone() };
            if self.by_key.insert(slot, entry).is_some() {
                return Err(TenantFileError::DuplicateKey(name));
            }
            if self.by_key.len() > Self::KEYS_MAX {
                return Err(TenantFileError::TooManyKeys);
            }
        }
        self.tenants.push(tenant);
        Ok(())
    }
}
