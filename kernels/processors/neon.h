// Primitives for 64-bit ARM: NEON as every such processor has it. vectors.h lists them.

#pragma once

#include <arm_neon.h>

constexpr int LANES = 4;  // GCC keeps vectors of more than one register in memory
#include "types.h"

namespace {

inline Floats widened(Shorts halves) { return (Floats)vcvt_f32_f16((float16x4_t)halves); }

inline Shorts narrowed(Floats x) { return (Shorts)vcvt_f16_f32((float32x4_t)x); }

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

}  // namespace
