// Selective scans of Mamba-2 on a CPU. Arithmetic is float32. A token is computed in one order, whatever other tokens
// the pass has. Tokens that read the same state read it together. Multiply-adds are fused explicitly, so a result does
// not depend on how many sums a loop computes.

#include "../operators.h"
#include "../recurrent.h"

namespace {

template <typename T>
struct SelectiveScan : Recurrence {
    const T* x_TF;
    const float *shift_C, *decay_H, *bias_H, *skip_H, *norm_E;
    float *queries, *sums, *products;  // of the tokens: C; x, later the outputs; products of C with ancestors' B
    T* out;
    float eps, least, most, gate, step;

    int64_t width() const { return channels() + values() + H; }

    void take(int64_t t) const {
        const T* x = x_TF + t * width() + values();
        each(channels(), [&](int64_t e, auto n) { store(load(x + e, n), kept + t * row() + e, n); });
    }

    // Computes a token's B, C, written values and decays, and the part of its output that comes from its own x.
    void prepare(int64_t t) const {
        float *own = kept + t * row() + channels(), *written = own + keys(), *sum = sums + t * values();
        convolve(t, 0, values(), shift_C, sum);
        convolve(t, values(), values() + keys(), shift_C, own);
        convolve(t, values() + keys(), channels(), shift_C, queries + t * keys());
        const T* steps = x_TF + t * width() + values() + channels();
        for (int64_t h = 0; h < H; h++) {
            const float taken = std::min(std::max(softplus(load(steps + h, 1)[0] * step + bias_H[h]), least), most);
            own[keys() + values() + h] = decay_H[h] * taken;
            each(V, [&](int64_t e, auto n) {
                const Floats x = load(sum + h * V + e, n);
                store(x * taken, written + h * V + e, n), store(x * skip_H[h], sum + h * V + e, n);
            });
        }
    }

    // Multiplies a token's C with its ancestors' B in the block and, last, with its own B, for all heads of a group.
    void multiply(int64_t t) const {
        const int64_t count = lengths_T[t];
        for (int64_t g = 0; g < G; g++) {
            const float* query = queries + t * keys() + g * K;
            const int64_t key = channels() + g * K;
            float* to = products + (t * G + g) * (reach + 1);
            groups(count + 1, [&](int64_t first, auto some) {
                const float* of[some()];
                for (int i = 0; i < some(); i++)
                    of[i] = row_of(first + i < count ? paths_TN[t * reach + first + i] : -1 - t) + key;
                Floats sum[some()]{};
                each(K, [&](int64_t e, auto n) {
                    const Floats x = load(query + e, n);
                    for (int i = 0; i < some(); i++) sum[i] = fused(load(of[i] + e, n), x, sum[i]);
                });
                for (int i = 0; i < some(); i++) to[first + i] = sum_of(sum[i]);
            });
        }
    }

    // Multiplies a head of a state by C of some tokens; each product has [V] elements.
    template <typename Tokens, typename Vectors, typename Count>
    void read(const float* state, int64_t t, int64_t query, int64_t at, float* reads, Tokens some, Vectors vectors,
              Count n) const {
        Floats sum[some()][vectors()]{};
        for (int64_t k = 0; k < K; k++)
            for (int i = 0; i < vectors(); i++) {
                const Floats s = load(state + k * V + at + i * LANES, n);
                for (int j = 0; j < some(); j++)
                    sum[j][i] = fused(s, all(queries[(t + j) * keys() + query + k]), sum[j][i]);
            }
        for (int j = 0; j < some(); j++)
            for (int i = 0; i < vectors(); i++) store(sum[j][i], reads + j * V + at + i * LANES, n);
    }

    void head(int64_t h, Above& above, std::vector<float>& room) const {
        const int64_t g = h / (H / G), key = channels() + g * K, value = channels() + keys() + h * V;
        for (int64_t first = 0, end; first < tokens; first = end) {
            const int64_t base = bases_T[first];
            end = end_of_group(first);
            const float* state = states + (base * H + h) * K * V;
            if (base == NULL_STATE)
                std::fill(room.begin(), room.end(), 0.0f);
            else if (end - first == 1)
                parts<2 * WIDE>(V, [&](int64_t at, auto vectors, auto n) {
                    read(state, first, g * K, at, room.data(), std::integral_constant<int, 1>{}, vectors, n);
                });
            else
                parts<WIDE>(V, [&](int64_t at, auto vectors, auto n) {
                    groups(end - first, [&](int64_t i, auto some) {
                        read(state, first + i, g * K, at, room.data() + i * V, some, vectors, n);
                    });
                });
            for (int64_t t = first; t < end; t++) token(t, h, key, value, state, room.data() + (t - first) * V, above);
        }
    }

    void token(int64_t t, int64_t h, int64_t key, int64_t value, const float* state, const float* reads,
               Above& above) const {
        const int64_t count = look_up(t, key, value, channels() + keys() + values() + h, 0, above);
        const float left = above.since[count], *by_query = products + (t * G + h / (H / G)) * (reach + 1);
        above.keys[count] = kept + t * row() + key, above.written[count] = kept + t * row() + value;
        above.since[count] = 1;
        float* sum = sums + t * values() + h * V;
        parts<WIDE>(V, [&](int64_t at, auto vectors, auto n) {
            Floats seen[vectors()];
            for (int i = 0; i < vectors(); i++) seen[i] = load(reads + at + i * LANES, n) * left;
            for (int64_t j = 0; j <= count; j++)
                for (int i = 0; i < vectors(); i++)
                    seen[i] = fused(load(above.written[j] + at + i * LANES, n), all(by_query[j] * above.since[j]), seen[i]);
            for (int i = 0; i < vectors(); i++) {
                float* to = sum + at + i * LANES;
                store(load(to, n) + seen[i], to, n);
            }
        });
        if (folds_T[t] != NULL_STATE)
            fold(state, states + (folds_T[t] * H + h) * K * V, [=](int64_t) { return left; }, count + 1, above);
    }

    // Applies the gates and the norm, if there is one; the norm's rows are the heads of a group.
    void normalize(int64_t t) const {
        const int64_t size = values() / G;
        for (int64_t g = 0; g < G; g++) {
            const int64_t first = g * size;
            float* sum = sums + t * values() + first;
            const T* z = x_TF + t * width() + first;
            Floats squares{};
            each(size, [&](int64_t e, auto n) {
                const Floats x = load(sum + e, n) * silu(load(z + e, n) * gate);
                squares = fused(x, x, squares);
                store(x, sum + e, n);
            });
            const float scale = 1 / std::sqrt(sum_of(squares) / size + eps);
            each(size, [&](int64_t e, auto n) {
                Floats x = load(sum + e, n);
                if (norm_E) x = x * scale * load(norm_E + first + e, n);
                store(x, out + t * values() + first + e, n);
            });
        }
    }

    void run(int64_t threads) const {
#pragma omp parallel num_threads(threads)
        {
#pragma omp for
            for (int64_t t = 0; t < tokens; t++) take(t);
#pragma omp for
            for (int64_t t = 0; t < tokens; t++) prepare(t);
#pragma omp for
            for (int64_t t = 0; t < tokens; t++) multiply(t);
            Above above = this->above();
            std::vector<float> room(std::min(tokens, MOST) * V);
#pragma omp for schedule(dynamic)
            for (int64_t h = 0; h < H; h++) head(h, above, room);
#pragma omp for
            for (int64_t t = 0; t < tokens; t++) normalize(t), keep(t);
        }
    }
};

}  // namespace

extern "C" void coppice_scan(int64_t kind, int64_t threads, const void* x, const Scan* scan, const Paths* paths,
                             float* kept, float* queries, float* sums, float* products, void* out, int64_t tokens) {
    const Scan& s = *scan;
    const Recurrence pass = recurrence(s, *paths, kept, tokens);
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        SelectiveScan<T>{pass, (const T*)x, s.shift_C, s.decay_H, s.bias_H, s.skip_H, s.norm_E, queries, sums,
                         products, (T*)out, s.eps, s.least, s.most, s.gate, s.step}
            .run(threads);
    });
}
