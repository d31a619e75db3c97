//! The code's shape, checked as a test: dependency arrows, sizes, bans, one place for names, a page per reason.
//!
//! Each rule names its replacement. Numbers that may only fall are ratchets: lower them when the code gets better.

use crate::root;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

mod arrows;
mod bans;
mod docs;
mod sizes;

/// A tracked source file.
struct Source {
    path: String,
    text: String,
}

/// Every Rust file of the workspace, generated ones excepted.
fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    walk(&root(), &mut found);
    found.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    assert!(found.len() > 20, "tidy sees the workspace");
    found.into_iter().map(|path| Source { path: relative(&path), text: read(&path) }).collect()
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> = fs::read_dir(dir).expect("readable").map(|entry| entry.expect("readable").path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if !matches!(name.as_str(), "target" | ".git" | "node_modules" | "__pycache__" | ".venv") {
                walk(&path, found);
            }
        } else {
            found.push(path);
        }
    }
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Whether a file holds only tests, so that limits on size and panics do not apply.
fn is_test(path: &str) -> bool {
    path.starts_with("tests/")
        || path.contains("/tests/")
        || path.ends_with("/tests.rs")
        || path.contains("/benches/")
        || path.contains("/examples/")
}

/// The part of a file before its inline test module.
fn before_tests(text: &str) -> &str {
    text.find("#[cfg(test)]\n").map_or(text, |at| &text[..at])
}

/// Fails with every finding at once.
fn report(rule: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{rule}\n{}", findings.join("\n"));
}

/// Crate folder → its manifest.
fn manifests() -> BTreeMap<String, toml::Table> {
    let workspace: toml::Table = read(&root().join("Cargo.toml")).parse().expect("valid TOML");
    let members = workspace["workspace"]["members"].as_array().expect("a list").clone();
    members
        .into_iter()
        .map(|member| {
            let name = member.as_str().expect("a path").to_owned();
            let manifest = read(&root().join(&name).join("Cargo.toml")).parse().expect("valid TOML");
            (name, manifest)
        })
        .collect()
}
