//! One output buffer written by several tasks, each its own part.

use std::marker::PhantomData;

/// A mutable slice that tasks cut disjoint parts from.
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out parts that its users promise to be disjoint, which is what sending `&mut [T]`
// pieces to threads would do.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// `len` elements from `at`.
    ///
    /// # Safety
    /// No other live part overlaps this one.
    pub(crate) unsafe fn slice(&self, at: usize, len: usize) -> &'a mut [T] {
        assert!(at <= self.len && len <= self.len - at, "{at} + {len} lies outside of {}", self.len);
        // SAFETY: in bounds by the check, alive and exclusive by lifetime and promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }

    /// The first element's address, for writes of whole vectors.
    pub(crate) fn as_mut_ptr(&self) -> *mut T {
        self.start
    }
}
