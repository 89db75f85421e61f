// Scans by channels of Mamba on a CPU. Arithmetic is float32. A vector of channels goes through all tokens of a pass with
// their states in hand; a token whose parent is not the token before it begins with its block's first state, and takes
// the block's tokens one after another, so that its bits do not depend on the tokens beside it.

#include "../operators.h"
#include "../recurrent.h"

namespace {

template <typename T>
struct ByChannels {
    const ChannelScan& s;
    const Paths& p;
    const T *x, *convolved, *low, *steps;
    float *kept, *queries;
    T* out;
    int64_t tokens;

    int64_t row() const { return 3 * s.channels + s.states; }
    const float* row_of(int64_t at) const { return at < 0 ? kept + (-1 - at) * row() : p.rows + at * row(); }

    void convolve(int64_t t) const {
        const int64_t C = s.channels;
        const int64_t* path = p.paths_TN + t * p.reach;
        each(C, [&](int64_t e, auto n) {
            Floats sum = load(x + t * 2 * C + e, n) * load(s.taps_KC + (s.taps - 1) * C + e, n);
            for (int64_t j = 0; j < s.taps - 1; j++) {
                const Floats above = path[j] < 0 ? load(x + (-1 - path[j]) * 2 * C + e, n)
                                                 : load(p.rows + path[j] * row() + e, n);
                sum = fused(above, load(s.taps_KC + (s.taps - 2 - j) * C + e, n), sum);
            }
            store(silu(sum + load(s.shift_C + e, n)), out + t * C + e, n);
        });
    }

    // B or C of a token, normed if there are norms.
    void take_shared(const T* from, const float* norm, float* to) const {
        const int64_t K = s.states;
        Floats squares{};
        each(K, [&](int64_t k, auto n) {
            const Floats found = load(from + k, n);
            squares = fused(found, found, squares);
            store(found, to + k, n);
        });
        if (!norm) return;
        const float scale = 1 / std::sqrt(sum_of(squares) / K + s.eps);
        each(K, [&](int64_t k, auto n) { store(load(to + k, n) * scale * load(norm + k, n), to + k, n); });
    }

    // What a token's row keeps, and its C.
    void prepare(int64_t t) const {
        const int64_t C = s.channels, K = s.states;
        float *own = kept + t * row(), *written = own + C + K, *step = written + C;
        const T* shared = low + t * (s.rank + 2 * K) + s.rank;
        take_shared(shared, s.norms_E, own + C);
        take_shared(shared + K, s.norms_E ? s.norms_E + K : nullptr, queries + t * K);
        each(C, [&](int64_t e, auto n) {
            const Floats d = softplus(load(steps + t * C + e, n) + load(s.bias_C + e, n));
            store(load(x + t * 2 * C + e, n), own + e, n);
            store(d * load(convolved + t * C + e, n), written + e, n);
            store(d, step + e, n);
        });
    }

    // Whether the state before a token is what the token before it leaves.
    bool goes_on(int64_t t) const {
        if (!t) return false;
        if (p.lengths_T[t]) return p.paths_TN[t * p.reach] == -t;
        return p.folds_T[t - 1] != NULL_STATE && p.bases_T[t] == p.folds_T[t - 1];
    }

    // Some channels of the state after a token, from those before it; f(k, state) is called for each of their numbers.
    template <typename Count, typename F>
    void advance(const float* row, int64_t at, Floats* state, Count n, F f) const {
        const int64_t C = s.channels, K = s.states;
        const Floats written = load(row + C + K + at, n), step = load(row + 2 * C + K + at, n) * LOG2_E;
        for (int64_t k = 0; k < K; k++) {
            const Floats decayed = exp2_of(step * load(s.rates_KC + k * C + at, n)) * state[k];
            f(k, state[k] = fused(all(row[C + k]), written, decayed));
        }
    }

    template <typename Count>
    void scan(int64_t at, Floats* state, Count n) const {
        const int64_t C = s.channels, K = s.states;
        for (int64_t t = 0; t < tokens; t++) {
            if (!goes_on(t)) {
                const float* from = p.states + p.bases_T[t] * K * C + at;
                for (int64_t k = 0; k < K; k++) state[k] = load(from + k * C, n);
                for (int64_t i = p.lengths_T[t] - 1; i >= 0; i--)
                    advance(row_of(p.paths_TN[t * p.reach + i]), at, state, n, [](int64_t, Floats) {});
            }
            Floats sum{};
            const float* query = queries + t * K;
            advance(kept + t * row(), at, state, n, [&](int64_t k, Floats x) { sum = fused(x, all(query[k]), sum); });
            if (p.folds_T[t] != NULL_STATE) {
                float* to = p.states + p.folds_T[t] * K * C + at;
                for (int64_t k = 0; k < K; k++) store(state[k], to + k * C, n);
            }
            const Floats own = load(convolved + t * C + at, n) * load(s.skip_C + at, n);
            store((sum + own) * silu(load(x + t * 2 * C + C + at, n)), out + t * C + at, n);
        }
    }

    void run(int64_t threads) const {
        const int64_t C = s.channels, vectors = (C + LANES - 1) / LANES;
#pragma omp parallel num_threads(threads)
        {
#pragma omp for
            for (int64_t t = 0; t < tokens; t++) prepare(t);
            std::vector<Floats> state(s.states);
#pragma omp for schedule(static)
            for (int64_t v = 0; v < vectors; v++)
                each(std::min<int64_t>(LANES, C - v * LANES),
                     [&](int64_t, auto n) { scan(v * LANES, state.data(), n); });
#pragma omp for
            for (int64_t t = 0; t < tokens; t++)
                if (p.rows_T[t] != TRASH)
                    std::memcpy(p.rows + p.rows_T[t] * row(), kept + t * row(), row() * sizeof(float));
        }
    }
};

}  // namespace

extern "C" void coppice_channel_conv(int64_t kind, int64_t threads, const void* x, const ChannelScan* scan,
                                     const Paths* paths, void* out, int64_t tokens) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        const ByChannels<T> pass{*scan, *paths, (const T*)x, nullptr, nullptr, nullptr, nullptr, nullptr, (T*)out, tokens};
#pragma omp parallel for num_threads(threads) if (tokens > 1)
        for (int64_t t = 0; t < tokens; t++) pass.convolve(t);
    });
}

extern "C" void coppice_channel_scan(int64_t kind, int64_t threads, const void* x, const void* convolved, const void* low,
                                     const void* steps, const ChannelScan* scan, const Paths* paths, float* kept,
                                     float* queries, void* out, int64_t tokens) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        ByChannels<T>{*scan, *paths, (const T*)x, (const T*)convolved, (const T*)low, (const T*)steps, kept, queries,
                      (T*)out, tokens}
            .run(threads);
    });
}
