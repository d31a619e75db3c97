use super::*;
use crate::secret::PoolSecret;

fn parts() -> IdentityParts {
    IdentityParts {
        weights: Framer::new("w").finish(),
        architecture: b"llama".to_vec(),
        tokenizer: Framer::new("t").finish(),
        chat_template: Framer::new("c").finish(),
        adapter: None,
        numerics: numerics().id(),
    }
}

fn numerics() -> NumericsParts {
    NumericsParts {
        mode: NumericsMode::Cpu,
        revision: 1,
        kv_dtype: "f32".into(),
        kv_layout: "v1".into(),
        parallel_degree: 1,
        block_size: 16,
    }
}

fn adapter(content: &str, scale: f32) -> Adapter {
    Adapter { content: Framer::new(content).finish(), scale }
}

/// One change per component of the identity; each must change the result, and no two may give the same one.
fn changed() -> Vec<(&'static str, ModelIdentity)> {
    let model = |change: fn(&mut IdentityParts)| {
        let mut parts = parts();
        change(&mut parts);
        parts.id()
    };
    let arithmetic = |change: fn(&mut NumericsParts)| {
        let mut numerics = numerics();
        change(&mut numerics);
        IdentityParts { numerics: numerics.id(), ..parts() }.id()
    };
    const KERNELS: Digest = Digest::new([7; 32]);
    vec![
        ("nothing", parts().id()),
        ("weights", model(|p| p.weights = Framer::new("w2").finish())),
        ("architecture", model(|p| p.architecture = b"qwen2".to_vec())),
        ("tokenizer", model(|p| p.tokenizer = Framer::new("t2").finish())),
        ("chat template", model(|p| p.chat_template = Framer::new("c2").finish())),
        ("weights and tokenizer swapped", model(|p| std::mem::swap(&mut p.weights, &mut p.tokenizer))),
        ("adapter set", model(|p| p.adapter = Some(adapter("a", 1.0)))),
        ("adapter content", model(|p| p.adapter = Some(adapter("b", 1.0)))),
        ("adapter scale", model(|p| p.adapter = Some(adapter("a", 0.5)))),
        ("mode", arithmetic(|n| n.mode = NumericsMode::CudaInvariant { compute_capability: 90, kernels: KERNELS })),
        ("mode fast", arithmetic(|n| n.mode = NumericsMode::CudaFast { compute_capability: 90, kernels: KERNELS })),
        ("mode fake", arithmetic(|n| n.mode = NumericsMode::Fake)),
        ("capability", arithmetic(|n| n.mode = NumericsMode::CudaInvariant { compute_capability: 89, kernels: KERNELS })),
        (
            "kernel digest",
            arithmetic(|n| n.mode = NumericsMode::CudaInvariant { compute_capability: 90, kernels: Digest::new([8; 32]) }),
        ),
        ("revision", arithmetic(|n| n.revision = 2)),
        ("kv dtype", arithmetic(|n| n.kv_dtype = "f16".into())),
        ("kv layout", arithmetic(|n| n.kv_layout = "v2".into())),
        ("parallel degree", arithmetic(|n| n.parallel_degree = 2)),
        ("block size", arithmetic(|n| n.block_size = 32)),
    ]
}

#[test]
fn every_component_changes_the_identity() {
    let rows = changed();
    for (index, (name, identity)) in rows.iter().enumerate() {
        for (other, seen) in &rows[..index] {
            assert_ne!(identity, seen, "`{name}` and `{other}` have one identity");
        }
    }
}

#[test]
fn equal_components_give_equal_identity() {
    assert_eq!(parts().id(), parts().id());
}

fn secret(byte: u8) -> PoolSecret {
    PoolSecret::new(&[byte; 32]).expect("long enough")
}

#[test]
fn each_component_of_a_domain_separates_it() {
    let base = ReuseDomain::derive(&secret(1), "org_1", 0, None);
    let rows = [
        base,
        ReuseDomain::derive(&secret(2), "org_1", 0, None),
        ReuseDomain::derive(&secret(1), "org_2", 0, None),
        ReuseDomain::derive(&secret(1), "org_1", 1, None),
        ReuseDomain::derive(&secret(1), "org_1", 0, Some("")),
        ReuseDomain::derive(&secret(1), "org_1", 0, Some("salt")),
        ReuseDomain::derive(&secret(1), "org_1salt", 0, None),
        ReuseDomain::derive(&secret(1), "salt", 0, Some("org_1")),
        SharedDomain::derive(&secret(1), "org_1").as_reuse_domain(&secret(1), None),
        SharedDomain::derive(&secret(1), "org_1").as_reuse_domain(&secret(1), Some("salt")),
    ];
    for (index, domain) in rows.iter().enumerate() {
        assert!(!rows[..index].contains(domain), "row {index} repeats an earlier domain");
    }
}

#[test]
fn a_salt_cannot_reach_another_tenants_domain() {
    // The classic framing attack: move a character between tenant and salt.
    let a = ReuseDomain::derive(&secret(1), "org_1", 0, Some("2345"));
    let b = ReuseDomain::derive(&secret(1), "org_12345", 0, Some(""));
    let c = ReuseDomain::derive(&secret(1), "org_12", 0, Some("345"));
    assert!(a != b && b != c && a != c);
}

#[test]
fn weights_digest_ignores_listing_order_but_not_names() {
    let (a, b) = (Framer::new("a").finish(), Framer::new("b").finish());
    assert_eq!(weights_digest([("x", a), ("y", b)]), weights_digest([("y", b), ("x", a)]));
    assert_ne!(weights_digest([("x", a), ("y", b)]), weights_digest([("x", b), ("y", a)]));
}

#[test]
fn domains_are_never_printed() {
    let domain = ReuseDomain::derive(&secret(1), "org_1", 0, None);
    let hex = domain.digest().to_hex();
    let shown = format!("{domain:?} {:?} {:?}", Root::of(&parts().id(), &domain), secret(1));
    assert!(!shown.contains(&hex[..8]));
}

#[test]
fn vectors_are_pinned() {
    let domain = ReuseDomain::derive(&secret(1), "org_1", 3, Some("salt"));
    let lines = [
        numerics().id().0.to_hex(),
        parts().id().0.to_hex(),
        domain.digest().to_hex(),
        SharedDomain::derive(&secret(1), "pool-uid").digest().to_hex(),
        Root::of(&parts().id(), &domain).digest().to_hex(),
        format!("{:02x?}", secret(1).epoch().0),
    ];
    let expected = include_str!("vectors.txt");
    assert_eq!(lines.join("\n"), expected.trim_end(), "an encoder changed: use a new version tag instead");
}
