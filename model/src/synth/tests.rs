//! Written models open, in every type, with numbers of the promised size.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use half::f16;

use super::*;
use crate::file::ModelFile;

#[test]
fn every_type_and_family_opens_and_has_the_described_shape() {
    for ty in TensorType::ALL {
        for arch in [Arch::Llama, Arch::Qwen2] {
            for tied in [false, true] {
                let model = TinyModel {
                    arch,
                    tied,
                    hidden: 256,
                    ffn: 256,
                    layers: 1,
                    types: WeightTypes::all(ty),
                    ..TinyModel::default()
                };
                let file = ModelFile::from_gguf_bytes("tiny.gguf", model.to_gguf().unwrap()).unwrap();
                assert_eq!(file.config().tied, tied);
                assert_eq!(file.tensor("output.weight").unwrap().ty, ty);
                assert_eq!(file.tensor("blk.0.attn_q.bias").is_some(), arch == Arch::Qwen2);
                assert!(file.tensor("blk.1.attn_q.weight").is_none());
                file.text().unwrap();
            }
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_gives_others() {
    let write = |seed| TinyModel { seed, ..TinyModel::default() }.to_gguf().unwrap();
    assert_eq!(write(7), write(7));
    assert_ne!(write(7), write(8));
}

#[test]
fn impossible_descriptions_are_refused() {
    let refused = |model: TinyModel| model.to_gguf().unwrap_err().to_string();
    assert!(refused(TinyModel { vocab: 10, ..TinyModel::default() }).contains("vocab is 10"));
    assert!(refused(TinyModel { heads: 0, ..TinyModel::default() }).contains("0 heads"));
    let q4k = WeightTypes::all(TensorType::Q4K);
    assert!(refused(TinyModel { types: q4k, ..TinyModel::default() }).contains("no multiple of the block of Q4_K"));
}

/// Reads one block of the simple types back by their layout.
fn values(ty: TensorType, bytes: &[u8]) -> Vec<f32> {
    let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    let nibbles = |at: usize| (0..32).map(move |i| f32::from((bytes[at + i % 16] >> (4 * (i / 16))) & 15));
    match ty {
        TensorType::Q4_0 => nibbles(2).map(|q| half(0) * (q - 8.0)).collect(),
        TensorType::Q4_1 => nibbles(4).map(|q| half(0) * q + half(2)).collect(),
        TensorType::Q8_0 => bytes[2..34].iter().map(|q| half(0) * f32::from(*q as i8)).collect(),
        TensorType::F32 => bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        _ => panic!("not read here"),
    }
}

#[test]
fn weights_have_about_the_asked_spread() {
    for ty in [TensorType::F32, TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0] {
        let rows = random_rows(&mut Noise::new(3), ty, 64, 256, 0.5).unwrap();
        let all: Vec<f32> = rows.chunks_exact(ty.block_bytes()).flat_map(|block| values(ty, block)).collect();
        let mean = all.iter().sum::<f32>() / all.len() as f32;
        let spread = (all.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / all.len() as f32).sqrt();
        assert!(mean.abs() < 0.08, "{} has mean {mean}", ty.name());
        assert!((0.4..0.65).contains(&spread), "{} has spread {spread}", ty.name());
    }
}
