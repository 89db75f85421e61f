// What the C++ kernels share: vectors of floats, the element types that they load and store, powers of two.

#pragma once

#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

namespace {  // of each file: they are not compiled alike

constexpr float LOG2_E = 1.44269504f;
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef _Float16 Halves __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
    uint16_t bits;
};

// Calls f(at, count) for the vectors that make up `width` elements; `count` is a constant but for what is left over.
template <typename F>
inline void each(int64_t width, F f) {
    int64_t at = 0;
    for (; at + LANES <= width; at += LANES) f(at, std::integral_constant<int, LANES>{});
    if (at < width) f(at, int(width - at));
}

inline Floats all(float x) { return Floats{} + x; }
inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

template <typename Vector>
inline Vector read(const void* from, int count) {
    Vector x{};
    if (count == LANES)
        std::memcpy(&x, from, sizeof x);  // of a size known here: one instruction
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

// The first `count` lanes from memory, the others 0.
inline Floats load(const float* from, int count = LANES) { return read<Floats>(from, count); }
inline Floats load(const _Float16* from, int count = LANES) {
    return __builtin_convertvector(read<Halves>(from, count), Floats);
}
inline Floats load(const BFloat16* from, int count = LANES) {
    return (Floats)(__builtin_convertvector(read<Shorts>(from, count), Ints) << 16);
}

// The nearest bfloat16, ties to even, as a float.
inline Floats rounded(Floats x) {
    const Ints bits = (Ints)x, up = bits + 0x7fff + ((bits >> 16) & 1);
    return (Floats)((x != x ? Ints{} + 0x7fc00000 : up) & ~0xffff);
}

// The first `count` lanes to memory, rounded to the nearest, ties to even.
inline void store(Floats x, float* to, int count = LANES) { write(x, to, count); }
inline void store(Floats x, _Float16* to, int count = LANES) { write(__builtin_convertvector(x, Halves), to, count); }
inline void store(Floats x, BFloat16* to, int count = LANES) {
    write(__builtin_convertvector((Ints)rounded(x) >> 16, Shorts), to, count);
}

// Primitives of dot products, on 32-bit words of elements: add(sum, words, x) is sum + words * x, x in all lanes.
struct Float32 {
    typedef Floats Sum;
    static Sum add(Sum sum, Ints words, int32_t x) {
        float value;
        std::memcpy(&value, &x, sizeof value);
        return sum + (Floats)words * value;
    }
};

#ifdef __AVX512BF16__
struct TwoBFloat16 {
    typedef Floats Sum;
    static Sum add(Sum sum, Ints words, int32_t x) {
        return (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)words, (__m512bh)_mm512_set1_epi32(x));
    }
};
#endif

#ifdef __AVX512VNNI__
struct FourInt8 {  // unsigned in x, signed in the vector
    typedef Ints Sum;
    static Sum add(Sum sum, Ints words, int32_t x) {
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)words);
    }
};
#endif

constexpr int64_t SPAN = 128;  // elements of a row of which the largest is its peak, as in rows/checks.py

// A bit for each lane of a comparison that holds.
inline uint32_t bits_of(Ints truth) {
#if defined(__AVX512F__)
    return _mm512_cmplt_epi32_mask((__m512i)truth, _mm512_setzero_si512());
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)truth);
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= uint32_t(truth[lane] != 0) << lane;
    return bits;
#endif
}

inline float largest_of(Floats x) {
    typedef float Four __attribute__((vector_size(16)));
    Four parts[LANES / 4], most;
    std::memcpy(parts, &x, sizeof x);
    most = parts[0];
    for (const Four part : parts) most = part > most ? part : most;
    return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

inline float sum_of(Floats x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
#endif
}

// 2^x for x <= 0, within 2e-7 of the value; 0 below -125, as subnormal numbers are slow. NaN stays NaN.
inline Floats exp2_of(Floats x) {
#ifdef __AVX512F__
    const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats f = x - whole;
#else
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction
    const Floats clipped = x < -125.0f ? all(-125.0f) : x;
    const Floats whole = (clipped + ROUND) - ROUND, f = clipped - whole;
#endif
    Floats y = all(1.535336188319500e-4f);  // Cephes, exp2f
    y = y * f + 1.339887440266574e-3f;
    y = y * f + 9.618437357674640e-3f;
    y = y * f + 5.550332471162809e-2f;
    y = y * f + 2.402264791363012e-1f;
    y = y * f + 6.931472028550421e-1f;
    y = y * f + 1.0f;
#ifdef __AVX512F__
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(there, (__m512)y, (__m512)whole);
#else
    const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    return x < -125.0f ? Floats{} : y * (Floats)power;
#endif
}

// The sum of 2^((x - top) * scale); top is the largest.
template <typename T>
inline double mass_of(const T* x, int64_t width, float top, float scale) {
    constexpr int64_t SUMMED = 256 * LANES;  // whose sum is a float: of more, rounding would show
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

// A close lower bound of the k-th largest of k or more numbers: it is the k-th largest of the maxima of pairs.
template <typename T>
inline T about_largest(std::vector<T>& x, int64_t k) {
    int64_t n = x.size();
    for (T& number : x) number = number == number ? number : -INFINITY;  // which can be ranked
    for (; n >= 4 * k; n -= n / 2)
        for (int64_t i = 0; i < n / 2; i++) x[i] = std::max(x[i], x[n - n / 2 + i]);
    std::nth_element(x.begin(), x.begin() + k - 1, x.begin() + n, std::greater<T>());
    return x[k - 1];
}

// Calls f with a value of the element type with this number (KINDS in cpp.py).
template <typename F>
inline void with_type(int64_t kind, F f) {
    if (kind == 0) f(float{});
    if (kind == 1) f(BFloat16{});
    if (kind == 2) f(_Float16{});
}

}  // namespace
