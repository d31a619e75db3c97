//! Rendezvous order: the same ranking of workers for a key on every router with the same members.
//!
//! Pure. The key is a [`BlockKey`](kvasir_core::BlockKey) at affinity depth, which covers the reuse domain: so the order is salted by domain, and two tenants'
//! equal prompts are ranked independently. Highest-random-weight hashing (Thaler and Ravishankar 1998): a member that leaves or joins moves
//! only its own share of keys.
//!
//! Costs: one 64-bit mix per worker, about 1 ns; the first R of n by selection, O(n).

use kvasir_core::{BlockKey, WorkerUid};

/// Number that stands for a worker in every rank; equal on all routers.
pub fn salt_of(uid: &WorkerUid) -> u64 {
    let hash = blake3::hash(uid.0.as_bytes());
    let mut bytes = [0u8; 8];
    bytes.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}

/// Weight of a worker for a key; larger comes first.
pub fn rank(salt: u64, affinity: u64) -> u64 {
    // Finaliser of MurmurHash3 (Appleby), twice: every input bit reaches every output bit.
    mix(mix(salt ^ affinity.rotate_left(32)).wrapping_add(affinity))
}

/// The number that a prompt is ranked by: its key at `affinity_tokens` depth, or the last full block's; `None` without a full block.
pub fn affinity_of(keys: &[BlockKey], block_size: u32, affinity_tokens: u32) -> Option<u64> {
    let depth = (affinity_tokens / block_size.max(1)).max(1) as usize;
    keys.get(depth.min(keys.len()).checked_sub(1)?).map(BlockKey::low_u64)
}

/// Indexes of the first `count` workers in rendezvous order; `salts` are those of the members, ties by index.
pub fn first(salts: impl Iterator<Item = (usize, u64)>, affinity: u64, count: usize) -> Vec<usize> {
    let mut ranked: Vec<(u64, std::cmp::Reverse<usize>)> =
        salts.map(|(index, salt)| (rank(salt, affinity), std::cmp::Reverse(index))).collect();
    if ranked.len() > count && count > 0 {
        ranked.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
        ranked.truncate(count);
    }
    ranked.sort_unstable_by(|a, b| b.cmp(a));
    ranked.truncate(count);
    ranked.into_iter().map(|(_, index)| index.0).collect()
}

fn mix(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn salts(count: usize) -> Vec<u64> {
        (0..count).map(|index| salt_of(&WorkerUid(format!("worker-{index}").into()))).collect()
    }

    #[test]
    fn keys_spread_evenly_over_workers() {
        let salts = salts(8);
        let mut hits = [0u32; 8];
        for key in 0..8_000u64 {
            hits[first(salts.iter().copied().enumerate(), mix(key), 1)[0]] += 1;
        }
        // Binomial(8000, 1/8): mean 1000, sigma 29.6; six sigmas.
        assert!(hits.iter().all(|hits| (823..=1177).contains(hits)), "{hits:?}");
    }

    #[test]
    fn a_leaving_worker_moves_only_its_own_keys() {
        let salts = salts(10);
        let mut moved = 0;
        for key in 0..2_000u64 {
            let before = first(salts.iter().copied().enumerate(), mix(key), 1)[0];
            let after = first(salts.iter().copied().enumerate().filter(|(index, _)| *index != 3), mix(key), 1)[0];
            assert!(before == after || before == 3, "a key of worker {before} moved");
            moved += u32::from(before != after);
        }
        assert!(moved > 0);
    }

    proptest! {
        #[test]
        fn the_first_r_are_the_head_of_the_whole_order(count in 1usize..40, take in 0usize..50, affinity: u64) {
            let salts = salts(count);
            let whole = first(salts.iter().copied().enumerate(), affinity, count);
            let head = first(salts.iter().copied().enumerate(), affinity, take);
            prop_assert_eq!(&whole[..take.min(count)], &head[..]);
        }
    }

    #[test]
    fn affinity_is_the_key_at_depth_or_the_last_full_block() {
        let keys: Vec<BlockKey> = (0..100u8).map(|index| BlockKey::from_digest(kvasir_core::Digest::new([index; 32]))).collect();
        assert_eq!(affinity_of(&keys, 16, 1024), Some(keys[63].low_u64()));
        assert_eq!(affinity_of(&keys[..10], 16, 1024), Some(keys[9].low_u64()));
        assert_eq!(affinity_of(&keys, 16, 1), Some(keys[0].low_u64()));
        assert_eq!(affinity_of(&[], 16, 1024), None);
    }
}
