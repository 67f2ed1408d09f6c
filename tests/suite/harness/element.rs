//! Element types in tests.
//!
//! Owns small exact numbers of every element type.

use flexring::{Boolean, Element};
use flexring_core::float8::{F8E4M3, F8E5M2};
use half::{bf16, f16};

/// An element type under test. Whole numbers up to 8 are exact in every type, and up to 127 in all types but
/// the 8-bit floats.
pub trait TestElement: Element + PartialEq + std::fmt::Debug {
    /// The whole number `value`.
    fn of(value: i64) -> Self;
    /// `base` to the power of `exponent`, wrapping for integers.
    fn power(base: i64, exponent: u32) -> Self;
}

macro_rules! integers {
    ($($ty:ident),*) => {$(
        impl TestElement for $ty {
            fn of(value: i64) -> Self {
                value as $ty
            }
            fn power(base: i64, exponent: u32) -> Self {
                (base as $ty).wrapping_pow(exponent)
            }
        }
    )*};
}

macro_rules! floats {
    ($($ty:ident: $of:expr),*) => {$(
        impl TestElement for $ty {
            fn of(value: i64) -> Self {
                ($of)(value as f64)
            }
            fn power(base: i64, exponent: u32) -> Self {
                ($of)((base as f64).powi(exponent as i32))
            }
        }
    )*};
}

/// Whole numbers are true if they are not 0.
impl TestElement for Boolean {
    fn of(value: i64) -> Self {
        (value != 0).into()
    }
    fn power(base: i64, _exponent: u32) -> Self {
        Self::of(base)
    }
}

integers! { i8, u8, i16, u16, i32, u32, i64, u64 }
floats! {
    f32: |value| value as f32, f64: |value| value, f16: f16::from_f64, bf16: bf16::from_f64,
    F8E4M3: |value| F8E4M3::from_f32(value as f32), F8E5M2: |value| F8E5M2::from_f32(value as f32)
}
