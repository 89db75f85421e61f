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

#ifdef __AVXVNNI__
#define INT8_DOTS
struct FourInt8 {
    typedef int8_t Row;
    typedef Ints Part;
    static constexpr int OFFSET = 128, VECTORS = 1, ORDER[4] = {0, 1, 2, 3};
    static Part part(Ints words) { return words; }
    static Ints add(Ints sum, Part part, const Row* x) {
        int32_t four;
        __builtin_memcpy(&four, x, sizeof four);
        return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)part, _mm256_set1_epi32(four));
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
// Bytes are extended to 16 bits, and pairs of products are added in 32 bits: in 16 bits, sums of two products of bytes
// would saturate.
struct FourInt8 {
    typedef int16_t Row;
    struct Part {
        Ints even, odd;
    };
    static constexpr int OFFSET = 128, VECTORS = 2, ORDER[4] = {0, 2, 1, 3};
    static Part part(Ints words) { return {words & 0x00ff00ff, (Ints)_mm256_srli_epi16((__m256i)words, 8)}; }
    static Ints add(Ints sum, Part part, const Row* x) {
        int32_t even, odd;
        __builtin_memcpy(&even, x, sizeof even);
        __builtin_memcpy(&odd, x + 2, sizeof odd);
        return sum + (Ints)_mm256_madd_epi16((__m256i)part.even, _mm256_set1_epi32(even)) +
               (Ints)_mm256_madd_epi16((__m256i)part.odd, _mm256_set1_epi32(odd));
    }
};

// Products of a byte up to 15 and an int8 are added in pairs in 16 bits; eight such sums (32 elements) cannot overflow.
struct FourNibbles {
    typedef int8_t Row;
    typedef int16_t Sum __attribute__((vector_size(4 * LANES)));
    static constexpr int VECTORS = 2;
    static Sum add(Sum sum, Ints numbers, const Row* x) {
        int32_t four;
        __builtin_memcpy(&four, x, sizeof four);
        sum += (Sum)_mm256_maddubs_epi16((__m256i)numbers, _mm256_set1_epi32(four));
        asm volatile("" : "+x"(sum));  // else GCC stores products in memory and adds them later
        return sum;
    }
    static Ints exact(Sum sum) { return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
};

// Four products of a byte up to 63 and an int8 can be added in 16 bits.
#define EIGHT_CODES
struct EightCodes {
    typedef int8_t Row;
    typedef Ints Sum;
    struct Part {
        Ints first, second;
    };
    static constexpr int VECTORS = 3;
    static Ints add(Ints sum, Part codes, const Row* x) {
        int32_t fours[2];
        __builtin_memcpy(fours, x, sizeof fours);
        const __m256i first = _mm256_maddubs_epi16((__m256i)codes.first, _mm256_set1_epi32(fours[0]));
        const __m256i second = _mm256_maddubs_epi16((__m256i)codes.second, _mm256_set1_epi32(fours[1]));
        return sum + (Ints)_mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));
    }
    static Ints exact(Ints sum) { return sum; }
};
#endif

}  // namespace
