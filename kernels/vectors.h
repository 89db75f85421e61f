// Code shared by all C++ kernels: vectors of floats, the element types that they load and store, powers of two.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

// Everything that depends on the instruction set is in one file per set: LANES, the number of floats in a vector, and
//   Floats widened(Shorts), Shorts narrowed(Floats)   conversions from and to float16, to the nearest, ties to even
//   Ints extended(Bytes)                              int8 to int32
//   uint32_t bits_of(Ints)                            a bit for each lane in which a comparison holds
//   float sum_of(Floats)                              the sum of all lanes
//   Floats nearest(Floats x)                          the nearest whole numbers, ties to even, for |x| < 2^22
//   Floats scaled(Floats y, Floats power, Floats x)   y * 2^power for a power of -125 to 0; 0 where x < -125
//   Floats fused(Floats x, Floats y, Floats sum)      x * y + sum, rounded once where the processor can; without it, a
//                                                     compiler fuses in some copies of a loop and not in others
//   REGISTERS, SPARE_REGISTERS                        vector registers, and those that a product needs besides sums
//   struct FourInt8                                   dot products of four int8 of a matrix and four of a row;
//                                                     INT8_DOTS is defined where one instruction computes them;
//                                                     there, `nearest` accepts |x| < 2^23
//   struct FourNibbles                                the same for four numbers from 0 to 15 and four int8 of a row
//   Ints looked_up(Ints, const Table&)                table entries for bytes from 0 to 15
//   Ints highest(Ints words, int i)                   byte i of each word moved to the highest byte, above zeros
//   struct EightCodes                                 optional, with EIGHT_CODES defined: dot products of eight numbers
//                                                     from 0 to 63, in two words, and eight int8 of a row
//   EXPANDS                                           defined where codes are expanded to floats for many rows of
//                                                     floats, see linear/expanded.h
//   Floats add_pairs(Floats sum, Ints, int32_t)       optional, with BFLOAT16_PAIRS defined: dot products of pairs, and
//   Shorts nearest_bfloat16(Floats), Floats floats_of(Shorts), void interleave(one, two, to)   of 2 * LANES each
//   void transpose(Ints (&x)[LANES])                  optional, with TRANSPOSE defined
// Where a processor multiplies tiles, TILES is defined, and processors/amx.h lists what it can do with them.
#if defined(__AVX512F__)
#include "processors/avx512.h"
#elif defined(__AVX2__) && defined(__F16C__)
#include "processors/avx2.h"
#elif defined(__aarch64__)
#include "processors/neon.h"
#else
#include "processors/plain.h"
#endif
#ifdef TILES_FROM
#include TILES_FROM
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#include "processors/amx.h"
#endif
namespace {  // one per file, because files are compiled with different flags

constexpr float LOG2_E = 1.44269504f;

struct Float16 {
    uint16_t bits;
};

struct BFloat16 {
    uint16_t bits;
};

constexpr int64_t INT8 = 3;  // as a `kind`
constexpr int64_t SCALE_BYTES = 2;  // of a row's scale in an int8 cache, see kv_kinds.py

// Calls f(at, count) for each vector of `width` elements; `count` is a compile-time constant except for the last,
// partial one.
template <typename F>
inline void each(int64_t width, F f) {
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES) f(at, std::integral_constant<int, LANES>{});
    if (at < width) f(at, int(width - at));
}

inline Floats all(float x) { return x - Floats{}; }  // unlike + 0, which changes -0, this costs nothing
inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

// The lowest byte of each lane.
inline Bytes low_bytes(Ints x) {
    if constexpr (LANES == 8)  // GCC 12 would convert them one by one
        return __builtin_convertvector(__builtin_convertvector(x, Shorts), Bytes);
    return __builtin_convertvector(x, Bytes);
}

template <typename Vector>
inline Vector read(const void* from, int count) {
    Vector x{};
    if (count == LANES)
        std::memcpy(&x, from, sizeof x);  // the constant size makes it one instruction
    else
        std::memcpy(&x, from, count * sizeof x / LANES);
    return x;
}

template <typename Vector>
inline void write(Vector x, void* to, int count) {
    if (count == LANES)
        std::memcpy(to, &x, sizeof x);
    else
        std::memcpy(to, &x, count * sizeof x / LANES);
}

// Keeps the first n lanes; the others become 0.
template <typename Vector>
inline Vector first_lanes(Vector x, int n) {
    for (int lane = n; lane < LANES; lane++) x[lane] = 0;
    return x;
}

// Loads the first `count` lanes; the others are 0.
inline Floats load(const float* from, int count = LANES) { return read<Floats>(from, count); }
inline Floats load(const Float16* from, int count = LANES) { return widened(read<Shorts>(from, count)); }
inline Floats load(const BFloat16* from, int count = LANES) {
    return (Floats)(__builtin_convertvector(read<Shorts>(from, count), Ints) << 16);
}

inline Floats load(const int8_t* from, int count = LANES) {
    return __builtin_convertvector(extended(read<Bytes>(from, count)), Floats);
}

// The nearest bfloat16, ties to even, as a float.
inline Floats rounded(Floats x) {
    const Ints bits = (Ints)x, up = bits + 0x7fff + ((bits >> 16) & 1);
    return (Floats)((x != x ? Ints{} + 0x7fc00000 : up) & ~0xffff);
}

// Stores the first `count` lanes, rounded to the nearest, ties to even.
inline void store(Floats x, float* to, int count = LANES) { write(x, to, count); }
inline void store(Floats x, Float16* to, int count = LANES) { write(narrowed(x), to, count); }
inline void store(Floats x, BFloat16* to, int count = LANES) {
    write(__builtin_convertvector((Ints)rounded(x) >> 16, Shorts), to, count);
}

// Exchanges lanes of two vectors so that 2 x 2 blocks of STRIDE numbers are transposed.
template <int STRIDE, int... LANE>
inline void exchange(Ints& one, Ints& two, std::integer_sequence<int, LANE...>) {
#ifdef __clang__
    const Ints first = __builtin_shufflevector(one, two, (LANE & STRIDE ? LANES + LANE - STRIDE : LANE)...);
    two = __builtin_shufflevector(one, two, (LANE & STRIDE ? LANES + LANE : LANE + STRIDE)...);
#else
    const Ints first = __builtin_shuffle(one, two, Ints{(LANE & STRIDE ? LANES + LANE - STRIDE : LANE)...});
    two = __builtin_shuffle(one, two, Ints{(LANE & STRIDE ? LANES + LANE : LANE + STRIDE)...});
#endif
    one = first;
}

#ifndef TRANSPOSE
// Transposes: exchanges lane l of x[i] and lane i of x[l].
template <int STRIDE = LANES / 2>
inline void transpose(Ints (&x)[LANES]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & STRIDE)) exchange<STRIDE>(x[i], x[i + STRIDE], std::make_integer_sequence<int, LANES>{});
    if constexpr (STRIDE > 1) transpose<STRIDE / 2>(x);
}
#endif

// Returns the largest lane of each x[i] in lane i; overwrites x.
template <int STRIDE = LANES / 2>
inline Floats largest_of_each(Floats (&x)[LANES]) {
#pragma GCC unroll 8
    for (int i = 0; i < STRIDE; i++) {
        Ints one = (Ints)x[i], two = (Ints)x[i + STRIDE];
        exchange<STRIDE>(one, two, std::make_integer_sequence<int, LANES>{});
        x[i] = larger((Floats)one, (Floats)two);
    }
    if constexpr (STRIDE > 1) return largest_of_each<STRIDE / 2>(x);
    return x[0];
}

// Primitives of dot products on 32-bit words of elements: add(sum, words, x) returns sum + words * x, with x in all
// lanes.
struct Float32 {
    typedef Floats Sum;
    static Sum add(Sum sum, Ints words, int32_t x) {
        float value;
        std::memcpy(&value, &x, sizeof value);
        return fused((Floats)words, all(value), sum);
    }
};

#ifdef BFLOAT16_PAIRS
struct TwoBFloat16 {
    typedef Floats Sum;
    static Sum add(Sum sum, Ints words, int32_t x) { return add_pairs(sum, words, x); }
};
#endif

constexpr int64_t SPAN = 128;  // elements of a row that share a peak, as in rows/checks.py

inline float largest_of(Floats x) {
    typedef float Four __attribute__((vector_size(16)));
    Four parts[LANES / 4], most;
    std::memcpy(parts, &x, sizeof x);
    most = parts[0];
    for (const Four part : parts) most = part > most ? part : most;
    return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

typedef int32_t FourInts __attribute__((vector_size(16)));

// The largest lane, whose bits are returned as a float.
inline float largest_of_bits(Ints x) {
    FourInts parts[LANES / 4], most;
    std::memcpy(parts, &x, sizeof x);
    most = parts[0];
    for (const FourInts part : parts) most = part > most ? part : most;
    const int32_t bits = std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    return largest;
}

// The largest magnitude of some elements; NaN if there is one.
template <typename T>
float magnitude_of(const T* x, int64_t width) {
    Ints most{};  // bits of floats: compared as integers, NaN is larger than all numbers
    each(width, [&](int64_t i, auto n) {
        const Ints size = (Ints)load(x + i, n) & 0x7fffffff;
        most = size > most ? size : most;
    });
    return largest_of_bits(most);
}

// 2^x for x <= 0, with a relative error below 2e-7; 0 below -125, because subnormal numbers are slow. NaN stays NaN.
inline Floats exp2_of(Floats x) {
    const Floats whole = nearest(x), f = x - whole;
    Floats y = all(1.535336188319500e-4f);  // Cephes, exp2f
    y = y * f + 1.339887440266574e-3f;
    y = y * f + 9.618437357674640e-3f;
    y = y * f + 5.550332471162809e-2f;
    y = y * f + 2.402264791363012e-1f;
    y = y * f + 6.931472028550421e-1f;
    y = y * f + 1.0f;
    return scaled(y, whole, x);
}

// x times the logistic function of y.
inline Floats times_sigmoid(Floats x, Floats y) {
    const Floats e = exp2_of((y < 0 ? y : -y) * LOG2_E);  // the function is e / (1 + e) or 1 / (1 + e)
    return x * (y < 0 ? e : all(1)) / (1 + e);
}

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

inline Floats tanh_of(Floats x) {
    const Floats square = x * x, e = exp2_of((x < 0 ? x : -x) * (2 * LOG2_E)), far = (1 - e) / (1 + e);
    Floats y = all(-6.274231621e-03f);
    y = y * square + 2.107167298e-02f;
    y = y * square - 5.385230828e-02f;
    y = y * square + 1.333258612e-01f;
    y = y * square - 3.333331756e-01f;
    return square < 0.3f ? x + x * square * y : x < 0 ? -far : far;
}

// The sum of 2^((x - top) * scale), where top is the largest element.
template <typename T>
inline double mass_of(const T* x, int64_t width, float top, float scale) {
    constexpr int64_t SUMMED = 256 * LANES;  // summed in float32; with more, rounding errors would be visible
    double mass = 0;
    for (int64_t at = 0; at < width; at += SUMMED) {
        Floats sum{};
        each(std::min(SUMMED, width - at), [&](int64_t i, auto n) {
            const Floats powers = exp2_of((load(x + at + i, n) - top) * scale);
            if (n == LANES) sum += powers;
            for (int j = n == LANES ? n : 0; j < n; j++) sum[0] += powers[j];
        });
        mass += sum_of(sum);
    }
    return mass;
}

// A close lower bound of the k-th largest of k or more numbers: the k-th largest of maxima of pairs (of pairs ...).
template <typename T>
inline T about_largest(std::vector<T>& x, int64_t k) {
    int64_t n = x.size();
    for (T& number : x) number = number == number ? number : -INFINITY;  // NaN cannot be ranked
    for (; n >= 4 * k; n -= n / 2)
        for (int64_t i = 0; i < n / 2; i++) x[i] = std::max(x[i], x[n - n / 2 + i]);
    std::nth_element(x.begin(), x.begin() + k - 1, x.begin() + n, std::greater<T>());
    return x[k - 1];
}

// Calls f with a value of the element type that has this number (KINDS in cpp.py).
template <typename F>
inline void with_type(int64_t kind, F f) {
    if (kind == 0) f(float{});
    if (kind == 1) f(BFloat16{});
    if (kind == 2) f(Float16{});
}

}  // namespace
