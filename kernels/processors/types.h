// The vectors that all kernels compute with, for the number of LANES that the including file has chosen.

#pragma once

#include <cstdint>

namespace {  // of each file: they are not compiled alike

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));  // also elements of 16-bit types, as bits

struct Table {
    int8_t of[16];
};

}  // namespace
