//! Documents that must follow the code.

use super::{read, report, walk};
use crate::root;
use kvasir_core::Reason;

#[test]
fn every_reason_has_a_page_that_agrees_with_it() {
    let mut findings = Vec::new();
    for reason in Reason::ALL {
        let path = root().join(format!("docs/errors/{}.md", reason.code()));
        if !path.exists() {
            findings.push(format!("docs/errors/{}.md is missing", reason.code()));
            continue;
        }
        let text = read(&path);
        let row = format!("| {} | {} ", reason.http_status(), reason.grpc_code());
        let retry = format!("| {} |\n", if reason.retryable() { "yes" } else { "no" });
        if !(text.starts_with(&format!("# `{}`\n", reason.code())) && text.contains(&row) && text.contains(&retry)) {
            findings.push(format!(
                "docs/errors/{}.md: title or table differs from core::Reason (`{row}…{}`)",
                reason.code(),
                retry.trim()
            ));
        }
    }
    report("error pages", &findings);
}

#[test]
fn no_page_describes_a_reason_that_is_gone() {
    let mut pages = Vec::new();
    walk(&root().join("docs/errors"), &mut pages);
    let findings: Vec<String> = pages
        .iter()
        .filter_map(|path| path.file_stem().map(|stem| stem.to_string_lossy().into_owned()))
        .filter(|stem| Reason::from_code(stem).is_none())
        .map(|stem| format!("docs/errors/{stem}.md: no such reason"))
        .collect();
    report("error pages", &findings);
}

#[test]
fn the_documents_that_people_need_are_there() {
    let findings: Vec<String> =
        ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "docs/roadmap.md", "docs/threat-model.md"]
            .into_iter()
            .filter(|path| !root().join(path).is_file())
            .map(|path| format!("{path} is missing"))
            .collect();
    report("documents", &findings);
}
