//! Two tenants on one fleet, by their keys.

use super::support::{tiny, with_fleet};
use kvasir_cli::client::Client;
use serde_json::json;
use std::fmt::Write as _;

/// `printf 'key-a' | sha256sum` and the same for `key-b`.
const KEY_A: &str = "a7b1f0b8d5bd6ac5ff2dd2d0a0b0a06e";

#[test]
fn a_tenant_finds_nothing_of_anothers_prompt_and_a_salt_narrows() {
    let state = tempfile::tempdir().unwrap();
    let mut args = tiny(1, state.path());
    let mut file = String::new();
    for (name, key) in [("team-a", format!("{KEY_A}-a")), ("team-b", format!("{KEY_A}-b"))] {
        writeln!(file, "[[tenant]]\nname = \"{name}\"\nkey_sha256 = [\"{}\"]\n", sha256_hex(&key)).unwrap();
    }
    let path = state.path().join("tenants.toml");
    std::fs::write(&path, file).unwrap();
    args.tenants = Some(path);
    with_fleet(&args, state.path(), |fleet| async move {
        let base = format!("http://{}", fleet.http());
        let a = Client::new(&base, Some(format!("{KEY_A}-a"))).unwrap();
        let b = Client::new(&base, Some(format!("{KEY_A}-b"))).unwrap();
        let tokens: Vec<u32> = (0..200).map(|i| i % 250).collect();
        let body = |salt: Option<&str>| {
            let mut body = json!({"model": fleet.model(), "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": true, "kvasir": {"report": true}});
            if let Some(salt) = salt {
                body["cache_salt"] = salt.into();
            }
            body
        };
        let cold = a.complete(body(None), |_| ()).await.unwrap();
        let warm = a.complete(body(None), |_| ()).await.unwrap();
        assert_eq!((cold.cached_tokens(), warm.cached_tokens()), (0, 192), "the tenant's own prompt hits");
        let other = b.complete(body(None), |_| ()).await.unwrap();
        assert_eq!(other.cached_tokens(), 0);
        assert_eq!(other.report["miss_reason"], "cold", "and nothing says that someone else sent it");
        let salted = a.complete(body(Some("s")), |_| ()).await.unwrap();
        assert_eq!(salted.cached_tokens(), 0);
        assert_eq!(cold.text, warm.text);
        assert_eq!(cold.text, other.text);
        let stranger = Client::new(&base, Some("wrong".into())).unwrap().complete(body(None), |_| ()).await;
        assert!(stranger.unwrap_err().to_string().contains("401"));
        let nobody = Client::new(&base, None).unwrap().complete(body(None), |_| ()).await;
        assert!(nobody.unwrap_err().to_string().contains("401"));
    });
}

fn sha256_hex(text: &str) -> String {
    use sha2::Digest as _;
    hex::encode(sha2::Sha256::digest(text.as_bytes()))
}
