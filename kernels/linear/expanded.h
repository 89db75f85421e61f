// Expands codes to floats, for many rows: the codes of a chunk are converted once, not once for each block of rows.
// Sums have the same bits.

#pragma once

#include "sums.h"

#ifdef EXPANDS

namespace {

// Whether codes are expanded for so many rows, of which a block has at most `most`: with few blocks, storing the floats
// takes longer than converting the codes again.
template <typename Element, int VECTORS>
constexpr bool expands(int rows, int most) {
    return Element::EXPANDED && VECTORS * LANES == PANEL && rows > 2 * most;
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("no-tree-vectorize")  // as in sums.h
#endif

// Converts steps of a panel. Numbers are stored in fours: GCC does not remember what it read before a store.
template <typename Element>
[[gnu::always_inline]] inline void expand(const char* at, int64_t ahead, int64_t steps, float* to) {
    constexpr int LINE = PANEL * Element::BYTES, FOUR = 4;
    for (int64_t i = 0; i < steps; i++, at += LINE, to += Element::STEP * PANEL) {
#pragma GCC unroll 8
        for (int line = 0; line < LINE; line += PANEL * 4) __builtin_prefetch(at + line + ahead);
#pragma GCC unroll 4
        for (int lane = 0; lane < PANEL; lane += LANES) {
            const auto words = Element::load(at + lane * 4);
#pragma GCC unroll 8
            for (int p = 0; p < Element::STEP; p += FOUR) {
                Floats numbers[FOUR];
#pragma GCC unroll 4
                for (int j = 0; j < FOUR; j++) numbers[j] = Element::part(words, p + j);
#pragma GCC unroll 4
                for (int j = 0; j < FOUR; j++) store(numbers[j], to + (p + j) * PANEL + lane);
            }
        }
    }
}

// Adds the products of a block of rows and a chunk of numbers [elements, PANEL].
template <int COUNT, int VECTORS>
void add_floats(const float* numbers, int64_t elements, const float* x, int64_t stride, const Floats* scales,
                Floats (*totals)[VECTORS]) {
    Floats sums[COUNT][VECTORS] = {};
    for (int64_t i = 0; i < elements; i += 4, numbers += 4 * PANEL, x += 4) {
        asm("" : "+r"(x), "+r"(stride));  // else GCC keeps the address of each row's elements, mostly in memory
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            Floats part[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                part[v] = load(numbers + j * PANEL + v * LANES);
                asm("" : "+v"(part[v]));  // else GCC reads it again for each row
            }
#pragma GCC unroll 16
            for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[row][v] += part[v] * x[row * stride + j];
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) totals[row][v] += sums[row][v] * scales[v];
}

template <int VECTORS, int COUNT, typename... Arguments>
void add_float_rows(int count, const Arguments&... arguments) {
    if (count == COUNT) return add_floats<COUNT, VECTORS>(arguments...);
    if constexpr (COUNT > 1) add_float_rows<VECTORS, COUNT - 1>(count, arguments...);
}

// Adds several chunks of groups to all of `count` rows.
template <typename Element, int VECTORS>
void add_expanded(int count, const float* x, int64_t stride, const Rows<Element>& rows, int64_t row0,
                  const Chunks<VECTORS>& chunks, Floats (*totals)[VECTORS]) {
    constexpr int MOST = max_rows<WideFloat32>(VECTORS);
    const int blocks = (count + MOST - 1) / MOST;
    alignas(64) float numbers[Element::CHUNK * PANEL];
    const char* at = chunks.at;
    for (int64_t c = 0; c < chunks.count; c++) {
        const auto& chunk = chunks.each[c];
        const int64_t elements = chunk.steps * Element::STEP;
        expand<Element>(at, chunks.ahead, chunk.steps, numbers);
        for (int b = 0; b < blocks; b++) {
            const int first = count * b / blocks, last = count * (b + 1) / blocks;
            add_float_rows<VECTORS, MOST>(last - first, numbers, elements, x + first * stride, stride,
                                          chunks.scales[chunk.place], totals + first);
        }
        if (rows.sums && chunk.group >= 0) {
            const float* of_x = rows.sums + row0 * rows.groups + chunk.group;
            for (int row = 0; row < count; row++)
                for (int v = 0; v < VECTORS; v++)
                    totals[row][v] += chunks.offsets[chunk.place][v] * of_x[row * rows.groups];
        }
        at += chunk.steps * PANEL * Element::BYTES, x += elements;
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

}  // namespace

#endif
