// The online softmax of a block (Milakov and Gimelshein, 2018): scores become weights, and what rows had is scaled to
// their new largest score. Scores lie row by row, so that lanes are keys, or key by key, so that lanes are rows: both
// ways give the same bits. Weights of a row are added up in one order: those of lane l of the vectors of a block's
// keys (or words of two keys), and then lanes in a tree.

#pragma once

#include "../vectors.h"
#include "ready.h"

namespace {

constexpr int MAX_ROWS = 64;  // of a tile; a multiple of LANES
const Floats NEVER = all(-INFINITY);

// How many vectors hold a number for each of so many rows from any row on.
constexpr int vectors_of(int rows) { return (rows + LANES - 1) / LANES; }

// The state of the online softmax of rows, over some of their keys. A vector may begin at any row.
struct Part {
    float* most_R;   // the largest score
    float* sum_R;    // of 2^(score - largest)
    Floats* out_RD;  // of values times 2^(score - largest)

    static int64_t size(int rows, int vectors) { return 2 * (vectors_of(rows) + 1) + rows * vectors; }

    Part(Floats* room, int rows)
        : most_R((float*)room), sum_R((float*)(room + vectors_of(rows) + 1)),
          out_RD(room + 2 * (vectors_of(rows) + 1)) {}

    void clear(int rows, int vectors) const {
        std::fill_n((Floats*)most_R, vectors_of(rows) + 1, NEVER);
        std::fill_n((Floats*)sum_R, vectors_of(rows) + 1, Floats{});
        std::fill_n(out_RD, rows * vectors, Floats{});
    }
};

template <bool QUANTISED>
class Softmax {
  public:
    Softmax(const Attention& p, const Floats* key_scales, const Floats* value_scales)
        : cap(p.cap), factor(cap > 0 ? p.scale / cap : p.scale * LOG2_E), key_scales((const float*)key_scales),
          value_scales((const float*)value_scales) {}

    Floats scores[MAX_ROWS * KEY_VECTORS];  // and then the weights: floats or pairs of bfloat16, in words
    uint32_t seen_R[MAX_ROWS + LANES];      // bits of the lanes of a block that a row of the tile sees
    float keep[MAX_ROWS + LANES];           // what is left of earlier weights

    // Scores and weights lie row by row; vectors first .. last - 1 of each row. EACH: weights of a word.
    template <int EACH>
    void by_row(int row, int rows, int first, int last, bool masked, const Part& part) {
        Floats tops[LANES], sums[LANES];
        Ints lanes[KEY_VECTORS];
        for (int i = 0; i < BLOCK; i++) lanes[i / LANES][i % LANES] = i;
        for (int r = 0; r < rows; r++) {
            Floats* some = &scores[r * KEY_VECTORS];
            Floats most = NEVER;
            for (int i = first; i < last; i++) {
                some[i] = score(some[i], QUANTISED ? load(key_scales + i * LANES) : Floats{});
                if (masked) some[i] = (Ints{} + int32_t(seen_R[row + r])) >> lanes[i] & 1 ? some[i] : NEVER;
                most = larger(some[i], most);
            }
            tops[r % LANES] = most;
            if (r == rows - 1 || r % LANES == LANES - 1)
                store(each_across(tops, r % LANES + 1, NEVER, larger), base + r / LANES * LANES);
        }
        for (int r = 0; r < rows; r += LANES) begin(row + r, r, load(base + r), part);
        for (int r = 0; r < rows; r++) {
            const Floats* some = &scores[r * KEY_VECTORS];
            Floats sum{};
#ifdef BFLOAT16_PAIRS
            if constexpr (EACH == 2)
                for (int i = first / 2 * 2; i < last; i += 2) {
                    const Floats low = i < first ? Floats{} : rough_exp2(some[i] - base[r]);
                    const Floats high = i + 1 < last ? rough_exp2(some[i + 1] - base[r]) : Floats{};
                    Ints words = bfloat16_of(low, high);
                    sum = add_pairs(sum, words, ones());
                    const float* scales = value_scales + i * LANES;
                    if (QUANTISED) words = bfloat16_of(low * load(scales), high * load(scales + LANES));
                    write(words, (Ints*)scores + (r * KEY_VECTORS + i) / 2, LANES);
                }
#endif
            if constexpr (EACH == 1)
                for (int i = first; i < last; i++) {
                    const Floats weights = exp2_of(some[i] - base[r]);
                    sum += weights;
                    scores[r * KEY_VECTORS + i] = QUANTISED ? weights * load(value_scales + i * LANES) : weights;
                }
            sums[r % LANES] = sum;
            if (r == rows - 1 || r % LANES == LANES - 1) {
                const int from = r / LANES * LANES;
                end(row + from, from, each_across(sums, r % LANES + 1, Floats{}, plus), part);
            }
        }
    }

#ifdef BFLOAT16_PAIRS
    // Scores and pairs of weights lie key by key, `count` vectors of rows for each; keys from .. to - 1, even numbers.
    void by_key(int row, int count, int from, int to, bool masked, const Part& part) {
        for (int c = 0; c < count; c++) {
            Floats* some = scores + c;
            const Ints seen = read<Ints>(seen_R + row + c * LANES, LANES);
            Floats most = NEVER;
            for (int k = from; k < to; k++) {
                Floats x = score(some[k * count], all(QUANTISED ? key_scales[k] : 0));
                if (masked) x = seen >> k & 1 ? x : NEVER;
                some[k * count] = x;
                most = larger(x, most);
            }
            begin(row + c * LANES, c * LANES, most, part);
            most = load(base + c * LANES);
            Floats sums[LANES] = {};
            for (int j = from / 2; j < to / 2; j++) {
                const Floats even = rough_exp2(some[2 * j * count] - most);
                const Floats odd = rough_exp2(some[(2 * j + 1) * count] - most);
                Ints words = pairs_of(even, odd);
                sums[j % LANES] = add_pairs(sums[j % LANES], words, ones());
                if (QUANTISED) words = pairs_of(even * value_scales[2 * j], odd * value_scales[2 * j + 1]);
                some[j * count] = (Floats)words;
            }
#pragma GCC unroll 8
            for (int stride = LANES / 2; stride; stride /= 2)
                for (int i = 0; i < stride; i++) sums[i] += sums[i + stride];
            end(row + c * LANES, c * LANES, sums[0], part);
        }
    }
#endif

  private:
    const float cap, factor;  // of the scores; with a cap of its tanh
    const float *const key_scales, *const value_scales;  // of an int8 cache
    float base[MAX_ROWS + LANES];

    // Two, of bfloat16.
    static int32_t ones() {
        int32_t pair = 0x3f803f80;
        asm("" : "+r"(pair));  // or GCC 12 makes the constant one of float16 on ARM, which is another number
        return pair;
    }

    static Floats plus(Floats x, Floats y) { return x + y; }

    Floats score(Floats x, Floats scales) const {
        x *= QUANTISED ? scales * factor : all(factor);
        return cap > 0 ? tanh_of(x) * (cap * LOG2_E) : x;
    }

    // Rows have these largest scores of a block.
    void begin(int row, int at, Floats top, const Part& part) {
        const Floats before = load(part.most_R + row), most = larger(top, before);
        store(most, part.most_R + row);
        const Floats from = most == NEVER ? Floats{} : most;
        store(from, base + at);
        store(exp2_of(before - from), keep + at);
    }

    // Rows have these sums of weights of a block.
    void end(int row, int at, Floats sum, const Part& part) {
        store(fused(load(part.sum_R + row), load(keep + at), sum), part.sum_R + row);
    }

    // Lane i is f of all lanes of x[i], `none` in those from `count` on.
    template <typename F>
    static Floats each_across(Floats (&x)[LANES], int count, Floats none, F f) {
        if (count >= LANES / 4) {
            std::fill(x + count, x + LANES, none);
            return across(x, f);
        }
        for (int i = 0; i < count; i++) none[i] = across(x[i], f);
        return none;
    }
};

}  // namespace
