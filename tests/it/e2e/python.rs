//! Real Python clients against the real model.

use super::support::{program, smollm2, with_fleet};
use std::path::Path;
use std::process::Command;

fn script(name: &str) -> String {
    format!("py/{name}")
}

async fn run(mut command: Command) {
    let shown = format!("{command:?}");
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{shown}\n{out}\n{err}");
    assert!(out.matches("ok test_").count() >= 6, "the script ran its tests:\n{out}");
}

#[test]
fn the_openai_sdk_and_a_python_grpc_client_get_what_they_expect() {
    let Some(python) = program("KVASIR_TEST_PYTHON", "the Python clients") else { return };
    let state = tempfile::tempdir().unwrap();
    with_fleet(&smollm2(2, state.path()), state.path(), |fleet| async move {
        let mut sdk = Command::new(&python);
        sdk.arg(script("openai_sdk.py")).arg(format!("http://{}", fleet.http())).arg(fleet.model());
        run(sdk).await;
        let protos = Path::new("../proto");
        let mut grpc = Command::new(&python);
        grpc.arg(script("grpc_client.py")).arg(fleet.grpc().to_string()).arg(fleet.model()).arg(protos);
        run(grpc).await;
    });
}
