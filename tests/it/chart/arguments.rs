//! Arguments: what chart and operator write into pods, read by the programs that start there. An unknown flag would be a crash loop in every
//! cluster and red in no test of one crate.

use super::examples::{EXAMPLES, pool};
use super::helm::{Helm, chart, container_args, one};
use clap::{Command, CommandFactory as _};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kvasir_operator::api::ServingPool;
use kvasir_operator::args::{Abilities, Args};
use kvasir_operator::build::{Builder, Seed};
use kvasir_operator::design::{Blueprint as _, Design, Found};
use kvasir_operator::validate;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A program's own reading of what stands in a pod.
fn read<A: clap::Parser>(args: &[String]) -> A {
    A::try_parse_from([String::new()].iter().chain(args)).unwrap_or_else(|error| panic!("{args:?}: {error}"))
}

/// Variables as the flags that stand for them.
fn flags(command: &Command, variables: &Value) -> Vec<String> {
    let flag = |(name, value): (&String, &Value)| {
        let of = command.get_arguments().find(|arg| arg.get_env().is_some_and(|env| env == name.as_str()));
        let long = of.and_then(|arg| arg.get_long()).unwrap_or_else(|| panic!("the program reads no variable {name}"));
        format!("--{long}={}", value.as_str().unwrap())
    };
    variables.as_object().unwrap().iter().map(flag).collect()
}

fn operator(helm: &Helm, more: &[&str], name: &str) -> Args {
    read(&container_args(&one(&helm.objects(more), "Deployment", name)["spec"]["template"]["spec"]))
}

#[test]
fn the_operator_takes_the_arguments_of_every_value_set() {
    let Some(helm) = Helm::find() else { return };
    let mut sets = 0;
    for entry in std::fs::read_dir(chart().join("tests/values")).unwrap() {
        let file = entry.unwrap().path();
        let objects = helm.objects(&["--values", file.to_str().unwrap()]);
        let is_operator = |it: &&Value| it["spec"]["template"]["spec"]["containers"][0]["name"] == "operator";
        let deployments = objects.iter().filter(|it| it["kind"] == "Deployment").filter(is_operator);
        for deployment in deployments {
            let args: Args = read(&container_args(&deployment["spec"]["template"]["spec"]));
            args.lead("me").unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            sets += 1;
        }
    }
    assert!(sets >= 3, "{sets} value sets have an operator");
}

#[test]
fn what_the_chart_is_told_reaches_the_operator() {
    let Some(helm) = Helm::find() else { return };
    let args = operator(&helm, &["--set", "scope=Namespace", "--set", "images.pullPolicy=Never"], "kvasir-operator");
    assert_eq!(args.namespace.as_deref(), Some("kvasir-system"));
    let settings = args.settings(Abilities { service_monitors: false, image_volumes: false });
    assert_eq!(settings.pull_policy, kvasir_operator::api::PullPolicy::Never);
    assert!(settings.worker_image.contains("worker") && settings.router_image.contains("router"), "{settings:?}");
    assert_eq!(operator(&helm, &[], "kvasir-operator").namespace, None);
}

/// Everything that a pool names.
fn found(pool: &ServingPool) -> Found {
    let mut secrets: BTreeMap<String, Arc<Secret>> = BTreeMap::new();
    for tenant in &pool.spec.tenants {
        let reference = &tenant.key_secret_ref;
        let value = ByteString(format!("sk-of-{}-0123456789", tenant.name).into_bytes());
        let secret = secrets.entry(reference.name.clone()).or_default();
        Arc::make_mut(secret).data.get_or_insert_default().insert(reference.key.clone(), value);
    }
    let prefixes = pool.spec.prefix_cache.shared_prefixes.iter().map(|prefix| {
        let data = [(prefix.config_map_ref.key.clone(), "text".to_owned())];
        (prefix.config_map_ref.name.clone(), Arc::new(ConfigMap { data: Some(data.into()), ..ConfigMap::default() }))
    });
    Found { secrets, config_maps: prefixes.collect() }
}

fn design(helm: &Helm, file: &str) -> Design {
    let args = operator(helm, &[], "kvasir-operator");
    let settings = args.settings(Abilities { service_monitors: false, image_volumes: true });
    let (_, mut pool) = pool(helm, file);
    pool.metadata.namespace.get_or_insert_with(|| "team-a".to_owned());
    pool.metadata.uid = Some("0c3a7c0e-0000-4000-8000-000000000001".to_owned());
    validate::read(&pool, &settings).unwrap_or_else(|faults| panic!("{file}: {faults:?}"));
    let builder = Builder::new(settings, Seed::random().unwrap());
    builder.design(&pool, &found(&pool)).unwrap_or_else(|faults| panic!("{file}: {faults:?}"))
}

#[test]
fn workers_and_routers_take_what_the_operator_writes_for_every_example() {
    let Some(helm) = Helm::find() else { return };
    for (file, name) in EXAMPLES {
        let design = design(&helm, file);
        let drafts = design.drafts.as_ref().map(|(template, _)| template);
        for template in [Some(&design.workers), design.without_draft.as_ref(), drafts].into_iter().flatten() {
            let args: kvasir_worker::args::Args = read(&container_args(&template.body["spec"]));
            assert!(args.served_name.is_some_and(|name| !name.is_empty()), "{file}");
        }
        let map = design.objects.iter().find(|it| it.name == format!("{name}-router-flags")).unwrap();
        let command = kvasir_router::args::Args::command();
        let _: kvasir_router::args::Args = read(&flags(&command, &map.body["data"]));
    }
}
