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
    asm("" : "+r"(bits));  // or GCC 12 spills the 16 bits of the mask and reads back 32
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

constexpr int REGISTERS = 32, SPARE_REGISTERS = 0;  // multiplications take an operand from memory for all lanes

#ifdef __AVX512BF16__
#define BFLOAT16_PAIRS
inline Floats add_pairs(Floats sum, Ints pairs, int32_t pair) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
}
#endif

#ifdef __AVX512VNNI__
#define INT8_DOTS
struct FourInt8 {
    typedef int8_t Row;
    typedef Ints Part;
    static constexpr int OFFSET = 128, VECTORS = 1, ORDER[4] = {0, 1, 2, 3};
    static Part part(Ints words) { return words; }
    static Ints add(Ints sum, Part part, const Row* x) {
        int32_t four;
        __builtin_memcpy(&four, x, sizeof four);
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)part, _mm512_set1_epi32(four));
    }
};

struct FourNibbles {
    typedef int8_t Row;
    typedef Ints Sum;
    static constexpr int VECTORS = 2;
    static Ints add(Ints sum, Ints numbers, const Row* x) { return FourInt8::add(sum, numbers, x); }
    static Ints exact(Ints sum) { return sum; }
};
#else
// As 16-bit numbers, of which pairs are multiplied and added in 32 bits: products of bytes would saturate in 16.
struct FourInt8 {
    typedef int16_t Row;
    struct Part {
        Ints even, odd;
    };
    static constexpr int OFFSET = 128, VECTORS = 2, ORDER[4] = {0, 2, 1, 3};
    static Part part(Ints words) { return {words & 0x00ff00ff, (Ints)_mm512_srli_epi16((__m512i)words, 8)}; }
    static Ints add(Ints sum, Part part, const Row* x) {
        int32_t even, odd;
        __builtin_memcpy(&even, x, sizeof even);
        __builtin_memcpy(&odd, x + 2, sizeof odd);
        return sum + (Ints)_mm512_madd_epi16((__m512i)part.even, _mm512_set1_epi32(even)) +
               (Ints)_mm512_madd_epi16((__m512i)part.odd, _mm512_set1_epi32(odd));
    }
};

// Two products of a byte of at most 15 and an int8 are added in 16 bits, and eight such sums, of 32 elements, fit.
struct FourNibbles {
    typedef int8_t Row;
    typedef int16_t Sum __attribute__((vector_size(4 * LANES)));
    static constexpr int VECTORS = 2;
    static Sum add(Sum sum, Ints numbers, const Row* x) {
        int32_t four;
        __builtin_memcpy(&four, x, sizeof four);
        sum += (Sum)_mm512_maddubs_epi16((__m512i)numbers, _mm512_set1_epi32(four));
        asm volatile("" : "+v"(sum));  // or GCC keeps products, in memory, to add them later
        return sum;
    }
    static Ints exact(Sum sum) { return (Ints)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }
};
#endif

}  // namespace
