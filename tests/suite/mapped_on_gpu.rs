//! Vectors in GPU memory that the program maps by itself, as PyTorch's expandable segments: processes of one
//! node, with the simulated driver or, with WORLDS=gpu, the machine's driver.

use crate::graphs::{capture, stream};
use crate::harness::{Rank, test_name};
use crate::registered_on_gpu::{DIRECT, outputs_of, settle, value};
use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType,
    CUmemLocation, CUmemLocationType, cuMemAddressFree, cuMemAddressReserve, cuMemCreate, cuMemMap,
    cuMemRelease, cuMemSetAccess, cuMemUnmap,
};
use cudarc::driver::{CudaSlice, CudaStream};
use flexring::ReduceOp;
use flexring::gpu::RegisteredOnGpu;
use std::mem::zeroed;
use std::sync::Arc;

/// Bytes of a physical allocation.
const SEGMENT: usize = 2 << 20;
/// Elements of a vector, which is shorter than a segment, and takes stages or is accessed directly.
const COUNT: usize = 200_000;

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const NONE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
const LOCATION: CUmemLocation =
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };

/// Addresses of a number of segments.
struct Reserved {
    stream: Arc<CudaStream>,
    start: u64,
    segments: usize,
}

#[allow(unsafe_code)]
impl Reserved {
    fn new(segments: usize) -> Self {
        let (stream, mut start) = (stream(), 0);
        // SAFETY: the out-parameter is writable.
        unsafe { cuMemAddressReserve(&raw mut start, segments * SEGMENT, 0, 0, 0) }
            .result()
            .expect("addresses");
        Self { stream, start, segments }
    }

    /// All of its segments, with memory that can be exported.
    fn mapped(segments: usize) -> Self {
        let reserved = Self::new(segments);
        (0..segments).for_each(|segment| reserved.map(segment, DESCRIPTOR));
        reserved
    }

    fn at(&self, segment: usize) -> u64 {
        self.start + (segment * SEGMENT) as u64
    }

    /// Maps a new allocation, of which nothing else is kept.
    fn map(&self, segment: usize, handle_types: CUmemAllocationHandleType) {
        let (mut memory, at) = (0, self.at(segment));
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: LOCATION, flags };
        // SAFETY: zeros are valid for the other members. Nothing is mapped at the addresses.
        unsafe {
            let wanted = CUmemAllocationProp {
                type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
                requestedHandleTypes: handle_types,
                location: LOCATION,
                ..zeroed()
            };
            cuMemCreate(&raw mut memory, SEGMENT, &raw const wanted, 0).result().expect("memory");
            cuMemMap(at, SEGMENT, 0, memory, 0).result().expect("a mapping");
            cuMemRelease(memory).result().expect("a handle");
            cuMemSetAccess(at, SEGMENT, &raw const access, 1).result().expect("access");
        }
    }

    fn unmap(&self, segment: usize) {
        // SAFETY: it is mapped, and no vector is used there meanwhile.
        unsafe { cuMemUnmap(self.at(segment), SEGMENT) }.result().expect("a mapping");
    }

    /// A vector that begins at this element. It must not be dropped before [`end`](Self::end).
    fn vector(&self, first: usize) -> CudaSlice<f32> {
        // SAFETY: the memory is valid as long as it is used.
        unsafe { self.stream.upgrade_device_ptr(self.start + 4 * first as u64, COUNT) }
    }

    fn write(&self, vector: &mut CudaSlice<f32>, rank: usize) {
        let elements: Vec<f32> = (0..COUNT).map(|at| value(at, rank)).collect();
        self.stream.memcpy_htod(&elements, vector).expect("a copy");
    }

    fn check_sum(&self, vector: &CudaSlice<f32>, ranks: usize, what: &str) {
        let found = self.stream.clone_dtoh(vector).expect("a result");
        let sum = |at: usize| (0..ranks).map(|rank| value(at, rank)).sum::<f32>();
        let wrong = (0..COUNT).find(|&at| found[at] != sum(at));
        assert!(wrong.is_none(), "{what}: element {wrong:?}");
    }

    /// Unmaps all, when no vector is used any more.
    fn end(self, vectors: impl IntoIterator<Item = CudaSlice<f32>>) {
        for vector in vectors {
            let _ = vector.leak();
        }
        (0..self.segments).for_each(|segment| self.unmap(segment));
        // SAFETY: they were reserved, and nothing is mapped there.
        unsafe { cuMemAddressFree(self.start, self.segments * SEGMENT) }.result().expect("addresses");
    }
}

fn registered(rank: &Rank, vector: CudaSlice<f32>) -> RegisteredOnGpu<'_, CudaSlice<f32>> {
    rank.register_on_gpu(vector).expect("registered memory")
}

#[test]
fn vectors_in_several_physical_allocations_are_accessed_directly() {
    let name = "vectors_in_several_physical_allocations_are_accessed_directly";
    for output in outputs_of(&test_name(module_path!(), name), 3, &[], |rank| {
        let memory = Reserved::mapped(3);
        // Both begin in one segment and end in the next one, and they share the second one.
        let middle = SEGMENT / 4;
        let places = [middle - COUNT / 2, 2 * middle - COUNT / 2];
        let mut vectors = places.map(|first| registered(&rank, memory.vector(first)));
        settle(&rank);
        for round in 0..2 {
            let [first, second] = &mut vectors;
            memory.write(first, rank.rank());
            rank.all_reduce_into_on_gpu(&**first, &mut **second, ReduceOp::Sum).expect("a call");
            memory.check_sum(second, 3, &format!("round {round}"));
            rank.all_reduce_on_gpu(&mut **first, ReduceOp::Sum).expect("a call in place");
            memory.check_sum(first, 3, &format!("in place, round {round}"));
            // What is deregistered goes through stages, and is registered again.
            let plain = vectors.map(|vector| vector.into_inner().expect("no call uses it"));
            vectors = plain.map(|mut vector| {
                memory.write(&mut vector, rank.rank());
                rank.all_reduce_on_gpu(&mut vector, ReduceOp::Sum).expect("a call");
                memory.check_sum(&vector, 3, "deregistered");
                registered(&rank, vector)
            });
            settle(&rank);
        }
        let plain = vectors.map(|vector| vector.into_inner().expect("no call uses it"));
        rank.synchronize().expect("all calls succeed");
        memory.end(plain);
    }) {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(DIRECT), "{text}");
    }
}

#[test]
fn memory_that_was_unmapped_or_replaced_is_not_used() {
    let name = "memory_that_was_unmapped_or_replaced_is_not_used";
    for output in outputs_of(&test_name(module_path!(), name), 2, &[], |rank| {
        let memory = Reserved::mapped(2);
        let mut vector = Some(registered(&rank, memory.vector(SEGMENT / 4 - COUNT / 2)));
        settle(&rank);
        let mut call = |what: &str| {
            let vector = vector.as_mut().expect("it is registered");
            memory.write(vector, rank.rank());
            rank.all_reduce_on_gpu(&mut **vector, ReduceOp::Sum).expect("a call");
            memory.check_sum(vector, 2, what);
        };
        call("as registered");
        // On one rank and then on both: the second segment, then the first one.
        for (segment, is_replaced) in [(1, rank.rank() == 0), (0, true)] {
            if is_replaced {
                memory.unmap(segment);
                memory.map(segment, DESCRIPTOR);
            }
            (0..3).for_each(|_| call("after memory was replaced"));
        }
        let plain = vector.take().map(|vector| vector.into_inner().expect("no call uses it"));
        // Registered again, both have the new memory.
        let mut again = registered(&rank, plain.expect("a vector"));
        settle(&rank);
        memory.write(&mut again, rank.rank());
        rank.all_reduce_on_gpu(&mut *again, ReduceOp::Sum).expect("a call");
        memory.check_sum(&again, 2, "registered again");
        let plain = again.into_inner().expect("no call uses it");
        rank.synchronize().expect("all calls succeed");
        memory.end([plain]);
    }) {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(DIRECT), "{text}");
        assert!(text.contains("were freed or unmapped while they were registered"), "{text}");
    }
}

/// Counter-example: the shorter memory got the number that the graph had for the longer one, so the neighbour
/// accessed what is behind it.
#[test]
fn a_graph_uses_no_shorter_memory_that_begins_where_its_own_began() {
    let name = "a_graph_uses_no_shorter_memory_that_begins_where_its_own_began";
    for output in outputs_of(&test_name(module_path!(), name), 2, &[], |rank| {
        let memory = Reserved::mapped(2);
        let mut long = registered(&rank, memory.vector(SEGMENT / 4 - COUNT / 2));
        settle(&rank);
        let graph = capture(&memory.stream, || {
            rank.all_reduce_on_gpu(&mut *long, ReduceOp::Sum).expect("it is captured");
        });
        let replay = |vector: &mut CudaSlice<f32>, what: &str| {
            memory.write(vector, rank.rank());
            graph.launch().expect("a launch");
            memory.check_sum(vector, 2, what);
        };
        replay(&mut long, "registered");
        let mut long = long.into_inner().expect("no call uses it");
        replay(&mut long, "deregistered");
        let mut short = registered(&rank, memory.vector(0));
        settle(&rank);
        memory.write(&mut short, rank.rank());
        rank.all_reduce_on_gpu(&mut *short, ReduceOp::Sum).expect("a call");
        memory.check_sum(&short, 2, "the first segment is registered");
        replay(&mut long, "its first segment is registered");
        let short = short.into_inner().expect("no call uses it");
        rank.synchronize().expect("all calls succeed");
        drop(graph);
        memory.end([long, short]);
    }) {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains(DIRECT), "{text}");
    }
}

#[test]
fn memory_that_cannot_be_shared_says_why() {
    let name = "memory_that_cannot_be_shared_says_why";
    for output in outputs_of(&test_name(module_path!(), name), 2, &[], |rank| {
        let memory = Reserved::new(3);
        memory.map(0, NONE);
        memory.map(1, DESCRIPTOR);
        // In memory without descriptors, partly so, beyond what is mapped, and of a pool.
        let first = [0, SEGMENT / 4 - COUNT / 2, 2 * SEGMENT / 4 - COUNT / 2];
        let mut vectors = first.map(|first| Some(registered(&rank, memory.vector(first))));
        let pool = memory.stream.alloc_zeros::<f32>(COUNT).expect("memory");
        let mut pool = registered(&rank, pool);
        settle(&rank);
        for vector in vectors[..2].iter_mut().flatten().chain([&mut pool]) {
            memory.write(vector, rank.rank());
            rank.all_reduce_on_gpu(&mut **vector, ReduceOp::Sum).expect("a call");
            memory.check_sum(vector, 2, "stages");
        }
        rank.synchronize().expect("all calls succeed");
        let plain = vectors.map(|vector| vector.expect("a vector").into_inner().expect("no call uses it"));
        drop(pool);
        memory.map(2, NONE);
        memory.end(plain);
    }) {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !text.contains(DIRECT), "{text}");
        let without = "without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (fix: request it in cuMemCreate)";
        assert_eq!(text.matches(without).count(), 2, "{text}");
        for why in ["they are not mapped as a whole", "they are memory of a pool"] {
            assert_eq!(text.matches(why).count(), 1, "{why}: {text}");
        }
    }
}
