// Elements of one and two bits (elements.h says what each defines).

#pragma once

#include "elements.h"

namespace {

// Four int2 per byte: byte j of a word has elements j, j + 4, j + 8 and j + 12 of a step.
struct Int2 : Rounded<FourNibbles, 2> {
    typedef Ints Part;
    static constexpr int STEP = 16, PARTS = 4, SUMS = INT4_SUMS;
    static constexpr bool WRITTEN_OUT = SUMS < REGISTERS;
    static constexpr float DEFAULT_LEAST = 0;
    static Part part(Words words, int i) { return words >> 2 * i & 0x03030303; }
};

// Eight int1 per byte, for numbers -1 and 1: bit i of byte j of a word has element 4 i + j of a step.
struct Int1 : Rounded<FourNibbles, 1> {
    typedef Ints Part;
    static constexpr int STEP = 32, PARTS = 8, SUMS = INT4_SUMS;
    static constexpr bool WRITTEN_OUT = SUMS < REGISTERS;
    static constexpr float DEFAULT_LEAST = 0;
    static Part part(Words words, int i) { return (i ? words >> (i - 1) : words << 1) & 0x02020202; }
};

// int2 multiplied by rows of floats: numbers from -2 to 1.
struct WideInt2 : Grouped, WideRows {
    typedef Ints Words;
    static constexpr int STEP = 16, BYTES = 4, PARTS = 16, VECTORS = 2;
    static constexpr float ZERO = 2, DEFAULT = 2, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES) ^ int(0xaaaaaaaa); }
    static Part part(Words words, int i) {
        return __builtin_convertvector(words << (30 - i % 4 * 8 - i / 4 * 2) >> 30, Floats);
    }
};

// int1 multiplied by rows of floats: the bit is the sign of 1.
struct WideInt1 : Grouped, WideRows {
    typedef Ints Words;
    static constexpr int STEP = 32, BYTES = 4, PARTS = 32, VECTORS = 2;
    static constexpr int SUMS = REGISTERS / 2;  // of more GCC keeps some in memory
    static constexpr float ZERO = 1, DEFAULT = 1, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return ~read<Ints>(at, LANES); }
    static Part part(Words words, int i) {
        return (Floats)((words << (31 - i % 4 * 8 - i / 4) & int(0x80000000)) | 0x3f800000);
    }
};

#ifdef INT8_DOTS

struct DigitsInt2 : Digits {
    typedef Ints Words;
    static constexpr int STEP = 16, BYTES = 4, PARTS = 4, VECTORS = 2;
    static constexpr float ZERO = 0, DEFAULT = 2, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) { return (Part)(words >> 2 * i & 0x03030303); }
};

struct DigitsInt1 : Digits {
    typedef Ints Words;
    static constexpr int STEP = 32, BYTES = 4, PARTS = 8, VECTORS = 2;
    static constexpr float ZERO = 0, DEFAULT = 1, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) { return (Part)((i ? words >> (i - 1) : words << 1) & 0x02020202); }
};

#endif

}  // namespace
