// The work on one tile by the threads of one CTA: the reduction of a descriptor's operands, or a copy.
//
// A tile's destination is divided into granules: aligned blocks of 16 bytes, of which the first and the last may be partial. If
// all operands have the same offset in a granule as the destination, whole granules are read and written, several at a time by
// each thread, to keep enough memory accesses in flight. All other granules are gathered element by element. A thread reads a
// granule of all operands before it writes it, so the destination may be one of the operands. No barriers.
#pragma once

#include "engine.h"
#include "memory_order.h"
#include "number.h"

namespace flexring {

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

// Part of a descriptor.
struct Tile {
    // The ring, the position of the descriptor's first entry in it, and the elements of the part.
    const Descriptor* ring;
    u32 entry;
    u64 first;
    u64 count;

    __device__ __forceinline__ const Descriptor& descriptor() const { return ring[entry]; }
};

// `tiles` tiles of the descriptor at a position of a ring, from tile number `first_tile` on, as one.
__device__ __forceinline__ Tile tiles_of(const Descriptor* ring, u32 entry, u32 first_tile, u32 tiles) {
    const Descriptor& descriptor = ring[entry];
    const u64 first = static_cast<u64>(first_tile) * descriptor.tile, left = descriptor.count - first;
    const u64 count = static_cast<u64>(tiles) * descriptor.tile;
    return Tile{ring, entry, first, left < count ? left : count};
}

// Number of entries of a descriptor.
__device__ __forceinline__ u32 entries_of(u32 operands) {
    return operands <= kFirstOperands ? 1 : 1 + (operands - kFirstOperands + kMoreOperands - 1) / kMoreOperands;
}

// The addresses of a tile in the operands, marked with kScaled as in the descriptor.
template <class Stored>
class Operands {
  public:
    __device__ __forceinline__ explicit Operands(const Tile& tile)
        : ring_(tile.ring), entry_(tile.entry), offset_(tile.first * sizeof(Stored)) {
#ifdef FLEXRING_ON_HOST
        const u32 count = tile.descriptor().operands;
        reached_.clear();
        for (u32 nth = 0; nth < count; ++nth) {
            const u64 word = in_descriptor(nth) + offset_;
            const Stored* at = reach_to_read(address_of(word), tile.count * sizeof(Stored));
            reached_.push_back(reinterpret_cast<u64>(at) | (word & kScaled));
        }
#endif
    }

    __device__ __forceinline__ u64 operator[](u32 nth) const {
#ifdef FLEXRING_ON_HOST
        return reached_[nth];
#else
        return in_descriptor(nth) + offset_;
#endif
    }

    static __device__ __forceinline__ const Stored* address_of(u64 word) {
        return reinterpret_cast<const Stored*>(word & ~kScaled);
    }

  private:
    __device__ __forceinline__ u64 in_descriptor(u32 nth) const {
        if (nth < kFirstOperands) return ring_[entry_].at[nth];
        const u32 further = nth - kFirstOperands;
        const Descriptor& entry = ring_[(entry_ + 1 + further / kMoreOperands) % kEntries];
        return reinterpret_cast<const MoreOperands&>(entry).at[further % kMoreOperands];
    }

    const Descriptor* ring_;
    u32 entry_;
    u64 offset_;
#ifdef FLEXRING_ON_HOST
    static inline thread_local std::vector<u64> reached_;
#endif
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

// What a descriptor says besides addresses, in registers: the compiler must assume that stores to the destination change memory.
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

template <class E>
__device__ __forceinline__ void reduce_tile(const Tile& tile) {
    using Stored = typename E::Stored;
    constexpr int kCount = kElements<E>;
    if (tile.count == 0) return;
    const Descriptor& descriptor = tile.descriptor();
    const Arithmetic<E> job{descriptor.operands, descriptor.divide, descriptor.operation, E::factor(descriptor.factor)};
    const u64 count = tile.count;
    const Operands<Stored> operands(tile);
    Stored* const into = reach_to_write(reinterpret_cast<Stored*>(descriptor.into) + tile.first, count * sizeof(Stored));

    // `skew`: elements missing from the first granule. Granules from `begin` to `end` are whole.
    const u32 skew = skew_of(into) / sizeof(Stored);
    const u64 granules = (skew + count + kCount - 1) / kCount;
    const u64 begin = skew ? 1 : 0, end = (skew + count) / kCount;
    u32 apart = 0;
#pragma unroll 1
    for (u32 nth = 0; nth < job.operands; ++nth) apart |= skew_of(operands.address_of(operands[nth])) ^ skew_of(into);
    const u64 step = blockDim.x;

    if (apart == 0) {
        constexpr int kGranules = kAtOnce<E>;
        for (u64 at = begin + threadIdx.x; at < end; at += step * kGranules) {
            const u64 first = at * kCount - skew;
            combine<E, kGranules>(
                operands, job,
                [=](const Stored* from, int g) {
                    const bool there = from != nullptr && at + g * step < end;
                    return there ? reinterpret_cast<const Granule*>(from + first)[g * step] : Granule{};
                },
                [=](int g, const Granule& granule) {
                    if (at + g * step < end) reinterpret_cast<Granule*>(into + first)[g * step] = granule;
                });
        }
    }

    // The rest: the partial granules, done by threads 0 and 1, or, if operands differ in offset, everything.
#pragma unroll 1
    for (u64 nth = threadIdx.x; nth < (apart ? granules : 2); nth += step) {
        const u64 at = apart == 0 && nth == 1 ? granules - 1 : nth;
        const bool whole = at >= begin && at < end;
        if (apart == 0 && (whole || (nth == 1 && at == 0))) continue;
        const long long first = static_cast<long long>(at * kCount) - skew;
        const int from = at == 0 ? static_cast<int>(skew) : 0;
        const int to = at < end ? kCount : static_cast<int>(skew + count - end * kCount);
        combine<E, 1>(
            operands, job,
            [=](const Stored* operand, int) {
                const Stored* elements = operand + first;
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
__device__ __forceinline__ void copy(u8* to, const u8* source, u64 count) {
    constexpr int kGranules = 4;
    if (count == 0) return;
    u8* const into = reach_to_write(to, count);
    const u8* const from = reach_to_read(source, count);

    const u32 skew = skew_of(into), apart = skew_of(from) ^ skew;
    const u64 granules = (skew + count + 15) / 16, begin = skew ? 1 : 0, end = (skew + count) / 16;
    const u64 step = blockDim.x;

    for (u64 at = begin + threadIdx.x; at < end; at += step * kGranules) {
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
    for (u64 nth = threadIdx.x; nth < 32; nth += step) {
        // The bytes of the first granule, and of the last one.
        const u64 at = nth < 16 ? 0 : granules - 1;
        const bool whole = at >= begin && at < end, again = nth >= 16 && at == 0;
        const u64 place = at * 16 + nth % 16;
        if (!whole && !again && place >= skew && place < skew + count) into[place - skew] = from[place - skew];
    }
}

}  // namespace flexring
