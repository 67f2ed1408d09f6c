// Loads, stores and atomic operations with a scope and an order, as PTX instructions.
//
// Scope `gpu`: threads of this GPU. Scope `sys`: also the host and other GPUs. Words that cross PCIe have one writer and no
// atomic operation, because not every link has those. kernels/host/shim.h has the same functions for a CPU, with the same
// orders. Includes nothing but number.h, because NVRTC has no headers.
#pragma once

#include "number.h"

#ifndef FLEXRING_ON_HOST

namespace flexring {

// A word that the host writes: what the host wrote before it is visible to what follows.
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

__device__ __forceinline__ u32 load_acquire_gpu(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// A word of GPU memory that may change meanwhile: some value that it has had, from L2.
__device__ __forceinline__ u64 load_relaxed(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// A word of host memory that does not change before the host is informed; never from L1.
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

// Pauses, for about so many nanoseconds at most. The fetcher's pause leaves PCIe to others; that of the other CTAs, L2.
__device__ __forceinline__ void pause_fetcher() { __nanosleep(200); }
__device__ __forceinline__ void pause_poller() { __nanosleep(100); }

// Where a simulated GPU checks and translates addresses, from `reach` to `end_reach`. A GPU does that itself.
template <class T>
__device__ __forceinline__ const T* reach_to_read(const T* at, u64) { return at; }
template <class T>
__device__ __forceinline__ T* reach_to_write(T* at, u64) { return at; }
template <class T>
__device__ __forceinline__ T& reach_shared(T* at) { return *at; }
__device__ __forceinline__ void end_reach() {}

}  // namespace flexring

#endif
