//! Results do not depend on how the program's threads compute: whether they flush subnormal numbers (as after
//! `torch.set_flush_denormal(True)`), how they round, and which exceptions trap. The threads keep these
//! settings, and their exception flags.

#![allow(unsafe_code, reason = "sets registers")]

use crate::harness::{Setup, World, cases, spawn};
use fastrand::Rng;
use flexring::internal::device::host::Host;
use flexring::{Communicator, Element, ReduceOp};
use flexring_core::config::Simd;
use flexring_core::float8::{F8E4M3, F8E5M2};
use flexring_ffi::collectives::flexring_all_reduce;
use flexring_ffi::comm::{flexring_comm_free, flexring_comm_init_rank};
use flexring_ffi::status::flexring_result;
use flexring_ffi::types::{FLEXRING_FLOAT64, flexring_op_create_premul_sum};
use flexring_ffi::unique_id::{flexring_get_unique_id, flexring_unique_id};
use half::{bf16, f16};
use std::arch::asm;
use std::ptr::null_mut;

/// The register with the settings of a thread: MXCSR.
#[cfg(target_arch = "x86_64")]
mod register {
    use super::asm;

    /// The default; subnormals are zeros (as operands, as results); results are rounded up; every exception
    /// traps.
    pub const ENVIRONMENTS: [u64; 4] = [0x1f80, 0x9fc0, 0x5f80, 0x0000];

    pub fn read() -> u64 {
        let mut value = 0u32;
        // SAFETY: the instruction writes four bytes at the address.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value) };
        value.into()
    }

    pub fn write(value: u64) {
        let value = value as u32;
        // SAFETY: the instruction reads four bytes at the address.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value) };
    }
}

/// The register with the settings of a thread: FPCR.
#[cfg(target_arch = "aarch64")]
mod register {
    use super::asm;

    /// The default; subnormals are zeros; results are rounded up; every exception traps, where the processor
    /// can.
    pub const ENVIRONMENTS: [u64; 4] = [0, 1 << 24 | 1 << 19, 1 << 22, 0x9f00];

    pub fn read() -> u64 {
        let value;
        // SAFETY: reads a register of this thread.
        unsafe { asm!("mrs {}, fpcr", out(reg) value) };
        value
    }

    pub fn write(value: u64) {
        // SAFETY: writes a register of this thread.
        unsafe { asm!("msr fpcr, {}", in(reg) value) };
    }
}

/// Runs `body` with these settings of its thread, and returns the settings after it.
fn with_environment<R>(environment: u64, body: impl FnOnce() -> R) -> (R, u64) {
    let before = register::read();
    register::write(environment);
    // Processors need not have all of them.
    let set = register::read();
    let result = std::hint::black_box(body)();
    let after = register::read();
    register::write(before);
    (result, if after == set { environment } else { after })
}

/// An element type, by the bits of its numbers.
trait Bits: Element {
    fn of(bits: u64) -> Self;
    fn bits(self) -> u64;
}

macro_rules! floats {
    ($($type:ty: $bits:ty;)*) => {$(
        impl Bits for $type {
            fn of(bits: u64) -> Self {
                Self::from_bits(bits as $bits)
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    )*};
}
floats! { f32: u32; f64: u64; f16: u16; bf16: u16; F8E4M3: u8; F8E5M2: u8; }

/// Subnormal numbers, and others with all bits of the fraction random, so that sums are rounded. Sums are
/// finite.
fn numbers<T: Bits>(random: &mut Rng, count: usize) -> Vec<T> {
    let (bits, fraction) = match (size_of::<T>(), T::DTYPE) {
        (8, _) => (64, 52),
        (4, _) => (32, 23),
        (2, flexring::DType::F16) => (16, 10),
        (2, _) => (16, 7),
        (_, flexring::DType::F8E4M3) => (8, 3),
        _ => (8, 2),
    };
    let number = |random: &mut Rng| {
        // The exponents around that of 1, and the least one, that of subnormals.
        let one = (1u64 << (bits - fraction - 2)) - 1;
        let exponent = if random.bool() { 0 } else { one - random.u64(..3) };
        random.u64(..2) << (bits - 1) | exponent << fraction | random.u64(..1 << fraction)
    };
    (0..count).map(|_| T::of(number(random))).collect()
}

/// The bits of the sums, averages and sums of products at each rank, whose threads have these settings.
/// Checks that they keep them.
fn results<T: Bits>(setup: &Setup, count: usize, environments: &[u64]) -> Vec<Vec<u64>> {
    spawn(setup, |comm| {
        let mut random = Rng::with_seed(comm.rank() as u64);
        let mut bits = Vec::new();
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PreMulSum(0.3), ReduceOp::Prod, ReduceOp::Max] {
            let mut vector = numbers::<T>(&mut random, count);
            let later = vector.clone();
            let environment = environments[comm.rank() % environments.len()];
            let (later, after) = with_environment(environment, || {
                comm.all_reduce(&mut vector, op).expect("a sum");
                // The first of these starts a thread that computes.
                comm.all_reduce_async(later, op).and_then(flexring::Request::wait).expect("a sum")
            });
            assert_eq!(after, environment, "the settings of the calling thread of rank {}", comm.rank());
            bits.extend(vector.iter().chain(&later).map(|number| number.bits()));
        }
        bits
    })
}

fn check<T: Bits>(setup: &Setup, count: usize) {
    let expected = results::<T>(setup, count, &[register::ENVIRONMENTS[0]]);
    let found = results::<T>(setup, count, &register::ENVIRONMENTS);
    for (rank, bits) in found.iter().enumerate() {
        assert!(bits == &expected[0], "{:?} x {count} at rank {rank}, {setup:?}", T::DTYPE);
    }
}

fn check_all(setup: &Setup) {
    for count in [7, 40, 3000] {
        check::<f32>(setup, count);
        check::<f64>(setup, count);
        check::<f16>(setup, count);
        check::<bf16>(setup, count);
        check::<F8E4M3>(setup, count);
        check::<F8E5M2>(setup, count);
    }
}

#[test]
fn results_do_not_depend_on_how_the_threads_of_the_program_compute() {
    for world in [World::Local, World::Shm, World::Tcp, World::Mixed] {
        if world.is_enabled() {
            check_all(&Setup::new(world, 4));
        }
    }
}

#[test]
fn no_instruction_set_computes_as_the_threads_of_the_program_do() {
    if !World::Local.is_enabled() {
        return;
    }
    for simd in [Simd::Scalar, Simd::Avx2, Simd::Avx512, Simd::Neon] {
        if Host::new(simd).is_ok() {
            let mut setup = Setup::new(World::Local, 4);
            setup.config.simd = simd;
            check_all(&setup);
        }
    }
}

#[test]
fn communicators_of_threads_that_compute_otherwise_give_equal_bits() {
    if !World::Local.is_enabled() {
        return;
    }
    // Long enough for the threads that help with reductions.
    const COUNT: usize = 200_000;
    let sums = |environment| {
        let (comms, after) = with_environment(environment, || {
            let mut setup = Setup::new(World::Local, 2);
            setup.config.threads = 2;
            setup.config.subchunk = flexring_core::config::Size(256 << 10);
            Communicator::local_with(&setup.config, 2).expect("two ranks")
        });
        assert_eq!(after, environment, "the settings of the thread that makes communicators");
        let sum = |comm: Communicator| {
            let mut vector = numbers::<f32>(&mut Rng::with_seed(comm.rank() as u64), COUNT);
            comm.all_reduce(&mut vector, ReduceOp::Sum).expect("a sum");
            vector.iter().map(|number| number.to_bits()).collect::<Vec<_>>()
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || sum(comm))).collect();
            ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Vec<_>>()
        })
    };
    let expected = sums(register::ENVIRONMENTS[0]);
    for _ in 0..cases(1) {
        for environment in register::ENVIRONMENTS {
            assert!(sums(environment) == expected, "{environment:#x}");
        }
    }
}

/// What the C ABI gives for a sum of 1 times a subnormal factor, in a world of one rank.
fn product_in_c(factor: f32) -> f64 {
    let (mut comm, mut op) = (null_mut(), 0);
    let mut id = flexring_unique_id { internal: [0; 128] };
    let (one, mut product) = (1f64, 0f64);
    let (from, to) = ((&raw const one).cast(), (&raw mut product).cast());
    // SAFETY: all pointers are to variables of these types, and the handle is live until it is freed.
    let results = unsafe {
        [
            flexring_get_unique_id(&raw mut id),
            flexring_comm_init_rank(&raw mut comm, 1, id, 0),
            flexring_op_create_premul_sum(factor, &raw mut op),
            flexring_all_reduce(from, to, 1, FLEXRING_FLOAT64, op, comm, null_mut()),
            flexring_comm_free(comm),
        ]
    };
    assert_eq!(results, [flexring_result::FLEXRING_SUCCESS; 5]);
    product
}

#[test]
fn factors_in_c_do_not_depend_on_how_the_threads_of_the_program_compute() {
    if !World::Local.is_enabled() {
        return;
    }
    let factor = f32::from_bits(1);
    for environment in register::ENVIRONMENTS {
        let (product, after) = with_environment(environment, || product_in_c(factor));
        assert_eq!(after, environment);
        assert_eq!(product.to_bits(), f64::from(factor).to_bits(), "{environment:#x}");
    }
}
