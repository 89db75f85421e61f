// The two products of a block of pairs of bfloat16, where the processor multiplies tiles (processors/amx.h). Their sums
// have one order for any number of rows: even elements of 32, odd ones, both, then these sums along the row. Tiles
// multiply many rows; vectors multiply a few, in the same order.

#pragma once

#include <algorithm>
#include <cstring>

#include "products.h"

namespace {

#ifdef TILES

// TILE_WORDS pairs of each of some rows, as floats.
template <int ROWS>
class Halves {
  public:
    void read(const int32_t* x_RW, int across) {
        for (int r = 0; r < ROWS; r++) {
            const Ints x = ::read<Ints>(x_RW + r * across, LANES);
            write(x << 16, even[r], LANES), write(x & ~0xffff, odd[r], LANES);
        }
    }

    // Adds the products of words and pair i of a row to the sums of even and of odd elements.
    void add(Ints words, int row, int i, Floats& evens, Floats& odds) const {
        evens = fused((Floats)(words << 16), all(even[row][i]), evens);
        odds = fused((Floats)(words & ~0xffff), all(odd[row][i]), odds);
    }

  private:
    alignas(TILE_BYTES) float even[ROWS][TILE_WORDS], odd[ROWS][TILE_WORDS];
};

// Computes by vectors, in the order of tiles: out[row] = out[row] * keep[row] + sum over words i from first to last - 1
// of x[row * across + i] * at(i); a null `keep` starts from 0. Each i prefetches LINES cache lines.
template <int ROWS, int COLUMNS, int LINES, typename At>
inline void multiply_few(const int32_t* x_RW, int across, At at, int first, int last, float* out, int stride,
                         const float* keep, Fetch& fetch) {
    Floats sum[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) sum[r][c] = keep ? load(out + r * stride + c * LANES) * keep[r] : Floats{};
    for (int begin = first / TILE_WORDS * TILE_WORDS; begin < last; begin += TILE_WORDS) {
        const int end = std::min(begin + TILE_WORDS, last);
        Halves<ROWS> halves;
        halves.read(x_RW + begin, across);
        Floats evens[ROWS][COLUMNS] = {}, odds[ROWS][COLUMNS] = {};
        for (int i = std::max(first, begin); i < end; i++) {
            const int32_t* y = at(i);
            fetch.some<LINES, 1>();
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++) {
                const Ints words = read<Ints>(y + c * LANES, LANES);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) halves.add(words, r, i - begin, evens[r][c], odds[r][c]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < COLUMNS; c++) sum[r][c] += evens[r][c] + odds[r][c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) store(sum[r][c], out + r * stride + c * LANES);
}

// Computes by tiles, for up to TILE_ROWS rows and COLUMNS vectors: out[row] += sum over words i < count of x[row *
// across + i] * y[i * y_across], or without ADDED out[row] = this sum. `count` is a multiple of TILE_WORDS.
template <int COLUMNS, bool ADDED>
inline void multiply_tiles(const int32_t* x_RW, int across, const int32_t* y, int y_across, int count, float* out,
                           int stride, Fetch& fetch) {
    each_tile<COLUMNS>([&](auto c) {
        if (ADDED)
            load_tile<c>(out + c * LANES, stride * 4);
        else
            clear_tile<c>();
    });
    for (int i = 0; i < count; i += TILE_WORDS) {
        load_tile<X_TILE>(x_RW + i, across * 4);
        each_tile<COLUMNS>([&](auto c) {
            constexpr int Y = Y_TILE + c % 2;
            fetch.some<8, TO_L2>();
            load_tile<Y>(y + int64_t(i) * y_across + c * LANES, y_across * 4);
            add_tile<true, c, X_TILE, Y>();
        });
    }
    each_tile<COLUMNS>([&](auto c) { store_tile<c>(out + c * LANES, stride * 4); });
}

// Calls f(first, done) for groups of TILE_ROWS rows, or for one of fewer. Where fewer are left, the last group contains
// rows first .. done - 1 of the one before.
template <typename F>
inline void by_tiles(int rows, F f) {
    shape_tiles(std::min(rows, TILE_ROWS));
    for (int done = 0; done < rows; done += TILE_ROWS) f(std::max(0, std::min(done, rows - TILE_ROWS)), done);
}

// As ByVectors.
struct ByTiles {
    static constexpr int EACH = 2;
    static_assert(BLOCK / EACH == TILE_WORDS, "the weights of a block fill a tile");

    // Vectors multiply one row, which waits for memory, and a few that see other keys than the rest of a tile: mostly a
    // token's own block, of which few lanes are in use.
    static bool whole(int rows, int tile_rows) { return rows > (tile_rows > FEW ? FEW : 1); }

    // Computes the scores of one row against vector i of the keys, multiplying keys as they are read.
    template <typename Keys>
    static void score_one(const Queries& q, Keys& ready, int i, Floats* scores_RS) {
        Floats sum{}, evens{}, odds{};
        Halves<1> halves;
        ready.template read_keys<true>(i, [&](int d, Ints words) {
            const int at = d % TILE_WORDS;
            if (at == 0) {
                sum += evens + odds, evens = odds = Floats{};
                halves.read(q.words + d, q.row);
            }
            ready.fetch_k.template some<1, 1>();
            halves.add(words, 0, at, evens, odds);
        });
        scores_RS[i] = sum + (evens + odds);
    }

    template <typename Keys>
    static void score(const Queries& q, int rows, int tile_rows, Keys& ready, int from, int to, Floats* scores_RS) {
        if (tile_rows == 1) {
            for (int i = from / LANES; i * LANES < to; i++) score_one(q, ready, i, scores_RS);
            return;
        }
        ready.template take_keys<true>(from, to);
        if (whole(rows, tile_rows))
            return by_tiles(rows, [&](int r, int) {
                multiply_tiles<KEY_VECTORS, false>(q.words + r * q.row, q.row, ready.key_words(0), BLOCK, ready.lines,
                                                   (float*)&scores_RS[r * KEY_VECTORS], BLOCK, ready.fetch_k);
            });
        for (int i = from / LANES; i * LANES < to; i++)
            with_count<FEW>(rows, [&](auto count) {
                multiply_few<count, 1, 2>(
                    q.words, q.row, [&](int d) { return ready.key_words(d) + i * LANES; }, 0, ready.words,
                    (float*)&scores_RS[i], BLOCK, nullptr, ready.fetch_k);
            });
    }

    template <typename Values>
    static void mix(int32_t* weights_RW, int rows, int tile_rows, Values& ready, int from, int to, Floats* out_RD,
                    const float* keep) {
        const int vectors = ready.value_width / LANES, width = ready.value_width;
        if (whole(rows, tile_rows)) {
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < vectors && keep[r] != 1; i++) out_RD[r * vectors + i] *= keep[r];
            return by_tiles(rows, [&](int r, int done) {
                std::fill(weights_RW + r * TILE_WORDS, weights_RW + done * TILE_WORDS, 0);
                for (int i = 0; i < vectors;) {
                    auto mix = [&](auto columns) {
                        multiply_tiles<columns, true>(weights_RW + r * TILE_WORDS, TILE_WORDS,
                                                      ready.value_pairs() + i * LANES, width, TILE_WORDS,
                                                      (float*)&out_RD[r * vectors + i], width, ready.fetch_v);
                        i += columns;
                    };
                    with_count<4>(vectors - i, mix);
                }
            });
        }
        with_count<FEW>(rows, [&](auto count) {
            for (int i = 0; i < vectors;) {
                auto mix = [&](auto columns) {
                    multiply_few<count, columns, columns>(
                        weights_RW, TILE_WORDS, [&](int j) { return ready.values[j] + i * LANES; }, from / EACH,
                        (to + EACH - 1) / EACH, (float*)&out_RD[i], width, keep, ready.fetch_v);
                    i += columns;
                };
                with_count<count <= 2 ? 4 : 2>(vectors - i, mix);
            }
        });
    }
};

#endif

}  // namespace
