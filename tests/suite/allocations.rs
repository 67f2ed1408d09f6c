//! Calls in the steady state do not allocate heap memory.

use crate::harness::{Setup, World, spawn};
use flexring::ReduceOp;
use flexring_core::config::Lowering;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the allocations of the threads that set `COUNTED`.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

#[allow(unsafe_code, reason = "GlobalAlloc is an unsafe trait")]
// SAFETY: all arguments are passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTED.try_with(Cell::get).unwrap_or(false) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
            COUNTED.set(false);
            eprintln!("allocated {layout:?} at {}", std::backtrace::Backtrace::force_capture());
        }
        // SAFETY: the caller keeps the contract of the system's allocator.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn calls_after_the_first_do_not_allocate() {
    if World::enabled()[0].is_gpu() {
        eprintln!("skipped: a call on a GPU is sent to the worker thread, which allocates a few bytes");
        return;
    }
    for &world in World::enabled() {
        for lowering in [Lowering::Direct, Lowering::Chain] {
            spawn(&Setup::new(world, 4).lowering(lowering), |comm| {
                // Without this, RDMA registers memory sub-chunk by sub-chunk in every call, which allocates.
                let mut heap = comm.register(vec![1f32; 200_000]).expect("memory that can be locked");
                let mut pool = comm.alloc::<f32>(200_000).expect("pool memory");
                for round in 0..10 {
                    // The first round is not counted: it installs programs, and the standard library
                    // allocates thread-locals.
                    COUNTED.set(round > 0);
                    for count in [1, 2, 1000, 200_000] {
                        comm.all_reduce(&mut heap[..count], ReduceOp::Max).expect("a maximum");
                        comm.all_reduce(&mut pool[..count], ReduceOp::Avg).expect("an average");
                        comm.all_reduce_into(&heap[..count], &mut pool[..count], ReduceOp::PreMulSum(0.5))
                            .expect("a sum");
                        comm.reduce_scatter_in_place(&mut heap[..4 * count.div_ceil(4)], ReduceOp::Max)
                            .expect("parts");
                        comm.all_gather_in_place(&mut pool[..4 * count.div_ceil(4)]).expect("all parts");
                        comm.broadcast(&mut pool[..count], 1).expect("a vector");
                        comm.reduce(&mut heap[..count], ReduceOp::Min, 2).expect("a minimum");
                        let whole = 4 * count.div_ceil(4);
                        comm.gather_in_place(&mut pool[..whole], 3).expect("all parts");
                        comm.scatter_in_place(&mut heap[..whole], 1).expect("a part");
                        comm.all_to_all(&heap[..whole], &mut pool[..whole]).expect("blocks");
                        let block = |from: usize, to: usize| count / 8 + (from + 2 * to) % 3;
                        let sends: [usize; 4] = std::array::from_fn(|to| block(comm.rank(), to));
                        let receives: [usize; 4] = std::array::from_fn(|from| block(from, comm.rank()));
                        let (send, receive) = (sends.iter().sum::<usize>(), receives.iter().sum::<usize>());
                        comm.all_to_all_v(&heap[..send], &sends, &mut pool[..receive], &receives)
                            .expect("uneven blocks");
                        comm.barrier().expect("all ranks");
                    }
                    COUNTED.set(false);
                    // No rank leaves while others are still counted.
                    comm.all_reduce(&mut [0u8], ReduceOp::Max).expect("a maximum");
                }
            });
            assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), 0, "{world:?}, {lowering:?}");
        }
    }
}
