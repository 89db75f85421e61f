// The two products of a block: of queries and keys, which are scores, and of weights and values. `ByVectors` multiplies
// rows of floats, or of pairs, in the order of their elements; see tiles.h for another order.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "ready.h"

namespace {

constexpr int FEW = 4;  // up to so many rows, keys are multiplied while they are transposed, and not stored

// Words of the queries of a tile's rows: `row` words from row to row, `word` from one word of a row to the next.
struct Queries {
    const int32_t* words;
    int row, word;

    Queries from(int first) const { return {words + first * row, row, word}; }
};

template <int COUNT, typename F>
inline void with_count(int count, F f) {
    if constexpr (COUNT > 1)
        if (count < COUNT) return with_count<COUNT - 1>(count, f);
    f(std::integral_constant<int, COUNT>{});
}

// Splits `rows` rows into groups of at most MOST and calls f(first, count) for each; count is a compile-time constant.
template <int MOST, typename F>
inline void by_rows(int rows, F f) {
    const int groups = (rows + MOST - 1) / MOST;
    for (int i = 0; i < groups; i++) {
        const int first = rows * i / groups;
        with_count<MOST>(rows * (i + 1) / groups - first, [&](auto count) { f(first, count); });
    }
}

// Computes out[row] = out[row] * keep[row] + sum over i of x[row * ACROSS + i * along] * at(i), in this order; a null
// `keep` starts from 0. A row of `out` has COLUMNS vectors, and rows are `stride` words apart. Each i prefetches LINES
// cache lines of the memory that is needed next.
template <typename Element, int ROWS, int COLUMNS, int ACROSS, int LINES, typename At>
inline void multiply(const int32_t* x, int along, At at, int first, int last, float* out, int stride,
                     const float* keep, Fetch& fetch) {
    const char* next = fetch.at;
    const int64_t line = fetch.at < fetch.end ? LINE : 0;  // 0 prefetches the same line again
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
                std::memcpy(&word, x + r * ACROSS, sizeof word);
                sum[r][c] = Element::add(sum[r][c], words[c], word);
            }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) store(sum[r][c], out + r * stride + c * LANES);
    fetch.at = next < fetch.end ? next : fetch.end;
}

template <int COLUMNS>
constexpr int MOST_ROWS = std::min(8, (REGISTERS - 4) / COLUMNS);  // rows whose sums fit into the registers

// Words hold PER_WORD elements, which Element adds.
template <typename Element, int PER_WORD>
struct ByVectors {
    static constexpr int EACH = PER_WORD, WEIGHTS = BLOCK / EACH;  // WEIGHTS: words in a row of weights

    // Whether some rows of a tile, which has `tile_rows`, are multiplied by all lanes of a block, seen or not.
    static bool whole(int, int) { return false; }

    // Computes the scores of a few rows against vector i of the keys, multiplying keys as they are read.
    template <int ROWS, typename Keys>
    static void score_few(const Queries& q, Keys& ready, int i, Floats* scores_RS) {
        Floats sum[ROWS] = {};
        ready.template read_keys<EACH == 2>(i, [&](int d, Ints words) {
            __builtin_prefetch(ready.fetch_k.at, 0, 1);
            ready.fetch_k.at += LINE;
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) sum[r] = Element::add(sum[r], words, q.words[d * q.word + r]);
        });
        for (int r = 0; r < ROWS; r++) scores_RS[r * KEY_VECTORS + i] = sum[r];
    }

    // Computes the scores of rows of a tile against the keys of lanes from .. to - 1.
    template <typename Keys>
    static void score(const Queries& q, int rows, int tile_rows, Keys& ready, int from, int to, Floats* scores_RS) {
        const int last = (to + LANES - 1) / LANES;
        if (tile_rows <= FEW) {
            for (int i = from / LANES; i < last; i++)
                with_count<FEW>(rows, [&](auto count) { score_few<count>(q, ready, i, scores_RS); });
            return;
        }
        ready.template take_keys<EACH == 2>(from, to);
        for (int i = from / LANES; i < last;) {
            auto score = [&](auto columns) {
                by_rows<MOST_ROWS<columns>>(rows, [&](int r, auto count) {
                    multiply<Element, count, columns, 1, count <= FEW ? 2 : 1>(
                        q.words + r, q.word, [&](int d) { return ready.key_words(d) + i * LANES; }, 0, ready.words,
                        (float*)&scores_RS[r * KEY_VECTORS + i], BLOCK, nullptr, ready.fetch_k);
                });
                i += columns;
            };
            if (i + 2 <= last)
                score(std::integral_constant<int, 2>{});
            else
                score(std::integral_constant<int, 1>{});
        }
    }

    // Multiplies the outputs of rows by `keep` and adds their weights of lanes from .. to - 1 times the values.
    template <typename Values>
    static void mix(int32_t* weights_RW, int rows, int, Values& ready, int from, int to, Floats* out_RD,
                    const float* keep) {
        const int vectors = ready.value_width / LANES;
        for (int i = 0; i < vectors;) {
            auto mix = [&](auto columns) {
                by_rows<MOST_ROWS<columns>>(rows, [&](int r, auto count) {
                    multiply<Element, count, columns, WEIGHTS, count <= FEW ? 4 : 2>(
                        weights_RW + r * WEIGHTS, 1, [&](int j) { return ready.values[j] + i * LANES; }, from / EACH,
                        (to + EACH - 1) / EACH, (float*)&out_RD[r * vectors + i], ready.value_width, keep + r,
                        ready.fetch_v);
                });
                i += columns;
            };
            if (i + 4 <= vectors)
                mix(std::integral_constant<int, 4>{});
            else if (i + 2 <= vectors)
                mix(std::integral_constant<int, 2>{});
            else
                mix(std::integral_constant<int, 1>{});
        }
    }
};

}  // namespace
