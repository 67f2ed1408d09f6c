//! Collectives on GPU memory that kernels run themselves. Builds without the feature `cuda` use `absent.rs`,
//! where there are none.

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(feature = "cuda")]
mod cuda;
