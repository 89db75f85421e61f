// Code that layers with a state share on a CPU: paths to rows and states, convolutions, states at the ends of blocks.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "operators.h"
#include "vectors.h"

namespace {

constexpr int64_t NULL_STATE = 0, TRASH = 1;  // as in layout.py
constexpr int64_t MOST = 64;                  // most tokens that read a state together
constexpr int TOGETHER = 4;                   // tokens, ancestors or rows of a state that are computed together
constexpr int WIDE = REGISTERS < 32 ? 2 : 4;  // vectors of a row of a state that are computed together

inline Floats silu(Floats x) { return times_sigmoid(x, x); }

inline Floats exp_of(Floats x) { return exp2_of(x * LOG2_E); }

inline Floats sigmoid(Floats x) { return times_sigmoid(all(1), x); }

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// The same of a vector, within 3e-7 of the value: log(1 + e) = 2 artanh(e / (2 + e)), by its series.
inline Floats softplus(Floats x) {
    const Floats e = exp_of(x < 0 ? x : -x), s = e / (2 + e), square = s * s;
    Floats y = all(1.0f / 15);
    y = y * square + 1.0f / 13;
    y = y * square + 1.0f / 11;
    y = y * square + 1.0f / 9;
    y = y * square + 1.0f / 7;
    y = y * square + 1.0f / 5;
    y = y * square + 1.0f / 3;
    y = y * square + 1.0f;
    return (x < 0 ? all(0.0f) : x) + 2 * s * y;
}

// Calls f(at, vectors, count) for parts of `width` elements: MANY whole vectors, one vector, or `count` lanes.
template <int MANY, typename F>
inline void parts(int64_t width, F f) {
    int64_t at = 0;
    for (; at + MANY * LANES <= width; at += MANY * LANES)
        f(at, std::integral_constant<int, MANY>{}, std::integral_constant<int, LANES>{});
    each(width - at, [&](int64_t i, auto n) { f(at + i, std::integral_constant<int, 1>{}, n); });
}

// Calls f(first, number) for groups of TOGETHER out of `count`, and for the rest; `number` is a compile-time constant.
template <typename F>
inline void groups(int64_t count, F f) {
    int64_t at = 0;
    for (; at + TOGETHER <= count; at += TOGETHER) f(at, std::integral_constant<int, TOGETHER>{});
    if (count - at == 3) f(at, std::integral_constant<int, 3>{});
    if (count - at == 2) f(at, std::integral_constant<int, 2>{});
    if (count - at == 1) f(at, std::integral_constant<int, 1>{});
}

// A pass of a layer with G heads of keys [K] and H heads of values [V]. `kept` has a row for each token of the pass:
// channels, keys, written values, logarithms of decays (or decays, of elements of keys).
struct Recurrence {
    const float* taps_KC;
    float *rows, *states;
    const int64_t *rows_T, *paths_TN, *lengths_T, *bases_T, *folds_T;
    float* kept;
    int64_t tokens, G, H, K, V, taps, reach, decays, elements;  // decays of a head, elements of a row

    int64_t keys() const { return G * K; }
    int64_t values() const { return H * V; }
    int64_t channels() const { return 2 * keys() + values(); }
    int64_t row() const { return elements; }
    const float* row_of(int64_t at) const { return at < 0 ? kept + (-1 - at) * row() : rows + at * row(); }

    // Convolves channels first .. end - 1 of a token; `bias` [channels] may be null.
    void convolve(int64_t t, int64_t first, int64_t end, const float* bias, float* to) const {
        const float* own = kept + t * row();
        const int64_t C = channels();
        each(end - first, [&](int64_t i, auto n) {
            const int64_t e = first + i;
            Floats sum = load(own + e, n) * load(taps_KC + (taps - 1) * C + e, n);
            for (int64_t j = 0; j < taps - 1; j++)
                sum += load(row_of(paths_TN[t * reach + j]) + e, n) * load(taps_KC + (taps - 2 - j) * C + e, n);
            if (bias) sum += load(bias + e, n);
            store(silu(sum), to + i, n);
        });
    }

    // The end of the group of tokens, at most MOST, that read the same state before any of them overwrites it.
    int64_t end_of_group(int64_t first) const {
        int64_t end = first + 1;
        for (const int64_t base = bases_T[first]; end < tokens && end - first < MOST && bases_T[end] == base; end++)
            if (folds_T[end - 1] != NULL_STATE && folds_T[end - 1] == base) break;
        return end;
    }

    // For a head of a token, its ancestors in the block and itself: their keys, the values they wrote, and the shares
    // of these that remain; last, the remaining share of the block's first state.
    struct Above {
        std::vector<const float*> keys, written;
        std::vector<float> since, weights;
    };

    Above above() const {
        Above found;
        found.keys.resize(reach + 1), found.written.resize(reach + 1), found.since.resize(reach + 1);
        found.weights.resize((reach + 1) * K);
        return found;
    }

    // Finds the ancestors (without the token itself) and returns their number. `key`, `value` and `decay` are offsets
    // in rows; `soon` elements of each key are prefetched.
    int64_t look_up(int64_t t, int64_t key, int64_t value, int64_t decay, int64_t soon, Above& above) const {
        const int64_t count = lengths_T[t];
        float log = kept[t * row() + decay];
        for (int64_t i = 0; i < count; i++) {
            const float* row = row_of(paths_TN[t * reach + i]);
            above.keys[i] = row + key, above.written[i] = row + value, above.since[i] = log;
            for (int64_t e = 0; e < soon; e += 16) __builtin_prefetch(row + key + e);
            for (int64_t e = 0; e < V; e += 16) __builtin_prefetch(row + value + e);
            log += row[decay];
        }
        above.since[count] = log;
        each(count + 1, [&](int64_t i, auto n) { store(exp_of(load(&above.since[i], n)), &above.since[i], n); });
        return count;
    }

    // Computes a head of the state after a token, of which a share since(k) of row k remains; `to` may be `state`.
    template <typename Since>
    void fold(const float* state, float* to, Since since, int64_t count, Above& above) const {
        for (int64_t j = 0; j < count; j++)
            each(K, [&](int64_t k, auto n) {
                store(load(above.keys[j] + k, n) * above.since[j], &above.weights[j * K + k], n);
            });
        parts<WIDE>(V, [&](int64_t at, auto vectors, auto n) {
            groups(K, [&](int64_t k, auto some) {
                Floats sum[some()][vectors()];
                for (int m = 0; m < some(); m++)
                    for (int i = 0; i < vectors(); i++)
                        sum[m][i] = load(state + (k + m) * V + at + i * LANES, n) * since(k + m);
                for (int64_t j = 0; j < count; j++)
                    for (int i = 0; i < vectors(); i++) {
                        const Floats u = load(above.written[j] + at + i * LANES, n);
                        for (int m = 0; m < some(); m++)
                            sum[m][i] = fused(u, all(above.weights[j * K + k + m]), sum[m][i]);
                    }
                for (int m = 0; m < some(); m++)
                    for (int i = 0; i < vectors(); i++) store(sum[m][i], to + (k + m) * V + at + i * LANES, n);
            });
        });
    }

    void keep(int64_t t) const {
        if (rows_T[t] != TRASH) std::memcpy(rows + rows_T[t] * row(), kept + t * row(), row() * sizeof(float));
    }
};

// The pass of a layer with these weights, a `Delta` or a `Scan`, and so many decays of a head.
template <typename Weights>
inline Recurrence recurrence(const Weights& w, const Paths& p, float* kept, int64_t tokens, int64_t decays = 1) {
    const int64_t keys = w.key_heads * w.key_size, values = w.value_heads * w.value_size;
    return {w.taps_KC, p.rows, p.states, p.rows_T, p.paths_TN, p.lengths_T, p.bases_T, p.folds_T,
            kept, tokens, w.key_heads, w.value_heads, w.key_size, w.value_size, w.taps, p.reach,
            decays, 3 * keys + 2 * values + w.value_heads * decays};
}

}  // namespace
