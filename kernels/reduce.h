// Elements of vectors in granules, which are 16 bytes: how a thread reads, combines and writes them.
//
// A thread reads a granule of all operands before it writes it, so the destination may be one of the operands. No barriers.
#pragma once

#include "collective.h"
#include "memory_order.h"
#include "number.h"

namespace flexring {

// The largest number of threads in a CTA.
constexpr int kMaxThreads = 512;
// Set in the address of an operand whose elements are multiplied by the call's factor. No address is that large.
constexpr u64 kScaled = 1ull << 63;

struct alignas(16) Granule {
    u32 words[4];
};

template <class E>
constexpr int kElements = 16 / static_cast<int>(sizeof(typename E::Stored));

// Granules of each operand that a thread reads at a time. Each takes four registers or more for its accumulators, and for
// integers with bitwise operations more: an element of 16 bits takes a whole register, one of 64 bits two and a long division.
template <class E>
constexpr int kAtOnce = sizeof(typename E::Stored) == 1                  ? 2
                        : !E::kBitwise || sizeof(typename E::Stored) == 4 ? 4
                        : sizeof(typename E::Stored) == 2                 ? 1
                                                                          : 2;

template <class E>
__device__ __forceinline__ void widen(const Granule& granule, typename E::Acc* values) {
    constexpr bool kPairs = sizeof(typename E::Acc) > sizeof(typename E::Stored);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 word = granule.words[i];
        if constexpr (kPairs && sizeof(typename E::Stored) == 2) {
            E::widen_pair(word, &values[2 * i]);
        } else if constexpr (kPairs) {
            E::widen_pair(word & 0xffff, &values[4 * i]);
            E::widen_pair(word >> 16, &values[4 * i + 2]);
        } else if constexpr (sizeof(typename E::Stored) == 1) {
#pragma unroll
            for (int j = 0; j < 4; ++j) values[4 * i + j] = E::widen(static_cast<u8>(word >> 8 * j));
        } else if constexpr (sizeof(typename E::Stored) == 2) {
            values[2 * i] = E::widen(static_cast<u16>(word));
            values[2 * i + 1] = E::widen(static_cast<u16>(word >> 16));
        } else if constexpr (sizeof(typename E::Stored) == 4) {
            values[i] = E::widen(word);
        } else if (i % 2 == 0) {
            values[i / 2] = E::widen(word | static_cast<u64>(granule.words[i + 1]) << 32);
        }
    }
}

template <class E>
__device__ __forceinline__ Granule narrow(const typename E::Acc* values) {
    constexpr bool kPairs = sizeof(typename E::Acc) > sizeof(typename E::Stored);
    Granule granule;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 word = 0;
        if constexpr (kPairs && sizeof(typename E::Stored) == 2) {
            word = E::narrow_pair(values[2 * i], values[2 * i + 1]);
        } else if constexpr (kPairs) {
            word = E::narrow_pair(values[4 * i], values[4 * i + 1]) |
                   E::narrow_pair(values[4 * i + 2], values[4 * i + 3]) << 16;
        } else if constexpr (sizeof(typename E::Stored) == 1) {
#pragma unroll
            for (int j = 0; j < 4; ++j) word |= static_cast<u32>(E::narrow(values[4 * i + j])) << 8 * j;
        } else if constexpr (sizeof(typename E::Stored) == 2) {
            word = E::narrow(values[2 * i]) | static_cast<u32>(E::narrow(values[2 * i + 1])) << 16;
        } else if constexpr (sizeof(typename E::Stored) == 4) {
            word = E::narrow(values[i]);
        } else {
            word = static_cast<u32>(E::narrow(values[i / 2]) >> 32 * (i % 2));
        }
        granule.words[i] = word;
    }
    return granule;
}

struct Sum {
    template <class E, class A>
    static __device__ __forceinline__ A of(A a, A b) { return E::sum(a, b); }
};
struct Prod {
    template <class E, class A>
    static __device__ __forceinline__ A of(A a, A b) { return E::product(a, b); }
};
struct Max {
    template <class E, class A>
    static __device__ __forceinline__ A of(A a, A b) { return E::maximum(a, b); }
};
struct Min {
    template <class E, class A>
    static __device__ __forceinline__ A of(A a, A b) { return E::minimum(a, b); }
};
struct And {
    template <class E, class A>
    static __device__ __forceinline__ A of(A a, A b) { return E::bits_and(a, b); }
};
struct Or {
    template <class E, class A>
    static __device__ __forceinline__ A of(A a, A b) { return E::bits_or(a, b); }
};
struct Xor {
    template <class E, class A>
    static __device__ __forceinline__ A of(A a, A b) { return E::bits_xor(a, b); }
};

__device__ __forceinline__ bool is_scaled(u64 word) { return (word & kScaled) != 0; }

// Widens the granules of an operand, and multiplies them with the factor if the operand is scaled.
template <class E, int kGranules>
__device__ __forceinline__ void take(bool scaled, typename E::Acc factor, const Granule (&read)[kGranules],
                                     typename E::Acc (&values)[kGranules][kElements<E>]) {
#pragma unroll
    for (int g = 0; g < kGranules; ++g) widen<E>(read[g], values[g]);
    if (scaled) {
#pragma unroll
        for (int g = 0; g < kGranules; ++g) {
#pragma unroll
            for (int i = 0; i < kElements<E>; ++i) values[g][i] = E::product(values[g][i], factor);
        }
    }
}

// What a call says besides addresses, in registers: the compiler must assume that stores to the destination change memory.
template <class E>
struct Arithmetic {
    u32 operands;
    u32 divide;
    u32 operation;
    typename E::Acc factor;
};

// Combines each of `sums` with one of `values`.
template <class E, class Op, int kGranules>
__device__ __forceinline__ void combine_each(const typename E::Acc (&values)[kGranules][kElements<E>],
                                             typename E::Acc (&sums)[kGranules][kElements<E>]) {
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
#pragma unroll
        for (int i = 0; i < kElements<E>; ++i) sums[g][i] = Op::template of<E>(sums[g][i], values[g][i]);
    }
}

// Widens and multiplies the granules of an operand, and combines them with `sums`. The operation is chosen here, so that all
// the code around it is in a kernel once; the branch is uniform, and small beside the loads of the granules.
template <class E, int kGranules>
__device__ __forceinline__ void add(const Arithmetic<E>& job, bool scaled, const Granule (&read)[kGranules],
                                    typename E::Acc (&sums)[kGranules][kElements<E>]) {
    typename E::Acc values[kGranules][kElements<E>];
    take<E, kGranules>(scaled, job.factor, read, values);
    if constexpr (E::kBitwise) {
        switch (job.operation) {
            case kAnd: return combine_each<E, And, kGranules>(values, sums);
            case kOr: return combine_each<E, Or, kGranules>(values, sums);
            case kXor: return combine_each<E, Xor, kGranules>(values, sums);
            default: break;
        }
    }
    switch (job.operation) {
        case kSum: return combine_each<E, Sum, kGranules>(values, sums);
        case kProd: return combine_each<E, Prod, kGranules>(values, sums);
        case kMax: return combine_each<E, Max, kGranules>(values, sums);
        default: return combine_each<E, Min, kGranules>(values, sums);
    }
}

// Adds an operand and the next one, if there is one. Both are read before either is used. (Reading one operand ahead does not
// work: the compiler gives both the same registers, and waits.)
template <class E, int kGranules, bool kFirst, class Words, class Load>
__device__ __forceinline__ void add_two(const Words& operands, u32 nth, const Arithmetic<E>& job, Load load,
                                        typename E::Acc (&sums)[kGranules][kElements<E>]) {
    const bool both = nth + 1 < job.operands;
    const u64 one = operands[nth], two = both ? operands[nth + 1] : 0;
    Granule first[kGranules], second[kGranules];
#pragma unroll
    for (int g = 0; g < kGranules; ++g) first[g] = load(Words::address_of(one), g);
#pragma unroll
    for (int g = 0; g < kGranules; ++g) second[g] = load(Words::address_of(two), g);
    if constexpr (kFirst) {
        take<E, kGranules>(is_scaled(one), job.factor, first, sums);
    } else {
        add<E, kGranules>(job, is_scaled(one), first, sums);
    }
    if (both) add<E, kGranules>(job, is_scaled(two), second, sums);
}

// Reduces kGranules granules: `load` reads the g-th one from an operand, or zeros if the operand is null; `store` writes it to
// the destination.
template <class E, int kGranules, class Words, class Load, class Store>
__device__ __forceinline__ void combine(const Words& operands, const Arithmetic<E>& job, Load load, Store store) {
    const u32 count = job.operands, divide = job.divide;
    typename E::Acc sums[kGranules][kElements<E>];
    if constexpr (kGranules == 1) {
        Granule read[1] = {load(Words::address_of(operands[0]), 0)};
        take<E, 1>(is_scaled(operands[0]), job.factor, read, sums);
#pragma unroll 1
        for (u32 nth = 1; nth < count; ++nth) {
            const u64 word = operands[nth];
            read[0] = load(Words::address_of(word), 0);
            add<E, 1>(job, is_scaled(word), read, sums);
        }
    } else {
        add_two<E, kGranules, true>(operands, 0, job, load, sums);
#pragma unroll 1
        for (u32 nth = 2; nth < count; nth += 2) {
            add_two<E, kGranules, false>(operands, nth, job, load, sums);
        }
    }
    if (divide > 1) {
        const typename E::Divisor divisor = E::divisor(divide);
#pragma unroll
        for (int g = 0; g < kGranules; ++g) {
#pragma unroll
            for (int i = 0; i < kElements<E>; ++i) sums[g][i] = E::quotient(sums[g][i], divisor);
        }
    }
#pragma unroll
    for (int g = 0; g < kGranules; ++g) store(g, narrow<E>(sums[g]));
}

// The offset of an address in its granule.
__device__ __forceinline__ u32 skew_of(const void* at) {
    return static_cast<u32>(reinterpret_cast<u64>(at)) % 16;
}

// Elements `from` to `to` of the granule that begins at `at`; zeros for the others.
template <class Stored>
__device__ __forceinline__ Granule gather(const Stored* at, int from, int to) {
    constexpr int kCount = 16 / static_cast<int>(sizeof(Stored));
    Granule granule = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < from || i >= to) continue;
        if constexpr (sizeof(Stored) == 8) {
            const u64 value = at[i];
            granule.words[2 * i] = static_cast<u32>(value);
            granule.words[2 * i + 1] = static_cast<u32>(value >> 32);
        } else {
            constexpr int kInWord = 4 / static_cast<int>(sizeof(Stored));
            granule.words[i / kInWord] |= static_cast<u32>(at[i]) << 32 / kInWord * (i % kInWord);
        }
    }
    return granule;
}

// Writes elements `from` to `to` of a granule, which begins at `at`.
template <class Stored>
__device__ __forceinline__ void scatter(Stored* at, const Granule& granule, int from, int to) {
    constexpr int kCount = 16 / static_cast<int>(sizeof(Stored));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if (i < from || i >= to) continue;
        if constexpr (sizeof(Stored) == 8) {
            at[i] = granule.words[2 * i] | static_cast<u64>(granule.words[2 * i + 1]) << 32;
        } else {
            constexpr int kInWord = 4 / static_cast<int>(sizeof(Stored));
            at[i] = static_cast<Stored>(granule.words[i / kInWord] >> 32 / kInWord * (i % kInWord));
        }
    }
}

}  // namespace flexring
