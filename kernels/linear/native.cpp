// Products of rows with a packed matrix (layout: panels.py): one row at the bandwidth of memory, many at the rate of
// the processor's multiplications, any number by the same code.
//
// A thread takes PIECE outputs at a time. Of these a set of vectors runs down its panels; the sums of a block of rows
// with the set stay in registers for a chunk of the width, and are then added to totals. So long rows lose no precision,
// and a row gets the same sums whatever rows are beside it. A chunk comes from memory once: the first block reads it
// first, and all blocks together fetch what lies AHEAD.

#include <algorithm>
#include <cstddef>
#include <memory>

#include "../operators.h"
#include "../vectors.h"
#include "elements.h"

namespace {

constexpr int PANEL = 16;     // outputs side by side
constexpr int PIECE = 64;     // outputs
constexpr int GROUP = 60;     // rows that share a fetch from the second-level cache
constexpr int AHEAD = 8192;   // bytes
constexpr int LEAST = LANES == PANEL ? 2 : PANEL / LANES;  // vectors per row of a set
constexpr int OWN_ROWS = 16;  // prepared by each thread for itself, as waiting for the others would take longer

// Whether the sums of a block and the vectors that it multiplies by fit into the registers.
template <typename Element>
constexpr bool fits(int rows, int vectors) {
    return rows * vectors + vectors * Element::VECTORS + SPARE_REGISTERS <= REGISTERS;
}

template <typename Element>
constexpr int max_rows(int vectors) {
    int rows = 1;
    while (fits<Element>(rows + 1, vectors)) rows++;
    return rows;
}

// Vectors of sums per row of a set: a piece if the rows are so few that it fits.
template <typename Element>
constexpr int vectors_for(int rows) {
    int vectors = PIECE / LANES;
    while (vectors > LEAST && !fits<Element>(rows, vectors)) vectors /= 2;
    return vectors;
}

// Rows as an element type multiplies by them, `stride` apart.
template <typename Element>
struct Rows {
    typename Element::Row* data;
    int64_t stride;
    Unit* units;  // one for each row
};

// Where a chunk of a set's first panel lies, and bytes from one panel to the next.
struct Chunk {
    const char* at;
    int64_t across, steps;
};

template <typename Element, int VECTORS, int COUNT>
void add_block(const typename Element::Row* x, int64_t stride, Chunk chunk, int64_t first, int64_t last,
               typename Element::Sum (*totals)[VECTORS]) {
    constexpr int LINE = PANEL * Element::BYTES, EACH = PANEL / LANES;
    typename Element::Sum sums[COUNT][VECTORS] = {};
    auto step = [&](int64_t i) {
        typename Element::Part part[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            part[v] = Element::load(chunk.at + v / EACH * chunk.across + i * LINE + v % EACH * LANES * Element::BYTES);
        for (int row = 0; row < COUNT; row++)
            for (int v = 0; v < VECTORS; v++)
                sums[row][v] = Element::add(sums[row][v], part[v], x + row * stride + i * Element::STEP);
    };
    int64_t i = 0;
    for (; i < last - first; i++) {
        for (int panel = 0; panel < VECTORS / EACH; panel++)
            __builtin_prefetch(chunk.at + panel * chunk.across + (first + i) * LINE + AHEAD);
        step(i);
    }
    for (; i < chunk.steps; i++) step(i);
    for (int row = 0; row < COUNT; row++)
        for (int v = 0; v < VECTORS; v++) totals[row][v] += sums[row][v];
}

template <typename Element, int VECTORS, int COUNT = max_rows<Element>(VECTORS), typename... Arguments>
void add_rows(int count, Arguments... arguments) {
    if (count == COUNT) return add_block<Element, VECTORS, COUNT>(arguments...);
    if constexpr (COUNT > 1) add_rows<Element, VECTORS, COUNT - 1>(count, arguments...);
}

// `count` rows, at most GROUP, times VECTORS vectors of outputs; finish(row, vector, sum) takes the sums.
template <typename Element, int VECTORS, typename Finish>
void multiply_set(const Rows<Element>& rows, int64_t row, int count, const char* panel, int64_t steps, Finish finish) {
    constexpr int LINE = PANEL * Element::BYTES, STEPS = Element::CHUNK / Element::STEP;
    constexpr int MOST = max_rows<Element>(VECTORS);
    typename Element::Sum totals[GROUP][VECTORS];
    std::memset(totals, 0, count * sizeof totals[0]);
    const int blocks = (count + MOST - 1) / MOST;
    for (int64_t at = 0; at < steps; at += STEPS) {
        const Chunk chunk{panel + at * LINE, steps * LINE, std::min<int64_t>(STEPS, steps - at)};
        for (int b = 0; b < blocks; b++) {
            const int first = count * b / blocks, last = count * (b + 1) / blocks;
            add_rows<Element, VECTORS>(last - first, rows.data + (row + first) * rows.stride + at * Element::STEP,
                                       rows.stride, chunk, chunk.steps * b / blocks, chunk.steps * (b + 1) / blocks,
                                       totals + first);
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) finish(row + r, v, totals[r][v]);
}

// Of outputs from `out` on, at most PIECE.
template <typename Element, int VECTORS = PIECE / LANES, typename Finish>
void multiply_piece(const Rows<Element>& rows, int64_t row, int count, const char* packed, int64_t steps, int64_t out,
                    int64_t outs, Finish finish) {
    if (VECTORS > vectors_for<Element>(count)) {
        if constexpr (VECTORS > LEAST)
            multiply_piece<Element, VECTORS / 2>(rows, row, count, packed, steps, out, outs, finish);
        return;
    }
    for (int64_t at = out; at < std::min(out + PIECE, outs); at += VECTORS * LANES)
        multiply_set<Element, VECTORS>(rows, row, count, packed + at * steps * Element::BYTES, steps,
                                       [&](int64_t r, int v, auto sum) { finish(r, at + v * LANES, sum); });
}

template <typename Element>
int64_t stride_of(int64_t width) {
    constexpr int64_t SIZE = sizeof(typename Element::Row);
    int64_t bytes = (width * SIZE + 63) / 64 * 64 + 64;  // a whole step past the width is read
    if (bytes % 2048 == 0) bytes += 64;                  // or rows would share few sets of the first-level cache
    return bytes / SIZE;
}

// Room that a thread keeps, for rows of `width`.
template <typename Element>
Rows<Element> room(int64_t rows, int64_t width) {
    static thread_local std::unique_ptr<char[]> kept;
    static thread_local int64_t size = 0;
    const int64_t stride = stride_of<Element>(width), data = rows * stride * sizeof(typename Element::Row);
    const int64_t wanted = data + rows * sizeof(Unit) + 64;
    if (size < wanted) kept.reset(new char[wanted]), size = wanted;
    char* aligned = kept.get() + 63 - ((uintptr_t)kept.get() + 63) % 64;
    return {(typename Element::Row*)aligned, stride, (Unit*)(aligned + data)};
}

template <typename Element>
void product(int64_t kind, int64_t threads, const Matrix& m, const void* x, void* out, int64_t rows) {
    const int64_t steps = (m.width + Element::STEP - 1) / Element::STEP;
    const bool whole = kind == 0 && std::is_same_v<typename Element::Row, float> && m.width % Element::STEP == 0;
    const bool direct = whole && (m.width % 512 || rows <= 4), common = !direct && rows > OWN_ROWS;
    auto prepare = [&](const Rows<Element>& to, int64_t row) {
        with_type(kind, [&](auto type) {
            typedef decltype(type) T;
            to.units[row] = Element::prepare((const T*)x + row * m.width, m.width, to.data + row * to.stride);
        });
    };
    Rows<Element> shared{(typename Element::Row*)x, m.width, nullptr};
    if (common) shared = room<Element>(rows, m.width);
#pragma omp parallel num_threads(threads)
    {
        Rows<Element> own = shared;
        if (common) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) prepare(shared, row);
        } else if (!direct) {
            own = room<Element>(rows, m.width);
            for (int64_t row = 0; row < rows; row++) prepare(own, row);
        }
        auto finish = [&](int64_t row, int64_t at, auto sum) {
            if (at >= m.outs) return;
            const int n = std::min<int64_t>(LANES, m.outs - at);
            const Floats value = Element::value(sum, own.units, row, m.scale, at, n);
            with_type(kind, [&](auto type) {
                typedef decltype(type) T;
                store(m.bias ? value + load((const T*)m.bias + at, n) : value, (T*)out + row * m.outs + at, n);
            });
        };
#pragma omp for schedule(dynamic)
        for (int64_t at = 0; at < m.outs; at += PIECE)
            for (int64_t row = 0; row < rows; row += GROUP)
                multiply_piece<Element>(own, row, int(std::min<int64_t>(GROUP, rows - row)), (const char*)m.panels,
                                        steps, at, m.outs, finish);
    }
}

template <typename Word>
void pack(int64_t threads, const Word* rows, Word* panels, int64_t count, int64_t steps) {
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < count; panel++)
        for (int64_t i = 0; i < steps; i++)
            for (int out = 0; out < PANEL; out++)
                panels[(panel * steps + i) * PANEL + out] = rows[(panel * PANEL + out) * steps + i];
}

}  // namespace

extern "C" void coppice_pack(int64_t threads, int64_t bytes, const void* rows, void* panels, int64_t count,
                             int64_t steps) {
    if (bytes == 4) pack(threads, (const uint32_t*)rows, (uint32_t*)panels, count, steps);
    if (bytes == 2) pack(threads, (const uint16_t*)rows, (uint16_t*)panels, count, steps);
}

extern "C" void coppice_linear(int64_t kind, int64_t threads, const Matrix* matrix, const void* x, void* out,
                               int64_t rows) {
    const Matrix& m = *matrix;
    if (m.kind == 0) product<WideFloat32>(kind, threads, m, x, out, rows);
    if (m.kind == 1) {
#ifdef BFLOAT16_PAIRS
        if (kind == 1) return product<PairsOfBFloat16>(kind, threads, m, x, out, rows);
#endif
        product<WideBFloat16>(kind, threads, m, x, out, rows);
    }
    if (m.kind == 2) product<WideFloat16>(kind, threads, m, x, out, rows);
    if (m.kind == 3) product<Int8>(kind, threads, m, x, out, rows);
}

extern "C" void coppice_linear_kinds(int64_t* kinds) {
    *kinds = 1 | 8;
#ifdef BFLOAT16_PAIRS
    *kinds |= 2;
#endif
}
