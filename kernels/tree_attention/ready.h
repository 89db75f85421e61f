// Prepares the keys and values of a block for multiplication. Keys are transposed, so that each lane of a vector is a
// key; values become rows of floats. Where the processor multiplies pairs of bfloat16, both are stored as such pairs.

#pragma once

#include <memory>
#include <type_traits>

#include "../tiles.h"
#include "../vectors.h"
#include "keys.h"

namespace {

constexpr int LINE = 64;  // bytes of a cache line

// Memory at .. end, which is prefetched while something else is computed.
struct Fetch {
    const char *at, *end;

    // Prefetches the next LINES cache lines.
    template <int LINES, int LEVEL>
    [[gnu::always_inline]] void some() {
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++, at += at < end ? LINE : 0) __builtin_prefetch(at, 0, LEVEL);
    }
};

constexpr int KEY_VECTORS = BLOCK / LANES;
constexpr int MAX_ROWS = 64;  // of a tile

// The slopes of a tile's rows (ALiBi), see `tree_attention` in __init__.py.
class Slopes {
  public:
    explicit Slopes(const Attention& p) : p(p) {}

    // Sets a row's query head, and the token whose position it has.
    void begin(int row, int token, int head) {
        const Floats place = all(p.positions[token]);
        slope_R[row] = p.coarse ? load((const BFloat16*)p.slopes + head, 1)[0] : ((const float*)p.slopes)[head];
        query_R[row] = p.coarse ? rounded(rounded(place) * slope_R[row])[0] : place[0];
    }

    // Returns what is added to a row's products with keys at these positions.
    Floats biases(int row, Floats places) const {
        if (p.coarse) return rounded(rounded(places) * slope_R[row]) - query_R[row];
        return (places - query_R[row]) * slope_R[row];
    }

  private:
    const Attention& p;
    float slope_R[MAX_ROWS], query_R[MAX_ROWS];  // slopes and positions of rows; of coarse slopes, their products
};

// Queries have type T, the cache has type C.
template <typename T, typename C>
class Ready {
  public:
    static constexpr bool QUANTISED = std::is_same_v<C, int8_t>;
#ifdef BFLOAT16_PAIRS
    static constexpr bool PAIRABLE = std::is_same_v<T, BFloat16>;
#else
    static constexpr bool PAIRABLE = false;
#endif

    Ready(const Attention& p, const char* k, const char* v)
        : p(p), k(k), v(v), D(p.head_dim), pairs(PAIRABLE && D % 2 == 0), words(pairs ? D / 2 : D),
          tiled(pairs && tiles_allowed()), lines(tiled ? (words + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS : words),
          value_width((D + LANES - 1) / LANES * LANES), keys_DS(new Ints[lines * KEY_VECTORS]()),
          values_SD(new Ints[BLOCK * value_width / LANES]) {}

    const Attention& p;
    const char *const k, *const v;
    const int D;
    const bool pairs;
    const int words;               // 32-bit words of a key: elements of a head, or pairs of them
    const bool tiled;              // pairs are added in the order of tiles, see tiles.h
    const int lines;               // words, and with tiles zeros that fill the last one
    const int value_width;         // words of a row of values, rounded up to whole vectors
    int32_t slots[BLOCK];          // of the next block; every lane has a valid one
    const int32_t* values[BLOCK];  // a row of words for each key or, with pairs, for two keys
    Fetch fetch_k, fetch_v;
    Floats key_scales[KEY_VECTORS], value_scales[KEY_VECTORS];  // of an int8 cache

    // Word i of each key of the block.
    const int32_t* key_words(int i) const { return (const int32_t*)&keys_DS[i * KEY_VECTORS]; }

    // Rows of `value_width` words for pairs of keys, one after the other.
    const int32_t* value_pairs() const { return (const int32_t*)values_SD.get(); }

    // Must be called before another head: discards what is ready.
    void forget() {
        std::fill_n(keys_of, BLOCK, -1);
        std::fill_n(values_of, BLOCK, -1);
    }

    // Starts the block of `slots` for head g. `last` is one past the last lane in use; `ahead`: the slots that follow
    // it in memory are prefetched meanwhile.
    void begin(int g, int last, bool ahead) {
        k_SD = k + head(g), v_SD = v + head(g);
        const int64_t next = (slots[last - 1] + int64_t(1)) * row_bytes, end = next + ahead * BLOCK * row_bytes;
        fetch_k = {k_SD + next, k_SD + end}, fetch_v = {v_SD + next, v_SD + end};
        if constexpr (QUANTISED) {
            const BFloat16 *k_S = (const BFloat16*)(k_SD + p.slots * row_bytes);
            const BFloat16 *v_S = (const BFloat16*)(v_SD + p.slots * row_bytes);
            for (int j = 0; j < BLOCK; j++) {
                key_scales[j / LANES][j % LANES] = load(k_S + slots[j], 1)[0];
                value_scales[j / LANES][j % LANES] = load(v_S + slots[j], 1)[0];
            }
        }
    }

    // Prefetches the rows of a token's own block that the block `before` does not have. Must be inlined: GCC drops
    // calls of functions that only prefetch.
    [[gnu::always_inline]] void fetch(int g, const OwnBlock& block, const OwnBlock* before) const {
        for (uint32_t there = block.there; there; there &= there - 1) {
            const int j = __builtin_ctz(there);
            if (before && before->there >> j & 1 && before->slots[j] == block.slots[j]) continue;
            const int64_t row = head(g) + int64_t(block.slots[j]) * row_bytes;
            for (int at = 0; at < row_bytes; at += LINE) {
                __builtin_prefetch(k + row + at);
                __builtin_prefetch(v + row + at);
            }
        }
    }

    // Prepares the keys of lanes first .. last - 1, and of other lanes of the same vectors, which must have slots too.
    template <bool PAIRS>
    void take_keys(int first, int last) {
        for (int i = first / LANES; i * LANES < last; i++) take_keys<PAIRS>(i);
    }

    // Prepares the values of lanes first .. last - 1; with pairs, also of the other half of a pair.
    void take_values(int first, int last) {
        if (pairs)
            for (int j = first / 2; 2 * j < last; j++) take_pair(j);
        else
            for (int j = first; j < last; j++) take_value(j);
    }

    // Calls f(d, words) for each word d, with this word of the LANES keys in vector i of the block.
    template <bool PAIRS, typename F>
    void read_keys(int i, F f) const {
        const char* rows[LANES];
        for (int lane = 0; lane < LANES; lane++) rows[lane] = k_SD + int64_t(slots[i * LANES + lane]) * row_bytes;
        each(row_bytes / 4, [&](int64_t word, auto n) { turn<PAIRS>(rows, word, 4 * n, n, f); });
        auto within = [&](int d, Ints some) {
            if (d < words) f(d, some);
        };
        if (row_bytes % 4) turn<PAIRS>(rows, row_bytes / 4, row_bytes % 4, 1, within);
    }

  private:
    const int row_bytes = D * sizeof(C);
    std::unique_ptr<Ints[]> keys_DS, values_SD;
    const char *k_SD, *v_SD;  // of the current head
    int32_t keys_of[BLOCK], values_of[BLOCK];  // the slots whose keys and values are ready

    int64_t head(int g) const { return g * p.slots * (row_bytes + (QUANTISED ? SCALE_BYTES : 0)); }

    template <bool PAIRS>
    void take_keys(int i) {
        int32_t *of = keys_of + i * LANES, *slot = slots + i * LANES, changed = 0;
        for (int lane = 0; lane < LANES; lane++) changed += of[lane] != slot[lane];
        if (!changed) return;
        if (row_bytes == 4 * words && changed <= LANES / 4) {  // the usual case for the next token of a tree
            for (int lane = 0; lane < LANES; lane++) {
                if (of[lane] == slot[lane]) continue;
                const char* row = k_SD + int64_t(slot[lane]) * row_bytes;
                int32_t* to = (int32_t*)&keys_DS[i] + lane;
                for (int d = 0; d < words; d++) std::memcpy(to + d * BLOCK, row + 4 * d, 4);
            }
        } else {
            read_keys<PAIRS>(i, [&](int d, Ints some) { keys_DS[d * KEY_VECTORS + i] = some; });
        }
        std::copy_n(slot, LANES, of);
    }

    // Transposes `count` words of LANES rows, starting at `word`, as stored in the cache; reads `bytes` bytes of each
    // row.
    template <bool PAIRS, typename B, typename N, typename F>
    void turn(const char* const* rows, int64_t word, B bytes, N count, F f) const {
        Ints x[LANES];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) {
            const char* from = rows[lane] + 4 * word;
            if (bytes == 4 * LANES) {
                x[lane] = read<Ints>(from, LANES);
            } else {
                x[lane] = Ints{};
                std::memcpy(&x[lane], from, bytes);
            }
        }
        transpose(x);
        for (int w = 0; w < count; w++) spread<PAIRS>(x[w], word + w, f);
    }

    // Converts words of the cache to the words that are multiplied: elements, or pairs of them.
    template <bool PAIRS, typename F>
    void spread(Ints x, int word, F f) const {
        constexpr int COUNT = 4 / sizeof(C);
        if constexpr (COUNT == 1) {
            f(word, x);
        } else if constexpr (PAIRS) {
            for (int i = 0; i < COUNT / 2; i++)
                f(word * (COUNT / 2) + i, QUANTISED ? pair(element(x, 2 * i), element(x, 2 * i + 1)) : x);
        } else {
            for (int i = 0; i < COUNT; i++) f(word * COUNT + i, (Ints)element(x, i));
        }
    }

    static Floats element(Ints x, int i) {
        if constexpr (QUANTISED) return __builtin_convertvector(x << (24 - 8 * i) >> 24, Floats);
        if constexpr (std::is_same_v<C, BFloat16>) return (Floats)(i ? x & ~0xffff : x << 16);
        if constexpr (std::is_same_v<C, Float16>) return widened(__builtin_convertvector(x >> 16 * i, Shorts));
        return (Floats)x;
    }

    // Packs two floats, both exact in bfloat16, into a word.
    static Ints pair(Floats low, Floats high) { return (Ints)((Words)low >> 16) | ((Ints)high & ~0xffff); }

    void take_value(int j) {
        const char* row = v_SD + int64_t(slots[j]) * row_bytes;
        if (std::is_same_v<C, float> && D == value_width) {
            values[j] = (const int32_t*)row;
            return;
        }
        if (values_of[j] == slots[j]) return;
        values_of[j] = slots[j];
        float* to = (float*)values_SD.get() + j * value_width;
        each(D, [&](int64_t d, auto n) { store(load((const C*)row + d, n), to + d, n); });
        values[j] = (const int32_t*)to;
    }

    // Prepares the values of two keys, interleaved element by element.
    void take_pair(int j) {
        const char *one = v_SD + int64_t(slots[2 * j]) * row_bytes, *two = v_SD + int64_t(slots[2 * j + 1]) * row_bytes;
        if (values_of[2 * j] == slots[2 * j] && values_of[2 * j + 1] == slots[2 * j + 1]) return;
        std::copy_n(slots + 2 * j, 2, values_of + 2 * j);
        int32_t* to = (int32_t*)values_SD.get() + j * value_width;
        int d = 0;
#ifdef BFLOAT16_PAIRS
        if (!QUANTISED)
            for (; d + 2 * LANES <= D; d += 2 * LANES) interleave(one + 2 * d, two + 2 * d, to + d);
#endif
        each(D - d, [&](int64_t i, auto n) {
            write(pair(load((const C*)one + d + i, n), load((const C*)two + d + i, n)), to + d + i, n);
        });
        values[j] = to;
    }
};

}  // namespace
