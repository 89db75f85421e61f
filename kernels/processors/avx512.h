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

inline Ints extended(Bytes x) { return (Ints)_mm512_cvtepi8_epi32((__m128i)x); }

inline uint32_t bits_of(Ints truth) {
    uint32_t bits = _mm512_cmplt_epi32_mask((__m512i)truth, _mm512_setzero_si512());
    asm("" : "+r"(bits));  // else GCC 12 spills 16 bits of the mask and reloads 32
    return bits;
}

inline float sum_of(Floats x) { return _mm512_reduce_add_ps((__m512)x); }

inline Floats nearest(Floats x) {
    return (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Floats scaled(Floats y, Floats power, Floats x) {
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(there, (__m512)y, (__m512)power);
}

inline Floats fused(Floats x, Floats y, Floats sum) {
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
}

inline Ints looked_up(Ints places, const Table& table) {
    return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table.of)), (__m512i)places);
}

inline Ints highest(Ints words, int byte) {
    if (byte == 0 || byte == 3) return words << (24 - 8 * byte) & int(0xff000000);
    const __m128i first = _mm_setr_epi32(0x00808080, 0x04808080, 0x08808080, 0x0c808080);
    const __m128i places = _mm_add_epi32(first, _mm_set1_epi32(byte << 24));
    return (Ints)_mm512_shuffle_epi8((__m512i)words, _mm512_broadcast_i32x4(places));
}

constexpr int REGISTERS = 32, SPARE_REGISTERS = 0;  // multiplications can broadcast an operand from memory

#ifdef __AVX512BF16__
#define BFLOAT16_PAIRS
inline Floats add_pairs(Floats sum, Ints pairs, int32_t pair) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
}

inline Shorts nearest_bfloat16(Floats x) { return (Shorts)_mm512_cvtneps_pbh((__m512)x); }
inline Floats floats_of(Shorts bfloat16) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bfloat16), 16);
}

inline void interleave(const void* one, const void* two, void* to) {
    __m512i indices = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i x = _mm512_loadu_si512(one), y = _mm512_loadu_si512(two);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(x, indices, y));
    indices = _mm512_add_epi16(indices, _mm512_set1_epi16(16));
    _mm512_storeu_si512((char*)to + 64, _mm512_permutex2var_epi16(x, indices, y));
}
#endif

// Unpack instructions need no index vectors, for which compilers would run out of registers.
#define TRANSPOSE
inline void transpose(Ints (&x)[LANES]) {
    __m512i columns[4][4];  // [r][c], quarter q: column 4 * q + c of rows 4 * r to 4 * r + 3
    for (int r = 0; r < 4; r++) {
        const __m512i *rows = (const __m512i*)x + 4 * r, low = _mm512_unpacklo_epi32(rows[0], rows[1]);
        const __m512i high = _mm512_unpackhi_epi32(rows[0], rows[1]);
        const __m512i next_low = _mm512_unpacklo_epi32(rows[2], rows[3]);
        const __m512i next_high = _mm512_unpackhi_epi32(rows[2], rows[3]);
        columns[0][r] = _mm512_unpacklo_epi64(low, next_low), columns[1][r] = _mm512_unpackhi_epi64(low, next_low);
        columns[2][r] = _mm512_unpacklo_epi64(high, next_high), columns[3][r] = _mm512_unpackhi_epi64(high, next_high);
    }
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(columns[c][0], columns[c][1], 0x44);
        const __m512i high = _mm512_shuffle_i32x4(columns[c][0], columns[c][1], 0xee);
        const __m512i next_low = _mm512_shuffle_i32x4(columns[c][2], columns[c][3], 0x44);
        const __m512i next_high = _mm512_shuffle_i32x4(columns[c][2], columns[c][3], 0xee);
        x[c] = (Ints)_mm512_shuffle_i32x4(low, next_low, 0x88);
        x[c + 4] = (Ints)_mm512_shuffle_i32x4(low, next_low, 0xdd);
        x[c + 8] = (Ints)_mm512_shuffle_i32x4(high, next_high, 0x88);
        x[c + 12] = (Ints)_mm512_shuffle_i32x4(high, next_high, 0xdd);
    }
}

// As bytes.h describes them.
inline Ints add_shorts(Ints x, Ints y) { return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y); }
inline Ints add_bytes(Ints x, Ints y) { return (Ints)_mm512_maddubs_epi16((__m512i)x, (__m512i)y); }
#ifdef __AVX512VNNI__
#define INT8_DOTS
#define MANY_REGISTERS
inline Ints add_fours(Ints sum, Ints x, Ints y) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)y);
}
#endif

}  // namespace

#include "bytes.h"
