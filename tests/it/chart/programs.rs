//! What chart and images say to the programs is what the programs take.

use super::helm::{Helm, container_args, one};
use super::values_of;
use crate::root;
use clap::Parser as _;
use kvasir_cli::args::{Cli, Command, GenerateArgs};
use serde_json::Value;
use std::fs;

fn generate(objects: &[Value], name: &str) -> (GenerateArgs, Value) {
    let spec = &one(objects, "Pod", name)["spec"];
    let args = container_args(spec);
    let cli = Cli::try_parse_from(["kvasir".to_owned()].into_iter().chain(args)).unwrap_or_else(|error| panic!("{error}"));
    let Command::Generate(args) = cli.command else { panic!("the test runs another command") };
    (args, spec["containers"][0]["env"].clone())
}

#[test]
fn the_test_pod_asks_the_pools_router_for_at_least_one_token() {
    let Some(helm) = Helm::find() else { return };
    let (args, env) = generate(&helm.objects(&[]), "kvasir-generate");
    assert_eq!(args.url, "http://first-router.kvasir-system.svc:80");
    assert_eq!((args.model.as_deref(), args.min_tokens, args.timeout_seconds), (Some("smollm2"), 1, 120));
    assert!(args.max_tokens >= args.min_tokens && !args.prompt.is_empty());
    assert!(env.is_null(), "no key unless one is named");
    let full = values_of("full");
    let (args, env) = generate(&helm.objects(&["--values", full.to_str().unwrap()]), "serving-generate");
    assert_eq!(args.url, "http://shared-prompt-router.team-a.svc:80");
    assert_eq!(args.timeout_seconds, 300);
    assert_eq!(env[0]["name"], "KVASIR_API_KEY");
    assert_eq!(env[0]["valueFrom"]["secretKeyRef"], serde_json::json!({"name": "tenant-web", "key": "api-key"}));
    assert!(env[0].get("value").is_none() && env.as_array().unwrap().len() == 1, "a key never stands in the pod");
}

#[test]
fn the_key_that_the_test_shows_is_read_from_that_variable() {
    let command = <Cli as clap::CommandFactory>::command();
    let generate = command.find_subcommand("generate").unwrap();
    let key = generate.get_arguments().find(|arg| arg.get_id() == "key").unwrap();
    assert_eq!(key.get_env().unwrap(), "KVASIR_API_KEY");
    assert!(key.is_hide_env_values_set(), "help never shows it");
}

#[test]
fn every_image_holds_a_program_that_the_build_makes_and_runs_it_as_nobody() {
    let dockerfile = fs::read_to_string(root().join("deploy/Dockerfile")).unwrap();
    let mut targets = 0;
    for stage in dockerfile.split("\nFROM ").skip(1).filter(|stage| stage.starts_with("base AS ")) {
        targets += 1;
        let line =
            |word: &str| stage.lines().find_map(|line| line.strip_prefix(word)).unwrap_or_else(|| panic!("no {word}in {stage}"));
        let (from, to) = line("COPY --from=build ").split_once(' ').unwrap();
        assert_eq!(line("ENTRYPOINT "), format!("[\"{to}\"]"));
        let program = from.strip_prefix("/out/").unwrap();
        assert_eq!(to, format!("/usr/bin/{program}"));
        let built = dockerfile.lines().find(|line| line.contains("for program in ")).unwrap();
        assert!(built.split([' ', ';']).any(|word| word == program), "the build does not keep {program}");
    }
    assert_eq!(targets, 4);
    assert!(dockerfile.lines().any(|line| line == "USER 65532:65532"), "images have the chart's user");
}
