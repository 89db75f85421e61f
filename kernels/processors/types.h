// The vector types of all kernels, with the number of LANES that the including file has chosen.

#pragma once

#include <cstdint>

namespace {  // one per file, because files are compiled with different flags

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));  // also bits of 16-bit element types

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;  // of a tile

struct Table {
    int8_t of[16];
};

}  // namespace
