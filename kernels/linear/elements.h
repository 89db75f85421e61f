// The elements of packed matrices. Each has
//   Row                  what a prepared row of x consists of
//   STEP, BYTES, PARTS   elements of a row that are loaded at once, what they take of a panel for one output, and in how
//                        many parts they are multiplied
//   CHUNK                elements of a row that are summed up before they are added to its total
//   Words, Part, VECTORS what is loaded for LANES outputs, what is multiplied at once, and the registers of both
//   Sum, Total           of LANES outputs, in a chunk and in a row
//   GROUPED              whether groups of elements have scales
// and prepares rows, loads words, makes parts of them, adds a part times elements of a row to sums, and makes values of
// totals, which are sums of sums, scaled those of groups.

#pragma once

#include "../vectors.h"

namespace {

struct Unit {  // of a row of x
    float size;
    int32_t excess;  // of its sums of products, see Int8
};

// Scale, zero and minimum of a group, for LANES outputs.
struct Scale {
    Floats scale, zero, least;
};

// Without groups, of which the sums are values at once, and multiplied part by part.
struct Plain {
    static constexpr int PARTS = 1;
    static constexpr bool GROUPED = false;
    static Floats value(Floats sum, const Unit&, const void*, int64_t, int) { return sum; }
};

// Rows of floats.
struct WideRows {
    typedef float Row;
    typedef Floats Part, Sum;

    template <typename T>
    static Unit prepare(const T* x, int64_t width, float* row, float) {
        each(width, [&](int64_t i, auto n) { write(load(x + i, n), row + i, n); });
        for (int i = 0; i < 8; i++) row[width + i] = 0;  // STEP is at most 8
        return {};
    }
    static Sum add(Sum sum, Part part, const Row* x) { return sum + part * x[0]; }
};

struct Wide : WideRows, Plain {
    typedef Floats Total;
    static constexpr int CHUNK = 64;
};

struct WideFloat32 : Wide {
    typedef Floats Words;
    static constexpr int STEP = 1, BYTES = 4, VECTORS = 1;
    static Words load(const char* at) { return read<Floats>(at, LANES); }
    static Part part(Words words, int) { return words; }
};

struct WideFloat16 : Wide {
    typedef Floats Words;
    static constexpr int STEP = 1, BYTES = 2, VECTORS = 1;
    static Words load(const char* at) { return ::load((const Float16*)at); }
    static Part part(Words words, int) { return words; }
};

// Pairs of elements lie in words, the first in the low half.
struct WideBFloat16 : Wide {
    typedef Ints Words;
    static constexpr int STEP = 2, BYTES = 4, PARTS = 2, VECTORS = 2;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) { return (Floats)(i ? words & ~0xffff : words << 16); }
};

#ifdef BFLOAT16_PAIRS
struct PairsOfBFloat16 : Plain {
    typedef BFloat16 Row;
    typedef Floats Sum, Total;
    typedef Ints Words, Part;
    static constexpr int STEP = 2, BYTES = 4, VECTORS = 1, CHUNK = 128;

    template <typename T>
    static Unit prepare(const T* x, int64_t width, BFloat16* row, float) {
        each(width, [&](int64_t i, auto n) { store(::load(x + i, n), row + i, n); });
        row[width] = {};
        return {};
    }
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int) { return words; }
    static Sum add(Sum sum, Part part, const Row* x) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return add_pairs(sum, part, pair);
    }
};
#endif

// A row of x in steps of 1 / levels of its largest magnitude: put(i, steps) takes LANES of them, those past the width 0.
// Returns the largest magnitude and the sum of the steps.
template <typename T, typename Put>
std::pair<float, int32_t> rounded_row(const T* x, int64_t width, float levels, Put put) {
    Floats most{};
    each(width, [&](int64_t i, auto n) {
        const Floats part = ::load(x + i, n), size = part < 0 ? -part : part;
        most = ((size > most) | (size != size)) ? size : most;  // NaN wins
    });
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (most[lane] > largest || most[lane] != most[lane]) largest = most[lane];
    const float step = largest / levels;
    Ints sum{};
    each(width, [&](int64_t i, auto n) {
        Ints steps = __builtin_convertvector(nearest(::load(x + i, n) / step), Ints);
        steps = steps > 127 ? Ints{} + 127 : steps;  // half a step too large where levels are 127.5
        for (int lane = n; lane < LANES; lane++) steps[lane] = 0;
        sum += steps;
        put(i, steps);
    });
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return {largest, total};
}

// Panels hold numbers that are 128 too large, and FourInt8 multiplies by those that are OFFSET too large. Sums are
// exact, so that all processors agree.
struct Int8 : FourInt8, Plain {
    typedef Ints Sum, Total;
    typedef FourInt8::Part Words;
    static constexpr int STEP = 4, BYTES = 4, CHUNK = 256;
    static Words load(const char* at) { return FourInt8::part(read<Ints>(at, LANES)); }
    static Part part(Words words, int) { return words; }

    template <typename T>
    static Unit prepare(const T* x, int64_t width, Row* row, float levels) {
        const auto [largest, sum] = rounded_row(x, width, levels, [&](int64_t i, Ints steps) {
            for (int lane = 0; lane < LANES; lane++) row[i + lane / 4 * 4 + ORDER[lane % 4]] = Row(steps[lane]);
        });
        return {largest, OFFSET * sum};
    }
    static Floats value(Ints sum, const Unit& unit, const void* scale_O, int64_t at, int n) {
        const Floats exact = __builtin_convertvector(sum - unit.excess, Floats);
        return exact * ::load((const float*)scale_O + at, n) * unit.size;
    }
};

// Elements in groups: numbers that are ZERO less than the codes; DEFAULT is the zero of a matrix that has none, and
// DEFAULT_LEAST of one that has minimums.
struct Grouped {
    typedef Floats Total;
    static constexpr bool GROUPED = true;
    static constexpr int CHUNK = 32;
    static Floats floats(Floats sum) { return sum; }
    static Floats floats(Ints sum) { return __builtin_convertvector(sum, Floats); }
    static Floats value(Floats total, const Unit&, const void*, int64_t, int) { return total; }
};

// Two int4 to a byte, of eight the first four in the low halves; those of rows are rounded.
struct Int4 : FourNibbles, Grouped {
    typedef Ints Words, Part;
    static constexpr int STEP = 8, BYTES = 4, PARTS = 2;
    static constexpr float ZERO = 0, DEFAULT = 8, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) { return (i ? words >> 4 : words) & 0x0f0f0f0f; }
    static Floats floats(Sum sum) { return Grouped::floats(exact(sum)); }

    template <typename T>
    static Unit prepare(const T* x, int64_t width, Row* row, float levels) {
        const auto [largest, sum] = rounded_row(x, width, levels, [&](int64_t i, Ints steps) {
            for (int lane = 0; lane < LANES; lane++) row[i + lane] = Row(steps[lane]);
        });
        for (int64_t i = (width + LANES - 1) / LANES * LANES; i % STEP; i++) row[i] = 0;
        return {largest / levels, 0};
    }
    static Floats value(Total total, const Unit& unit, const void*, int64_t, int) { return total * unit.size; }
};

// The same by rows of floats: numbers from -8 up.
struct WideInt4 : Grouped, WideRows {
    typedef Ints Words;
    static constexpr int STEP = 8, BYTES = 4, PARTS = 8, VECTORS = 2;
    static constexpr float ZERO = 8, DEFAULT = 8, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES) ^ int(0x88888888); }
    static Part part(Words words, int i) {  // bytes hold elements i and i + 4
        return __builtin_convertvector(words << (28 - i % 4 * 8 - i / 4 * 4) >> 28, Floats);
    }
};

// uint8: numbers from -128 up.
struct WideInt8 : Grouped, WideRows {
    typedef Ints Words;
    static constexpr int STEP = 4, BYTES = 4, PARTS = 4, VECTORS = 2;
    static constexpr float ZERO = 128, DEFAULT = 128, DEFAULT_LEAST = 128;
    static Words load(const char* at) { return read<Ints>(at, LANES) ^ int(0x80808080); }
    static Part part(Words words, int i) { return __builtin_convertvector(words << (24 - i * 8) >> 24, Floats); }
};

// e4m3: the bits of a float with another exponent. NaN becomes 480.
struct WideFloat8 : Grouped, WideRows {
    typedef Ints Words;
    static constexpr int STEP = 4, BYTES = 4, PARTS = 4, VECTORS = 2;
    static constexpr float ZERO = 0, DEFAULT = 0, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) {
        return (Floats)(words << (24 - i * 8) >> 4 & int(0x87f00000)) * 0x1p120f;
    }
};

}  // namespace
