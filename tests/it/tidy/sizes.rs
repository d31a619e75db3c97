//! Files and functions stay readable. The lists below are ratchets: entries may shrink or go, new ones need a reason in review.

use super::{before_tests, is_test, report, sources};

/// Hard limit of a file before its tests.
const FILE_LINES_MAX: usize = 800;
/// Hard limit of a function.
const FUNCTION_LINES_MAX: usize = 110;
/// A function longer than this is counted by the ratchet.
const FUNCTION_LINES_AIM: usize = 70;
/// How many functions are over the aim today; may only fall.
const FUNCTIONS_OVER_AIM: usize = 12;

#[test]
fn files_stay_under_their_limit() {
    let findings: Vec<String> = sources()
        .into_iter()
        .filter(|source| !is_test(&source.path))
        .map(|source| (before_tests(&source.text).lines().count(), source.path))
        .filter(|(lines, _)| *lines > FILE_LINES_MAX)
        .map(|(lines, path)| format!("{path}: {lines} lines; split it by what it owns (limit {FILE_LINES_MAX}, aim 400)"))
        .collect();
    report("file sizes", &findings);
}

#[test]
fn functions_stay_under_their_limit() {
    let mut over_limit = Vec::new();
    let mut over_aim = Vec::new();
    for source in sources().into_iter().filter(|source| !is_test(&source.path)) {
        for (name, line, lines) in functions(before_tests(&source.text)) {
            if lines > FUNCTION_LINES_MAX {
                over_limit.push(format!("{}:{line}: `{name}` has {lines} lines (limit {FUNCTION_LINES_MAX})", source.path));
            } else if lines > FUNCTION_LINES_AIM {
                over_aim.push(format!("{}:{line}: `{name}` has {lines} lines", source.path));
            }
        }
    }
    report("function sizes", &over_limit);
    assert!(
        over_aim.len() <= FUNCTIONS_OVER_AIM,
        "{} functions are over {FUNCTION_LINES_AIM} lines, the ratchet allows {FUNCTIONS_OVER_AIM}:\n{}",
        over_aim.len(),
        over_aim.join("\n")
    );
}

/// (name, first line, lines) of each function, by indentation: rustfmt closes a function at the column where it began.
fn functions(text: &str) -> Vec<(String, usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let trimmed = line.trim_start();
        let Some(at) = trimmed.find("fn ") else { continue };
        let head = &trimmed[..at];
        let is_function = head
            .split_whitespace()
            .all(|word| matches!(word, "pub" | "const" | "async" | "unsafe" | "extern") || word.starts_with("pub("));
        if !is_function || trimmed.trim_end().ends_with(';') {
            continue;
        }
        let indent = line.len() - trimmed.len();
        let close = format!("{}}}", " ".repeat(indent));
        let end = lines[start..].iter().position(|line| *line == close).map_or(start, |offset| start + offset);
        let name: String = trimmed[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        found.push((name, start + 1, end - start + 1));
    }
    found
}

#[test]
fn the_function_finder_sees_what_it_should() {
    let text = "pub fn one() {\n    x();\n}\nimpl A {\n    pub(crate) async fn two(&self) {\n        y();\n        z();\n    }\n}\nfn decl();\n";
    assert_eq!(functions(text), [("one".to_owned(), 1, 3), ("two".to_owned(), 5, 4)]);
}
