// Products of a few rows with a matrix that oneDNN packed, at the bandwidth of memory. oneDNN stores panels of 64
// outputs one after the other. For each 32-bit word of a row of x (one float32, two bfloat16 or four int8) a panel has
// the 64 words to multiply it with, padded with zeros to a multiple of 16 words of depth. The sums of all rows stay in
// registers while half a panel streams by, or a whole panel if there are few rows.

#include <algorithm>
#include <cstddef>
#include <vector>

#include "../operators.h"
#include "../vectors.h"

namespace {

constexpr int PANEL = 64;                // words
constexpr int ROWS = 15;                 // the most whose sums with half a panel fit into the registers
constexpr int MAX_WHOLE_PANEL_ROWS = 7;  // the most whose sums with a whole panel do
constexpr int CHUNK = 256;               // words with a sum of their own, so that long rows lose no precision
constexpr int LEAD = 4096;               // words between a prefetch, into the second-level cache, and its use

// COUNT rows of x, `words` long and `stride` apart, times a panel; finish(vector, COUNT, sum_of) takes the sums, which
// are sum_of(row). However many passes a chunk of the panel takes, it is fetched in the order in which it lies.
template <typename Element, int COUNT, typename Finish>
void panel_product(const int32_t* x, int64_t stride, const int32_t* panel, int64_t words, Finish finish) {
    constexpr int VECTORS = PANEL / LANES / (COUNT <= MAX_WHOLE_PANEL_ROWS ? 1 : 2), PASSES = PANEL / LANES / VECTORS;
    typename Element::Sum totals[PASSES][COUNT][VECTORS] = {};
    for (int64_t first = 0; first < words; first += CHUNK) {
        const int64_t end = std::min(words, first + CHUNK);
        const int32_t* ahead = panel + first * PANEL + LEAD + (PASSES - 1) * CHUNK * VECTORS * LANES;
        for (int pass = 0; pass < PASSES; pass++) {
            const int32_t* part = panel + pass * VECTORS * LANES;
            typename Element::Sum sums[COUNT][VECTORS] = {};
            for (int64_t i = first; i < end; i++, ahead += VECTORS * LANES) {
                Ints w[VECTORS];
                for (int v = 0; v < VECTORS; v++) {
                    __builtin_prefetch(ahead + v * LANES, 0, 1);
                    std::memcpy(&w[v], part + i * PANEL + v * LANES, sizeof w[v]);
                }
                for (int row = 0; row < COUNT; row++)
                    for (int v = 0; v < VECTORS; v++)
                        sums[row][v] = Element::add(sums[row][v], w[v], x[row * stride + i]);
            }
            for (int row = 0; row < COUNT; row++)
                for (int v = 0; v < VECTORS; v++) totals[pass][row][v] += sums[row][v];
        }
    }
    for (int v = 0; v < PASSES * VECTORS; v++)
        finish(v, COUNT, [&](int row) { return totals[v / VECTORS][row][v % VECTORS]; });
}

template <typename Element, int COUNT = ROWS, typename Finish>
void some_rows(int count, const int32_t* x, int64_t stride, const int32_t* panel, int64_t words, Finish finish) {
    if (count == COUNT) return panel_product<Element, COUNT>(x, stride, panel, words, finish);
    if constexpr (COUNT > 1) some_rows<Element, COUNT - 1>(count, x, stride, panel, words, finish);
}

// Rows at multiples of 2 KiB share few sets of the first-level cache: they are copied to another distance.
const int32_t* apart(const int32_t* x, int64_t rows, int64_t words, int64_t& stride) {
    static thread_local std::vector<int32_t> copy;
    stride = words;
    if (rows <= MAX_WHOLE_PANEL_ROWS || words % 512) return x;
    stride += 16;
    copy.resize(rows * stride);
    for (int64_t row = 0; row < rows; row++) std::memcpy(&copy[row * stride], x + row * words, 4 * words);
    return copy.data();
}

// prepare(row) makes a row of x first; finish(first row, rows, first output, outputs, sum_of) as above.
template <typename Element, typename Prepare, typename Finish>
void product(int64_t threads, const void* x, const void* packed, int64_t rows, int64_t words, int64_t outs,
             Prepare prepare, Finish finish) {
    const int64_t groups = (rows + ROWS - 1) / ROWS, depth = (words + 15) / 16 * 16;
#pragma omp parallel num_threads(threads)
    {
        if constexpr (!std::is_same_v<Prepare, std::nullptr_t>) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) prepare(row);
        }
        int64_t stride;
        const int32_t* own = apart((const int32_t*)x, rows, words, stride);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < outs; first += PANEL)
            for (int64_t group = 0; group < groups; group++) {
                const int64_t row = rows * group / groups, end = rows * (group + 1) / groups;
                const int32_t* panel = (const int32_t*)packed + first * depth;
                some_rows<Element>(end - row, own + row * stride, stride, panel, words,
                                   [&](int v, int count, auto sum_of) {
                                       const int64_t out = first + v * LANES;
                                       if (out < outs)
                                           finish(row, count, out, int(std::min<int64_t>(LANES, outs - out)), sum_of);
                                   });
            }
    }
}

// A row in steps of 1 / 127 of its largest magnitude, which is returned; 128 stands for 0.
template <typename T>
float quantize(const T* x, uint8_t* steps, int64_t width) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    Floats most{};
    each(width, [&](int64_t i, auto n) {
        const Floats part = load(x + i, n), size = part < 0 ? -part : part;
        most = (size > most) | (size != size) ? size : most;  // NaN wins
    });
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        if (most[lane] > largest || most[lane] != most[lane]) largest = most[lane];
    const float scale = 127 / largest;
    each(width, [&](int64_t i, auto n) {
        const Bytes bytes =
            __builtin_convertvector(__builtin_convertvector(load(x + i, n) * scale + 128.5f, Ints), Bytes);
        std::memcpy(steps + i, &bytes, n);
    });
    return largest;
}

}  // namespace

extern "C" void coppice_linear_kinds(int64_t* kinds) {
    *kinds = 0;
#ifdef __AVX512F__
    *kinds |= 1;
#endif
#ifdef __AVX512BF16__
    *kinds |= 2;
#endif
#ifdef __AVX512VNNI__
    *kinds |= 4;
#endif
}

extern "C" void coppice_linear(int64_t kind, int64_t threads, const void* x, const void* packed, const void* bias,
                               void* out, int64_t rows, int64_t words, int64_t outs) {
    auto run = [&](auto element, auto type) {
        typedef decltype(type) T;
        auto finish = [&](int64_t row, int count, int64_t at, int n, auto sum_of) {
            const Floats more = bias ? load((const T*)bias + at, n) : Floats{};
            for (int r = 0; r < count; r++) store(sum_of(r) + more, (T*)out + (row + r) * outs + at, n);
        };
        product<decltype(element)>(threads, x, packed, rows, words, outs, nullptr, finish);
    };
    if (kind == 0) run(Float32{}, float{});
#ifdef __AVX512BF16__
    if (kind == 1) run(TwoBFloat16{}, BFloat16{});
#endif
}

extern "C" void coppice_quantize(int64_t kind, int64_t threads, const void* x, uint8_t* steps, void* top, int64_t rows,
                                 int64_t width) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
#pragma omp parallel for num_threads(threads)
        for (int64_t r = 0; r < rows; r++)
            store(all(quantize((const T*)x + r * width, steps + r * width, width)), (T*)top + r, 1);
    });
}

extern "C" void coppice_int8_linear(int64_t kind, int64_t threads, const void* x, const void* packed,
                                    const int32_t* sums, const float* scale, const void* bias, void* out, int64_t rows,
                                    int64_t width, int64_t outs) {
#ifdef __AVX512VNNI__
    std::vector<uint8_t> steps(rows * width);
    std::vector<float> top(rows);
    auto round = [&](int64_t row) {
        with_type(kind, [&](auto type) {
            top[row] = quantize((const decltype(type)*)x + row * width, &steps[row * width], width);
        });
    };
    auto finish = [&](int64_t row, int count, int64_t at, int n, auto sum_of) {
        with_type(kind, [&](auto type) {
            typedef decltype(type) T;
            const Ints offset = 128 * read<Ints>(sums + at, n);
            const Floats unit = load(scale + at, n), more = bias ? load((const T*)bias + at, n) : Floats{};
            for (int r = 0; r < count; r++) {
                const Floats exact = __builtin_convertvector(sum_of(r) - offset, Floats);
                store(exact * unit * top[row + r] + more, (T*)out + (row + r) * outs + at, n);
            }
        });
    };
    product<FourInt8>(threads, steps.data(), packed, rows, width / 4, outs, round, finish);
#endif
}
