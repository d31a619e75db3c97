//! Things that may not be written, each with what to write instead.

use super::{before_tests, is_test, report, sources, walk};
use crate::root;

/// Pattern, where it is allowed (path fragments), what to do instead.
const BANS: &[(&str, &[&str], &str)] = &[
    (
        "std::env::var",
        &["xtask/", "tests/", "build.rs", "cli/src/bench/"],
        "read the environment with clap in args.rs and pass settings",
    ),
    ("#[ignore", &[], "put a long loop under `cargo xtask soak`, or make the test fast"),
    ("\"kvasir_", &["telemetry/src/", "tests/", "/tests.rs"], "use the constant in telemetry/src/names.rs"),
    ("std::process::exit", &["/src/main.rs", "/src/bin/", "xtask/"], "return an error to main"),
    (
        "println!",
        &["/src/main.rs", "/src/bin/", "cli/", "xtask/", "build.rs", "/examples/", "tests/"],
        "log with tracing; only programs print",
    ),
    (
        "SystemTime::now",
        &[
            "telemetry/",
            "cli/",
            "xtask/",
            "tests/",
            "model/src/fetch",
            "model/src/template",
            "door/",
            "router/",
            "worker/src/service",
        ],
        "decisions use an injected monotonic clock",
    ),
];

/// Module names that say nothing.
const NAMELESS: &[&str] = &["utils", "util", "common", "helpers", "helper", "manager", "misc"];

#[test]
fn banned_words_are_not_written() {
    let mut findings = Vec::new();
    for source in sources() {
        if source.path.starts_with("tests/it/tidy") {
            continue;
        }
        let text = before_tests(&source.text);
        for (pattern, allowed, instead) in BANS {
            if is_test(&source.path) && *pattern != "#[ignore" || allowed.iter().any(|place| source.path.contains(place)) {
                continue;
            }
            for (number, line) in text.lines().enumerate() {
                if line.contains(pattern) && !line.trim_start().starts_with("//") {
                    findings.push(format!("{}:{}: `{pattern}`: {instead}", source.path, number + 1));
                }
            }
        }
    }
    report("bans", &findings);
}

/// The gate runs tests on clusters in a stage of their own, chosen by a part of their names. Another test with that part would run in neither stage.
#[test]
fn only_the_tests_on_clusters_have_cluster_in_their_path() {
    let findings: Vec<String> = sources()
        .into_iter()
        .filter(|source| !source.path.starts_with("tests/it/"))
        .filter(|source| source.path.ends_with("/cluster.rs") || source.path.contains("/cluster/"))
        .filter(|source| source.text.contains("#[test]") || source.text.contains("#[tokio::test"))
        .map(|source| {
            format!("{}: the stage `tests` leaves out what has `cluster::` in its path; name the module otherwise", source.path)
        })
        .collect();
    report("cluster", &findings);
}

#[test]
fn unsafe_code_stays_in_its_two_homes() {
    let findings: Vec<String> = sources()
        .into_iter()
        .filter(|source| {
            !source.path.starts_with("kernels/")
                && source.path != "model/src/mmap.rs"
                && !source.path.starts_with("tests/it/tidy")
        })
        .filter(|source| source.text.lines().any(|line| line.contains("unsafe ") && !line.trim_start().starts_with("//")))
        .map(|source| format!("{}: `unsafe` belongs into kernels/ or model/src/mmap.rs", source.path))
        .collect();
    report("unsafe", &findings);
}

#[test]
fn modules_have_names_that_say_something() {
    let findings: Vec<String> = sources()
        .into_iter()
        .filter(|source| {
            let stem = source.path.rsplit('/').next().unwrap_or_default().trim_end_matches(".rs");
            NAMELESS.contains(&stem)
        })
        .map(|source| format!("{}: name the noun that the module owns", source.path))
        .collect();
    report("module names", &findings);
}

#[test]
fn every_file_begins_with_its_purpose() {
    let findings: Vec<String> = sources()
        .into_iter()
        .filter(|source| {
            !source.path.ends_with("/tests.rs")
                && !source.path.contains("/tests/")
                && !source.text.starts_with("//!")
                && !source.text.starts_with("#![")
        })
        .map(|source| format!("{}: the first line is a module doc: what it owns, what it refuses to know", source.path))
        .collect();
    report("module docs", &findings);
}

#[test]
fn no_large_or_binary_file_is_tracked() {
    let mut files = Vec::new();
    walk(&root(), &mut files);
    let findings: Vec<String> = files
        .into_iter()
        .filter(|path| path.metadata().is_ok_and(|meta| meta.len() > 1 << 20))
        .map(|path| format!("{}: over 1 MiB; weights and tools are fetched into the cache by digest", path.display()))
        .collect();
    report("large files", &findings);
}
