// The element types: how they are stored, the type that they are accumulated in, and the conversions.
//
// Results have the same bits as those of src/device/host, except for the payload and sign of NaNs, which the hardware
// chooses. Includes nothing, because NVRTC has no headers. Conversion instructions are used where the architecture has them;
// the plain code beside them is for older architectures, and for the host, on which these kernels are tested.
#pragma once

namespace flexring {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// These additions and multiplications are never contracted into a fused instruction that rounds once.
__device__ __forceinline__ float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double sum(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }

__device__ __forceinline__ u32 bits_of(float a) { return __float_as_uint(a); }
__device__ __forceinline__ u64 bits_of(double a) { return static_cast<u64>(__double_as_longlong(a)); }
__device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ double float_of(u64 bits) { return __longlong_as_double(static_cast<long long>(bits)); }

template <class F>
__device__ __forceinline__ F maximum(F a, F b) {
    const F larger = a > b ? a : b;
    // Equal numbers have equal bits, except for zeros: the result is -0 only if both are.
    const F value = a == b ? float_of(bits_of(a) & bits_of(b)) : larger;
    // If b is NaN, the comparison above has chosen it.
    return a != a ? a : value;
}

template <class F>
__device__ __forceinline__ F minimum(F a, F b) {
    const F smaller = a < b ? a : b;
    // As above, but the result is -0 if either zero is.
    const F value = a == b ? float_of(bits_of(a) | bits_of(b)) : smaller;
    return a != a ? a : value;
}

// Integers are accumulated in their own type and wrap around, which only unsigned arithmetic may do.
template <class T, class Unsigned>
struct Integer {
    static constexpr bool kBitwise = true;
    using Stored = Unsigned;
    using Acc = T;
    static constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(1);
    struct Divisor {
        u32 ranks;
        // 2^16 / ranks, rounded up: exact enough for 8-bit numbers.
        int reciprocal;
    };

    static __device__ __forceinline__ T widen(Unsigned stored) { return static_cast<T>(stored); }
    static __device__ __forceinline__ Unsigned narrow(T value) { return static_cast<Unsigned>(value); }

    static __device__ __forceinline__ T sum(T a, T b) {
        return static_cast<T>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
    }
    static __device__ __forceinline__ T product(T a, T b) {
        // Not in `int`, to which shorter types are promoted: it may overflow.
        return static_cast<T>(static_cast<Unsigned>(1u * static_cast<Unsigned>(a) * static_cast<Unsigned>(b)));
    }
    static __device__ __forceinline__ T maximum(T a, T b) { return a > b ? a : b; }
    static __device__ __forceinline__ T minimum(T a, T b) { return a < b ? a : b; }
    static __device__ __forceinline__ T bits_and(T a, T b) { return static_cast<T>(a & b); }
    static __device__ __forceinline__ T bits_or(T a, T b) { return static_cast<T>(a | b); }
    static __device__ __forceinline__ T bits_xor(T a, T b) { return static_cast<T>(a ^ b); }

    // The factor is an integer in the range of the type.
    static __device__ __forceinline__ T factor(double factor) { return static_cast<T>(factor); }

    static __device__ __forceinline__ Divisor divisor(u32 ranks) {
        // An 8-bit number divided by 256 or more is 0.
        return Divisor{ranks, 65536 / static_cast<int>(ranks < 256 ? ranks : 256) + 1};
    }
    static __device__ __forceinline__ T quotient(T value, Divisor divisor) {
        if constexpr (sizeof(T) == 1) {
            // For negative numbers the shift gives the quotient minus 1.
            const int a = value;
            return static_cast<T>(((a * divisor.reciprocal) >> 16) - (a >> 31));
        } else {
            bool negative = false;
            if constexpr (kSigned) negative = value < 0;
            const Unsigned bits = static_cast<Unsigned>(value);
            const Unsigned absolute = static_cast<Unsigned>(negative ? 0 - bits : bits);
            const Unsigned magnitude = static_cast<Unsigned>(absolute / divisor.ranks);
            return static_cast<T>(negative ? 0 - magnitude : magnitude);
        }
    }
};

using Int8 = Integer<signed char, u8>;
using Uint8 = Integer<u8, u8>;
using Int16 = Integer<short, u16>;
using Uint16 = Integer<u16, u16>;
using Int32 = Integer<int, u32>;
using Uint32 = Integer<u32, u32>;
using Int64 = Integer<long long, u64>;
using Uint64 = Integer<u64, u64>;

// A byte that is true if it is not 0. Sums and maxima are true if either is, products and minima if both are.
struct Boolean {
    static constexpr bool kBitwise = true;
    using Stored = u8;
    using Acc = u8;
    using Divisor = u32;

    static __device__ __forceinline__ u8 widen(u8 stored) { return stored != 0; }
    static __device__ __forceinline__ u8 narrow(u8 value) { return value; }
    static __device__ __forceinline__ u8 bits_and(u8 a, u8 b) { return a & b; }
    static __device__ __forceinline__ u8 bits_or(u8 a, u8 b) { return a | b; }
    static __device__ __forceinline__ u8 bits_xor(u8 a, u8 b) { return a ^ b; }
    static __device__ __forceinline__ u8 sum(u8 a, u8 b) { return bits_or(a, b); }
    static __device__ __forceinline__ u8 product(u8 a, u8 b) { return bits_and(a, b); }
    static __device__ __forceinline__ u8 maximum(u8 a, u8 b) { return bits_or(a, b); }
    static __device__ __forceinline__ u8 minimum(u8 a, u8 b) { return bits_and(a, b); }
    // There are no factors and averages of truth values.
    static __device__ __forceinline__ u8 factor(double factor) { return factor != 0; }
    static __device__ __forceinline__ u32 divisor(u32 ranks) { return ranks; }
    static __device__ __forceinline__ u8 quotient(u8 value, u32) { return value; }
};

// The arithmetic that all floats share.
template <class F>
struct Float {
    static constexpr bool kBitwise = false;
    using Acc = F;
    using Divisor = F;

    static __device__ __forceinline__ F sum(F a, F b) { return flexring::sum(a, b); }
    static __device__ __forceinline__ F product(F a, F b) { return flexring::product(a, b); }
    static __device__ __forceinline__ F maximum(F a, F b) { return flexring::maximum(a, b); }
    static __device__ __forceinline__ F minimum(F a, F b) { return flexring::minimum(a, b); }
    static __device__ __forceinline__ F factor(double factor) { return static_cast<F>(factor); }
    static __device__ __forceinline__ F divisor(u32 ranks) { return static_cast<F>(ranks); }
    static __device__ __forceinline__ float quotient(float a, float b) { return __fdiv_rn(a, b); }
    static __device__ __forceinline__ double quotient(double a, double b) { return __ddiv_rn(a, b); }
};

struct Single : Float<float> {
    using Stored = u32;
    static __device__ __forceinline__ float widen(u32 stored) { return float_of(stored); }
    static __device__ __forceinline__ u32 narrow(float value) { return bits_of(value); }
};

struct Double : Float<double> {
    using Stored = u64;
    static __device__ __forceinline__ double widen(u64 stored) { return float_of(stored); }
    static __device__ __forceinline__ u64 narrow(double value) { return bits_of(value); }
};

// Floats of 16 and 8 bits are converted in pairs, with the first element in the lower bits.

struct Half : Float<float> {
    using Stored = u16;

    static __device__ __forceinline__ float widen(u32 bits) {
#ifdef __CUDA_ARCH__
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
        return value;
#else
        const u32 magnitude = (bits & 0x7fff) << 13;
        // A subnormal is m * 2^-24. As the fraction of a number with exponent -14 it has a leading one too many.
        const float subnormal = float_of((113u << 23) + magnitude) - float_of(113u << 23);
        // Infinities and NaNs have the largest exponent of either format.
        const u32 normal = magnitude + (magnitude >= (31u << 23) ? 224u << 23 : 112u << 23);
        return float_of((bits & 0x8000) << 16 | (magnitude < (1u << 23) ? bits_of(subnormal) : normal));
#endif
    }

    static __device__ __forceinline__ u32 narrow(float value) {
#ifdef __CUDA_ARCH__
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
#else
        const u32 bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        if (magnitude >= 0x47800000) return sign | (value != value ? 0x7e00 : 0x7c00);
        // Floats from 0.5 on are spaced like subnormal f16, so the addition rounds.
        if (magnitude < (113u << 23)) return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
        return sign | (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
#endif
    }

    static __device__ __forceinline__ void widen_pair(u32 pair, float* values) {
        values[0] = widen(pair & 0xffff);
        values[1] = widen(pair >> 16);
    }

    static __device__ __forceinline__ u32 narrow_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return narrow(low) | narrow(high) << 16;
#endif
    }
};

struct Bfloat : Float<float> {
    using Stored = u16;

    static __device__ __forceinline__ void widen_pair(u32 pair, float* values) {
        values[0] = float_of(pair << 16);
        values[1] = float_of(pair & 0xffff0000);
    }

    static __device__ __forceinline__ u32 narrow_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return in_upper_half(low) >> 16 | (in_upper_half(high) & 0xffff0000);
#endif
    }

  private:
    static __device__ __forceinline__ u32 in_upper_half(float value) {
        const u32 bits = bits_of(value);
        // Truncation could turn a NaN into an infinity.
        return value != value ? bits | 0x00400000 : bits + 0x7fff + (bits >> 16 & 1);
    }
};

// OCP E4M3: no infinities, and one NaN of each sign. Values that would round beyond 448 become NaN, as in PyTorch.
struct E4m3 : Float<float> {
    using Stored = u8;

    static __device__ __forceinline__ void widen_pair(u32 pair, float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<u16>(pair)));
        Half::widen_pair(halves, values);
#else
        values[0] = widen(pair & 0xff);
        values[1] = widen(pair >> 8 & 0xff);
#endif
    }

    static __device__ __forceinline__ u32 narrow_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        // The instruction saturates at 448, infinities included.
        return pair | (beyond(low) ? 0x7fu : 0u) | (beyond(high) ? 0x7f00u : 0u);
#else
        return narrow(low) | narrow(high) << 8;
#endif
    }

  private:
    // Halfway between 448 and the next step; the tie goes to 448, which is even. False for NaN.
    static __device__ __forceinline__ bool beyond(float value) { return value > 464.0f || value < -464.0f; }

    static __device__ __forceinline__ float widen(u32 bits) {
        // The exponent biases differ by 120, for subnormals too.
        const float value = float_of((bits & 0x7f) << 20) * 0x1p120f;
        const u32 magnitude = (bits & 0x7f) == 0x7f ? 0x7fc00000 : bits_of(value);
        return float_of(magnitude | (bits & 0x80) << 24);
    }

    static __device__ __forceinline__ u32 narrow(float value) {
        const u32 bits = bits_of(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
        // Floats from 2^14 on are spaced like subnormals of this type, so the addition rounds.
        const u32 subnormal = bits_of(sum(float_of(magnitude), 0x1p14f)) - (141u << 23);
        const u32 normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
        const u32 finite = magnitude < (121u << 23) ? subnormal : normal;
        return sign | (value != value || beyond(value) ? 0x7f : finite);
    }
};

// OCP E5M2: the upper half of an f16.
struct E5m2 : Float<float> {
    using Stored = u8;

    static __device__ __forceinline__ void widen_pair(u32 pair, float* values) {
        values[0] = Half::widen((pair & 0xff) << 8);
        values[1] = Half::widen(pair & 0xff00);
    }

    static __device__ __forceinline__ u32 narrow_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        u16 pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        // The instruction saturates at 57344, infinities included.
        return pair + (beyond(low) ? 1u : 0u) + (beyond(high) ? 0x100u : 0u);
#else
        return narrow(low) | narrow(high) << 8;
#endif
    }

  private:
    // Halfway between 57344 and the next step; the tie goes to the latter, which is even. False for NaN.
    static __device__ __forceinline__ bool beyond(float value) { return value >= 61440.0f || value <= -61440.0f; }

    static __device__ __forceinline__ u32 narrow(float value) {
        const u32 bits = bits_of(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
        // Floats from 2^7 on are spaced like subnormals of this type, so the addition rounds.
        const u32 subnormal = bits_of(sum(float_of(magnitude), 0x1p7f)) - (134u << 23);
        const u32 normal = (magnitude + 0xfffff + (magnitude >> 21 & 1) - (112u << 23)) >> 21;
        const u32 finite = magnitude < (113u << 23) ? subnormal : normal;
        return sign | (value != value ? 0x7e : beyond(value) ? 0x7c : finite);
    }
};

}  // namespace flexring

// The types, named as in crates/flexring-core/src/dtype.rs. A test that needs few of them defines those itself.
#ifndef FLEXRING_TYPES
#define FLEXRING_TYPES(with)                                                        \
    with(int8, Int8) with(uint8, Uint8) with(int32, Int32) with(uint32, Uint32)     \
    with(int64, Int64) with(uint64, Uint64) with(half, Half) with(float, Single)    \
    with(double, Double) with(bfloat16, Bfloat) with(float8e4m3, E4m3) with(float8e5m2, E5m2) \
    with(int16, Int16) with(uint16, Uint16) with(bool, Boolean)
#endif
