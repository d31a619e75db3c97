//! The tensor directory: names, types, shapes, byte ranges, all proven before use.
//!
//! Owns range checks. Refuses to know tensor meaning. Called by [`super::Gguf::parse`]. One pass and one sort.

use std::collections::HashMap;

use super::cursor::Cursor;
use super::{GgufError, MAX_NAME_BYTES, unsupported_type};
use crate::tensor::{TensorType, TensorView};

/// Most dimensions of a tensor.
const MAX_DIMS: u32 = 4;

/// One directory entry, whose range is inside the file.
#[derive(Debug)]
pub(super) struct TensorEntry {
    ty: TensorType,
    dims: [u64; MAX_DIMS as usize],
    rank: usize,
    start: usize,
    bytes: usize,
}

impl TensorEntry {
    pub(super) fn shape(&self) -> &[u64] {
        &self.dims[..self.rank]
    }

    /// The tensor as rows of columns; `None` for more than two dimensions.
    pub(super) fn view<'a>(&self, file: &'a [u8]) -> Option<TensorView<'a>> {
        let (cols, rows) = match *self.shape() {
            [cols] => (cols, 1),
            [cols, rows] => (cols, rows),
            _ => return None,
        };
        let bytes = file.get(self.start..self.start + self.bytes)?;
        Some(TensorView { ty: self.ty, rows: rows as usize, cols: cols as usize, bytes })
    }
}

pub(super) fn read_directory(
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: u64,
) -> Result<(HashMap<String, TensorEntry>, Vec<String>), GgufError> {
    let mut order = Vec::new();
    let mut raw = Vec::new();
    for index in 0..count {
        let name = cursor.string(MAX_NAME_BYTES, || format!("name of tensor {index}"))?.to_owned();
        raw.push(read_entry(cursor, &name)?);
        order.push(name);
    }
    let data_start = (cursor.position() as u64).next_multiple_of(alignment);
    let data_len = (cursor.file_len() as u64).saturating_sub(data_start);
    let mut tensors = HashMap::new();
    for (name, (mut entry, offset)) in order.iter().zip(raw) {
        let refused = |problem: String| GgufError::Range { tensor: name.clone(), offset, bytes: entry.bytes as u64, problem };
        if !offset.is_multiple_of(alignment) {
            return Err(refused(format!("is not aligned to {alignment}")));
        }
        let end = offset.checked_add(entry.bytes as u64).filter(|end| *end <= data_len);
        if end.is_none() {
            return Err(refused(format!("ends past the file: the data section has {data_len} bytes")));
        }
        entry.start = (data_start + offset) as usize;
        if tensors.insert(name.clone(), entry).is_some() {
            return Err(GgufError::Duplicate { kind: "tensor", name: name.clone() });
        }
    }
    refuse_overlap(&tensors, data_start)?;
    Ok((tensors, order))
}

fn read_entry(cursor: &mut Cursor<'_>, name: &str) -> Result<(TensorEntry, u64), GgufError> {
    let rank = cursor.u32(|| format!("dimension count of tensor {name}"))?;
    if !(1..=MAX_DIMS).contains(&rank) {
        return Err(GgufError::Count {
            field: format!("dimension count of tensor {name}"),
            count: u64::from(rank),
            limit: u64::from(MAX_DIMS),
        });
    }
    let mut dims = [1; MAX_DIMS as usize];
    for (index, dim) in dims.iter_mut().take(rank as usize).enumerate() {
        *dim = cursor.u64(|| format!("dimension {index} of tensor {name}"))?;
    }
    let type_id = cursor.u32(|| format!("type of tensor {name}"))?;
    let offset = cursor.u64(|| format!("offset of tensor {name}"))?;
    let ty = TensorType::from_ggml_id(type_id).ok_or_else(|| unsupported_type(name, type_id))?;
    let bytes = byte_len(ty, &dims, name, rank as usize)?;
    Ok((TensorEntry { ty, dims, rank: rank as usize, start: 0, bytes }, offset))
}

fn byte_len(ty: TensorType, dims: &[u64; MAX_DIMS as usize], name: &str, rank: usize) -> Result<usize, GgufError> {
    let refused = |problem| GgufError::Shape { tensor: name.to_owned(), shape: dims[..rank].to_vec(), problem };
    if dims.contains(&0) {
        return Err(refused("a dimension is 0"));
    }
    let cols = usize::try_from(dims[0]).map_err(|_| refused("the innermost dimension is too large"))?;
    if !cols.is_multiple_of(ty.block_len()) {
        return Err(refused("the innermost dimension is no multiple of the type's block"));
    }
    let overflow = "the number of bytes overflows";
    let mut bytes = ty.row_bytes(cols).ok_or_else(|| refused(overflow))? as u64;
    for dim in &dims[1..] {
        bytes = bytes.checked_mul(*dim).filter(|bytes| i64::try_from(*bytes).is_ok()).ok_or_else(|| refused(overflow))?;
    }
    usize::try_from(bytes).map_err(|_| refused(overflow))
}

fn refuse_overlap(tensors: &HashMap<String, TensorEntry>, data_start: u64) -> Result<(), GgufError> {
    let mut ranges: Vec<(usize, usize, &String)> =
        tensors.iter().map(|(name, entry)| (entry.start, entry.start + entry.bytes, name)).collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let [(_, end, first), (start, stop, second)] = pair else { continue };
        if start < end {
            return Err(GgufError::Range {
                tensor: (*second).clone(),
                offset: *start as u64 - data_start,
                bytes: (*stop - *start) as u64,
                problem: format!("overlaps tensor {first}"),
            });
        }
    }
    Ok(())
}
