// Primitives for AVX-512. vectors.h lists them.

#pragma once

#include <immintrin.h>

constexpr int LANES = 16;
#include "types.h"

namespace {

inline Floats widened(Shorts halves) { return (Floats)_mm512_cvtph_ps((__m256i)halves); }

inline Shorts narrowed(Floats x) {
    return (Shorts)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline uint32_t bits_of(Ints truth) { return _mm512_cmplt_epi32_mask((__m512i)truth, _mm512_setzero_si512()); }

inline float sum_of(Floats x) { return _mm512_reduce_add_ps((__m512)x); }

inline Floats nearest(Floats x) {
    return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Floats scaled(Floats y, Floats power, Floats x) {
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(there, (__m512)y, (__m512)power);
}

}  // namespace
