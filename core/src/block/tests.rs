use super::*;
use crate::secret::PoolSecret;
use proptest::prelude::*;

const BLOCK: u32 = 4;

fn identity(name: &str) -> ModelIdentity {
    ModelIdentity(Framer::new(name).finish())
}

fn secret() -> PoolSecret {
    PoolSecret::new(&[9; 32]).expect("long enough")
}

fn domain(tenant: &str) -> ReuseDomain {
    ReuseDomain::derive(&secret(), tenant, 0, None)
}

fn keys(tenant: &str, shared_tokens: Option<u32>, tokens: &[u32]) -> Vec<BlockKey> {
    let shared = SharedDomain::derive(&secret(), "pool");
    let prefix = Prefix::new(&identity("m"), &domain(tenant), shared_tokens.map(|tokens| (&shared, tokens)));
    block_keys(prefix, BLOCK, tokens)
}

fn common(a: &[BlockKey], b: &[BlockKey]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn only_full_blocks_have_keys() {
    assert_eq!(keys("a", None, &[1, 2, 3]).len(), 0);
    assert_eq!(keys("a", None, &[1, 2, 3, 4, 5]).len(), 1);
}

#[test]
fn a_key_covers_its_whole_prefix() {
    let one = keys("a", None, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let other = keys("a", None, &[9, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(common(&one, &other), 0);
    assert_ne!(one[1], other[1]);
}

#[test]
fn tenants_share_nothing_without_a_registered_prefix() {
    let tokens: Vec<u32> = (0..32).collect();
    let (a, b) = (keys("a", None, &tokens), keys("b", None, &tokens));
    assert!(a.iter().all(|key| !b.contains(key)));
}

#[test]
fn a_registered_prefix_is_shared_up_to_a_block_boundary_and_rerooted_after_it() {
    let tokens: Vec<u32> = (0..32).collect();
    let (a, b) = (keys("a", Some(10), &tokens), keys("b", Some(10), &tokens));
    assert_eq!(common(&a, &b), 2, "10 shared tokens are two whole blocks of 4");
    assert!(a[2..].iter().all(|key| !b.contains(key)));
    assert_eq!(keys("a", Some(3), &tokens), keys("a", None, &tokens), "less than a block shares nothing");
}

#[test]
fn a_rerooted_block_differs_from_the_same_tokens_under_the_shared_root() {
    let tokens: Vec<u32> = (0..12).collect();
    assert_ne!(keys("a", Some(4), &tokens)[1], keys("a", Some(8), &tokens)[1]);
}

#[test]
fn multimodal_content_is_part_of_the_key() {
    let prefix = Prefix::new(&identity("m"), &domain("a"), None);
    let key = |extra: Option<&[u8]>| KeyChain::new(prefix, BLOCK).push(&[1, 2, 3, 4], extra);
    assert_ne!(key(None), key(Some(b"")));
    assert_ne!(key(Some(b"image-1@0")), key(Some(b"image-2@0")));
}

#[test]
fn vectors_are_pinned() {
    let tokens: Vec<u32> = (100..116).collect();
    let lines: Vec<_> = keys("a", Some(8), &tokens).iter().map(|key| key.digest().to_hex()).collect();
    assert_eq!(lines.join("\n"), include_str!("vectors.txt").trim_end(), "the chain changed: use a new version tag instead");
}

proptest! {
    #[test]
    fn equal_keys_mean_equal_prefixes(a in prop::collection::vec(0u32..3, 0..40), b in prop::collection::vec(0u32..3, 0..40)) {
        let same = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
        prop_assert_eq!(common(&keys("t", None, &a), &keys("t", None, &b)), same / BLOCK as usize);
    }

    #[test]
    fn a_chain_built_in_steps_equals_the_one_built_at_once(tokens in prop::collection::vec(any::<u32>(), 0..60)) {
        let prefix = Prefix::new(&identity("m"), &domain("a"), None);
        let mut chain = KeyChain::new(prefix, BLOCK);
        let stepped: Vec<_> = tokens.chunks_exact(BLOCK as usize).map(|block| chain.push(block, None)).collect();
        prop_assert_eq!(stepped, keys("a", None, &tokens));
    }
}
