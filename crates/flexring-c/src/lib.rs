//! `libflexring.a` and `libflexring.so`: they export the functions of `flexring-ffi`.

extern crate flexring_ffi as _;
