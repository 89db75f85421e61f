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

inline Ints extended(Bytes x) { return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x)); }

inline uint32_t bits_of(Ints truth) { return _mm256_movemask_ps((__m256)truth); }

inline float sum_of(Floats x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

inline Floats nearest(Floats x) {
    return (Floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Floats scaled(Floats y, Floats power, Floats x) {
    const Ints exponent = (__builtin_convertvector(power, Ints) + 127) << 23;
    return x < -125.0f ? Floats{} : y * (Floats)exponent;
}

inline Floats fused(Floats x, Floats y, Floats sum) {
#ifdef __FMA__
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#else
    return x * y + sum;
#endif
}

inline Ints looked_up(Ints places, const Table& table) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table.of));
    return (Ints)_mm256_shuffle_epi8(both, (__m256i)places);
}

inline Ints highest(Ints words, int byte) {
    if (byte == 0) return words << 24;
    if (byte == 3) return words & int(0xff000000);
    const Ints places = Ints{0, 4, 8, 12, 0, 4, 8, 12} + byte;  // a constant in memory, because registers are scarce
    return (Ints)_mm256_shuffle_epi8((__m256i)words, (__m256i)(places << 24 | 0x808080));
}

constexpr int REGISTERS = 16, SPARE_REGISTERS = 1;

#define EXPANDS

// As bytes.h describes them.
inline Ints add_shorts(Ints x, Ints y) { return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y); }
inline Ints add_bytes(Ints x, Ints y) { return (Ints)_mm256_maddubs_epi16((__m256i)x, (__m256i)y); }
#ifdef __AVXVNNI__
#define INT8_DOTS
inline Ints add_fours(Ints sum, Ints x, Ints y) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)y);
}
#endif

}  // namespace

#include "bytes.h"
