// Products of small matrices of words, in registers.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../vectors.h"
#include "ready.h"

namespace {

template <int COUNT, typename F>
inline void with_count(int count, F f) {
    if constexpr (COUNT > 1)
        if (count < COUNT) return with_count<COUNT - 1>(count, f);
    f(std::integral_constant<int, COUNT>{});
}

// Calls f(first, count) with a constant count of at most MOST for all of `rows` rows.
template <int MOST, typename F>
inline void by_rows(int rows, F f) {
    const int groups = (rows + MOST - 1) / MOST;
    for (int i = 0; i < groups; i++) {
        const int first = rows * i / groups;
        with_count<MOST>(rows * (i + 1) / groups - first, [&](auto count) { f(first, count); });
    }
}

// Calls f(i, columns) with constant numbers of columns, 4, 2 or 1, for vectors first .. last - 1.
template <typename F>
inline void by_columns(int first, int last, F f) {
    for (; first + 4 <= last; first += 4) f(first, std::integral_constant<int, 4>{});
    for (; first + 2 <= last; first += 2) f(first, std::integral_constant<int, 2>{});
    if (first < last) f(first, std::integral_constant<int, 1>{});
}

template <int COLUMNS>
constexpr int MOST_ROWS = std::min(8, (REGISTERS - 4) / COLUMNS);  // whose sums fit into the registers

// Adds products of words: out[row] = out[row] * keep[row] + the sum over i of x[row * across + i * along] times the
// words at(i), in this order; `keep` null: from 0. `out` is a row of COLUMNS vectors, and the next row `stride` words
// on. At each i it fetches LINES cache lines for what comes later.
template <typename Element, int ROWS, int COLUMNS, int LINES, typename Across, typename At>
inline void multiply(const int32_t* x, int along, Across across, At at, int first, int last, float* out, int stride,
                     const float* keep, Fetch& fetch) {
    const char* next = fetch.at;
    const int64_t line = fetch.at < fetch.end ? LINE : 0;  // of what was fetched, one again
    Floats sum[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) sum[r][c] = keep ? load(out + r * stride + c * LANES) * keep[r] : Floats{};
    x += first * along;
    for (int i = first; i < last; i++, x += along) {
        const int32_t* y = at(i);
#pragma GCC unroll 8
        for (int j = 0; j < LINES; j++) __builtin_prefetch(next + j * line, 0, 1);
        next += LINES * line;
        Ints words[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) words[c] = read<Ints>(y + c * LANES, LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) {
                int32_t word;
                std::memcpy(&word, x + r * across, sizeof word);
                sum[r][c] = Element::add(sum[r][c], words[c], word);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) store(sum[r][c], out + r * stride + c * LANES);
    fetch.at = next < fetch.end ? next : fetch.end;
}

}  // namespace
