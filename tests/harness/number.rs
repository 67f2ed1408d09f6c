//! Element types as the tests see them.

use flexring::Element;
use half::{bf16, f16};

/// An element type: small whole numbers are exact in all of them.
pub trait Number: Element + PartialEq + std::fmt::Debug {
    /// A small whole number.
    fn of(value: i64) -> Self;
    /// `base` to the power of `exponent`; wrapped, as integers are.
    fn power(base: i64, exponent: u32) -> Self;
}

macro_rules! integers {
    ($($ty:ident),*) => {$(
        impl Number for $ty {
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
        impl Number for $ty {
            fn of(value: i64) -> Self {
                ($of)(value as f64)
            }
            fn power(base: i64, exponent: u32) -> Self {
                ($of)((base as f64).powi(exponent as i32))
            }
        }
    )*};
}

integers! { i8, u8, i32, u32, i64, u64 }
floats! { f32: |value| value as f32, f64: |value| value, f16: f16::from_f64, bf16: bf16::from_f64 }
