// Gated delta nets on a CPU. Arithmetic is float32. A token is computed in one order, whatever other tokens the pass
// has. Tokens that read the same state read it together: each part that is loaded serves several of them. Multiply-adds
// are fused explicitly, so a result does not depend on how many sums a loop computes.

#include "../operators.h"
#include "../recurrent.h"

namespace {

constexpr int NARROW = WIDE / 2;  // vectors of a state's row when several tokens, each with two sums, read it

template <typename T, bool BY_KEY>  // elements of keys have decays
struct DeltaNet : Recurrence {
    const T* x_TF;
    const float *decay_H, *bias_D, *norm_V;
    float* queries;  // of the tokens of the pass
    T* out;
    float eps, most, bound;
    bool by_sigmoid;  // gates are multiplied by `sigmoid`

    int64_t width() const { return channels() + values() + H + H * decays; }

    void take(int64_t t) const {
        const T* x = x_TF + t * width();
        each(channels(), [&](int64_t e, auto n) { store(load(x + e, n), kept + t * row() + e, n); });
    }

    void normalize(float* x, float factor) const {
        Floats sum{};
        each(K, [&](int64_t e, auto n) { sum += load(x + e, n) * load(x + e, n); });
        const float scale = factor / std::sqrt(sum_of(sum) + 1e-6f);
        each(K, [&](int64_t e, auto n) { store(load(x + e, n) * scale, x + e, n); });
    }

    // The logarithm of a decay, by a factor below 0.
    template <typename X>
    X log_of_decay(float factor, X x) const {
        return bound ? bound * sigmoid(-factor * x) : factor * softplus(x);
    }

    // Computes a token's query, key, values (stored where its written values will be) and decays.
    void prepare(int64_t t) const {
        float* own = kept + t * row() + channels();
        convolve(t, 0, keys(), nullptr, queries + t * keys());
        convolve(t, keys(), channels(), nullptr, own);
        for (int64_t g = 0; g < G; g++) {
            normalize(queries + t * keys() + g * K, 1 / std::sqrt(float(K)));
            normalize(own + g * K, 1);
        }
        const T* a = x_TF + t * width() + channels() + values() + H;
        own += keys() + values();
        for (int64_t h = 0; h < H; h++) {
            if (!BY_KEY) {
                own[h] = log_of_decay(decay_H[h], load(a + h, 1)[0] + bias_D[h]);
                continue;
            }
            const int64_t first = h * K;
            each(K, [&](int64_t e, auto n) {
                const Floats x = load(a + first + e, n) + load(bias_D + first + e, n);
                store(exp_of(log_of_decay(decay_H[h], x)), own + first + e, n);
            });
        }
    }

    // Elements between the keys, and between the queries, of two tokens that read a state.
    int64_t key_step() const { return BY_KEY ? 2 * K : row(); }
    int64_t query_step() const { return BY_KEY ? 2 * K : keys(); }

    // Multiplies a head of a state by the keys and queries of some tokens; each product has [V] elements.
    template <typename Tokens, typename Vectors, typename Count>
    void read(const float* state, const float* key, const float* query, int64_t at, float* reads, Tokens some,
              Vectors vectors, Count n) const {
        Floats one[some()][vectors()]{}, two[some()][vectors()]{};
        for (int64_t k = 0; k < K; k++)
            for (int i = 0; i < vectors(); i++) {
                const Floats s = load(state + k * V + at + i * LANES, n);
                for (int j = 0; j < some(); j++) {
                    one[j][i] = fused(s, all(key[j * key_step() + k]), one[j][i]);
                    two[j][i] = fused(s, all(query[j * query_step() + k]), two[j][i]);
                }
            }
        for (int j = 0; j < some(); j++)
            for (int i = 0; i < vectors(); i++) {
                store(one[j][i], reads + 2 * j * V + at + i * LANES, n);
                store(two[j][i], reads + (2 * j + 1) * V + at + i * LANES, n);
            }
    }

    // Also the products of a token's key and query with its ancestors' keys, for one head. If elements of keys decay,
    // the shares of the state's rows that remain, and the keys and queries of a group as far as they remain.
    struct Told : Above {
        std::vector<float> by_key, by_query, left, readers;
    };

    // `look_up` where elements of keys decay: `weights` are the ancestors' keys as far as they remain, `left` has
    // shares of the rows of the block's first state; nothing else decays.
    int64_t look_up_by_key(int64_t t, int64_t key, int64_t value, int64_t decay, Told& above) const {
        const int64_t count = lengths_T[t];
        float* left = above.left.data();
        std::memcpy(left, kept + t * row() + decay, K * sizeof(float));
        for (int64_t i = 0; i < count; i++) {
            const float* row = row_of(paths_TN[t * reach + i]);
            float* remaining = &above.weights[i * K];
            each(K, [&](int64_t e, auto n) {
                const Floats share = load(left + e, n);
                store(load(row + key + e, n) * share, remaining + e, n);
                store(share * load(row + decay + e, n), left + e, n);
            });
            above.keys[i] = remaining, above.written[i] = row + value;
        }
        std::fill_n(above.since.begin(), count + 1, 1.0f);
        return count;
    }

    // What remains at tokens first .. end - 1 of the block's first state, put into copies of their keys and queries.
    void scale_readers(int64_t first, int64_t end, int64_t key, int64_t query, int64_t decay, Told& above) const {
        for (int64_t t = first; t < end; t++) {
            float *by_key = &above.readers[(t - first) * 2 * K], *by_query = by_key + K, *left = above.left.data();
            std::memcpy(left, kept + t * row() + decay, K * sizeof(float));
            for (int64_t i = 0; i < lengths_T[t]; i++) {
                const float* more = row_of(paths_TN[t * reach + i]) + decay;
                each(K, [&](int64_t e, auto n) { store(load(left + e, n) * load(more + e, n), left + e, n); });
            }
            each(K, [&](int64_t e, auto n) {
                const Floats share = load(left + e, n);
                store(share * load(kept + t * row() + key + e, n), by_key + e, n);
                store(share * load(queries + t * keys() + query + e, n), by_query + e, n);
            });
        }
    }

    void head(int64_t h, Told& above, std::vector<float>& room) const {
        const int64_t key = channels() + h / (H / G) * K, value = channels() + keys() + h * V;
        const int64_t decay = channels() + keys() + values() + h * decays;
        for (int64_t first = 0, end; first < tokens; first = end) {
            const int64_t base = bases_T[first];
            end = end_of_group(first);
            const float* state = states + (base * H + h) * K * V;
            const int64_t query = h / (H / G) * K;
            const float *by_key = kept + first * row() + key, *by_query = queries + first * keys() + query;
            if (BY_KEY && base != NULL_STATE) {
                scale_readers(first, end, key, query, decay, above);
                by_key = above.readers.data(), by_query = by_key + K;
            }
            if (base == NULL_STATE)
                std::fill(room.begin(), room.end(), 0.0f);
            else if (end - first == 1)
                parts<2 * WIDE>(V, [&](int64_t at, auto vectors, auto n) {
                    read(state, by_key, by_query, at, room.data(), std::integral_constant<int, 1>{}, vectors, n);
                });
            else
                parts<NARROW>(V, [&](int64_t at, auto vectors, auto n) {
                    groups(end - first, [&](int64_t i, auto some) {
                        read(state, by_key + i * key_step(), by_query + i * query_step(), at, room.data() + i * 2 * V,
                             some, vectors, n);
                    });
                });
            for (int64_t t = first; t < end; t++)
                token(t, h, key, value, decay, state, room.data() + (t - first) * 2 * V, above);
        }
    }

    void token(int64_t t, int64_t h, int64_t key, int64_t value, int64_t decay, const float* state, float* reads,
               Told& above) const {
        float* own = kept + t * row();
        const float *query = queries + t * keys() + h / (H / G) * K, *x_key = own + key;
        const int64_t count =
            BY_KEY ? look_up_by_key(t, key, value, decay, above) : look_up(t, key, value, decay, K, above);
        groups(count, [&](int64_t first, auto some) {
            Floats one[some()]{}, two[some()]{};
            each(K, [&](int64_t e, auto n) {
                const Floats by_key = load(x_key + e, n), by_query = load(query + e, n);
                for (int i = 0; i < some(); i++) {
                    const Floats x = load(above.keys[first + i] + e, n);
                    one[i] = fused(x, by_key, one[i]), two[i] = fused(x, by_query, two[i]);
                }
            });
            for (int i = 0; i < some(); i++) {
                above.by_key[first + i] = above.since[first + i] * sum_of(one[i]);
                above.by_query[first + i] = above.since[first + i] * sum_of(two[i]);
            }
        });
        Floats product{};
        each(K, [&](int64_t e, auto n) { product = fused(load(x_key + e, n), load(query + e, n), product); });
        const float same = sum_of(product);
        const T *z = x_TF + t * width() + channels() + h * V, *b = x_TF + t * width() + channels() + values() + h;
        const float all_since = above.since[count], beta = most / (1 + std::exp(-load(b, 1)[0]));
        Floats squares{};
        parts<WIDE>(V, [&](int64_t at, auto vectors, auto n) {
            Floats told[vectors()], seen[vectors()];
            for (int i = 0; i < vectors(); i++) {
                told[i] = load(reads + at + i * LANES, n) * all_since;
                seen[i] = load(reads + V + at + i * LANES, n) * all_since;
            }
            for (int64_t j = 0; j < count; j++)
                for (int i = 0; i < vectors(); i++) {
                    const Floats u = load(above.written[j] + at + i * LANES, n);
                    told[i] = fused(u, all(above.by_key[j]), told[i]);
                    seen[i] = fused(u, all(above.by_query[j]), seen[i]);
                }
            for (int i = 0; i < vectors(); i++) {
                float* to = own + value + at + i * LANES;
                const Floats u = (load(to, n) - told[i]) * beta;
                store(u, to, n);
                seen[i] = fused(u, all(same), seen[i]);
                squares = fused(first_lanes(seen[i], n), seen[i], squares);
                store(seen[i], reads + V + at + i * LANES, n);
            }
        });
        if (folds_T[t] != NULL_STATE) {
            above.keys[count] = x_key, above.written[count] = own + value, above.since[count] = 1;
            float* to = states + (folds_T[t] * H + h) * K * V;
            if (BY_KEY)
                fold(state, to, [left = above.left.data()](int64_t k) { return left[k]; }, count + 1, above);
            else
                fold(state, to, [=](int64_t) { return all_since; }, count + 1, above);
        }
        const float scale = 1 / std::sqrt(sum_of(squares) / V + eps);
        const auto finish = [&](auto factor_of) {
            each(V, [&](int64_t e, auto n) {
                store(load(reads + V + e, n) * scale * load(norm_V + e, n) * factor_of(load(z + e, n)),
                      out + t * values() + h * V + e, n);
            });
        };
        by_sigmoid ? finish([](Floats x) { return sigmoid(x); }) : finish([](Floats x) { return silu(x); });
    }

    void run(int64_t threads) const {
#pragma omp parallel num_threads(threads)
        {
#pragma omp for
            for (int64_t t = 0; t < tokens; t++) take(t);
#pragma omp for
            for (int64_t t = 0; t < tokens; t++) prepare(t);
            const int64_t together = std::min(tokens, MOST);
            Told above{this->above(), std::vector<float>(reach + 1), std::vector<float>(reach + 1),
                       std::vector<float>(BY_KEY ? K : 0), std::vector<float>(BY_KEY ? together * 2 * K : 0)};
            std::vector<float> room(together * 2 * V);
#pragma omp for schedule(dynamic)
            for (int64_t h = 0; h < H; h++) head(h, above, room);
#pragma omp for
            for (int64_t t = 0; t < tokens; t++) keep(t);
        }
    }
};

}  // namespace

extern "C" void coppice_delta_net(int64_t kind, int64_t threads, const void* x, const Delta* delta, const Paths* paths,
                                  float* kept, float* queries, void* out, int64_t tokens) {
    const Delta& d = *delta;
    const Recurrence pass = recurrence(d, *paths, kept, tokens, d.key_decays ? d.key_size : 1);
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        const auto run = [&](auto by_key) {
            DeltaNet<T, by_key()>{pass,      (const T*)x, d.decay_H, d.bias_D, d.norm_V,
                                  queries,   (T*)out,     d.eps,     d.most,   d.bound,
                                  d.sigmoid != 0}.run(threads);
        };
        d.key_decays ? run(std::true_type()) : run(std::false_type());
    });
}
