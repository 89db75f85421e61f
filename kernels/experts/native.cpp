// Mixtures of experts. The rows of a pass are grouped by the experts that they chose, so each expert is read once. The
// threads share the products of all experts as one piece of work, because experts have unequal numbers of rows.
//
// Every row is summed in the order of its own choices, so other rows do not change its bits.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include <sys/mman.h>

#include "../operators.h"
#include "../vectors.h"

namespace {

enum Scores { SOFTMAX, SOFTMAX_OF_CHOSEN, SIGMOID, SPARSEMIXER, SIGMOID_OF_CHOSEN };

// NaN is the largest, as in PyTorch.
bool above(float x, float y) { return x > y || (x != x && y == y); }

// Chooses the experts of a row and their weights.
class Choice {
  public:
    explicit Choice(const Mixture& mixture) : m(mixture), keys(mixture.experts) {}

    void make(const float* logits, int64_t* experts, float* weights) {
        if (m.scores == SPARSEMIXER) return sparsemixer(logits, experts, weights);
        float top = 0, sum = 0;
        if (m.scores == SOFTMAX) {
            top = *std::max_element(logits, logits + m.experts, [](float x, float y) { return above(y, x); });
            for (int64_t i = 0; i < m.experts; i++) sum += std::exp(logits[i] - top);
        }
        for (int64_t i = 0; i < m.experts; i++) {
            keys[i] = m.scores == SIGMOID ? sigmoid(logits[i]) : logits[i];
            if (m.bias) keys[i] = (m.scores == SOFTMAX ? std::exp(logits[i] - top) / sum : keys[i]) + m.bias[i];
        }
        if (m.groups > 1) leave_groups();
        for (int64_t k = 0; k < m.chosen; k++) experts[k] = largest(experts, k);
        if (m.scores == SOFTMAX_OF_CHOSEN) top = logits[experts[0]];
        const bool sigmoids = m.scores == SIGMOID || m.scores == SIGMOID_OF_CHOSEN;
        for (int64_t k = 0; k < m.chosen; k++) {
            const float logit = logits[experts[k]];
            weights[k] = sigmoids ? sigmoid(logit) : std::exp(logit - top);
            if (m.scores == SOFTMAX_OF_CHOSEN) sum += weights[k];
        }
        for (int64_t k = 0; k < m.chosen && !sigmoids; k++) weights[k] /= sum;
        if (m.normalized) {
            float all = 0;
            for (int64_t k = 0; k < m.chosen; k++) all += weights[k];
            for (int64_t k = 0; k < m.chosen; k++) weights[k] /= all + m.epsilon;
        }
        for (int64_t k = 0; k < m.chosen; k++) weights[k] *= m.scale * (m.factors ? m.factors[experts[k]] : 1);
    }

  private:
    // The expert with the largest key, except the first `count` of `taken`; ties go to the lower number.
    int64_t largest(const int64_t* taken, int64_t count) const {
        int64_t best = -1;
        for (int64_t i = 0; i < m.experts; i++)
            if (std::find(taken, taken + count, i) == taken + count && (best < 0 || above(keys[i], keys[best]))) best = i;
        return best;
    }

    // Keeps only the keys of the best groups.
    void leave_groups() {
        const int64_t size = m.experts / m.groups;
        std::vector<float> best(m.groups), sorted(size);
        for (int64_t g = 0; g < m.groups; g++) {
            std::copy_n(&keys[g * size], size, sorted.begin());
            std::partial_sort(sorted.begin(), sorted.begin() + m.best, sorted.end(), above);
            for (int64_t i = 0; i < m.best; i++) best[g] += sorted[i];
        }
        std::vector<bool> left(m.groups);
        for (int64_t k = 0; k < m.kept; k++) {
            int64_t first = -1;
            for (int64_t g = 0; g < m.groups; g++)
                if (!left[g] && (first < 0 || above(best[g], best[first]))) first = g;
            left[first] = true;
        }
        for (int64_t i = 0; i < m.experts; i++)
            if (!left[i / size]) keys[i] = -INFINITY;
    }

    // Chooses two experts. The second one's weight is its share of a softmax without the first.
    void sparsemixer(const float* logits, int64_t* experts, float* weights) {
        std::copy(logits, logits + m.experts, keys.begin());
        for (int64_t k = 0; k < 2; k++) {
            experts[k] = largest(experts, k);
            const float top = logits[experts[k]];
            float sum = 0;
            for (int64_t i = 0; i < m.experts; i++) {
                if (k == 1 && i == experts[0]) continue;
                const bool far = (top - logits[i]) / std::max(std::abs(logits[i]), top) > 2 * m.jitter;
                if (!far) sum += std::exp(logits[i] - top);
            }
            weights[k] = 1 / sum;
        }
    }

    const Mixture& m;
    std::vector<float> keys;
};

// Only for read-only memory whose pages all belong to a file; keeper.py guarantees this.
void advise(const Keeper& keeper, int64_t expert, int advice) {
    for (int64_t i = keeper.first[expert]; i < keeper.first[expert + 1]; i++)
        madvise((void*)keeper.places[2 * i], size_t(keeper.places[2 * i + 1]), advice);
}

// Drops the least recently used experts to make room for those that rows chose, before their pages are read. All
// missing experts are requested at once, so that the disk reads them concurrently.
void keep(Keeper& keeper, int64_t kept, const std::vector<int64_t>& chosen) {
    static std::mutex alone;  // several threads may run passes
    const std::lock_guard<std::mutex> lock(alone);
    const int64_t now = ++keeper.clock;
    std::vector<int64_t> missing;
    for (int64_t number : chosen) {
        const int64_t expert = kept + number;
        if (keeper.used[expert] == 0) {
            missing.push_back(expert);
            keeper.held += keeper.sizes[expert];
        }
        keeper.used[expert] = now;
    }
    while (keeper.held > keeper.limit) {
        int64_t oldest = -1;
        for (int64_t i = 0; i < keeper.count; i++)
            if (keeper.used[i] && keeper.used[i] < now && (oldest < 0 || keeper.used[i] < keeper.used[oldest])) oldest = i;
        if (oldest < 0) break;  // this pass needs more than the limit
        advise(keeper, oldest, MADV_DONTNEED);
        keeper.used[oldest] = 0;
        keeper.held -= keeper.sizes[oldest];
    }
    for (int64_t expert : missing) advise(keeper, expert, MADV_WILLNEED);
}

template <typename T>
std::unique_ptr<T[]> room(int64_t size) {
    return std::unique_ptr<T[]>(new T[size]);
}

template <typename T>
void run(int64_t kind, int64_t threads, const Mixture& m, const T* x, const T* scored, T* out, int64_t rows) {
    const int64_t K = m.chosen, total = rows * K, E = m.width, X = m.experts, halves = 1 + m.gated;
    const auto logits = room<T>(rows * X);
    coppice_linear(kind, threads, m.router, scored, logits.get(), rows);
    std::vector<int64_t> chosen(total), first(X + 1), place(total);
    std::vector<float> weights(total), wide(X);
    Choice choice(m);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = 0; i < X; i++) wide[i] = load(logits.get() + r * X + i, 1)[0];
        choice.make(wide.data(), &chosen[r * K], &weights[r * K]);
    }
    if (m.keeper) keep(*m.keeper, m.kept_from, chosen);
    // Groups rows by expert: the first place of each expert, then the place of each choice.
    for (int64_t expert : chosen) first[expert + 1]++;
    for (int64_t i = 0; i < X; i++) first[i + 1] += first[i];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < total; i++) place[i] = next[chosen[i]]++;

    const auto gathered = room<T>(total * E), up = room<T>(total * halves * m.inner), middle = room<T>(total * m.inner);
    const auto shared_up = room<T>(rows * halves * m.shared), shared_middle = room<T>(rows * m.shared);
    const auto shared_out = room<T>(m.shared ? rows * E : 0), gates = room<T>(m.gate ? rows : 0);
    for (int64_t i = 0; i < total; i++) {
        T* row = gathered.get() + place[i] * E;
        std::memcpy(row, x + i / K * E, E * sizeof(T));
        if (!m.on_inputs) continue;
        each(E, [&](int64_t j, auto n) { store(weights[i] * load(row + j, n), row + j, n); });
        weights[i] = 1;
    }

    std::vector<Product> products;
    if (m.shared) products.push_back({m.up + X, x, shared_up.get(), rows});
    if (m.gate) products.push_back({m.gate, x, gates.get(), rows});
    for (int64_t i = 0; i < X; i++)
        if (const int64_t count = first[i + 1] - first[i])
            products.push_back({m.up + i, gathered.get() + first[i] * E, up.get() + first[i] * halves * m.inner, count});
    coppice_linears(kind, threads, products.data(), int64_t(products.size()));

    const auto activate = m.gated ? coppice_activation_mul : coppice_activation;
    activate(kind, threads, m.function, up.get(), middle.get(), total, m.inner);
    products.clear();
    if (m.shared) {
        activate(kind, threads, m.function, shared_up.get(), shared_middle.get(), rows, m.shared);
        products.push_back({m.down + X, shared_middle.get(), shared_out.get(), rows});
    }
    const auto& made = gathered;  // reused: the experts' inputs are no longer needed
    for (int64_t i = 0; i < X; i++)
        if (const int64_t count = first[i + 1] - first[i])
            products.push_back({m.down + i, middle.get() + first[i] * m.inner, made.get() + first[i] * E, count});
    coppice_linears(kind, threads, products.data(), int64_t(products.size()));

#pragma omp parallel for num_threads(threads) if (rows * E > 1 << 14)
    for (int64_t r = 0; r < rows; r++) {
        const float gate = m.gate ? sigmoid(load(gates.get() + r, 1)[0]) : 1;
        each(E, [&](int64_t i, auto n) {
            Floats sum{};
            for (int64_t k = 0; k < K; k++)
                sum += weights[r * K + k] * load(made.get() + place[r * K + k] * E + i, n);
            if (m.shared) sum += gate * load(shared_out.get() + r * E + i, n);
            store(sum, out + r * E + i, n);
        });
    }
}

}  // namespace

extern "C" void coppice_experts(int64_t kind, int64_t threads, const Mixture* mixture, const void* x,
                                const void* scored, void* out, int64_t rows) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        run(kind, threads, *mixture, (const T*)x, (const T*)scored, (T*)out, rows);
    });
}
