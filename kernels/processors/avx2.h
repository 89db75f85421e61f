// Primitives for AVX2 with F16C. vectors.h lists them.

#pragma once

#include <immintrin.h>

constexpr int LANES = 8;
#include "types.h"

namespace {

inline Floats widened(Shorts halves) { return (Floats)_mm256_cvtph_ps((__m128i)halves); }

inline Shorts narrowed(Floats x) {
    return (Shorts)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline uint32_t bits_of(Ints truth) { return _mm256_movemask_ps((__m256)truth); }

inline float sum_of(Floats x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

inline Floats nearest(Floats x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction
    return (x + ROUND) - ROUND;
}

inline Floats scaled(Floats y, Floats power, Floats x) {
    const Ints exponent = (__builtin_convertvector(power, Ints) + 127) << 23;
    return x < -125.0f ? Floats{} : y * (Floats)exponent;
}

}  // namespace
