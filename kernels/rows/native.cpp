// Operators on rows, on a CPU: between the matrix products of a layer, and on logits and log-probabilities.
// Arithmetic is float32.

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "../operators.h"
#include "../vectors.h"

namespace {

constexpr int64_t MAX_SERIAL = 1 << 14;  // elements; only for more is it worth waking threads

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

// The computed mean is off by its rounding. Both moments are taken around it and corrected by the mean of the
// differences (Chan et al., 1983), so that a row far from 0 loses no precision.
template <typename T>
void layer_norm(const T* x, const T* weight, const T* bias, T* out, int64_t width, float eps) {
    Floats sum{}, left{}, squares{};
    each(width, [&](int64_t i, auto n) { sum += load(x + i, n); });
    const float about = sum_of(sum) / width;
    each(width, [&](int64_t i, auto n) {
        Floats part = load(x + i, n) - about;
        for (int lane = n; lane < LANES; lane++) part[lane] = 0;
        left += part, squares += part * part;
    });
    const float rest = sum_of(left) / width, mean = about + rest;
    const float share = 1 / std::sqrt(std::max(sum_of(squares) / width - rest * rest, 0.0f) + eps);
    each(width, [&](int64_t i, auto n) {
        store((load(x + i, n) - mean) * share * load(weight + i, n) + load(bias + i, n), out + i, n);
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

// x times the logistic function of y.
Floats times_sigmoid(Floats x, Floats y) {
    const Floats e = exp2_of((y < 0 ? y : -y) * LOG2_E);  // the function is e / (1 + e) or 1 / (1 + e)
    return x * (y < 0 ? e : all(1)) / (1 + e);
}

// x times the normal distribution function. Approximated is the smaller part of the mass, so that neither loses
// precision.
Floats gelu(Floats x) {
    const Floats t = 1 / (1 + 0.35f * (x < 0 ? -x : x));
    Floats y = all(-2.912596377e-02f);  // y * t is the tail over e^(-x^2 / 2), within 4e-8 of it
    y = y * t + 1.438726980e-01f;
    y = y * t - 2.555054810e-01f;
    y = y * t + 1.589302857e-01f;
    y = y * t - 2.293778200e-02f;
    y = y * t + 1.054331891e-01f;
    y = y * t + 1.198523792e-01f;
    y = y * t + 1.398590894e-01f;
    y = y * t + 1.396215695e-01f;
    const Floats tail = y * t * exp2_of(x * x * (-0.5f * LOG2_E));  // the mass past |x|
    return x * (x < 0 ? tail : 1 - tail);
}

constexpr int64_t CLAMPED_SWIGLU = 7;  // after the ACTIVATIONS in checks.py

// Calls f with the function that Python numbers so (ACTIVATIONS in checks.py).
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

// Outside the function that calls it: Clang refuses a parallel region in a lambda in a lambda.
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

// NaN stays.
Floats clamped_swiglu(Floats gate, Floats up) {
    const Floats most = all(7), some = gate > most ? most : gate, near = up > most ? most : up < -most ? -most : up;
    return times_sigmoid(some, 1.702f * some) * (near + 1);
}

template <typename T>
void sigmoid_mul(int64_t threads, const T* x, const T* gates, T* out, int64_t rows, int64_t width, int64_t stride) {
#pragma omp parallel for num_threads(threads) if (rows * width > MAX_SERIAL)
    for (int64_t r = 0; r < rows; r++)
        each(width, [&](int64_t i, auto n) {
            store(times_sigmoid(load(x + r * width + i, n), load(gates + r * stride + i, n)), out + r * width + i, n);
        });
}

// The largest of some elements, of which `read` returns n from the i-th on.
template <typename F>
float peak_of(int64_t width, F read) {
    Floats most = all(-INFINITY);
    each(width, [&](int64_t i, auto n) {
        const Floats some = read(i, n);
        if (n == LANES) most = larger(some, most);
        for (int j = n == LANES ? n : 0; j < n; j++) most[0] = std::max(most[0], some[j]);
    });
    return largest_of(most);
}

// Log-probabilities of a row are its logits less these.
struct Mass {
    float top, log_mass;
    bool finite;  // all logits
};

// The peaks become those of log-probabilities.
template <typename T>
Mass mass_and_peaks(const T* x, float* peaks, int64_t width) {
    Floats strange{};
    float top = -INFINITY;
    for (int64_t at = 0; at < width; at += SPAN) {
        const float peak = peak_of(std::min(SPAN, width - at), [&](int64_t i, auto n) {
            const Floats some = load(x + at + i, n);
            strange += some - some;  // 0, or NaN
            return some;
        });
        top = std::max(top, peaks[at / SPAN] = peak);
    }
    const float log_mass = std::log(mass_of(x, width, top, LOG2_E));
    for (int64_t at = 0; at < width; at += SPAN) peaks[at / SPAN] = peaks[at / SPAN] - top - log_mass;
    return {top, log_mass, sum_of(strange) == 0};
}

// Rows of float32; places are indices into all of them.
struct Rows {
    const float* x;
    const int64_t width;

    template <typename N>
    Floats read(int64_t, int64_t place, N n) const {
        return load(x + place, n);
    }
    void prefetch(int64_t place, int64_t size) const {
        for (int64_t byte = 0; byte < 4 * size; byte += 64) __builtin_prefetch((const char*)(x + place) + byte);
    }
};

// Log-probabilities of rows of logits, computed where they are read.
template <typename T>
struct Logits {
    const T* x;
    const int64_t width;
    const Mass* mass;

    template <typename N>
    Floats read(int64_t row, int64_t place, N n) const {
        return load(x + place, n) - mass[row].top - mass[row].log_mass;
    }
    void prefetch(int64_t place, int64_t size) const {
        for (int64_t byte = 0; byte < int64_t(sizeof(T)) * size; byte += 64)
            __builtin_prefetch((const char*)(x + place) + byte);
    }
};

// The largest of each block of the first elements of a row.
template <typename R>
void find_peaks(const R& rows, int64_t row, int64_t size, int64_t block, float* peaks) {
    for (int64_t at = 0; at < size; at += block)
        *peaks++ = peak_of(std::min(block, size - at),
                           [&](int64_t i, auto n) { return rows.read(row, row * rows.width + at + i, n); });
}

// Log-probabilities of a row, -inf from the size-th on, and their peaks. Returns whether all of it is finite.
template <typename T>
bool log_softmax(const T* x, float* out, float* peaks, int64_t width, int64_t size) {
    const Mass mass = mass_and_peaks(x, peaks, width);
    const Logits<T> logits{x, width, &mass};
    each(width, [&](int64_t i, auto n) { store(logits.read(0, i, n), out + i, n); });
    if (size < width) {
        std::fill(out + size, out + width, -INFINITY);
        const int64_t whole = size / SPAN * SPAN;
        find_peaks(Rows{out + whole, width - whole}, 0, width - whole, SPAN, peaks + whole / SPAN);
    }
    return mass.finite;
}

struct Entry {
    float value;
    int64_t place;
};

// Finds the k largest elements of rows, sorted; ties go to the lower index. They are no smaller than the k-th largest
// of the blocks' maxima, so that few blocks are searched.
class Leaders {
  public:
    std::vector<Entry> found;  // the k, then other candidates; places are indices into all rows

    // The first `size` elements of each row; `sums` are added to rows if there are any. `given` are the peaks of blocks
    // of SPAN of each row.
    template <typename R>
    void find(const R& x, int64_t rows, int64_t size, int64_t k, const float* given, const float* sums) {
        int64_t block = std::clamp<int64_t>(rows * size / (2 * k) / LANES * LANES, LANES, SPAN);
        if (block < SPAN) given = nullptr;
        const int64_t blocks = (size + block - 1) / block;
        peaks.resize(rows * blocks);
        for (int64_t r = 0; r < rows; r++) {
            float* mine = peaks.data() + r * blocks;
            if (given)
                std::copy_n(given + r * blocks, blocks, mine);
            else
                find_peaks(x, r, size, block, mine);
            for (int64_t b = 0; sums && b < blocks; b++) mine[b] += sums[r];
        }
        float least = -INFINITY;
        if (int64_t(peaks.size()) >= k) {
            ranked = peaks;
            least = about_largest(ranked, k);
        }
        near.clear();
        each(peaks.size(), [&](int64_t i, auto n) {
            uint32_t bits = ~bits_of(load(peaks.data() + i, n) < least) & ((uint64_t(1) << n) - 1);
            for (; bits; bits &= bits - 1) {
                const int64_t r = (i + __builtin_ctz(bits)) / blocks, at = (i + __builtin_ctz(bits)) % blocks * block;
                near.push_back({r, r * x.width + at, std::min(block, size - at)});
                x.prefetch(near.back().first, block);
            }
        });
        found.clear();
        int64_t equal = 0;  // to `least`; no more than k are looked at
        for (const Block& some : near) {
            const float sum = sums ? sums[some.row] : 0;
            each(some.size, [&](int64_t i, auto n) {
                const Floats part = x.read(some.row, some.first + i, n) + sum;
                const Ints low = equal < k ? part < least : part <= least;
                uint32_t bits = ~bits_of(low) & ((uint64_t(1) << n) - 1);  // NaN is not low, so that there are k
                for (; bits; bits &= bits - 1) {
                    const int lane = __builtin_ctz(bits);
                    found.push_back({part[lane], some.first + i + lane});
                    equal += part[lane] == least;
                }
            });
        }
        std::partial_sort(found.begin(), found.begin() + k, found.end(), [](const Entry& a, const Entry& b) {
            return a.value > b.value || (a.value == b.value && a.place < b.place);
        });
    }

    void write(int64_t k, double* out) const {
        for (int64_t i = 0; i < k; i++) out[i] = found[i].value, out[k + i] = found[i].place;
    }

    // The first of k places for values, and of as many for their places; returns how many are more than -inf.
    int64_t write_finite(int64_t count, int64_t k, double* out) const {
        int64_t i = 0;
        for (; i < count && found[i].value > -INFINITY; i++) out[i] = found[i].value, out[k + i] = found[i].place;
        return i;
    }

  private:
    struct Block {
        int64_t row, first, size;
    };
    std::vector<float> peaks, ranked;
    std::vector<Block> near;
};

// The masses of rows, and the peaks of their first `size` elements. Outside the function that calls it, for Clang.
template <typename T>
void measure(const T* x, Mass* mass, float* peaks, int64_t threads, int64_t rows, int64_t width, int64_t size) {
    const int64_t blocks = (size + SPAN - 1) / SPAN, all = (width + SPAN - 1) / SPAN;
#pragma omp parallel num_threads(threads) if (rows > 1 && rows * width > MAX_SERIAL)
    {
        std::vector<float> found(all);
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            mass[r] = mass_and_peaks(x + r * width, found.data(), width);
            std::copy_n(found.data(), blocks, peaks + r * blocks);
            if (const int64_t last = (blocks - 1) * SPAN; size < width && size)
                find_peaks(Logits<T>{x + r * width + last, width, mass + r}, 0, size - last, SPAN,
                           peaks + (r + 1) * blocks - 1);
        }
    }
}

// The first k values that are at least `least`, then their places; NaN where there are fewer.
void at_least(const float* x, const float* peaks, int64_t width, float least, int64_t k, double* out) {
    int64_t found = 0;
    for (int64_t b = 0; b * SPAN < width && found < k; b++) {
        if (peaks && peaks[b] < least) continue;
        each(std::min(SPAN, width - b * SPAN), [&](int64_t i, auto n) {
            const float* from = x + b * SPAN + i;
            uint32_t bits = bits_of(load(from, n) >= least) & ((uint64_t(1) << n) - 1);
            for (; bits && found < k; bits &= bits - 1, found++) {
                const int lane = __builtin_ctz(bits);
                out[found] = from[lane], out[k + found] = b * SPAN + i + lane;
            }
        });
    }
    for (; found < k; found++) out[found] = out[k + found] = NAN;
}

// See reference.mix.
Words mix(Words x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}

// A number u in (0, 1) makes noise -log(-log(u)) of a sum that reaches the best so far only if -log(u), which is no
// less than 1 - u, is at most the ratio of the token's probability to the one that would tie without noise. Few sums
// are taken, so that there are few logarithms.
int64_t gumbel_argmax(const float* logp, int64_t width, uint32_t one, uint32_t two) {
    constexpr float SHARE = 0.9999 / 4294967296.0;  // of a bit; less, as there is rounding
    float best = -INFINITY;
    int64_t place = 0;
    Words token{};
    for (int lane = 0; lane < LANES; lane++) token[lane] = lane;
    each(width, [&](int64_t at, auto n) {
        const Words bits = mix(mix((token + uint32_t(at)) ^ one) + two);
        const Floats ahead = (load(logp + at, n) - best) * LOG2_E;
        const Floats least = __builtin_convertvector(~bits, Floats) * SHARE;
        uint32_t may = bits_of(least <= exp2_of(ahead < 0 ? ahead : Floats{})) & ((uint64_t(1) << n) - 1);
        for (; may; may &= may - 1) {
            const int lane = __builtin_ctz(may);
            const double u = (bits[lane] + 0.5) / 4294967296.0;
            const float sum = logp[at + lane] + float(-std::log(-std::log(u)));
            if (sum > best) best = sum, place = at + lane;
        }
    });
    return place;
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
                                    int64_t rows, int64_t width, int64_t stride) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        sigmoid_mul(threads, (const T*)x, (const T*)gates, (T*)out, rows, width, stride);
    });
}

extern "C" void coppice_activation(int64_t kind, int64_t threads, int64_t number, const void* x, void* out,
                                   int64_t rows, int64_t width) {
    with_type(kind, [&](auto type) {
        using T = decltype(type);
        with_activation(number, [&](auto run) { activate(run, threads, (const T*)x, (T*)out, rows, width); });
    });
}

extern "C" void coppice_log_softmax(int64_t kind, int64_t threads, const void* x, float* out, bool* finite,
                                    float* peaks, int64_t rows, int64_t width, int64_t size) {
    const int64_t blocks = (width + SPAN - 1) / SPAN;
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width > MAX_SERIAL)
        for (int64_t r = 0; r < rows; r++)
            finite[r] = log_softmax((const T*)x + r * width, out + r * width, peaks + r * blocks, width, size);
    });
}

extern "C" void coppice_top_k(int64_t threads, const float* x, double* out, int64_t rows, int64_t width, int64_t k) {
    if (!k) return;
#pragma omp parallel num_threads(threads) if (rows * width > 4 * MAX_SERIAL)
    {
        Leaders leaders;
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            leaders.find(Rows{x + r * width, width}, 1, width, k, nullptr, nullptr);
            leaders.write(k, out + 2 * r * k);
        }
    }
}

extern "C" void coppice_top_sums(const float* x, const float* peaks, const float* sums, double* out, int64_t rows,
                                 int64_t width, int64_t k) {
    Leaders leaders;
    leaders.find(Rows{x, width}, rows, width, k, peaks, sums);
    leaders.write(k, out);
}

extern "C" void coppice_top_sums_of_logits(int64_t kind, int64_t threads, const void* x, bool* finite, double* out,
                                           const float* sums, int64_t* parts, int64_t count, int64_t rows,
                                           int64_t width, int64_t size) {
    const int64_t blocks = (size + SPAN - 1) / SPAN;
    std::vector<Mass> mass(rows);
    std::unique_ptr<float[]> peaks(new float[rows * blocks]);
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        measure((const T*)x, mass.data(), peaks.get(), threads, rows, width, size);
        Leaders leaders;
        int64_t first = 0;
        for (int64_t* part = parts; part < parts + 3 * count; part += 3) {
            const int64_t k = part[1], most = std::min(k, part[0] * size);
            leaders.find(Logits<T>{(const T*)x + first * width, width, mass.data() + first}, part[0], size, most,
                         peaks.get() + first * blocks, sums + first);
            part[2] = leaders.write_finite(most, k, out);
            first += part[0], out += 2 * k;
        }
    });
    for (int64_t r = 0; r < rows; r++) finite[r] = mass[r].finite;
}

extern "C" void coppice_at_least(const float* x, const float* peaks, double* out, int64_t rows, int64_t width,
                                 int64_t k, float least) {
    const int64_t blocks = (width + SPAN - 1) / SPAN;
    for (int64_t r = 0; r < rows; r++)
        at_least(x + r * width, peaks ? peaks + r * blocks : nullptr, width, least, k, out + 2 * r * k);
}

extern "C" void coppice_gumbel_argmax(int64_t threads, const float* logp, const uint32_t* keys, int64_t* tokens,
                                      int64_t rows, int64_t width) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width > MAX_SERIAL)
    for (int64_t r = 0; r < rows; r++) tokens[r] = gumbel_argmax(logp + r * width, width, keys[2 * r], keys[2 * r + 1]);
}

extern "C" void coppice_window_max(int64_t threads, const float* tape, const int64_t* starts, const float* sums,
                                   float* out, int64_t rows, int64_t windows, int64_t width) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * windows * width > 4 * MAX_SERIAL)
    for (int64_t r = 0; r < rows; r++)
        each(width, [&](int64_t i, auto n) {
            Floats most = all(-INFINITY);
            for (int64_t w = r * windows; w < (r + 1) * windows; w++)
                if (sums[w] > -INFINITY) most = larger(load(tape + starts[w] + i, n) + sums[w], most);
            store(most, out + r * width + i, n);
        });
}

extern "C" void coppice_window_wins(int64_t threads, const float* tape, const int64_t* starts, const float* sums,
                                    const float* best, int64_t* out, int64_t rows, int64_t windows, int64_t width) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * windows * width > 4 * MAX_SERIAL)
    for (int64_t w = 0; w < rows * windows; w++) {
        Ints won{};
        each(width, [&](int64_t i, auto n) {
            Ints above = load(tape + starts[w] + i, n) + sums[w] >= load(best + i, n);
            for (int lane = n; lane < LANES; lane++) above[lane] = 0;
            won -= above;
        });
        out[w] = 0;
        for (int lane = 0; lane < LANES && sums[w] > -INFINITY; lane++) out[w] += won[lane];
    }
}
