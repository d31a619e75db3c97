//! Programs from the Go module proxy. Their build folders hold a `go.mod` that is written here and go away after the build.

use super::{place, run};
use crate::Error;
use crate::args::KUBERNETES_VERSION;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The parts of Kubernetes' own repository that its module asks for as version 0.0.0: each has to be replaced by its published twin.
const STAGING: &[&str] = &[
    "api",
    "apiextensions-apiserver",
    "apimachinery",
    "apiserver",
    "cli-runtime",
    "client-go",
    "cloud-provider",
    "cluster-bootstrap",
    "code-generator",
    "component-base",
    "component-helpers",
    "controller-manager",
    "cri-api",
    "cri-client",
    "csi-translation-lib",
    "dynamic-resource-allocation",
    "endpointslice",
    "externaljwt",
    "kms",
    "kube-aggregator",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "metrics",
    "mount-utils",
    "pod-security-admission",
    "sample-apiserver",
    "sample-cli-plugin",
    "sample-controller",
];

/// Programs of one module.
pub(super) struct Build {
    name: &'static str,
    version: &'static str,
    go_mod: String,
    /// Completes `go.mod` and `go.sum`.
    resolve: Vec<String>,
    ldflags: String,
    /// Program → package.
    programs: Vec<(String, String)>,
}

/// These programs of Kubernetes.
pub(super) fn kubernetes(programs: &[&str]) -> Build {
    let package = |name: &str| format!("k8s.io/kubernetes/cmd/{name}");
    let staging = KUBERNETES_VERSION.replacen("v1.", "v0.", 1);
    let mut go_mod =
        format!("module kvasir.dev/kubernetes\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes {KUBERNETES_VERSION}\n\ntool (\n");
    go_mod.extend(super::KUBERNETES.iter().map(|name| format!("\t{}\n", package(name))));
    go_mod.push_str(")\n\nreplace (\n");
    go_mod.extend(STAGING.iter().map(|name| format!("\tk8s.io/{name} => k8s.io/{name} {staging}\n")));
    go_mod.push_str(")\n");
    let mut numbers = KUBERNETES_VERSION.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    // Without them the programs call themselves v0.0.0, and clients and the API server judge compatibility by that.
    let versions = ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"]
        .map(|at| format!("-X {at}.gitVersion={KUBERNETES_VERSION} -X {at}.gitMajor={major} -X {at}.gitMinor={minor}"))
        .join(" ");
    Build {
        name: "kubernetes",
        version: KUBERNETES_VERSION,
        go_mod,
        resolve: ["mod", "tidy"].map(str::to_owned).into(),
        ldflags: format!("-s -w {versions}"),
        programs: programs.iter().map(|name| ((*name).to_owned(), package(name))).collect(),
    }
}

/// helm.
pub(super) fn helm() -> Build {
    let (version, package) = (super::HELM_VERSION, "helm.sh/helm/v4/cmd/helm");
    Build {
        name: "helm",
        version,
        go_mod: "module kvasir.dev/helm\n\ngo 1.24.0\n".to_owned(),
        resolve: vec!["get".to_owned(), "-tool".to_owned(), format!("{package}@{version}")],
        ldflags: "-s -w".to_owned(),
        programs: vec![("helm".to_owned(), package.to_owned())],
    }
}

/// Builds what the cache lacks and gives name and place of each program.
pub(super) fn ensure(cache: &Path, build: &Build, say: &dyn Fn(&str)) -> Result<Vec<(String, PathBuf)>, Error> {
    let placed = |name: &str| cache.join(format!("bin/{name}-{}", build.version));
    let missing: Vec<_> = build.programs.iter().filter(|(name, _)| !placed(name).exists()).collect();
    if !missing.is_empty() {
        let names: Vec<&str> = missing.iter().map(|(name, _)| name.as_str()).collect();
        say(&format!("building {} {} with Go, once; this takes minutes", names.join(", "), build.version));
        let dir = cache.join(format!("build-{}", build.name));
        fs::create_dir_all(dir.join("out")).map_err(Error::io("create", &dir))?;
        fs::write(dir.join("go.mod"), &build.go_mod).map_err(Error::io("write", &dir.join("go.mod")))?;
        go(&dir, &build.resolve.iter().map(String::as_str).collect::<Vec<_>>())?;
        let mut args = vec!["build", "-trimpath", "-ldflags", &build.ldflags, "-o", "out/"];
        args.extend(missing.iter().map(|(_, package)| package.as_str()));
        go(&dir, &args)?;
        for name in names {
            place(&dir.join("out").join(name), &placed(name))?;
        }
        // It holds copies of the binaries and is never used again.
        let _kept_on_failure = fs::remove_dir_all(dir);
    }
    Ok(build.programs.iter().map(|(name, _)| (name.clone(), placed(name))).collect())
}

fn go(dir: &Path, args: &[&str]) -> Result<(), Error> {
    let mut command = Command::new("go");
    command.args(args).current_dir(dir).env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=mod");
    run(&mut command, "install Go 1.24 or newer")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_staging_module_is_replaced_by_the_release_that_fits() {
        let build = kubernetes(&["kubelet"]);
        assert_eq!(build.go_mod.matches("=>").count(), 31);
        assert!(build.go_mod.contains("\tk8s.io/api => k8s.io/api v0.34.4\n"), "{}", build.go_mod);
        assert_eq!(build.programs, [("kubelet".to_owned(), "k8s.io/kubernetes/cmd/kubelet".to_owned())]);
        assert!(build.ldflags.contains("-X k8s.io/component-base/version.gitMinor=34"), "{}", build.ldflags);
    }

    #[test]
    fn what_the_cache_holds_is_not_built_again() {
        let cache = tempfile::tempdir().unwrap();
        fs::create_dir(cache.path().join("bin")).unwrap();
        let placed = cache.path().join(format!("bin/helm-{}", super::super::HELM_VERSION));
        fs::write(&placed, "").unwrap();
        let found = ensure(cache.path(), &helm(), &|step| panic!("{step}")).unwrap();
        assert_eq!(found, [("helm".to_owned(), placed)]);
    }
}
