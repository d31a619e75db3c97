//! A GGUF v3 writer. Called by [`super::TinyModel`] and by tests that need one odd field.

use crate::tensor::TensorType;

/// Alignment of tensor data in bytes.
const ALIGNMENT: usize = 32;

/// Collects keys and tensors, then writes them in order.
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    keys: Vec<(String, u32, Vec<u8>)>,
    tensors: Vec<(String, u32, Vec<u64>, Vec<u8>)>,
}

impl GgufWriter {
    /// An empty file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a key to raw bytes of value type `ty` (the format's number); a key that is there already is replaced.
    pub fn raw(&mut self, key: &str, ty: u32, bytes: Vec<u8>) {
        match self.keys.iter_mut().find(|(name, ..)| name == key) {
            Some(slot) => *slot = (key.to_owned(), ty, bytes),
            None => self.keys.push((key.to_owned(), ty, bytes)),
        }
    }

    /// Appends a key even if it is there already, for files that must be refused.
    pub fn raw_again(&mut self, key: &str, ty: u32, bytes: Vec<u8>) {
        self.keys.push((key.to_owned(), ty, bytes));
    }

    /// Removes a key.
    pub fn remove(&mut self, key: &str) {
        self.keys.retain(|(name, ..)| name != key);
    }

    /// Sets an unsigned 32-bit value.
    pub fn u32(&mut self, key: &str, value: u32) {
        self.raw(key, 4, value.to_le_bytes().to_vec());
    }

    /// Sets a 32-bit float.
    pub fn f32(&mut self, key: &str, value: f32) {
        self.raw(key, 6, value.to_le_bytes().to_vec());
    }

    /// Sets a boolean.
    pub fn bool(&mut self, key: &str, value: bool) {
        self.raw(key, 7, vec![u8::from(value)]);
    }

    /// Sets a string.
    pub fn string(&mut self, key: &str, value: &str) {
        self.raw(key, 8, string_bytes(value));
    }

    /// Sets an array of strings.
    pub fn strings<'a>(&mut self, key: &str, values: impl ExactSizeIterator<Item = &'a str>) {
        let mut bytes = array_head(8, values.len());
        values.for_each(|value| bytes.extend(string_bytes(value)));
        self.raw(key, 9, bytes);
    }

    /// Sets an array of signed 32-bit integers.
    pub fn i32s(&mut self, key: &str, values: &[i32]) {
        let mut bytes = array_head(5, values.len());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self.raw(key, 9, bytes);
    }

    /// Appends a tensor; `dims` innermost first.
    pub fn tensor(&mut self, name: &str, ty: TensorType, dims: &[u64], bytes: Vec<u8>) {
        self.raw_tensor(name, ty.ggml_id(), dims, bytes);
    }

    /// Appends a tensor of any type number, for files that must be refused.
    pub fn raw_tensor(&mut self, name: &str, ty: u32, dims: &[u64], bytes: Vec<u8>) {
        self.tensors.push((name.to_owned(), ty, dims.to_vec(), bytes));
    }

    /// Removes a tensor.
    pub fn remove_tensor(&mut self, name: &str) {
        self.tensors.retain(|(known, ..)| known != name);
    }

    /// Writes header, metadata, directory and data.
    pub fn finish(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, ty, bytes) in &self.keys {
            out.extend(string_bytes(key));
            out.extend(ty.to_le_bytes());
            out.extend(bytes);
        }
        let mut offset = 0;
        for (name, ty, dims, bytes) in &self.tensors {
            out.extend(string_bytes(name));
            out.extend((dims.len() as u32).to_le_bytes());
            for dim in dims {
                out.extend(dim.to_le_bytes());
            }
            out.extend(ty.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + bytes.len()).next_multiple_of(ALIGNMENT);
        }
        for (.., bytes) in &self.tensors {
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
            out.extend(bytes);
        }
        out
    }
}

fn string_bytes(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

fn array_head(element: u32, len: usize) -> Vec<u8> {
    let mut bytes = element.to_le_bytes().to_vec();
    bytes.extend((len as u64).to_le_bytes());
    bytes
}
