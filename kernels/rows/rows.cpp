// Operators on rows, on a CPU: what a layer does between its matrix products. Arithmetic is float32.

#include <algorithm>
#include <vector>

#include "../vectors.h"

namespace {

constexpr int64_t SMALL = 1 << 14;  // elements; fewer are not worth waking threads
constexpr float LOG2_E = 1.44269504f;

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t width, float eps) {
    Floats sum{};
    each(width, [&](int64_t i, auto n) {
        const Floats part = load(x + i, n);
        sum += part * part;
    });
    const float share = 1 / std::sqrt(sum_of(sum) / width + eps);
    each(width, [&](int64_t i, auto n) { store(load(x + i, n) * share * load(weight + i, n), out + i, n); });
}

template <typename T>
void rotary(const T* x, const T* cos, const T* sin, T* out, int64_t head_dim, int64_t dims) {
    const int64_t half = dims / 2;
    each(half, [&](int64_t i, auto n) {
        const Floats first = load(x + i, n), second = load(x + half + i, n);
        const Floats c = load(cos + i, n), s = load(sin + i, n);
        store(first * c - second * s, out + i, n);
        store(second * c + first * s, out + half + i, n);
    });
    std::copy(x + dims, x + head_dim, out + dims);
}

template <typename T>
void silu_mul(const T* gate, const T* up, T* out, int64_t width) {
    each(width, [&](int64_t i, auto n) {
        const Floats x = load(gate + i, n);
        const Floats e = exp2_of((x < 0 ? x : -x) * LOG2_E);  // sigmoid is e / (1 + e) or 1 / (1 + e)
        store(x * (x < 0 ? e : all(1)) / (1 + e) * load(up + i, n), out + i, n);
    });
}

struct Entry {
    float value;
    int64_t place;
};

// The k largest of a row, in order, of equal ones the first. Most vectors hold none that is large enough by then.
void top_k(const float* x, int64_t width, int64_t k, float* values, int64_t* places, std::vector<Entry>& kept) {
    auto before = [](const Entry& a, const Entry& b) {
        return a.value > b.value || (a.value == b.value && a.place < b.place);
    };
    if (!k) return;
    kept.clear();
    for (int64_t i = 0; i < k; i++) kept.push_back({x[i], i});
    float least = -INFINITY;  // k that are kept are no smaller
    auto cut = [&] {
        std::nth_element(kept.begin(), kept.begin() + k - 1, kept.end(), before);
        kept.resize(k);
        least = kept[k - 1].value;
    };
    cut();
    each(width - k, [&](int64_t i, auto n) {
        const int64_t at = k + i;
        uint32_t bits = bits_of(load(x + at, n) > least) & ((uint64_t(1) << n) - 1);
        for (; bits; bits &= bits - 1) {
            const int64_t place = at + __builtin_ctz(bits);
            kept.push_back({x[place], place});
        }
        if (int64_t(kept.size()) > 2 * k + LANES) cut();
    });
    std::partial_sort(kept.begin(), kept.begin() + k, kept.end(), before);
    for (int64_t i = 0; i < k; i++) values[i] = kept[i].value, places[i] = kept[i].place;
}

}  // namespace

extern "C" void coppice_rms_norm(int64_t kind, int64_t threads, const void* x, const void* weight, void* out,
                                 int64_t rows, int64_t width, float eps) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
        for (int64_t r = 0; r < rows; r++)
            rms_norm((const T*)x + r * width, (const T*)weight, (T*)out + r * width, width, eps);
    });
}

// x [tokens, heads, head_dim] with strides of its own, cos and sin [tokens, dims]; out is contiguous.
extern "C" void coppice_rotary(int64_t kind, int64_t threads, const void* x, const void* cos, const void* sin,
                               void* out, int64_t tokens, int64_t heads, int64_t head_dim, int64_t dims,
                               int64_t token_stride, int64_t head_stride) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_dim > SMALL)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t h = 0; h < heads; h++)
                rotary((const T*)x + t * token_stride + h * head_stride, (const T*)cos + t * dims,
                       (const T*)sin + t * dims, (T*)out + (t * heads + h) * head_dim, head_dim, dims);
    });
}

// x [rows, 2 width]: gates, then what they let through.
extern "C" void coppice_silu_mul(int64_t kind, int64_t threads, const void* x, void* out, int64_t rows, int64_t width) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (rows * width > SMALL)
        for (int64_t r = 0; r < rows; r++) {
            const T* gate = (const T*)x + r * 2 * width;
            silu_mul(gate, gate + width, (T*)out + r * width, width);
        }
    });
}

// k of 0 to the width; no NaN.
extern "C" void coppice_top_k(int64_t threads, const float* x, float* values, int64_t* places, int64_t rows,
                              int64_t width, int64_t k) {
#pragma omp parallel num_threads(threads) if (rows * width > SMALL)
    {
        std::vector<Entry> kept;
#pragma omp for
        for (int64_t r = 0; r < rows; r++) top_k(x + r * width, width, k, values + r * k, places + r * k, kept);
    }
}
