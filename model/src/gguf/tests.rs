//! Reading good files, and refusing every broken one with the field's name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::file::ModelFile;
use crate::synth::{GgufWriter, TinyModel};
use crate::tensor::TensorType;

fn parse(bytes: Vec<u8>) -> Result<Gguf, GgufError> {
    Gguf::parse(Arc::new(Mapping::from_vec(bytes)))
}

fn refusal(bytes: Vec<u8>) -> String {
    let started = Instant::now();
    let error = parse(bytes).expect_err("the file is broken");
    assert!(started.elapsed() < Duration::from_secs(1), "took {:?}", started.elapsed());
    assert_eq!(error.reason(), Reason::ModelFile);
    error.to_string()
}

fn writer() -> GgufWriter {
    let mut writer = GgufWriter::new();
    writer.string("general.architecture", "llama");
    writer.u32("llama.block_count", 2);
    writer.i32s("numbers", &[1, -2, 3]);
    writer.strings("words", ["one", "", "drei"].into_iter());
    writer.tensor("a", TensorType::F32, &[4, 2], vec![1; 32]);
    writer.tensor("b", TensorType::Q8_0, &[32], vec![2; 34]);
    writer
}

/// Offset of the directory entry of the tensor `name`, just after its name.
fn entry_at(bytes: &[u8], name: &str) -> usize {
    let mut needle = (name.len() as u64).to_le_bytes().to_vec();
    needle.extend(name.as_bytes());
    bytes.windows(needle.len()).position(|window| window == needle).unwrap() + needle.len()
}

fn patched(at: usize, new: &[u8]) -> Vec<u8> {
    let mut bytes = writer().finish();
    bytes[at..at + new.len()].copy_from_slice(new);
    bytes
}

#[test]
fn keys_and_tensors_read_back_as_written() {
    let gguf = parse(writer().finish()).unwrap();
    assert_eq!(gguf.version(), 3);
    assert_eq!(gguf.string("general.architecture").unwrap(), Some("llama"));
    assert_eq!(gguf.unsigned("llama.block_count").unwrap(), Some(2));
    assert_eq!(gguf.integers("numbers").unwrap(), [1, -2, 3]);
    assert_eq!(gguf.strings("words").unwrap(), ["one", "", "drei"]);
    assert_eq!(gguf.tensor_names().collect::<Vec<_>>(), ["a", "b"]);
    let a = gguf.tensor("a").unwrap();
    assert_eq!((a.ty, a.rows, a.cols, a.bytes), (TensorType::F32, 2, 4, &[1; 32][..]));
    let b = gguf.tensor("b").unwrap();
    assert_eq!((b.ty, b.rows, b.cols, b.bytes), (TensorType::Q8_0, 1, 32, &[2; 34][..]));
    assert!(gguf.tensor("c").is_none());
}

#[test]
fn version_two_reads_like_version_three() {
    assert_eq!(parse(patched(4, &2_u32.to_le_bytes())).unwrap().version(), 2);
}

#[test]
fn other_versions_magics_and_byte_orders_are_refused_by_name() {
    assert!(refusal(patched(0, b"GGUX")).contains("magic is \"GGUX\""));
    assert!(refusal(patched(4, &0_u32.to_le_bytes())).contains("version is 0"));
    assert!(refusal(patched(4, &1_u32.to_le_bytes())).contains("version is 1"));
    assert!(refusal(patched(4, &99_u32.to_le_bytes())).contains("version is 99"));
    assert!(refusal(patched(4, &3_u32.to_be_bytes())).contains("big-endian"));
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n".to_vec();
    assert!(refusal(pointer).contains("git lfs pointer"));
    assert!(refusal(b"<html>not found</html>".to_vec()).contains("not a gguf file"));
}

#[test]
fn an_empty_file_is_refused() {
    assert!(refusal(Vec::new()).contains("magic needs 4 bytes"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("empty.gguf");
    std::fs::write(&path, b"").unwrap();
    assert!(ModelFile::open(&path).unwrap_err().to_string().contains("empty (0 bytes)"));
}

#[test]
fn giant_counts_and_lengths_are_refused_without_allocating() {
    assert!(refusal(patched(8, &(1_u64 << 63).to_le_bytes())).contains("tensor_count is 9223372036854775808"));
    assert!(refusal(patched(16, &(1_u64 << 63).to_le_bytes())).contains("metadata_kv_count is 9223372036854775808"));
    // The first key's length.
    assert!(refusal(patched(24, &(1_u64 << 60).to_le_bytes())).contains("metadata key 0 needs 1152921504606846976 bytes"));
    let mut huge = writer();
    huge.raw("numbers", 9, [5_u32.to_le_bytes().to_vec(), (1_u64 << 62).to_le_bytes().to_vec()].concat());
    assert!(refusal(huge.finish()).contains("length of key numbers is 4611686018427387904"));
}

#[test]
fn impossible_dimensions_are_refused_by_tensor() {
    let good = writer().finish();
    let at = entry_at(&good, "a");
    assert!(refusal(patched(at, &u32::MAX.to_le_bytes())).contains("dimension count of tensor a is 4294967295"));
    assert!(refusal(patched(at, &0_u32.to_le_bytes())).contains("dimension count of tensor a is 0"));
    assert!(refusal(patched(at + 4, &0_u64.to_le_bytes())).contains("a dimension is 0"));
    // 2^62 rows of 4 floats are 2^66 bytes, which is 0 modulo 2^64.
    assert!(refusal(patched(at + 12, &(1_u64 << 62).to_le_bytes())).contains("overflows"));
    assert!(refusal(patched(at + 4, &((1_u64 << 42) + 1).to_le_bytes())).contains("tensor a at data offset 0"));
    assert!(refusal(patched(at + 4, &u64::MAX.to_le_bytes())).contains("overflows"));
    let b = entry_at(&good, "b");
    assert!(refusal(patched(b + 4, &33_u64.to_le_bytes())).contains("no multiple of the type's block"));
}

#[test]
fn bad_types_and_ranges_are_refused_by_tensor() {
    let good = writer().finish();
    let at = entry_at(&good, "a");
    // After the dimension count and two dimensions.
    assert!(refusal(patched(at + 20, &10_u32.to_le_bytes())).contains("tensor a has type Q2_K"));
    assert!(refusal(patched(at + 20, &77_u32.to_le_bytes())).contains("tensor a has type number 77"));
    assert!(refusal(patched(at + 24, &(1_u64 << 40).to_le_bytes())).contains("ends past the file"));
    assert!(refusal(patched(at + 24, &(u64::MAX - 31).to_le_bytes())).contains("ends past the file"));
    assert!(refusal(patched(at + 24, &7_u64.to_le_bytes())).contains("not aligned to 32"));
    let b = entry_at(&good, "b");
    assert!(refusal(patched(b + 16, &0_u64.to_le_bytes())).contains("overlaps"));
}

#[test]
fn duplicates_and_bad_alignments_are_refused() {
    let mut twice = writer();
    twice.tensor("a", TensorType::F32, &[1], vec![0; 4]);
    assert!(refusal(twice.finish()).contains("tensor \"a\" twice"));
    let mut twice = writer();
    twice.raw_again("llama.block_count", 4, vec![0; 4]);
    assert!(refusal(twice.finish()).contains("key \"llama.block_count\" twice"));
    for alignment in [0, 3, 4, 48, 1 << 30] {
        let mut odd = writer();
        odd.u32("general.alignment", alignment);
        assert!(refusal(odd.finish()).contains(&format!("general.alignment is {alignment}")));
    }
    let mut odd = writer();
    odd.string("general.alignment", "32");
    assert!(refusal(odd.finish()).contains("general.alignment is \"32\""));
}

#[test]
fn wrong_value_types_are_refused_by_key() {
    let mut odd = writer();
    odd.raw("x", 13, vec![0; 8]);
    assert!(refusal(odd.finish()).contains("type of key x has value type 13"));
    let mut odd = writer();
    odd.raw("x", 7, vec![2]);
    assert!(refusal(odd.finish()).contains("key x is 2, expected 0 or 1"));
    let mut odd = writer();
    odd.raw("x", 9, [9_u32.to_le_bytes().to_vec(), vec![0; 8]].concat());
    assert!(refusal(odd.finish()).contains("array of arrays"));
    let mut odd = writer();
    odd.raw("x", 8, [2_u64.to_le_bytes().to_vec(), vec![0xff, 0xfe]].concat());
    assert!(refusal(odd.finish()).contains("value of key x is not valid utf-8"));

    let gguf = parse(writer().finish()).unwrap();
    assert!(gguf.unsigned("words").unwrap_err().to_string().contains("key words is an array of string, expected an integer"));
    assert!(
        gguf.strings("numbers").unwrap_err().to_string().contains("key numbers is an array of i32, expected an array of strings")
    );
    assert!(gguf.string("llama.block_count").unwrap_err().to_string().contains("is u32, expected a string"));
    assert!(gguf.strings("absent").unwrap_err().to_string().contains("key absent is missing"));
}

#[test]
fn a_model_cut_at_any_byte_is_refused() {
    let whole = TinyModel { layers: 1, hidden: 32, ffn: 32, ..TinyModel::default() }.to_gguf().unwrap();
    assert!(parse(whole.clone()).is_ok());
    // Every byte of the header; in the tensor data a step that is no multiple of the alignment.
    let data = 12 << 10;
    let cuts = (0..data.min(whole.len())).chain((data..whole.len()).step_by(257)).chain([whole.len() - 1]);
    for cut in cuts {
        let error = parse(whole[..cut].to_vec()).expect_err("cut").to_string();
        assert!(!error.is_empty(), "cut at {cut}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn flipped_bytes_never_panic_and_never_reach_outside(changes in prop::collection::vec((0_usize..6000, any::<u8>()), 1..12)) {
        let mut bytes = TinyModel { layers: 1, hidden: 32, ffn: 32, ..TinyModel::default() }.to_gguf().unwrap();
        for (at, value) in changes {
            let len = bytes.len();
            bytes[at % len] = value;
        }
        // Whatever opens must be usable in full.
        if let Ok(file) = ModelFile::from_gguf_bytes("fuzzed.gguf", bytes) {
            let gguf = file.gguf().unwrap();
            for name in gguf.tensor_names() {
                if let Some(view) = gguf.tensor(name) {
                    prop_assert_eq!(view.bytes.len(), view.rows * view.ty.row_bytes(view.cols).unwrap());
                }
            }
            let _ = file.text();
        }
    }

    #[test]
    fn random_bytes_after_the_magic_never_panic(tail in prop::collection::vec(any::<u8>(), 0..400)) {
        let bytes = [b"GGUF\x03\0\0\0".to_vec(), tail].concat();
        let _ = parse(bytes);
    }
}
