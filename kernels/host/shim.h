// The part of CUDA that the kernels use, for a host compiler: a CTA is one host thread, with one CUDA thread.
//
// Owns the orders of `memory_order.h` as atomic operations of the compiler. None is stronger than on a GPU, so ThreadSanitizer
// reports a missing one. Compile without contraction (-ffp-contract=off).
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#define FLEXRING_ON_HOST
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#ifdef FLEXRING_CTA_THREADS
// A test with one CTA in a process, whose threads are host threads.
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

struct Index {
    unsigned x, y, z;
};

inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

#ifdef FLEXRING_CTA_THREADS
// Waits for all threads of the CTA; returns whether any has passed a number that is not 0.
int meet_threads(int any);
#else
inline int meet_threads(int any) { return any; }
#endif
inline void __syncthreads() { meet_threads(0); }
inline int __syncthreads_or(int any) { return meet_threads(any); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

[[noreturn]] inline void __trap() {
    std::fputs("a kernel has executed a trap\n", stderr);
    std::abort();
}

template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "both types have the same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline unsigned __float_as_uint(float a) { return same_bits<unsigned>(a); }
inline float __uint_as_float(unsigned a) { return same_bits<float>(a); }
inline long long __double_as_longlong(double a) { return same_bits<long long>(a); }
inline double __longlong_as_double(long long a) { return same_bits<double>(a); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }

#include "../number.h"

namespace flexring {

// What a CTA runs on. Its functions may throw, to end the CTA.
class Machine {
  public:
    virtual ~Machine() = default;
    // Where the bytes at an address of the GPU can be accessed, until `end_reach`.
    virtual void* reach(void* at, u64 bytes, u32 alignment, bool write) = 0;
    // As `reach`, for words that several CTAs access with atomic operations.
    virtual void* reach_shared(void* at, u64 bytes, bool write) = 0;
    virtual void end_reach() = 0;
    // The CTA waits.
    virtual void pause() = 0;
    // A word changes that other CTAs wait for.
    virtual void published(const void* word) = 0;
};

// Of this CTA.
inline thread_local Machine* machine = nullptr;

inline u64 load_acquire_sys(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline u64 load_acquire_gpu(const u64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline u64 load_relaxed(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline u32 load_relaxed(const u32* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline u64 load_relaxed_sys(const u64* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
inline void store_relaxed(u64* word, u64 value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
    if (machine) machine->published(word);
}
inline void store_relaxed(u32* word, u32 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
inline void store_release_gpu(u64* word, u64 value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    if (machine) machine->published(word);
}
// ThreadSanitizer does not know fences, so this is not a fence and a relaxed store.
inline void store_release_sys(u64* word, u64 value) {
    if (machine) machine->published(word);
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
inline void store_relaxed_sys(u64* word, u64 value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
// What follows is a relaxed store of a packet, and what it orders are packets too, which ThreadSanitizer does not report.
inline void release_sys() {
#ifndef __SANITIZE_THREAD__
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
#endif
}
inline void store_packet(u64* words, u64 first, u64 second) {
    __atomic_store_n(words + 1, second, __ATOMIC_RELAXED);
    if (machine) machine->published(words);
    __atomic_store_n(words, first, __ATOMIC_RELAXED);
}
// As above: this is not a fence before a relaxed store.
inline void store_packet_release(u64* words, u64 first, u64 second) {
    __atomic_store_n(words + 1, second, __ATOMIC_RELEASE);
    if (machine) machine->published(words);
    __atomic_store_n(words, first, __ATOMIC_RELEASE);
}
inline void load_packet(const u64* words, u64& first, u64& second) {
    first = __atomic_load_n(words, __ATOMIC_RELAXED);
    second = __atomic_load_n(words + 1, __ATOMIC_RELAXED);
}
inline void load_packet_acquire(const u64* words, u64& first, u64& second) {
    first = __atomic_load_n(words, __ATOMIC_ACQUIRE);
    second = __atomic_load_n(words + 1, __ATOMIC_ACQUIRE);
}
inline void load_streamed(const u32* words, u32 (&into)[4]) { std::memcpy(into, words, sizeof into); }
inline void store_streamed(u32* words, const u32 (&from)[4]) { std::memcpy(words, from, sizeof from); }
inline void store_staged(u32* words, const u32 (&from)[4]) { std::memcpy(words, from, sizeof from); }
inline void load_staged(const u32* words, u32 (&into)[4]) { std::memcpy(into, words, sizeof into); }
inline u32 add_acq_rel(u32* word, u32 value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }
inline u64 add_acq_rel(u64* word, u64 value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }
inline u64 add_acquire(u64* word, u64 value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQUIRE); }
inline u64 add_relaxed(u64* word, u64 value) { return __atomic_fetch_add(word, value, __ATOMIC_RELAXED); }
inline u64 compare_and_swap(u64* word, u64 expected, u64 value) {
    __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
inline u64 nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline void pause_waiter() { machine->pause(); }

template <class T>
inline const T* reach_to_read(const T* at, u64 bytes) {
    return machine ? static_cast<const T*>(machine->reach(const_cast<T*>(at), bytes, sizeof(T), false)) : at;
}
template <class T>
inline T* reach_to_write(T* at, u64 bytes) {
    return machine ? static_cast<T*>(machine->reach(at, bytes, sizeof(T), true)) : at;
}
template <class T>
inline T* reach_shared(T* at, u64 bytes) {
    void* const any = const_cast<std::remove_const_t<T>*>(at);
    return machine ? static_cast<T*>(machine->reach_shared(any, bytes, !std::is_const_v<T>)) : at;
}
template <class T>
inline T& reach_shared(T* at) {
    return *reach_shared(at, sizeof(T));
}
inline void end_reach() {
    if (machine) machine->end_reach();
}

}  // namespace flexring
