// Primitives for any processor, using only the compiler's vector extensions. vectors.h lists them.

#pragma once

constexpr int LANES = 4;
#include "types.h"

namespace {

// Both conversions follow FP16 (Maratyszcza, github.com/Maratyszcza/FP16): a normal half becomes a float with its
// exponent bits, multiplied by a power of two; a subnormal half becomes the difference of two floats.
inline Floats widened(Shorts halves) {
    const Words bits = __builtin_convertvector(halves, Words), number = bits << 17;  // without the sign
    const Floats normal = (Floats)((number >> 4) + (0xe0u << 23)) * 0x1p-112f;
    const Floats subnormal = (Floats)((number >> 17) | 0x3f000000u) - 0.5f;
    return (Floats)((number < 1u << 27 ? (Words)subnormal : (Words)normal) | (bits & 0x8000u) << 16);
}

// Adding a power of two, chosen by how many bits remain, rounds to the nearest, ties to even.
inline Shorts narrowed(Floats x) {
    const Words bits = (Words)x, number = bits << 1, exponent = number & 0xff000000u;
    const Words least = exponent < 0x71000000u ? Words{} + 0x71000000u : exponent;
    const Floats size = (Floats)(number >> 1) * 0x1p112f * 0x1p-110f;  // inf if too large
    const Words sum = (Words)((Floats)((least >> 1) + 0x07800000u) + size);
    const Words half = (sum >> 13 & 0x7c00u) + (sum & 0xfffu);
    const Words finite_or_not = number > 0xff000000u ? Words{} + 0x7e00u : half;
    return __builtin_convertvector(finite_or_not | (bits >> 16 & 0x8000u), Shorts);
}

inline Ints extended(Bytes x) { return __builtin_convertvector(x, Ints); }

inline uint32_t bits_of(Ints truth) {
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= uint32_t(truth[lane] != 0) << lane;
    return bits;
}

inline float sum_of(Floats x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

inline Floats nearest(Floats x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: sums with it are whole numbers
    return (x + ROUND) - ROUND;
}

inline Floats scaled(Floats y, Floats power, Floats x) {
    const Ints exponent = (__builtin_convertvector(power, Ints) + 127) << 23;
    return x < -125.0f ? Floats{} : y * (Floats)exponent;
}

inline Floats fused(Floats x, Floats y, Floats sum) { return x * y + sum; }

inline Ints looked_up(Ints places, const Table& table) {
    uint8_t bytes[sizeof places];
    __builtin_memcpy(bytes, &places, sizeof places);
    for (uint8_t& byte : bytes) byte = uint8_t(table.of[byte]);
    __builtin_memcpy(&places, bytes, sizeof places);
    return places;
}

inline Ints highest(Ints words, int byte) { return words << (24 - 8 * byte) & int(0xff000000); }

constexpr int REGISTERS = 16, SPARE_REGISTERS = 1;

struct FourInt8 {
    typedef int32_t Row;
    struct Part {
        Ints numbers[4];
    };
    static constexpr int OFFSET = 128, VECTORS = 4, ORDER[4] = {0, 1, 2, 3};
    static Part part(Ints words) { return {{words & 255, words >> 8 & 255, words >> 16 & 255, words >> 24 & 255}}; }
    static Ints add(Ints sum, Part part, const Row* x) {
        for (int i = 0; i < 4; i++) sum += part.numbers[i] * x[i];
        return sum;
    }
};

struct FourNibbles {
    typedef int32_t Row;
    typedef Ints Sum;
    static constexpr int VECTORS = 2;
    static Ints add(Ints sum, Ints numbers, const Row* x) { return FourInt8::add(sum, FourInt8::part(numbers), x); }
    static Ints exact(Ints sum) { return sum; }
};

}  // namespace
