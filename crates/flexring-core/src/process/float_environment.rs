//! The floating-point environment of a thread: rounding, flushing of subnormal numbers, and exceptions that
//! trap.
//!
//! A program may change it for its threads, and a new thread inherits it. Ranks must compute the same bits
//! and the same plans, so the library computes in the default environment. Owns the registers that hold it,
//! MXCSR or FPCR and FPSR. The control word of x87 has no effect: on x86-64 Rust computes with SSE.

/// Keeps this thread in the default floating-point environment. When it is dropped, the environment is what
/// it was before, with its exception flags.
#[must_use]
pub struct DefaultFloatEnvironment {
    before: registers::State,
}

impl DefaultFloatEnvironment {
    /// Enters the default environment. Writes nothing if the thread is in it already.
    #[inline]
    pub fn enter() -> Self {
        let before = registers::State::read();
        if !before.is_default() {
            registers::State::DEFAULT.write();
        }
        Self { before }
    }
}

impl Drop for DefaultFloatEnvironment {
    #[inline]
    fn drop(&mut self) {
        if registers::State::read() != self.before {
            self.before.write();
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod registers {
    use std::arch::asm;

    /// The bits of MXCSR that are exception flags.
    const FLAGS: u32 = 0x3f;

    /// MXCSR.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(super) struct State(u32);

    impl State {
        /// All exceptions are masked, results are rounded to nearest, nothing is flushed.
        pub(super) const DEFAULT: Self = Self(0x1f80);

        #[inline]
        pub(super) fn read() -> Self {
            let mut value = 0u32;
            // SAFETY: the instruction writes four bytes at the address.
            unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack, preserves_flags)) };
            Self(value)
        }

        /// Not inlined, so that the compiler moves no arithmetic across it.
        #[cold]
        #[inline(never)]
        pub(super) fn write(self) {
            // SAFETY: the instruction reads four bytes at the address. They are the default or were read from
            // the register, so no reserved bit is set.
            unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const self.0, options(nostack, preserves_flags)) };
        }

        #[inline]
        pub(super) fn is_default(self) -> bool {
            self.0 & !FLAGS == Self::DEFAULT.0
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod registers {
    use std::arch::asm;

    /// FPCR, and FPSR with the exception flags.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(super) struct State {
        control: u64,
        status: u64,
    }

    impl State {
        /// No exception traps, results are rounded to nearest, nothing is flushed.
        pub(super) const DEFAULT: Self = Self { control: 0, status: 0 };

        #[inline]
        pub(super) fn read() -> Self {
            let (control, status);
            // SAFETY: reads registers of this thread.
            unsafe {
                asm!("mrs {}, fpcr", "mrs {}, fpsr", out(reg) control, out(reg) status, options(nostack, preserves_flags));
            }
            Self { control, status }
        }

        /// Not inlined, so that the compiler moves no arithmetic across it.
        #[cold]
        #[inline(never)]
        pub(super) fn write(self) {
            // SAFETY: the values are the default or were read from the registers.
            unsafe {
                asm!("msr fpcr, {}", "msr fpsr, {}", in(reg) self.control, in(reg) self.status, options(nostack, preserves_flags));
            }
        }

        #[inline]
        pub(super) fn is_default(self) -> bool {
            self.control == Self::DEFAULT.control
        }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod registers {
    /// Not known for this architecture.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(super) struct State;

    impl State {
        pub(super) const DEFAULT: Self = Self;

        pub(super) fn read() -> Self {
            Self
        }

        pub(super) fn write(self) {}

        pub(super) fn is_default(self) -> bool {
            true
        }
    }
}
