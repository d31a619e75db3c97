//! Tenants: who is let in, as whom, and where each key is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use super::*;
use crate::DoorSettings;
use crate::testing::{MODEL, Rig, Scripted, call, model, rig_with, secret, speak};
use axum::body::Body;
use http::Request as HttpRequest;
use kvasir_core::FinishReason;
use proptest::prelude::*;

fn sha256_hex(key: &str) -> String {
    hex::encode(Sha256::digest(key))
}

fn file() -> String {
    let (a, b, c) = (sha256_hex("key-a"), sha256_hex("key-b"), sha256_hex("key-c"));
    format!(
        "[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{a}\", \"{b}\"]\nweight = 3\n\n[[tenant]]\nname = \"c\"\nkey_sha256 = \"{c}\"\n"
    )
}

fn table() -> TenantTable {
    TenantTable::parse(&file(), &secret(), &Isolation::PerTenant).unwrap()
}

fn guarded() -> Rig {
    let serve = Scripted::new(vec![model(MODEL)], speak(&["hi"], FinishReason::Stop));
    rig_with(serve, table(), DoorSettings::default())
}

#[test]
fn each_key_finds_its_tenant_and_no_other_does() {
    let table = table();
    let find = |header: &str| table.authenticate(Some(header.as_bytes())).map(|tenant| tenant.tag().0.to_string());
    assert_eq!(find("Bearer key-a").unwrap(), "a");
    assert_eq!(find("bearer  key-b").unwrap(), "a");
    assert_eq!(find("Bearer key-c").unwrap(), "c");
    for wrong in ["", "Bearer", "Bearer ", "Basic key-a", "key-a", "Bearer key-d", "Bearer key-a2", "Bearer KEY-A"] {
        assert_eq!(find(wrong).unwrap_err().reason, Reason::Unauthenticated, "{wrong:?}");
    }
    assert_eq!(find(&format!("Bearer {}", sha256_hex("key-a"))).unwrap_err().reason, Reason::Unauthenticated);
    assert_eq!(table.authenticate(None).unwrap_err().reason, Reason::Unauthenticated);
    assert_eq!(table.tenants()[0].weight, 3);
    assert!(!table.is_open());
}

#[test]
fn domains_differ_by_tenant_epoch_and_salt_and_are_shared_only_by_choice() {
    let table = table();
    let (a, c) = (table.tenants()[0].clone(), table.tenants()[1].clone());
    assert_ne!(a.domain(None), c.domain(None));
    assert_ne!(a.domain(None), a.domain(Some("x")));
    assert_ne!(a.domain(Some("x")), c.domain(Some("x")));
    assert_eq!(a.domain(Some("x")), a.domain(Some("x")));
    let later = TenantTable::parse(&file().replace("weight = 3", "cache_epoch = 1"), &secret(), &Isolation::PerTenant).unwrap();
    assert_ne!(later.tenants()[0].domain(None), a.domain(None));
    let pooled = TenantTable::parse(&file(), &secret(), &Isolation::Pool("pool-1".into())).unwrap();
    assert_eq!(pooled.tenants()[0].domain(None), pooled.tenants()[1].domain(None));
    assert_ne!(pooled.tenants()[0].domain(None), pooled.tenants()[0].domain(Some("x")));
}

#[test]
fn a_file_with_a_mistake_is_refused_with_the_place_named() {
    let digest = sha256_hex("k");
    let cases = [
        ("", "lists no tenant"),
        ("[[tenant]]\nname = \"a\"\n", "key_sha256"),
        ("[[tenant]]\nname = \"a\"\nkey_sha256 = []\n", "no key_sha256"),
        ("[[tenant]]\nname = \"a\"\nkey_sha256 = \"abc\"\n", "64 hexadecimal digits"),
        (&format!("[[tenant]]\nname = \"a b\"\nkey_sha256 = \"{digest}\"\n"), "tenant 1 of the file: a name of 3 characters"),
        (&format!("[[tenant]]\nname = \"\"\nkey_sha256 = \"{digest}\"\n"), "1 to 63"),
        (&format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"{digest}\"\nweight = 0\n"), "weight = 0"),
        (&format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"{digest}\"\nwieght = 1\n"), "wieght"),
        (&format!("[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{digest}\", \"{digest}\"]\n"), "already listed"),
        (
            &format!(
                "[[tenant]]\nname = \"a\"\nkey_sha256 = \"{digest}\"\n[[tenant]]\nname = \"a\"\nkey_sha256 = \"{}\"\n",
                sha256_hex("l")
            ),
            "listed twice",
        ),
    ];
    for (text, wanted) in cases {
        let error =
            TenantTable::parse(text, &secret(), &Isolation::PerTenant).err().unwrap_or_else(|| panic!("{text:?} was taken"));
        assert!(error.to_string().contains(wanted), "{error} lacks {wanted:?}");
    }
}

#[test]
fn a_file_says_closed_or_open_only_in_so_many_words() {
    let closed = TenantTable::parse("tenant = []\n", &secret(), &Isolation::PerTenant).unwrap();
    assert!(!closed.is_open() && closed.tenants().is_empty());
    assert_eq!(closed.authenticate(Some(b"Bearer key-a")).unwrap_err().reason, Reason::Unauthenticated);
    let open = TenantTable::parse("open = true\n", &secret(), &Isolation::PerTenant).unwrap();
    assert_eq!(&*open.authenticate(None).unwrap().tag().0, TenantTable::DEFAULT_TENANT);
    for (text, wanted) in [("open = false\n", "lists no tenant"), ("open = true\ntenant = []\n", "remove one")] {
        let error = TenantTable::parse(text, &secret(), &Isolation::PerTenant).err().unwrap();
        assert!(error.to_string().contains(wanted), "{error}");
    }
}

#[test]
fn a_table_that_is_awaited_sends_nobody_away_for_good() {
    let table = TenantTable::awaited();
    for key in [None, Some(&b"Bearer key-a"[..])] {
        let error = table.authenticate(key).unwrap_err();
        assert_eq!((error.reason, error.retry_after.is_some()), (Reason::NotReady, true));
    }
}

#[test]
fn no_error_repeats_what_stands_in_the_file() {
    const KEY: &str = "sk-pasted-by-mistake";
    for text in [
        format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"{KEY}\"\n"),
        format!("[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{KEY}\"\n"),
        format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"{KEY}\n"),
        format!("[[tenant]]\nname = \"a\"\nkey_sha256 = {{ \"{KEY}\" = 1 }}\n"),
        format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"k\"\nweight = \"{KEY}\"\n"),
        format!("{KEY}\n"),
        format!("{KEY} = 1\n"),
        format!("[[tenant]]\nname = \"a\"\nkey_sha256 = \"k\"\n\"{KEY}\" = 1\n"),
        format!("[[tenant]]\nname = \"{KEY}/{KEY}\"\nkey_sha256 = \"k\"\n"),
        format!("tenant = \"{KEY}\"\n"),
    ] {
        let error = TenantTable::parse(&text, &secret(), &Isolation::PerTenant).err().unwrap();
        assert!(!format!("{error} {error:?}").contains(KEY), "{error}");
    }
}

/// R46: default deny for every spelling of every path, by every method, over HTTP and gRPC.
#[tokio::test]
async fn only_health_and_metrics_are_open() {
    let rig = guarded();
    let paths = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/tiny",
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1/%2e/chat/completions",
        "/V1/CHAT/COMPLETIONS",
        "/v1//chat/completions",
        "/",
        "/nothing",
        "/docs",
        "/healthz/",
        "//healthz",
        "/HEALTHZ",
        "/healthz/../v1/models",
        "/%68ealthz",
        "/metrics/x",
        "/readyz%20",
        "/invocations",
        "/kvasir.inference.v1.Inference/Generate",
    ];
    for path in paths {
        for method in ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"] {
            for key in [None, Some("Bearer wrong"), Some("Bearer "), Some("Bearer"), Some("")] {
                let mut request = HttpRequest::builder().method(method).uri(path).header("x-tenant-id", "a");
                if let Some(key) = key {
                    request = request.header("authorization", key);
                }
                let reply = call(&rig, request.body(Body::from("{}")).unwrap()).await;
                assert_eq!(reply.status, 401, "{method} {path} with {key:?}");
                if method != "HEAD" {
                    assert_eq!(reply.json()["error"]["code"], "unauthenticated", "{method} {path}");
                }
                assert_eq!(reply.headers["www-authenticate"], "Bearer");
            }
        }
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        for method in ["GET", "HEAD"] {
            let reply = call(&rig, HttpRequest::builder().method(method).uri(path).body(Body::empty()).unwrap()).await;
            assert_eq!(reply.status, 200, "{method} {path}");
        }
        let reply = call(&rig, HttpRequest::post(path).body(Body::empty()).unwrap()).await;
        assert_eq!(reply.status, 401, "POST {path}");
    }
    assert_eq!(rig.serve.seen.lock().unwrap().len(), 0);
}

#[tokio::test]
async fn each_grpc_method_but_health_and_reflection_needs_a_key() {
    let rig = guarded();
    let methods = ["Generate", "Chat", "Tokenize", "Models", "Nothing", "generate"]
        .map(|name| format!("/kvasir.inference.v1.Inference/{name}"));
    let others = ["/kvasir.worker.v1.Worker/Generate", "/", "/grpc.health.v1.Health/Check/", "//grpc.health.v1.Health/Check"];
    for path in methods.iter().map(String::as_str).chain(others) {
        let request = HttpRequest::post(path).header("content-type", "application/grpc").body(Body::from(vec![0u8; 5])).unwrap();
        let reply = call(&rig, request).await;
        assert_eq!((reply.status.as_u16(), reply.headers["grpc-status"].to_str().unwrap()), (200, "16"), "{path}");
    }
    let request = HttpRequest::post("/grpc.health.v1.Health/Check").header("content-type", "application/grpc");
    let reply = call(&rig, request.body(Body::from(vec![0u8; 5])).unwrap()).await;
    assert_eq!(reply.status, 200);
    assert_ne!(reply.headers.get("grpc-status").map(http::HeaderValue::as_bytes), Some(&b"16"[..]));
}

#[tokio::test]
async fn a_key_lets_in_until_it_is_removed_and_tenant_headers_mean_nothing() {
    let rig = guarded();
    let body = serde_json::json!({ "messages": [{ "role": "user", "content": "x" }] }).to_string();
    let send = |key: &'static str| {
        let request = HttpRequest::post("/v1/chat/completions").header("authorization", key).header("x-kvasir-tenant", "c");
        call(&rig, request.body(Body::from(body.clone())).unwrap())
    };
    assert_eq!(send("Bearer key-a").await.status, 200);
    assert_eq!(&*rig.serve.last().tenant.0, "a");
    let wrong_route =
        call(&rig, HttpRequest::get("/nothing").header("authorization", "Bearer key-a").body(Body::empty()).unwrap()).await;
    assert_eq!(wrong_route.status, 404);
    let only_c = file().split("\n\n").nth(1).unwrap().to_owned();
    rig.tenants.replace(TenantTable::parse(&only_c, &secret(), &Isolation::PerTenant).unwrap());
    assert_eq!(send("Bearer key-a").await.status, 401);
    assert_eq!(send("Bearer key-c").await.status, 200);
    let two = HttpRequest::get("/v1/models").header("authorization", "Bearer key-c").header("authorization", "Bearer key-c");
    assert_eq!(call(&rig, two.body(Body::empty()).unwrap()).await.status, 401);
}

proptest! {
    #[test]
    fn no_other_header_value_authenticates(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let known = [&b"key-a"[..], b"key-b", b"key-c"];
        let carries_key = known.iter().any(|key| bytes.ends_with(key));
        prop_assume!(!carries_key);
        prop_assert!(table().authenticate(Some(&bytes)).is_err());
    }
}
