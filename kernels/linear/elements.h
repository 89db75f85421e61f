// The elements of packed matrices. Each has
//   Row            what a prepared row of x consists of
//   STEP, BYTES    elements of a row that are multiplied at once, and what they take of a panel for one output
//   CHUNK          elements of a row that are summed up before they are added to its total
//   Part, VECTORS  the elements of LANES outputs that are multiplied at once, in so many registers
//   Sum            of LANES outputs
// and prepares rows, loads parts, adds a part times STEP elements of a row to sums, and makes values of sums.

#pragma once

#include "../vectors.h"

namespace {

struct Unit {  // of a row of x
    float size;
    int32_t excess;  // of its sums of products, see Int8
};

// Rows of floats.
struct Wide {
    typedef float Row;
    typedef Floats Sum;
    static constexpr int CHUNK = 64;

    template <typename T>
    static Unit prepare(const T* x, int64_t width, float* row) {
        each(width, [&](int64_t i, auto n) { write(load(x + i, n), row + i, n); });
        row[width] = 0;  // STEP is at most 2
        return {};
    }
    static Floats value(Floats sum, const Unit*, int64_t, const float*, int64_t, int) { return sum; }
};

struct WideFloat32 : Wide {
    typedef Floats Part;
    static constexpr int STEP = 1, BYTES = 4, VECTORS = 1;
    static Part load(const char* at) { return read<Floats>(at, LANES); }
    static Sum add(Sum sum, Part part, const Row* x) { return sum + part * x[0]; }
};

struct WideFloat16 : Wide {
    typedef Floats Part;
    static constexpr int STEP = 1, BYTES = 2, VECTORS = 1;
    static Part load(const char* at) { return ::load((const Float16*)at); }
    static Sum add(Sum sum, Part part, const Row* x) { return sum + part * x[0]; }
};

// Pairs of elements lie in words, the first in the low half.
struct WideBFloat16 : Wide {
    struct Part {
        Floats first, second;
    };
    static constexpr int STEP = 2, BYTES = 4, VECTORS = 2;
    static Part load(const char* at) {
        const Ints words = read<Ints>(at, LANES);
        return {(Floats)(words << 16), (Floats)(words & ~0xffff)};
    }
    static Sum add(Sum sum, Part part, const Row* x) { return sum + part.first * x[0] + part.second * x[1]; }
};

#ifdef BFLOAT16_PAIRS
struct PairsOfBFloat16 {
    typedef BFloat16 Row;
    typedef Floats Sum;
    typedef Ints Part;
    static constexpr int STEP = 2, BYTES = 4, VECTORS = 1, CHUNK = 128;

    template <typename T>
    static Unit prepare(const T* x, int64_t width, BFloat16* row) {
        each(width, [&](int64_t i, auto n) { store(::load(x + i, n), row + i, n); });
        row[width] = {};
        return {};
    }
    static Part load(const char* at) { return read<Ints>(at, LANES); }
    static Sum add(Sum sum, Part part, const Row* x) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return add_pairs(sum, part, pair);
    }
    static Floats value(Floats sum, const Unit*, int64_t, const float*, int64_t, int) { return sum; }
};
#endif

// Rows of x are rounded to steps of 1 / 127 of their largest magnitude. Panels hold numbers that are 128 too large, and
// FourInt8 multiplies by those that are OFFSET too large. Sums are exact, so that all processors agree.
struct Int8 : FourInt8 {
    typedef Ints Sum;
    static constexpr int STEP = 4, BYTES = 4, CHUNK = 256;
    static Part load(const char* at) { return part(read<Ints>(at, LANES)); }

    template <typename T>
    static Unit prepare(const T* x, int64_t width, Row* row) {
        Floats most{};
        each(width, [&](int64_t i, auto n) {
            const Floats part = ::load(x + i, n), size = part < 0 ? -part : part;
            most = ((size > most) | (size != size)) ? size : most;  // NaN wins
        });
        float largest = 0;
        for (int lane = 0; lane < LANES; lane++)
            if (most[lane] > largest || most[lane] != most[lane]) largest = most[lane];
        const float scale = 127 / largest;
        Ints sum{};
        each(width, [&](int64_t i, auto n) {
            Ints steps = __builtin_convertvector(::load(x + i, n) * scale + 128.5f, Ints) - 128;
            for (int lane = n; lane < LANES; lane++) steps[lane] = 0;
            sum += steps;
            for (int lane = 0; lane < LANES; lane++) row[i + lane / 4 * 4 + ORDER[lane % 4]] = Row(steps[lane]);
        });
        int32_t total = 0;
        for (int lane = 0; lane < LANES; lane++) total += sum[lane];
        return {largest, OFFSET * total};
    }
    static Floats value(Ints sum, const Unit* units, int64_t row, const float* scale_O, int64_t at, int n) {
        const Floats exact = __builtin_convertvector(sum - units[row].excess, Floats);
        return exact * ::load(scale_O + at, n) * units[row].size;
    }
};

}  // namespace
