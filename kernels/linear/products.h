// Products of rows and a packed matrix (layout: panels.py), for any element type. The same code multiplies one row,
// limited by memory bandwidth, and many, limited by the processor's multiplications.
//
// A thread takes PIECE outputs at a time and processes them in sets of vectors. The sums of a block of rows and a set
// stay in registers for a chunk of the width and are then added to totals. Long rows therefore lose no precision, and a
// row's sums do not depend on the rows beside it. A chunk is read from memory once: by the first block of rows; all
// blocks together prefetch what lies AHEAD.

#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "../operators.h"
#include "../tiles.h"
#include "../vectors.h"
#include "decoded.h"
#include "expanded.h"
#include "sums.h"
#include "tiles.h"

// A part of a product, and the outputs first .. last - 1 of it that a thread computes at once.
struct Run {
    const Matrix* matrix;
    const void* x;
    char* out;
    int64_t stride, rows, first, last;
    int64_t number;  // the part's number
};

// The products of an element type: a whole one, and a part of one; `prepared` is the part whose rows the thread has
// prepared last.
struct Products {
    void (*whole)(int64_t kind, int64_t threads, const Matrix& m, const void* x, void* out, int64_t stride, int64_t rows);
    void (*part)(int64_t kind, const Run& run, int64_t& prepared);
};

// Sources of their own instantiate the element types of codes in groups and of codes that index a table: compilers take
// longer for these than for all other sources, and can take them side by side.
const Products& of_groups(const Matrix& m);
const Products& of_tables(const Matrix& m);

namespace {

constexpr int RUNS = 4;        // runs of consecutive pieces per thread
constexpr float LEAST_MAGNITUDE = 1e-5f;  // of a row that is rounded by its own; BitNet's
constexpr int OWN_ROWS = 16;  // up to so many, each thread prepares all rows: waiting for the others would take longer

// Multiplies `count` rows (at most BATCH) with VECTORS vectors of outputs from `out` on, and calls
// finish(row, vector, total).
template <typename Element, int VECTORS, typename Finish>
void multiply_set(const Rows<Element>& rows, int64_t row, int count, const Matrix& m, int64_t steps, int64_t out,
                  Finish finish) {
    constexpr int LINE = PANEL * Element::BYTES;
    constexpr int MOST = Element::TILED ? TILE_ROWS : max_rows<Element>(VECTORS);
    typename Element::Total totals[BATCH][VECTORS];
    std::memset(totals, 0, count * sizeof totals[0]);
    const int blocks = (count + MOST - 1) / MOST;
    auto begin = [&](int block) { return Element::TILED ? std::min(block * MOST, count) : count * block / blocks; };
    const char* panel = (const char*)m.panels + out * steps * Element::BYTES;
    // The memory behind a panel is the set's next panel, which was already read: prefetch the next set instead.
    auto ahead = [&](int64_t at) {
        return AHEAD + (at * LINE + AHEAD < steps * LINE ? 0 : (VECTORS * LANES / PANEL - 1) * steps * LINE);
    };
    auto add = [&](int64_t at, const auto& part, int64_t fetched) {
        for (int b = 0; b < blocks; b++) {
            const int first = begin(b);
            const typename Element::Row* x = rows.data + (row + first) * rows.stride + at * Element::STEP;
            add_rows<Element, VECTORS>(begin(b + 1) - first, x, rows.stride, rows, row + first, part,
                                       fetched * b / blocks, fetched * (b + 1) / blocks, totals + first);
        }
    };
    if constexpr (Element::GROUPED) {
        Chunks<VECTORS> chunks{panel, steps * LINE, 0, 0, 0, {}, {}, {}};
        alignas(64) char decoded[Element::IN_BITS ? PIECE * MOST_CHUNKS * Element::CHUNK : 1];
        const bool in_bits = Element::IN_BITS && m.kind != INT8_GROUPS;
        for (int64_t at = 0, taken; at < steps; at += taken, chunks.at += taken * LINE, chunks.unit += chunks.count) {
            taken = take<Element, VECTORS>(m, out, at, steps, rows.groups, rows.sums, chunks);
            if (in_bits) {
                chunks.at = decoded, chunks.across = taken * LINE;
                decode(m, out, at * Element::STEP, taken * Element::STEP, VECTORS * LANES / PANEL, decoded);
            } else
                chunks.ahead = ahead(at);
#ifdef EXPANDS
            if constexpr (expands<Element, VECTORS>(BATCH, MOST))
                if (expands<Element, VECTORS>(count, MOST)) {
                    const float* x = rows.data + row * rows.stride + at * Element::STEP;
                    add_expanded<Element>(count, x, rows.stride, rows, row, chunks, totals);
                    continue;
                }
#endif
            add(at, chunks, chunks.count);
        }
    } else {
        constexpr int STEPS = Element::CHUNK / Element::STEP;
        for (int64_t at = 0; at < steps; at += STEPS) {
            const Chunk chunk{panel + at * LINE, steps * LINE, std::min<int64_t>(STEPS, steps - at), ahead(at),
                              Element::ROUNDED ? at * Element::STEP / Element::ROUNDED : 0};
            add(at, chunk, chunk.steps);
        }
    }
    for (int r = 0; r < count; r++)
        for (int v = 0; v < VECTORS; v++) finish(row + r, v, totals[r][v]);
}

// Multiplies with at most PIECE outputs from `out` on.
template <typename Element, int VECTORS = PIECE / LANES, typename Finish>
void multiply_piece(const Rows<Element>& rows, int64_t row, int count, const Matrix& m, int64_t steps, int64_t out,
                    Finish finish) {
    constexpr bool NEEDED = Element::TILED || VECTORS <= LEAST || fits<Element>(1, VECTORS);  // else not even compiled
    if (VECTORS > vectors_for<Element>(count)) {
        if constexpr (VECTORS > (Element::NARROW ? PANEL / LANES : LEAST))
            multiply_piece<Element, VECTORS / 2>(rows, row, count, m, steps, out, finish);
    } else if constexpr (NEEDED)
        for (int64_t at = out; at < std::min(out + PIECE, m.outs); at += VECTORS * LANES)
            multiply_set<Element, VECTORS>(rows, row, count, m, steps, at,
                                           [&](int64_t r, int v, auto total) { finish(r, at + v * LANES, total); });
}

template <typename Element>
int64_t stride_of(int64_t width) {
    constexpr int64_t SIZE = sizeof(typename Element::Row);
    int64_t stride = (width + 63) / 64 * 64 + 64;  // reads go up to one step past the width
    if (stride * SIZE % 2048 == 0) stride += 64;   // else rows would share few sets of the first-level cache
    return stride;
}

// Calls f(first, last, unit) for all elements of a row that are rounded together: ROUNDED of a group, or the whole row.
template <typename Element, typename F>
void each_unit(const Matrix& m, F f) {
    const int64_t group = Element::GROUPED ? m.group : m.width, each = Element::ROUNDED ? Element::ROUNDED : m.width;
    int64_t unit = 0, last = group;
    for (int64_t at = 0, end; at < m.width; at = end, unit++) {
        if (at == last) last += group;
        end = Element::ROUNDED ? std::min({at + each, last, m.width}) : m.width;
        f(at, end, unit);
    }
}

// A buffer for prepared rows, which a thread keeps for later products.
template <typename Element>
Rows<Element> room(int64_t rows, const Matrix& m, int64_t groups) {
    static thread_local std::unique_ptr<char[]> kept;
    static thread_local int64_t size = 0;
    int64_t units = 0;
    each_unit<Element>(m, [&](int64_t, int64_t, int64_t) { units++; });
    const int64_t stride = stride_of<Element>(m.width), each = Element::TILED ? TILE_ROWS : 1;
    const int64_t data = (rows + each - 1) / each * each * stride * sizeof(typename Element::Row);
    const int64_t batches = (rows + BATCH - 1) / BATCH, sums = data + batches * BATCH * units * sizeof(Unit);
    const int64_t wanted = sums + rows * groups * sizeof(float) + 64;
    if (size < wanted) kept.reset(new char[wanted]), size = wanted;
    char* aligned = kept.get() + 63 - ((uintptr_t)kept.get() + 63) % 64;
    return {(typename Element::Row*)aligned, stride, (Unit*)(aligned + data), (float*)(aligned + sums), groups, units};
}

// Prepares row `row` of x for multiplication, with the sums of its groups. `ordered`: a buffer for a permuted row.
template <typename Element, typename T>
void prepare(const Matrix& m, const T* x, int64_t row, const Rows<Element>& to, float* ordered) {
    typename Element::Row* prepared = to.data + row * to.stride;
    auto round = [&](const auto* from) {
        const float own = m.by_row || m.step_in ? std::max(magnitude_of(from, m.width), LEAST_MAGNITUDE) : 0;
        // Multiples of `step_in` stay exact; of a row with NaN the results are NaN, as if it had another magnitude.
        const Levels levels{m.levels, m.step_in && own == own ? m.step_in * m.levels : own};
        each_unit<Element>(m, [&](int64_t first, int64_t last, int64_t number) {
            Unit& unit = *to.unit(row, number);
            unit = Element::prepare(from + first, last - first, prepared + first, levels);
            if (m.zero || m.least) unit.start = 0;
        });
    };
    if (m.order) {
        for (int64_t i = 0; i < m.width; i++) ordered[i] = load(x + row * m.width + m.order[i], 1)[0];
        round(ordered);
    } else
        round(x + row * m.width);
    if constexpr (Element::GROUPED && !Element::ROUNDED)
        for (int64_t group = 0; group < to.groups; group++) {
            const int64_t first = group * m.group;
            to.sums[row * to.groups + group] = Element::sum(prepared + first, std::min(m.width - first, m.group));
        }
}

// One product of rows and a matrix, for an element type.
template <typename Element>
struct Work {
    const Matrix& m;
    const int64_t kind;
    const void* x;
    void* out;
    const int64_t stride, rows;  // of the output
    const int64_t steps = (m.width + Element::STEP - 1) / Element::STEP;
    const int64_t groups = Element::GROUPED ? (m.width + m.group - 1) / m.group : 0;
    const bool floats = std::is_same_v<typename Element::Row, float>;
    const bool whole = kind == 0 && floats && m.width % Element::STEP == 0 && !m.order &&
                       !(Element::GROUPED && (m.zero || m.least));
    const bool direct = whole && (m.width % 512 || rows <= 4);  // rows are multiplied where they are stored

    Rows<Element> given() const { return {(typename Element::Row*)x, m.width, nullptr, nullptr, groups, 0}; }
    Rows<Element> prepared() const { return direct ? given() : room<Element>(rows, m, groups); }

    void prepare_row(const Rows<Element>& to, int64_t row, float* ordered) const {
        with_type(kind, [&](auto type) { prepare<Element>(m, (const decltype(type)*)x, row, to, ordered); });
    }

    // The rows for one thread, which prepares them unless they are `ready`.
    Rows<Element> own(Rows<Element> to, bool ready) const {
        if (!ready) {
            std::vector<float> ordered(m.order ? m.width : 0);
            for (int64_t row = 0; row < rows; row++) prepare_row(to, row, ordered.data());
        }
        if ((floats || Element::ROUNDED) && !m.zero && !m.least) to.sums = nullptr;
        return to;
    }

    // Computes the outputs of a piece.
    void multiply(const Rows<Element>& from, int64_t at) const {
        auto finish = [&](int64_t row, int64_t at, auto total) {
            if (at >= m.outs) return;
            const int n = std::min<int64_t>(LANES, m.outs - at);
            const Floats value = Element::value(total, from.units ? from.unit(row, 0) : nullptr, m.scale, at, n);
            with_type(kind, [&](auto type) {
                typedef decltype(type) T;
                store(m.bias ? value + load((const T*)m.bias + at, n) : value, (T*)out + row * stride + at, n);
            });
        };
        for (int64_t row = 0; row < rows; row += BATCH)
            multiply_piece<Element>(from, row, int(std::min<int64_t>(BATCH, rows - row)), m, steps, at, finish);
    }
};

// Pieces per run. A run is read as one stream; several runs per thread compensate for threads that are descheduled.
inline int64_t run_of(int64_t pieces, int64_t threads) { return std::max<int64_t>(1, pieces / (RUNS * threads)); }

template <typename Element>
void product(int64_t kind, int64_t threads, const Matrix& m, const void* x, void* out, int64_t stride, int64_t rows) {
    const Work<Element> work{m, kind, x, out, stride, rows};
    const bool common = !work.direct && rows > OWN_ROWS;
    Rows<Element> shared = work.given();
    if (common) shared = work.prepared();
#pragma omp parallel num_threads(threads)
    {
        if (common) {
            std::vector<float> ordered(m.order ? m.width : 0);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) work.prepare_row(shared, row, ordered.data());
        }
        use_tiles<Element>(rows);
        const Rows<Element> own = work.own(common ? shared : work.prepared(), common || work.direct);
        const int64_t run = run_of((m.outs + PIECE - 1) / PIECE, threads);
#pragma omp for schedule(dynamic, run)
        for (int64_t at = 0; at < m.outs; at += PIECE) work.multiply(own, at);
        leave_tiles();
    }
}

template <typename Element>
void multiply_run(int64_t kind, const Run& run, int64_t& prepared) {
    const Work<Element> work{*run.matrix, kind, run.x, run.out, run.stride, run.rows};
    const Rows<Element> own = work.own(work.prepared(), work.direct || prepared == run.number);
    prepared = work.direct ? prepared : run.number;
    use_tiles<Element>(run.rows);
    for (int64_t at = run.first; at < run.last; at += PIECE) work.multiply(own, at);
}

template <typename Element>
constexpr Products PRODUCTS{product<Element>, multiply_run<Element>};

// The products by tiles, if this process may use them.
template <typename Element>
const Products& tiled() {
#ifdef TILES
    if (tiles_allowed()) return PRODUCTS<Tiled<Element>>;
#endif
    return PRODUCTS<Element>;
}

}  // namespace
