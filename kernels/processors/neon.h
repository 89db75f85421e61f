// Primitives for 64-bit ARM with baseline NEON. vectors.h lists them.

#pragma once

#include <arm_neon.h>

constexpr int LANES = 4;  // GCC keeps vectors of more than one register in memory
#include "types.h"

namespace {

inline Floats widened(Shorts halves) { return (Floats)vcvt_f32_f16((float16x4_t)halves); }

inline Shorts narrowed(Floats x) { return (Shorts)vcvt_f16_f32((float32x4_t)x); }

inline Ints extended(Bytes x) {
    return (Ints)vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)vdup_n_s32((int32_t)x))));
}

inline uint32_t bits_of(Ints truth) {
    const Words bits = {1, 2, 4, 8};
    return vaddvq_u32((uint32x4_t)((Words)truth & bits));
}

inline float sum_of(Floats x) { return vaddvq_f32((float32x4_t)x); }

inline Floats nearest(Floats x) { return (Floats)vrndnq_f32((float32x4_t)x); }

inline Floats scaled(Floats y, Floats power, Floats x) {
    const Ints exponent = (__builtin_convertvector(power, Ints) + 127) << 23;
    return x < -125.0f ? Floats{} : y * (Floats)exponent;
}

inline Floats fused(Floats x, Floats y, Floats sum) {
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
}

inline Ints looked_up(Ints places, const Table& table) {
    return (Ints)vqtbl1q_s8(vld1q_s8(table.of), (uint8x16_t)places);
}

inline Ints highest(Ints words, int byte) { return words << (24 - 8 * byte) & int(0xff000000); }

constexpr int REGISTERS = 32, SPARE_REGISTERS = 1;

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define BFLOAT16_PAIRS
inline Floats add_pairs(Floats sum, Ints pairs, int32_t pair) {
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)pairs, (bfloat16x8_t)vdupq_n_s32(pair));
}

inline Shorts nearest_bfloat16(Floats x) { return (Shorts)vcvt_bf16_f32((float32x4_t)x); }

inline Floats floats_of(Shorts bfloat16) { return (Floats)vshll_n_u16((uint16x4_t)bfloat16, 16); }

inline void interleave(const void* one, const void* two, void* to) {
    const uint16x8x2_t both = vzipq_u16(vld1q_u16((const uint16_t*)one), vld1q_u16((const uint16_t*)two));
    vst1q_u16((uint16_t*)to, both.val[0]);
    vst1q_u16((uint16_t*)to + 8, both.val[1]);
}
#endif

#ifdef __ARM_FEATURE_DOTPROD
#define INT8_DOTS
#endif
struct FourInt8 {
    typedef int8_t Row;
    typedef int8x16_t Part;
    static constexpr int OFFSET = 0, VECTORS = 1, ORDER[4] = {0, 1, 2, 3};
    static Part part(Ints words) { return (Part)(words ^ int(0x80808080)); }  // signed
    static Ints add(Ints sum, Part part, const Row* x) {
        int32_t word;
        __builtin_memcpy(&word, x, sizeof word);
        const Part four = (Part)vdupq_n_s32(word);
#ifdef __ARM_FEATURE_DOTPROD
        return (Ints)vdotq_s32((int32x4_t)sum, part, four);
#else
        const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(part), vget_low_s8(four)));
        const int32x4_t high = vpaddlq_s16(vmull_high_s8(part, four));
        return sum + (Ints)vpaddq_s32(low, high);
#endif
    }
};

struct FourNibbles {
    typedef int8_t Row;
    typedef Ints Sum;
    static constexpr int VECTORS = 2;
    static Ints add(Ints sum, Ints numbers, const Row* x) { return FourInt8::add(sum, (int8x16_t)numbers, x); }
    static Ints exact(Ints sum) { return sum; }
};

}  // namespace
