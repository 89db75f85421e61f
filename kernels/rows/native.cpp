// CPU operators on rows, between the matrix products of a layer. Arithmetic is float32.

#include <algorithm>
#include <cmath>

#include "../operators.h"
#include "../vectors.h"

namespace {

constexpr int64_t MAX_SERIAL = 1 << 14;  // elements; waking threads pays only for more than these
constexpr int64_t MOST_ROWS = 16;  // of a token, see rows/checks.py

template <typename T, typename W>
void rms_norm(const T* x, const W* weight, T* out, int64_t width, float eps) {
    Floats sum{};
    each(width, [&](int64_t i, auto n) {
        const Floats part = load(x + i, n);
        sum += part * part;
    });
    const float share = 1 / std::sqrt(sum_of(sum) / width + eps);
    each(width, [&](int64_t i, auto n) { store(load(x + i, n) * share * load(weight + i, n), out + i, n); });
}

struct Moments {
    float mean, variance;
};

// The computed mean has a rounding error. Both moments are taken around it and corrected by the mean of the differences
// (Chan et al., 1983), so rows far from 0 lose no precision.
template <typename T>
Moments moments(const T* x, int64_t width) {
    Floats sum{}, left{}, squares{};
    each(width, [&](int64_t i, auto n) { sum += load(x + i, n); });
    const float about = sum_of(sum) / width;
    each(width, [&](int64_t i, auto n) {
        const Floats part = first_lanes(load(x + i, n) - about, n);
        left += part, squares += part * part;
    });
    const float rest = sum_of(left) / width;
    return {about + rest, std::max(sum_of(squares) / width - rest * rest, 0.0f)};
}

template <typename T>
void layer_norm(const T* x, const T* weight, const T* bias, T* out, int64_t width, float eps) {
    const auto [mean, variance] = moments(x, width);
    const float share = 1 / std::sqrt(variance + eps), about = mean;  // a lambda cannot capture a structured binding
    each(width, [&](int64_t i, auto n) {
        store((load(x + i, n) - about) * share * load(weight + i, n) + load(bias + i, n), out + i, n);
    });
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
    if (out != x) std::copy(x + dims, x + head_dim, out + dims);
}

// x times the normal distribution function. The smaller tail is approximated, so neither tail loses precision.
Floats gelu(Floats x) {
    const Floats t = 1 / (1 + 0.35f * (x < 0 ? -x : x));
    Floats y = all(-2.912596377e-02f);  // y * t is the tail divided by e^(-x^2 / 2), within 4e-8
    y = y * t + 1.438726980e-01f;
    y = y * t - 2.555054810e-01f;
    y = y * t + 1.589302857e-01f;
    y = y * t - 2.293778200e-02f;
    y = y * t + 1.054331891e-01f;
    y = y * t + 1.198523792e-01f;
    y = y * t + 1.398590894e-01f;
    y = y * t + 1.396215695e-01f;
    const Floats tail = y * t * exp2_of(x * x * (-0.5f * LOG2_E));  // the mass beyond |x|
    return x * (x < 0 ? tail : 1 - tail);
}

constexpr int64_t CLAMPED_SWIGLU = 7;  // the number after those of ACTIVATIONS in checks.py

// Calls f with the activation of this number (ACTIVATIONS in checks.py).
template <typename F>
void with_activation(int64_t number, F f) {
    if (number == 0) f([](Floats x) { return x < 0 ? Floats{} : x; });
    if (number == 1) f([](Floats x) { return gelu(x); });
    if (number == 2) f([](Floats x) { return times_sigmoid(x, x * (1.59576912f + 0.0713548163f * x * x)); });
    if (number == 3) f([](Floats x) { return times_sigmoid(x, x); });
    if (number == 4) f([](Floats x) { return times_sigmoid(x, 1.702f * x); });
    if (number == 5) f([](Floats x) { return tanh_of(x); });
    if (number == 6) f([](Floats x) { return x < 0 ? Floats{} : x * x; });
}

// e^x - 1 for x <= 0, computed by tanh, so that it stays precise near 0.
Floats expm1_of(Floats x) {
    const Floats t = tanh_of(0.5f * x);
    return 2 * t / (1 - t);
}

// `curve`: see `xielu` in rows/__init__.py.
Floats xielu(Floats x, const float* curve) {
    const Floats least = all(std::min(curve[3], 0.0f)), low = x < least ? x : least;
    return (x > 0 ? curve[0] * x * x : curve[1] * (expm1_of(low) - x)) + curve[2] * x;
}

// A function of its own, because Clang refuses a parallel region in a lambda inside a lambda.
template <typename T, typename F>
void activate(F run, int64_t threads, const T* x, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for num_threads(threads) if (rows * width > MAX_SERIAL)
    for (int64_t r = 0; r < rows; r++)
        each(width, [&](int64_t i, auto n) { store(run(load(x + r * width + i, n)), out + r * width + i, n); });
}

template <typename T, typename F>
void activate_mul(F run, int64_t threads, const T* x, T* out, int64_t rows, int64_t width) {
#pragma omp parallel for num_threads(threads) if (rows * width > MAX_SERIAL)
    for (int64_t r = 0; r < rows; r++) {
        const T* gate = x + r * 2 * width;
        each(width, [&](int64_t i, auto n) {
            store(run(load(gate + i, n), load(gate + width + i, n)), out + r * width + i, n);
        });
    }
}

// NaN is kept.
Floats clamped_swiglu(Floats gate, Floats up) {
    const Floats most = all(7), some = gate > most ? most : gate, near = up > most ? most : up < -most ? -most : up;
    return times_sigmoid(some, 1.702f * some) * (near + 1);
}

// x times log(1 + e^y).
Floats times_softplus(Floats x, Floats y) {
    Floats factors = y;
    for (int i = 0; i < LANES; i++)
        factors[i] = (y[i] < 0 ? 0 : y[i]) + std::log1p(std::exp(-std::abs(y[i])));
    return x * factors;
}

template <typename T, typename F>
void gate(F times, int64_t threads, const T* x, const T* gates, T* out, int64_t rows, int64_t width, int64_t stride,
          int64_t share) {
#pragma omp parallel for num_threads(threads) if (rows * width > MAX_SERIAL)
    for (int64_t r = 0; r < rows; r++) {
        const T *from = x + r * width, *gate = gates + r * stride;
        T* to = out + r * width;
        if (share == 1)
            each(width, [&](int64_t i, auto n) {
                store(times(load(from + i, n), load(gate + i, n)), to + i, n);
            });
        for (int64_t at = 0; share > 1 && at < width; at += share) {
            const Floats own = all(load(gate + at / share, 1)[0]);
            each(share, [&](int64_t i, auto n) {
                store(times(load(from + at + i, n), own), to + at + i, n);
            });
        }
    }
}

template <typename T>
void sparsify(const T* x, T* out, int64_t width, float factor) {
    const Moments row = moments(x, width);
    const float least = row.mean + factor * std::sqrt(row.variance);
    each(width, [&](int64_t i, auto n) {
        const Floats part = load(x + i, n) - least;
        store(part < 0 ? Floats{} : part, out + i, n);
    });
    if (out != x) std::copy(x + width, x + 2 * width, out + width);
}

// `more` may be x: a column is read in all rows before it is written.
template <typename T>
void add_weighted(const T* x, const T* more, const T* weights, T* out, int64_t rows, int64_t sources, int64_t width) {
    each(width, [&](int64_t i, auto n) {
        Floats sums[MOST_ROWS];
        for (int64_t r = 0; r < rows; r++) {
            sums[r] = load(x + r * width + i, n);
            for (int64_t m = 0; m < sources; m++)
                sums[r] += load(weights + r * sources + m, 1)[0] * load(more + m * width + i, n);
        }
        for (int64_t r = 0; r < rows; r++) store(sums[r], out + r * width + i, n);
    });
}

}  // namespace

extern "C" void coppice_rms_norm(int64_t kind, int64_t threads, const void* x, const void* weight, void* out,
                                 int64_t rows, int64_t width, float eps, int64_t exact) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
        const auto all = [&](auto* vector) {
#pragma omp parallel for num_threads(threads) if (rows * width > MAX_SERIAL)
            for (int64_t r = 0; r < rows; r++)
                rms_norm((const T*)x + r * width, vector, (T*)out + r * width, width, eps);
        };
        exact ? all((const float*)weight) : all((const T*)weight);
    });
}

extern "C" void coppice_layer_norm(int64_t kind, int64_t threads, const void* x, const void* weight, const void* bias,
                                   void* out, int64_t rows, int64_t width, float eps) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (rows * width > MAX_SERIAL)
        for (int64_t r = 0; r < rows; r++)
            layer_norm((const T*)x + r * width, (const T*)weight, (const T*)bias, (T*)out + r * width, width, eps);
    });
}

extern "C" void coppice_head_norm(int64_t kind, int64_t threads, void* x, const void* weight, const void* bias,
                                  int64_t tokens, int64_t heads, int64_t head_dim, int64_t token_stride, int64_t step,
                                  float eps, int64_t exact) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_dim > MAX_SERIAL)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t h = 0; h < heads; h++) {
                T* row = (T*)x + t * token_stride + h * head_dim;
                const T *w = (const T*)weight + h * step, *b = bias ? (const T*)bias + h * step : nullptr;
                if (b)
                    layer_norm(row, w, b, row, head_dim, eps);
                else if (exact)
                    rms_norm(row, (const float*)weight + h * step, row, head_dim, eps);
                else
                    rms_norm(row, w, row, head_dim, eps);
            }
    });
}

extern "C" void coppice_rotary(int64_t kind, int64_t threads, const void* x, const void* cos, const void* sin,
                               void* out, int64_t tokens, int64_t heads, int64_t head_dim, int64_t dims,
                               int64_t token_stride, int64_t head_stride, int64_t out_stride) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_dim > MAX_SERIAL)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t h = 0; h < heads; h++)
                rotary((const T*)x + t * token_stride + h * head_stride, (const T*)cos + t * dims,
                       (const T*)sin + t * dims, (T*)out + t * out_stride + h * head_dim, head_dim, dims);
    });
}

extern "C" void coppice_activation_mul(int64_t kind, int64_t threads, int64_t number, const void* x, void* out,
                                       int64_t rows, int64_t width) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
        if (number == CLAMPED_SWIGLU)
            return activate_mul(clamped_swiglu, threads, (const T*)x, (T*)out, rows, width);
        with_activation(number, [&](auto run) {
            const auto gated = [&](Floats gate, Floats up) { return run(gate) * up; };
            activate_mul(gated, threads, (const T*)x, (T*)out, rows, width);
        });
    });
}

extern "C" void coppice_sigmoid_mul(int64_t kind, int64_t threads, const void* x, const void* gates, void* out,
                                    int64_t rows, int64_t width, int64_t stride, int64_t share, int64_t softplus) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        const auto run = [&](auto times) {
            gate(times, threads, (const T*)x, (const T*)gates, (T*)out, rows, width, stride, share);
        };
        softplus ? run([](Floats a, Floats b) { return times_softplus(a, b); })
                 : run([](Floats a, Floats b) { return times_sigmoid(a, b); });
    });
}

extern "C" void coppice_activation(int64_t kind, int64_t threads, int64_t number, const void* x, void* out,
                                   int64_t rows, int64_t width) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
        with_activation(number, [&](auto run) { activate(run, threads, (const T*)x, (T*)out, rows, width); });
    });
}

extern "C" void coppice_xielu(int64_t kind, int64_t threads, const void* x, const float* curve, void* out, int64_t rows,
                              int64_t width) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
        activate([=](Floats part) { return xielu(part, curve); }, threads, (const T*)x, (T*)out, rows, width);
    });
}

extern "C" void coppice_sparsify(int64_t kind, int64_t threads, const void* x, void* out, int64_t rows, int64_t width,
                                 float factor) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (rows * width > MAX_SERIAL)
        for (int64_t r = 0; r < rows; r++)
            sparsify((const T*)x + 2 * r * width, (T*)out + 2 * r * width, width, factor);
    });
}

extern "C" void coppice_add_weighted(int64_t kind, int64_t threads, const void* x, const void* more,
                                     const void* weights, void* out, int64_t tokens, int64_t rows, int64_t sources,
                                     int64_t width) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (tokens * rows * width > MAX_SERIAL)
        for (int64_t t = 0; t < tokens; t++)
            add_weighted((const T*)x + t * rows * width, (const T*)more + t * sources * width,
                         (const T*)weights + t * rows * sources, (T*)out + t * rows * width, rows, sources, width);
    });
}
