// Products by tiles (processors/amx.h): an instruction multiplies 16 rows of x and 64 bytes of each output of a panel.
// Sums of int8 are exact, so that results have the bits of the vector code. Products of bfloat16 are summed in an order
// of their own, which is the same for any number of rows: even elements of 32, odd ones, both, then these sums along the
// row.

#pragma once

#include "../tiles.h"
#include "sums.h"

namespace {

#ifdef TILES

// An element type, multiplied by tiles. Rows of x are followed by zeros up to a whole tile.
template <typename Element>
struct Tiled : Element {
    typedef typename Element::Row Row;
    static constexpr bool TILED = true;
    static constexpr int CHUNK = 256;

    template <typename T>
    static Unit prepare(const T* x, int64_t width, Row* row, const Levels& levels) {
        const Unit unit = Element::prepare(x, width, row, levels);
        constexpr int64_t EACH = TILE_BYTES / sizeof(Row);
        std::fill(row + width, row + (width + EACH - 1) / EACH * EACH, Row{});
        return unit;
    }
};

// The lines of a panel for a tile; those of the last, partial one are copied to `whole` and followed by zeros.
struct TileLines {
    const Chunk& chunk;
    alignas(64) char whole[TILE_ROWS * TILE_BYTES];

    explicit TileLines(const Chunk& chunk) : chunk(chunk) {}

    const char* line(int64_t step, int panel) {
        const char* from = chunk.at + panel * chunk.across + step * TILE_BYTES;
        if (step + TILE_ROWS <= chunk.steps) return from;
        const int64_t there = (chunk.steps - step) * TILE_BYTES;
        std::memcpy(whole, from, there);
        std::memset(whole + there, 0, sizeof whole - there);
        return whole;
    }
};

// Multiplies one row of bfloat16 by vectors, with the bits of tiles: they load a matrix from memory in bursts, which takes
// longer.
template <typename Element, int VECTORS>
void add_row(const typename Element::Row* x, const Chunk& chunk, int64_t first, int64_t last,
             typename Element::Total (*totals)[VECTORS]) {
    const AsTiles mode;
    alignas(64) float even[Element::CHUNK / 2], odd[Element::CHUNK / 2];
    for (int64_t step = 0; step < chunk.steps; step += LANES) {
        const Ints words = read<Ints>(x + step * Element::STEP, LANES);
        write(words << 16, even + step, LANES), write(words & ~0xffff, odd + step, LANES);
    }
    for (int64_t begin = 0; begin < chunk.steps; begin += TILE_ROWS) {
        Floats evens[VECTORS] = {}, odds[VECTORS] = {};
        for (int64_t step = begin; step < std::min(begin + TILE_ROWS, chunk.steps); step++)
            for (int v = 0; v < VECTORS; v++) {
                const char* line = chunk.at + v * chunk.across + step * TILE_BYTES;
                if (step >= first && step < last) __builtin_prefetch(line + chunk.ahead);
                const Ints words = read<Ints>(line, LANES);
                evens[v] = fused((Floats)(words << 16), all(even[step]), evens[v]);
                odds[v] = fused((Floats)(words & ~0xffff), all(odd[step]), odds[v]);
            }
        for (int v = 0; v < VECTORS; v++) totals[0][v] += evens[v] + odds[v];
    }
}

template <typename Element, int VECTORS>
void add_tiles(int count, const typename Element::Row* x, int64_t stride, const Rows<Element>& rows, int64_t row0,
               const Chunk& chunk, int64_t first, int64_t last, typename Element::Total (*totals)[VECTORS]) {
    typedef typename Element::Row Row;
    TileLines lines(chunk);
    const int64_t between = stride * sizeof(Row);
    auto multiply = [&](int64_t step, auto v) {
        constexpr int Y = Y_TILE + v % 2;
        if (step >= first && step < last)
            for (int line = 0; line < TILE_ROWS; line++)
                __builtin_prefetch(chunk.at + v * chunk.across + (step + line) * TILE_BYTES + chunk.ahead, 0, TO_L2);
        load_tile<Y>(lines.line(step, v), TILE_BYTES);
        add_tile<!Element::ROUNDED, v, X_TILE, Y>();
    };
    auto load_x = [&](int64_t step) { load_tile<X_TILE>((const char*)x + step * 4, between); };
    if constexpr (Element::ROUNDED == 0) {
        if (count == 1) return add_row<Element>(x, chunk, first, last, totals);
        each_tile<VECTORS>([&](auto v) { load_tile<v>(&totals[0][v], sizeof totals[0]); });
        for (int64_t step = 0; step < chunk.steps; step += TILE_ROWS) {
            load_x(step);
            each_tile<VECTORS>([&](auto v) { multiply(step, v); });
        }
        each_tile<VECTORS>([&](auto v) { store_tile<v>(&totals[0][v], sizeof totals[0]); });
    } else {
        alignas(64) Ints sums[2][TILE_ROWS][VECTORS];
        const Unit* units = rows.unit(row0, chunk.unit);
        auto finish = [&](const Ints (*sums)[VECTORS], const Unit* units) {
            for (int row = 0; row < count; row++)
                for (int v = 0; v < VECTORS; v++)
                    totals[row][v] = fused(__builtin_convertvector(sums[row][v] + units[row].start, Floats),
                                           all(units[row].size), totals[row][v]);
        };
        int64_t unit = 0;
        for (int64_t step = 0; step < chunk.steps; step += TILE_ROWS, unit++) {
            load_x(step);
            each_tile<VECTORS>([&](auto v) {
                clear_tile<v>();
                multiply(step, v);
                store_tile<v>(&sums[unit % 2][0][v], sizeof sums[0][0]);
            });
            if (unit) finish(sums[(unit - 1) % 2], units + (unit - 1) * BATCH);
        }
        finish(sums[(unit - 1) % 2], units + (unit - 1) * BATCH);
    }
}

template <typename Element>
void use_tiles(int64_t rows) {
    if constexpr (Element::TILED) shape_tiles(int(std::min<int64_t>(rows, TILE_ROWS)));
}
#else
template <typename Element>
void use_tiles(int64_t) {}
#endif

}  // namespace
