// The part of CUDA that the kernels use, for a host compiler: runs the same source on a CPU, one thread after another.
// Compile without contraction (-ffp-contract=off).
#pragma once

#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(most)
// Passed by reference, because a copy for each thread would take most of the time.
#define FLEXRING_PARAMETER(type) const type&

struct Index {
    unsigned x, y, z;
};

inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

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
