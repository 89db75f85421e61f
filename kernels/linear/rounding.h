// Rounds elements of rows to multiples of their largest magnitude, for products of integers.

#pragma once

#include "../vectors.h"

namespace {

// The rounding of elements of a row: the number of levels, and the magnitude of the largest; 0: that of the elements.
struct Levels {
    float count, largest;
};

// The sums of every fourth lane.
inline FourInts sums_of_fourths(Ints x) {
    FourInts parts[LANES / 4], sums{};
    std::memcpy(parts, &x, sizeof x);
    for (const FourInts part : parts) sums += part;
    return sums;
}

// Rounds elements of a row to multiples ("steps") of their largest magnitude / levels and calls put(i, steps) for every
// LANES of them; steps past the width are 0. Returns the largest magnitude.
template <typename T, typename Put>
float rounded_row(const T* x, int64_t width, const Levels& levels, Put put) {
    const float largest = levels.largest ? levels.largest : magnitude_of(x, width), step = largest / levels.count;
    const float inverse = 1 / largest * levels.count;  // as PyTorch divides 127 by a tensor, which decides ties
    if (!(step > 0 && step < INFINITY)) {  // a row of zeros, NaN or infinity has no quotients to round
        each(width, [&](int64_t i, auto) { put(i, Ints{}); });
        return largest;
    }
    const int32_t top = int32_t(levels.count);
    each(width, [&](int64_t i, auto n) {
        const Floats some = ::load(x + i, n);
        Ints steps = __builtin_convertvector(nearest(levels.largest ? some * inverse : some / step), Ints);
        steps = steps > top ? Ints{} + top : steps;  // with 127.5 levels, the largest would round up
        put(i, first_lanes(steps, n));
    });
    return largest;
}

// Stores LANES steps in a row; each four of them in the order that FourInt8 expects.
template <typename Row>
void put_row(Ints steps, Row* row) {
    if constexpr (sizeof(Row) == sizeof(Bytes) / LANES) {
        const Bytes bytes = low_bytes(steps);
        std::memcpy(row, &bytes, sizeof bytes);
    } else {
        using Rows = std::conditional_t<sizeof(Row) == sizeof(Shorts) / LANES, Shorts, Ints>;
        const Rows numbers = __builtin_convertvector(steps, Rows);
        Rows ordered;
        for (int lane = 0; lane < LANES; lane++) ordered[lane / 4 * 4 + FourInt8::ORDER[lane % 4]] = numbers[lane];
        static_assert(sizeof ordered == LANES * sizeof(Row));
        std::memcpy(row, &ordered, sizeof ordered);
    }
}

}  // namespace
