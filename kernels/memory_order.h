// Loads, stores and atomic operations with a scope and an order, as PTX instructions.
//
// Scope `gpu`: threads of this GPU. Scope `sys`: also the host and other GPUs. Words that cross PCIe have one writer and no
// atomic operation, because not every link has those. kernels/host/shim.h has the same functions for a CPU, with the same
// orders. Includes nothing but number.h, because NVRTC has no headers.
#pragma once

#include "number.h"

#ifndef FLEXRING_ON_HOST

namespace flexring {

// A word that the host or another GPU writes: what it wrote before is visible to what follows.
__device__ __forceinline__ u64 load_acquire_sys(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// A word that another CTA writes: what that CTA wrote before it, or had acquired, is visible to what follows.
__device__ __forceinline__ u64 load_acquire_gpu(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// A word of GPU memory that may change meanwhile: some value that it has had, from L2.
__device__ __forceinline__ u64 load_relaxed(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_relaxed(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// A word that the host or another GPU may write: some value that it has had; never from L1.
__device__ __forceinline__ u64 load_relaxed_sys(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// A word that another CTA may read meanwhile; a release store or the end of the kernel makes it visible in order.
__device__ __forceinline__ void store_relaxed(u64* word, u64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(u32* word, u32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// A word that the host reads or another GPU; a release store makes it visible in order.
__device__ __forceinline__ void store_relaxed_sys(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// What this CTA wrote before its last barrier is visible to a GPU that sees what this thread writes next.
__device__ __forceinline__ void release_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Two words that are written together, but not seen together: each says for itself whether it has arrived.
__device__ __forceinline__ void store_packet(u64* words, u64 first, u64 second) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(first), "l"(second) : "memory");
}
// Behind what this thread released before.
__device__ __forceinline__ void store_packet_release(u64* words, u64 first, u64 second) { store_packet(words, first, second); }
__device__ __forceinline__ void load_packet(const u64* words, u64& first, u64& second) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(words) : "memory");
}
// What was written before it is visible to what follows.
__device__ __forceinline__ void load_packet_acquire(const u64* words, u64& first, u64& second) {
    asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(words) : "memory");
}

// 16 bytes that other GPUs read or write, but not at the same time: other words order the accesses.
__device__ __forceinline__ void store_staged(u32* words, const u32 (&from)[4]) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(words), "r"(from[0]), "r"(from[1]), "r"(from[2]),
                 "r"(from[3])
                 : "memory");
}
__device__ __forceinline__ void load_staged(const u32* words, u32 (&into)[4]) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "l"(words)
                 : "memory");
}

// 16 bytes that this kernel accesses once: they are the first to leave L2.
__device__ __forceinline__ void load_streamed(const u32* words, u32 (&into)[4]) {
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(into[0]), "=r"(into[1]), "=r"(into[2]), "=r"(into[3])
                 : "l"(words)
                 : "memory");
}
__device__ __forceinline__ void store_streamed(u32* words, const u32 (&from)[4]) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(words), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

// Publishes to other CTAs what this CTA wrote before its last barrier.
__device__ __forceinline__ void store_release_gpu(u64* word, u64 value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Publishes to the host what this CTA wrote before its last barrier, and what it had acquired from others.
__device__ __forceinline__ void store_release_sys(u64* word, u64 value) {
    asm volatile("fence.acq_rel.sys;\n\tst.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Publishes what this CTA wrote before its last barrier, and acquires what the earlier adders published. This thread's earlier loads
// are not moved behind it.
__device__ __forceinline__ u32 add_acq_rel(u32* word, u32 value) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(value) : "memory");
    return before;
}

__device__ __forceinline__ u64 add_acq_rel(u64* word, u64 value) {
    u64 before;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
}

// Acquires what the earlier adders published.
__device__ __forceinline__ u64 add_acquire(u64* word, u64 value) {
    u64 before;
    asm volatile("atom.add.acquire.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
}

// These order nothing else.
__device__ __forceinline__ u64 add_relaxed(u64* word, u64 value) {
    u64 before;
    asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(word), "l"(value) : "memory");
    return before;
}
__device__ __forceinline__ u64 compare_and_swap(u64* word, u64 expected, u64 value) {
    u64 before;
    asm volatile("atom.cas.relaxed.gpu.global.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(word), "l"(expected), "l"(value)
                 : "memory");
    return before;
}

// A clock.
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Between two looks at a word that another GPU writes, which cost time enough.
__device__ __forceinline__ void pause_waiter() {}

// Where a simulated GPU checks and translates addresses, from `reach` to `end_reach`. A GPU does that itself.
template <class T>
__device__ __forceinline__ const T* reach_to_read(const T* at, u64) { return at; }
template <class T>
__device__ __forceinline__ T* reach_to_write(T* at, u64) { return at; }
template <class T>
__device__ __forceinline__ T& reach_shared(T* at) { return *at; }
template <class T>
__device__ __forceinline__ T* reach_shared(T* at, u64) { return at; }
__device__ __forceinline__ void end_reach() {}

}  // namespace flexring

#endif
