// The kernels: reductions of every type with every operation, and copies.
//
// A kernel works on a Batch of tasks. A task's destination is divided into granules: aligned blocks of 16 bytes, of which the
// first and the last may be partial. If all operands have the same offset in a granule as the destination, whole granules are
// read and written, several at a time by each thread, to keep enough memory accesses in flight. All other granules are
// gathered element by element. A thread reads a granule of all operands before it writes it, so the destination may be one
// of the operands.
//
// Launched with (x, tasks) blocks of at most kMaxThreads threads. Any number of blocks does the whole work.
#include "batch.h"
#include "number.h"

// Read from parameter memory, without a copy for each thread.
#ifndef FLEXRING_PARAMETER
#define FLEXRING_PARAMETER(type) const __grid_constant__ type
#endif

namespace flexring {

struct alignas(16) Granule {
    u32 words[4];
};

template <class E>
constexpr int kElements = 16 / static_cast<int>(sizeof(typename E::Stored));

// Granules of each operand that a thread reads at a time. Each takes four registers or more for its accumulators.
template <class E>
constexpr int kAtOnce = sizeof(typename E::Stored) == 1 ? 2 : 4;

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

// Widens the granules of an operand, and multiplies them with its factor.
template <class E, int kGranules>
__device__ __forceinline__ void take(const Operand& operand, const Granule (&read)[kGranules],
                                     typename E::Acc (&values)[kGranules][kElements<E>]) {
#pragma unroll
    for (int g = 0; g < kGranules; ++g) widen<E>(read[g], values[g]);
    if (operand.scaled) {
        const typename E::Acc factor = E::factor(operand.factor);
#pragma unroll
        for (int g = 0; g < kGranules; ++g) {
#pragma unroll
            for (int i = 0; i < kElements<E>; ++i) values[g][i] = E::product(values[g][i], factor);
        }
    }
}

// Widens and multiplies the granules of an operand, and combines them with `sums`.
template <class E, class Op, int kGranules>
__device__ __forceinline__ void add(const Operand& operand, const Granule (&read)[kGranules],
                                    typename E::Acc (&sums)[kGranules][kElements<E>]) {
    typename E::Acc values[kGranules][kElements<E>];
    take<E, kGranules>(operand, read, values);
#pragma unroll
    for (int g = 0; g < kGranules; ++g) {
#pragma unroll
        for (int i = 0; i < kElements<E>; ++i) sums[g][i] = Op::template of<E>(sums[g][i], values[g][i]);
    }
}

// Adds an operand and the next one, if there is one. Both are read before either is used. (Reading one operand ahead does not
// work: the compiler gives both the same registers, and waits.)
template <class E, class Op, int kGranules, bool kFirst, class Load>
__device__ __forceinline__ void add_two(const Operand* operands, u32 nth, u32 count, Load load,
                                        typename E::Acc (&sums)[kGranules][kElements<E>]) {
    const bool both = nth + 1 < count;
    const Operand& one = operands[nth];
    const Operand& two = operands[both ? nth + 1 : nth];
    Granule first[kGranules], second[kGranules];
#pragma unroll
    for (int g = 0; g < kGranules; ++g) first[g] = load(one.at, g);
#pragma unroll
    for (int g = 0; g < kGranules; ++g) second[g] = load(both ? two.at : nullptr, g);
    if constexpr (kFirst) {
        take<E, kGranules>(one, first, sums);
    } else {
        add<E, Op, kGranules>(one, first, sums);
    }
    if (both) add<E, Op, kGranules>(two, second, sums);
}

// Reduces kGranules granules: `load` reads the g-th one from an operand, or zeros if the operand is null; `store` writes it to
// the destination.
template <class E, class Op, int kGranules, class Load, class Store>
__device__ __forceinline__ void combine(const Operand* operands, u32 count, u32 divide, Load load, Store store) {
    typename E::Acc sums[kGranules][kElements<E>];
    if constexpr (kGranules == 1) {
        Granule read[1] = {load(operands[0].at, 0)};
        take<E, 1>(operands[0], read, sums);
#pragma unroll 1
        for (u32 nth = 1; nth < count; ++nth) {
            read[0] = load(operands[nth].at, 0);
            add<E, Op, 1>(operands[nth], read, sums);
        }
    } else {
        add_two<E, Op, kGranules, true>(operands, 0, count, load, sums);
#pragma unroll 1
        for (u32 nth = 2; nth < count; nth += 2) {
            add_two<E, Op, kGranules, false>(operands, nth, count, load, sums);
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

template <class E, class Op>
__device__ __forceinline__ void reduce(const Batch& batch) {
    using Stored = typename E::Stored;
    constexpr int kCount = kElements<E>;
    const Task& task = batch.tasks[blockIdx.y];
    const Operand* operands = &batch.operands[task.first];
    Stored* const into = static_cast<Stored*>(task.into);
    const u64 count = task.count;
    const u32 operand_count = task.operands, divide = task.divide;
    if (count == 0) return;

    // `skew`: elements missing from the first granule. Granules from `begin` to `end` are whole.
    const u32 skew = skew_of(into) / sizeof(Stored);
    const u64 granules = (skew + count + kCount - 1) / kCount;
    const u64 begin = skew ? 1 : 0, end = (skew + count) / kCount;
    u32 apart = 0;
    for (u32 nth = 0; nth < operand_count; ++nth) apart |= skew_of(operands[nth].at) ^ skew_of(into);
    const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;

    if (apart == 0) {
        constexpr int kGranules = kAtOnce<E>;
        const u64 step = blockDim.x;
        for (u64 at = begin + blockIdx.x * step * kGranules + threadIdx.x; at < end; at += threads * kGranules) {
            const u64 first = at * kCount - skew;
            combine<E, Op, kGranules>(
                operands, operand_count, divide,
                [=](const void* from, int g) {
                    const Stored* elements = static_cast<const Stored*>(from) + first;
                    const bool there = from != nullptr && at + g * step < end;
                    return there ? reinterpret_cast<const Granule*>(elements)[g * step] : Granule{};
                },
                [=](int g, const Granule& granule) {
                    if (at + g * step < end) reinterpret_cast<Granule*>(into + first)[g * step] = granule;
                });
        }
    }

    // The rest: the partial granules, done by threads 0 and 1, or, if operands differ in offset, everything.
    for (u64 nth = thread; nth < (apart ? granules : 2); nth += threads) {
        const u64 at = apart == 0 && nth == 1 ? granules - 1 : nth;
        const bool whole = at >= begin && at < end;
        if (apart == 0 && (whole || (nth == 1 && at == 0))) continue;
        const long long first = static_cast<long long>(at * kCount) - skew;
        const int from = at == 0 ? static_cast<int>(skew) : 0;
        const int to = at < end ? kCount : static_cast<int>(skew + count - end * kCount);
        combine<E, Op, 1>(
            operands, operand_count, divide,
            [=](const void* operand, int) {
                const Stored* elements = static_cast<const Stored*>(operand) + first;
                const bool aligned = whole && skew_of(elements) == 0;
                return aligned ? *reinterpret_cast<const Granule*>(elements) : gather(elements, from, to);
            },
            [=](int, const Granule& granule) {
                if (whole) {
                    *reinterpret_cast<Granule*>(into + first) = granule;
                } else {
                    scatter(into + first, granule, from, to);
                }
            });
    }
}

// Copies bytes. Neither side needs to be aligned.
__device__ __forceinline__ void copy(const Batch& batch) {
    constexpr int kGranules = 4;
    const Task& task = batch.tasks[blockIdx.y];
    u8* const into = static_cast<u8*>(task.into);
    const u8* const from = static_cast<const u8*>(batch.operands[task.first].at);
    const u64 count = task.count;
    if (count == 0) return;

    const u32 skew = skew_of(into), apart = skew_of(from) ^ skew;
    const u64 granules = (skew + count + 15) / 16, begin = skew ? 1 : 0, end = (skew + count) / 16;
    const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
    const u64 step = blockDim.x;

    for (u64 at = begin + blockIdx.x * step * kGranules + threadIdx.x; at < end; at += threads * kGranules) {
        Granule read[kGranules] = {};
#pragma unroll
        for (int g = 0; g < kGranules; ++g) {
            const u64 here = at + g * step;
            if (here >= end) continue;
            const void* source = from + (here * 16 - skew);
            // Reads as wide as the alignment of both sides allows.
            if (apart == 0) {
                read[g] = *static_cast<const Granule*>(source);
            } else if (apart % 8 == 0) {
                read[g] = gather(static_cast<const u64*>(source), 0, 2);
            } else if (apart % 4 == 0) {
                read[g] = gather(static_cast<const u32*>(source), 0, 4);
            } else if (apart % 2 == 0) {
                read[g] = gather(static_cast<const u16*>(source), 0, 8);
            } else {
                read[g] = gather(static_cast<const u8*>(source), 0, 16);
            }
        }
#pragma unroll
        for (int g = 0; g < kGranules; ++g) {
            const u64 here = at + g * step;
            if (here < end) *reinterpret_cast<Granule*>(into + (here * 16 - skew)) = read[g];
        }
    }
    for (u64 nth = thread; nth < 32; nth += threads) {
        // The bytes of the first granule, and of the last one.
        const u64 at = nth < 16 ? 0 : granules - 1;
        const bool whole = at >= begin && at < end, again = nth >= 16 && at == 0;
        const u64 place = at * 16 + nth % 16;
        if (!whole && !again && place >= skew && place < skew + count) into[place - skew] = from[place - skew];
    }
}

}  // namespace flexring

// One kernel for each type, named as in src/dtype.rs, and each operation.
#define FLEXRING_OPERATIONS(with, name, type) \
    with(sum, Sum, name, type) with(prod, Prod, name, type) with(max, Max, name, type) with(min, Min, name, type)
#define FLEXRING_REDUCTIONS(with)                \
    FLEXRING_OPERATIONS(with, int8, Int8)        \
    FLEXRING_OPERATIONS(with, uint8, Uint8)      \
    FLEXRING_OPERATIONS(with, int32, Int32)      \
    FLEXRING_OPERATIONS(with, uint32, Uint32)    \
    FLEXRING_OPERATIONS(with, int64, Int64)      \
    FLEXRING_OPERATIONS(with, uint64, Uint64)    \
    FLEXRING_OPERATIONS(with, half, Half)        \
    FLEXRING_OPERATIONS(with, float, Single)     \
    FLEXRING_OPERATIONS(with, double, Double)    \
    FLEXRING_OPERATIONS(with, bfloat16, Bfloat)  \
    FLEXRING_OPERATIONS(with, float8e4m3, E4m3)  \
    FLEXRING_OPERATIONS(with, float8e5m2, E5m2)

#define FLEXRING_KERNEL(op, Op, name, Type)                                                     \
    extern "C" __global__ void __launch_bounds__(flexring::kMaxThreads)                        \
        flexring_##op##_##name(FLEXRING_PARAMETER(flexring::Batch) batch) {                     \
        flexring::reduce<flexring::Type, flexring::Op>(batch);                                  \
    }

FLEXRING_REDUCTIONS(FLEXRING_KERNEL)

extern "C" __global__ void __launch_bounds__(flexring::kMaxThreads)
    flexring_copy(FLEXRING_PARAMETER(flexring::Batch) batch) {
    flexring::copy(batch);
}
