//! The float control word: rounding to nearest even, denormals kept, no traps.
//!
//! A library in the process (or a parent thread at spawn) may have set flush-to-zero; sums would then differ
//! from another host's in their last bits. So each run puts the default in place and restores it after.

/// Holds the default environment until dropped.
pub(super) struct Default(Option<u64>);

impl Default {
    pub(super) fn enter() -> Self {
        let found = arch::read();
        if found & arch::CONTROL == arch::DEFAULT {
            return Self(None);
        }
        arch::write(found & !arch::CONTROL | arch::DEFAULT);
        Self(Some(found))
    }
}

impl Drop for Default {
    fn drop(&mut self) {
        if let Some(found) = self.0 {
            arch::write(found);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod arch {
    use std::arch::asm;

    /// Everything but the six sticky exception flags.
    pub(crate) const CONTROL: u64 = 0xffc0;
    /// All exceptions masked, nearest even, neither flush-to-zero nor denormals-are-zero.
    pub(crate) const DEFAULT: u64 = 0x1f80;

    pub(crate) fn read() -> u64 {
        let mut word = 0_u32;
        // SAFETY: stores 4 bytes at a valid, aligned address and touches nothing else.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        u64::from(word)
    }

    pub(crate) fn write(word: u64) {
        let word = word as u32;
        // SAFETY: reads 4 bytes at a valid address; the value came from `read`, or is it with control bits
        // replaced by the architecture's default, so no reserved bit is set.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags, readonly)) };
    }
}

#[cfg(target_arch = "aarch64")]
pub(super) mod arch {
    use std::arch::asm;

    /// Alternative half precision, default NaN, flush-to-zero, rounding mode, half flush-to-zero.
    pub(crate) const CONTROL: u64 = 0x07c8_0000;
    pub(crate) const DEFAULT: u64 = 0;

    pub(crate) fn read() -> u64 {
        let word: u64;
        // SAFETY: reads a register that is always present.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
        word
    }

    pub(crate) fn write(word: u64) {
        // SAFETY: writes back a value that `read` gave, with control bits cleared.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nomem, nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) mod arch {
    pub(crate) const CONTROL: u64 = 0;
    pub(crate) const DEFAULT: u64 = 0;

    pub(crate) fn read() -> u64 {
        0
    }

    pub(crate) fn write(_: u64) {}
}
