// Products of a block of rows and a set of output vectors, summed over a chunk of the width; the scales of groups.

#pragma once

#include <algorithm>
#include <cstddef>

#include "../operators.h"
#include "../vectors.h"
#include "elements.h"

namespace {

constexpr int PIECE = 64;     // outputs
constexpr int UNIT = 256;     // elements of a row that share a unit of scales
#ifdef TILES
constexpr int BATCH = 64;     // rows, whole tiles, that share a fetch from the second-level cache
#else
constexpr int BATCH = 60;     // rows that share a fetch from the second-level cache
#endif
constexpr int LEAST = LANES == PANEL ? 2 : PANEL / LANES;  // fewest output vectors of a set

// Whether the sums of a block and the vectors being multiplied fit into the registers, within Element::SUMS.
template <typename Element>
constexpr bool fits(int rows, int vectors) {
    constexpr int OF_SUM = sizeof(typename Element::Sum) / sizeof(Floats);
    return (rows * OF_SUM + Element::VECTORS) * vectors + SPARE_REGISTERS <= REGISTERS &&
           rows * vectors <= Element::SUMS;
}

template <typename Element>
constexpr int max_rows(int vectors) {
    int rows = 1;
    while (fits<Element>(rows + 1, vectors)) rows++;
    return rows;
}

// Output vectors of a set for so many rows: a whole piece if its sums fit.
template <typename Element>
constexpr int vectors_for(int rows) {
    int vectors = PIECE / LANES;
    if (Element::TILED) return vectors;
    while (vectors > LEAST && !fits<Element>(rows, vectors)) vectors /= 2;
    return rows <= Element::NARROW && !fits<Element>(rows, vectors) ? PANEL / LANES : vectors;
}

// Rows of x as an element type multiplies them, `stride` elements apart.
template <typename Element>
struct Rows {
    typename Element::Row* data;
    int64_t stride;
    Unit* units;  // one for each ROUNDED elements of a group, or for a row; interleaved for BATCH rows
    float* sums;  // the sum of each group of each row; null: not needed
    int64_t groups, each;  // groups of a row; units of a row

    Unit* unit(int64_t row, int64_t number) const {
        return units + (row / BATCH * each + number) * BATCH + row % BATCH;
    }
};

// A chunk of the width: its address in the first panel of the set, bytes between panels, steps, bytes from a line to
// the one that is prefetched with it, and the chunk's first unit.
struct Chunk {
    const char* at;
    int64_t across, steps, ahead, unit;
};

// Consecutive chunks of a matrix with groups.
constexpr int MOST_CHUNKS = 8;

template <int VECTORS>
struct Chunks {
    const char* at;
    int64_t across, count, ahead, unit;
    struct {
        int64_t steps, group;  // group -1: another chunk of the same group adds the sum of x
        int64_t place;         // index of the group's scales
    } each[MOST_CHUNKS];
    // For each group and LANES outputs: factors of the sums of products (`scales`) and, if rows have sums, of the sums
    // of x (`offsets`).
    Floats scales[MOST_CHUNKS][VECTORS], offsets[MOST_CHUNKS][VECTORS];
};

template <typename Element, int VECTORS, int COUNT>
[[gnu::always_inline]] inline void add_step(const char* at, int64_t across, const typename Element::Row* x,
                                            int64_t stride, typename Element::Sum (*sums)[VECTORS]) {
    constexpr int EACH = PANEL / LANES;
    typename Element::Words words[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
        words[v] = Element::load(at + v / EACH * across + v % EACH * LANES * std::min(Element::BYTES, 4));
    constexpr int EACH_PART = Element::STEP / Element::PARTS;
#pragma GCC unroll 32
    for (int p = 0; p < Element::PARTS; p++) {
        if (Element::PARTS >= 8 && p % 4 == 0)
            asm("" : "+r"(x), "+r"(stride));  // else GCC keeps the address of each word of each row, mostly in memory
        if constexpr (Element::PARTS > 8 && COUNT == 1) {  // part by part, else GCC keeps sums in memory
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[0][v] = Element::add(sums[0][v], Element::part(words[v], p), x + p * EACH_PART);
            continue;
        }
        typename Element::Part part[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) part[v] = Element::part(words[v], p);
#pragma GCC unroll 32
        for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[row][v] = Element::add(sums[row][v], part[v], x + row * stride + p * EACH_PART);
    }
}

template <typename Element, int VECTORS, int COUNT>
void add_block(const typename Element::Row* x, int64_t stride, const Rows<Element>& rows, int64_t row0,
               const Chunk& chunk, int64_t first, int64_t last, typename Element::Total (*totals)[VECTORS]) {
    constexpr int LINE = PANEL * Element::BYTES, EACH = PANEL / LANES;
    typename Element::Sum sums[COUNT][VECTORS] = {};
    auto step = [&](int64_t i) {
        add_step<Element, VECTORS, COUNT>(chunk.at + i * LINE, chunk.across, x + i * Element::STEP, stride, sums);
    };
    auto fetching_step = [&](int64_t i) {
        for (int panel = 0; panel < VECTORS / EACH; panel++)
            __builtin_prefetch(chunk.at + panel * chunk.across + (first + i) * LINE + chunk.ahead);
        step(i);
    };
    int64_t i = 0;
    if constexpr (Element::ROUNDED > 0) {
        const Unit* units = rows.unit(row0, chunk.unit);
        for (int64_t end; i < chunk.steps; units += BATCH) {
            for (int row = 0; row < COUNT; row++)
                for (int v = 0; v < VECTORS; v++) sums[row][v] = Ints{} + units[row].start;
            end = std::min<int64_t>(i + Element::ROUNDED / Element::STEP, chunk.steps);
            for (; i < std::min(end, last - first); i++) fetching_step(i);
            for (; i < end; i++) step(i);
            for (int row = 0; row < COUNT; row++)
                for (int v = 0; v < VECTORS; v++)
                    totals[row][v] += __builtin_convertvector(sums[row][v], Floats) * units[row].size;
        }
    } else {
        for (; i < last - first; i++) fetching_step(i);
        for (; i < chunk.steps; i++) step(i);
        for (int row = 0; row < COUNT; row++)
            for (int v = 0; v < VECTORS; v++) totals[row][v] += sums[row][v];
    }
}

// These loops are already vectorised. For 7 or 8 rows of int4 GCC would vectorise them again and keep the sums in
// memory, which makes 15 rows take twice as long.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("no-tree-vectorize")
#endif

// Adds a chunk of one group. `steps` is an int64_t or a compile-time constant; `ahead` as in Chunk, 0: no prefetch.
template <typename Element, int VECTORS, int COUNT, typename Steps>
[[gnu::always_inline]] inline void add_chunk(const char* at, int64_t across, int64_t ahead,
                                             const typename Element::Row* x, int64_t stride, Steps steps,
                                             const Unit* units, const Floats* scales,
                                             typename Element::Total (*totals)[VECTORS]) {
    constexpr int LINE = PANEL * Element::BYTES, EACH = PANEL / LANES;
    typename Element::Sum sums[COUNT][VECTORS] = {};
    if constexpr (Element::ROUNDED > 0)
#pragma GCC unroll 32
        for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[row][v] = Element::begin(units[row].start);
    auto fetch = [&](int64_t i) __attribute__((always_inline)) {
        if (ahead)
#pragma GCC unroll 4
            for (int panel = 0; panel < VECTORS / EACH; panel++)
#pragma GCC unroll 8
                for (int line = 0; line < LINE; line += PANEL * 4)
                    __builtin_prefetch(at + panel * across + i * LINE + line + ahead);
    };
    auto step = [&](int64_t i) __attribute__((always_inline)) {
        add_step<Element, VECTORS, COUNT>(at + i * LINE, across, x + i * Element::STEP, stride, sums);
    };
    if constexpr (Element::WRITTEN_OUT && !std::is_same_v<Steps, int64_t>) {
        for (int i = 0; i < Steps::value; i++) fetch(i);
#pragma GCC unroll 4
        for (int i = 0; i < Steps::value; i++) step(i);
    } else
        for (int64_t i = 0; i < steps; i++) fetch(i), step(i);
#pragma GCC unroll 32
    for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            Floats scale = scales[v];
            if constexpr (Element::ROUNDED > 0) scale *= units[row].size;
            totals[row][v] += Element::floats(sums[row][v]) * scale;
        }
}

// The same, not inlined, for the last chunk of a row: inlined, it would take registers from the main loop.
template <typename Element, int VECTORS, int COUNT, typename... Arguments>
[[gnu::noinline]] void add_rest(const Arguments&... arguments) {
    add_chunk<Element, VECTORS, COUNT>(arguments...);
}

// Adds several chunks of groups. Chunks first .. last - 1 prefetch what follows.
template <typename Element, int VECTORS, int COUNT>
void add_block(const typename Element::Row* x, int64_t stride, const Rows<Element>& rows, int64_t row0,
               const Chunks<VECTORS>& chunks, int64_t first, int64_t last,
               typename Element::Total (*totals)[VECTORS]) {
    constexpr int LINE = PANEL * Element::BYTES, STEPS = Element::CHUNK / Element::STEP;
    const char* at = chunks.at;
    const Unit* units = Element::ROUNDED ? rows.unit(row0, chunks.unit) : nullptr;
    const int64_t across = chunks.across, count = chunks.count;
    const bool summed = rows.sums;
    for (int64_t c = 0; c < count; c++, units += Element::ROUNDED ? BATCH : 0) {
        const auto& chunk = chunks.each[c];
        const int64_t ahead = c >= first && c < last ? chunks.ahead : 0;
        const Floats* scales = chunks.scales[chunk.place];
        if (chunk.steps == STEPS) {
            if (Element::WRITTEN_OUT)
                asm("" : "+r"(stride));  // else GCC keeps the address of each word of each row, mostly in memory
            add_chunk<Element, VECTORS, COUNT>(at, across, ahead, x, stride,
                                               std::integral_constant<int64_t, STEPS>{}, units, scales, totals);
        } else if (Element::WRITTEN_OUT)
            add_rest<Element, VECTORS, COUNT>(at, across, ahead, x, stride, chunk.steps, units, scales, totals);
        else
            add_chunk<Element, VECTORS, COUNT>(at, across, ahead, x, stride, chunk.steps, units, scales, totals);
        if (summed && (Element::ROUNDED || chunk.group >= 0)) {
            const float* of_x = rows.sums + row0 * rows.groups + chunk.group;
            const Floats* offsets = chunks.offsets[chunk.place];
            for (int row = 0; row < COUNT; row++) {
                const float sum = Element::ROUNDED ? units[row].size * units[row].sum : of_x[row * rows.groups];
                for (int v = 0; v < VECTORS; v++) totals[row][v] += offsets[v] * sum;
            }
        }
        at += chunk.steps * LINE, x += chunk.steps * Element::STEP;
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

// The same for `count` rows, at most TILE_ROWS, in tiles (tiles.h).
template <typename Element, int VECTORS>
void add_tiles(int count, const typename Element::Row* x, int64_t stride, const Rows<Element>& rows, int64_t row0,
               const Chunk& chunk, int64_t first, int64_t last, typename Element::Total (*totals)[VECTORS]);

template <typename Element, int VECTORS, int COUNT = max_rows<Element>(VECTORS), typename... Arguments>
void add_rows(int count, const Arguments&... arguments) {
    if constexpr (Element::TILED) return add_tiles<Element, VECTORS>(count, arguments...);
    if (count == COUNT) return add_block<Element, VECTORS, COUNT>(arguments...);
    if constexpr (COUNT > 1) add_rows<Element, VECTORS, COUNT - 1>(count, arguments...);
}

// 2^(exponent - 128); the smallest results are subnormal.
inline Floats power(Bytes exponents) {
    const Ints exponent = extended(exponents) & 255;
    return (Floats)(exponent < 2 ? (exponent + 1) << 21 : (exponent - 1) << 23);
}

// Reads the scales of groups first..last for the outputs from `out` on (the first of a panel), and offsets if wanted.
template <typename Element, int VECTORS>
void take_scales(const Matrix& m, int64_t out, int64_t first, int64_t last, int64_t groups, bool offsets,
                 Chunks<VECTORS>& to) {
    constexpr int EACH = PANEL / LANES;
    const Floats zero = all((m.least ? Element::DEFAULT_LEAST : Element::DEFAULT) - Element::ZERO);
    auto each = [&](auto scale, auto offset) {
        for (int v = 0; v < VECTORS; v++) {
            const int64_t panel = out / PANEL + v / EACH, lane = v % EACH * LANES;
            for (int64_t group = first; group <= last; group++) {
                const int64_t at = (panel * groups + group) * PANEL + lane;
                const Floats of_group = scale(at, group, panel, lane) * Element::SHARE;
                to.scales[group - first][v] = of_group * Element::PLACE;
                if (offsets) to.offsets[group - first][v] = offset(of_group, at, group, panel, lane);
            }
        }
    };
    if constexpr (Element::EXPONENTS)
        return each([&](int64_t at, auto...) { return power(read<Bytes>((const int8_t*)m.scale + at, LANES)); },
                    [&](Floats scale, auto...) { return -zero * scale; });
    if (m.scale_kind == INT8) {
        const int of_unit = __builtin_ctzll(UNIT / m.group);
        auto counted = [&](const void* values, const void* units, int64_t at, int64_t group, int64_t panel,
                           int64_t lane) {
            const int64_t unit = (panel * (m.width / UNIT) + (group >> of_unit)) * PANEL + lane;
            return load((const int8_t*)values + at) * load((const Float16*)units + unit);
        };
        return each([&](auto... place) { return counted(m.scale, m.unit, place...); },
                    [&](Floats scale, auto... place) {
                        if (!m.least) return -zero * scale;
                        return counted(m.least, m.least_unit, place...) - zero * scale;
                    });
    }
    with_type(m.scale_kind, [&](auto type) {
        typedef decltype(type) T;
        each([&](int64_t at, auto...) { return load((const T*)m.scale + at); },
             [&](Floats scale, int64_t at, auto...) {
                 if (m.least) return load((const T*)m.least + at) - zero * scale;
                 return -(m.zero ? load((const T*)m.zero + at) - Element::ZERO : zero) * scale;
             });
    });
}

// Describes the next chunks from step `at` on; returns the number of their steps.
template <typename Element, int VECTORS>
int64_t take(const Matrix& m, int64_t out, int64_t at, int64_t steps, int64_t groups, bool offsets,
             Chunks<VECTORS>& chunks) {
    constexpr int STEPS = Element::CHUNK / Element::STEP;
    const int64_t group_steps = (m.group + Element::STEP - 1) / Element::STEP, from = at, first = at / group_steps;
    int64_t last = first, begin = first * group_steps, end = std::min(steps, begin + group_steps);
    for (chunks.count = 0; chunks.count < MOST_CHUNKS && at < steps; chunks.count++) {
        if (at == end) last++, begin = end, end = std::min(steps, end + group_steps);
        auto& chunk = chunks.each[chunks.count];
        chunk.place = last - first;
        chunk.group = at == begin ? last : -1;
        chunk.steps = std::min<int64_t>(STEPS, end - at);
        at += chunk.steps;
    }
    take_scales<Element>(m, out, first, last, groups, offsets, chunks);
    return at - from;
}

}  // namespace
