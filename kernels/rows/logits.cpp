// CPU operators on rows of logits and log-probabilities. Arithmetic is float32.

#include <algorithm>
#include <memory>
#include <vector>

#include "../operators.h"
#include "../vectors.h"

namespace {

constexpr int64_t MAX_SERIAL = 1 << 14;  // elements; waking threads pays only for more than these

// The largest of `width` elements; read(i, n) returns n of them from the i-th on.
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

// The log-probabilities of a row are its logits minus top and log_mass.
struct Mass {
    float top, log_mass;
    bool finite;  // all logits are
};

// Computes a row's mass and the peaks of its log-probabilities.
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

// Rows of float32. A place is an index into all rows together.
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

// Log-probabilities of rows of logits, computed on reading.
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

// The largest element of each block of the row's first `size` elements.
template <typename R>
void find_peaks(const R& rows, int64_t row, int64_t size, int64_t block, float* peaks) {
    for (int64_t at = 0; at < size; at += block)
        *peaks++ = peak_of(std::min(block, size - at),
                           [&](int64_t i, auto n) { return rows.read(row, row * rows.width + at + i, n); });
}

// Writes the log-probabilities of a row (-inf from the size-th on) and their peaks. Returns whether all are finite.
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

// Finds the k largest elements of some rows, sorted; ties go to the lower index. None is smaller than the k-th largest
// block maximum, so few blocks are searched.
class Leaders {
  public:
    std::vector<Entry> found;  // the k largest, then other candidates; places are indices into all rows

    // Searches the first `size` elements of each row. `sums` are added to rows, unless null. `given`: the peaks of each
    // row's blocks of SPAN, or null.
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
        int64_t equal = 0;  // to `least`; at most k of them are needed
        for (const Block& some : near) {
            const float sum = sums ? sums[some.row] : 0;
            each(some.size, [&](int64_t i, auto n) {
                const Floats part = x.read(some.row, some.first + i, n) + sum;
                const Ints low = equal < k ? part < least : part <= least;
                uint32_t bits = ~bits_of(low) & ((uint64_t(1) << n) - 1);  // NaN is not low, so at least k remain
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

    // Writes values to the first of k numbers and their places to k further ones. Returns how many exceed -inf.
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

// Computes the masses of rows and the peaks of their first `size` elements. Clang needs this outside its caller.
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

// Writes the first k values that are at least `least`, then their places; NaN where there are fewer.
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

// Draws a token by the Gumbel-max trick. The noise of a uniform number u is -log(-log(u)). A sum reaches the best so
// far only if -log(u), which is at least 1 - u, is at most the ratio of the token's probability to the one that would
// tie without noise. This cheap test excludes nearly all tokens, so few logarithms are computed.
int64_t gumbel_argmax(const float* logp, int64_t width, uint32_t one, uint32_t two) {
    constexpr float SHARE = 0.9999 / 4294967296.0;  // of the lowest bit, reduced for rounding
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
            const Ints above = load(tape + starts[w] + i, n) + sums[w] >= load(best + i, n);
            won -= first_lanes(above, n);
        });
        out[w] = 0;
        for (int lane = 0; lane < LANES && sums[w] > -INFINITY; lane++) out[w] += won[lane];
    }
}
