// Makes the keys and values of a block ready for products: keys transposed, so that the lanes of a vector are keys, and
// values as rows of floats; or both as pairs of bfloat16, where the processor multiplies these.

#pragma once

#include <memory>
#include <type_traits>

#include "../vectors.h"
#include "keys.h"

namespace {

// Memory that is fetched meanwhile, from `at` on.
struct Fetch {
    const char *at, *end;
};

constexpr int KEY_VECTORS = BLOCK / LANES;
constexpr int LINE = 64;  // bytes of a cache line

// Queries are of type T, the cache of type C.
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
          value_width((D + LANES - 1) / LANES * LANES), keys_DS(new Ints[words * KEY_VECTORS]),
          values_SD(new Ints[BLOCK * value_width / LANES]) {}

    const Attention& p;
    const char *const k, *const v;
    const int D;
    const bool pairs;
    const int words;               // elements of a head, or pairs of them
    const int value_width;         // words of a row of values, which fill vectors
    int32_t slots[BLOCK];          // of the next block, in all lanes
    const int32_t* values[BLOCK];  // of each key or, for pairs, of each two: a row of words
    Fetch fetch_k, fetch_v;
    Floats key_scales[KEY_VECTORS], value_scales[KEY_VECTORS];  // of an int8 cache

    // Words i of the keys.
    const int32_t* key_words(int i) const { return (const int32_t*)&keys_DS[i * KEY_VECTORS]; }

    // Another head is next.
    void forget() {
        std::fill_n(keys_of, BLOCK, -1);
        std::fill_n(values_of, BLOCK, -1);
    }

    // The slots of a head are next; `ahead`: those behind them are fetched meanwhile.
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

    // Fetches the rows of a token's own block that one before it does not have. Inline, as GCC leaves out calls of
    // functions that do nothing else.
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

    // Makes the keys of lanes first .. last - 1 ready, and maybe others, which must have slots.
    template <bool PAIRS>
    void take_keys(int first, int last) {
        for (int i = first / LANES; i * LANES < last; i++) take_keys<PAIRS>(i);
    }

    // Makes the values of lanes first .. last - 1 ready; for pairs even numbers.
    void take_values(int first, int last) {
        if (pairs)
            for (int j = first / 2; 2 * j < last; j++) take_pair(j);
        else
            for (int j = first; j < last; j++) take_value(j);
    }

    // Calls f(d, words) with words d of LANES keys, the i-th vector of the block.
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
    const char *k_SD, *v_SD;  // of the head
    int32_t keys_of[BLOCK], values_of[BLOCK];  // the slots whose keys and values are ready

    int64_t head(int g) const { return g * p.slots * (row_bytes + (QUANTISED ? SCALE_BYTES : 0)); }

    template <bool PAIRS>
    void take_keys(int i) {
        int32_t *of = keys_of + i * LANES, *slot = slots + i * LANES, changed = 0;
        for (int lane = 0; lane < LANES; lane++) changed += of[lane] != slot[lane];
        if (!changed) return;
        if (row_bytes == 4 * words && changed <= LANES / 4) {  // as for the next token of a tree
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

    // `count` words as they lie in the cache, from one on; of each row `bytes` bytes are read.
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

    // Makes of such words those that the products multiply: elements, or pairs of them.
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

    // Floats that are bfloat16, too.
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

    // The values of two keys, element beside element.
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
