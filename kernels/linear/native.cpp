// Products of rows and a packed matrix (layout: panels.py). The same code multiplies one row, limited by memory
// bandwidth, and many, limited by the processor's multiplications.
//
// A thread takes PIECE outputs at a time and processes them in sets of vectors. The sums of a block of rows and a set
// stay in registers for a chunk of the width and are then added to totals. Long rows therefore lose no precision, and a
// row's sums do not depend on the rows beside it. A chunk is read from memory once: by the first block of rows; all
// blocks together prefetch what lies AHEAD.

#include <algorithm>
#include <cstddef>
#include <memory>

#include "../operators.h"
#include "../vectors.h"
#include "decoded.h"
#include "sums.h"

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
    constexpr int MOST = max_rows<Element>(VECTORS);
    typename Element::Total totals[BATCH][VECTORS];
    std::memset(totals, 0, count * sizeof totals[0]);
    const int blocks = (count + MOST - 1) / MOST;
    const char* panel = (const char*)m.panels + out * steps * Element::BYTES;
    // The memory behind a panel is the set's next panel, which was already read: prefetch the next set instead.
    auto ahead = [&](int64_t at) {
        return AHEAD + (at * LINE + AHEAD < steps * LINE ? 0 : (VECTORS * LANES / PANEL - 1) * steps * LINE);
    };
    auto add = [&](int64_t at, const auto& part, int64_t fetched) {
        for (int b = 0; b < blocks; b++) {
            const int first = count * b / blocks, last = count * (b + 1) / blocks;
            add_rows<Element, VECTORS>(last - first, rows.data + (row + first) * rows.stride + at * Element::STEP,
                                       rows.stride, rows, row + first, part, fetched * b / blocks,
                                       fetched * (b + 1) / blocks, totals + first);
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
    if (VECTORS > vectors_for<Element>(count)) {
        if constexpr (VECTORS > (Element::NARROW ? PANEL / LANES : LEAST))
            multiply_piece<Element, VECTORS / 2>(rows, row, count, m, steps, out, finish);
        return;
    }
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
    int64_t unit = 0;
    for (int64_t at = 0, end; at < m.width; at = end, unit++) {
        end = Element::ROUNDED ? std::min({at + each, at / group * group + group, m.width}) : m.width;
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
    const int64_t stride = stride_of<Element>(m.width), data = rows * stride * sizeof(typename Element::Row);
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
        const Levels levels{m.levels, m.by_row ? std::max(magnitude_of(from, m.width), LEAST_MAGNITUDE) : 0};
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
int64_t run_of(int64_t pieces, int64_t threads) { return std::max<int64_t>(1, pieces / (RUNS * threads)); }

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
        const Rows<Element> own = work.own(common ? shared : work.prepared(), common || work.direct);
        const int64_t run = run_of((m.outs + PIECE - 1) / PIECE, threads);
#pragma omp for schedule(dynamic, run)
        for (int64_t at = 0; at < m.outs; at += PIECE) work.multiply(own, at);
    }
}

// Calls f with the element type of a kind whose codes index a table; returns false for other kinds.
template <template <typename> typename Element, typename F>
bool with_table(int64_t kind, F f) {
    switch (kind) {
        case 7: return f(Element<E2M1>{}), true;
        case 8: return f(Element<IQ4>{}), true;
        case 11: return f(Element<IQ2>{}), true;
        case 12: return f(Element<IQ3>{}), true;
        case 13: return f(Element<IQ3S>{}), true;
        case 14: return f(Element<FP4>{}), true;
    }
    return false;
}

// Calls f with the element type that multiplies rows of `kind` with a matrix.
template <typename F>
void with_element([[maybe_unused]] int64_t kind, const Matrix& m, F f) {
    if (m.kind == 0) f(WideFloat32{});
    if (m.kind == 1) {
#ifdef BFLOAT16_PAIRS
        if (kind == 1) return f(PairsOfBFloat16{});
#endif
        f(WideBFloat16{});
    }
    if (m.kind == 2) f(WideFloat16{});
    if (m.kind == 3) f(Int8{});
    if (m.kind == 4 && m.levels) return f(Int4{});
#if defined(MANY_REGISTERS) || defined(EIGHT_CODES)
    if (m.kind == 9 && m.levels) return f(RoundedBits<5>{});
    if (m.kind == 10 && m.levels) return f(RoundedBits<6>{});
#endif
#ifdef MANY_REGISTERS
    if (m.kind == 9) return f(DigitsBits<5>{});
    if (m.kind == 10) return f(DigitsBits<6>{});
#endif
    const bool bytes = m.kind == INT8_GROUPS || m.kind == 9 || m.kind == 10;
    if (bytes && m.levels) return f(Int8Codes{});
    if (m.levels && with_table<Codes>(m.kind, f)) return;
#ifdef INT8_DOTS
    if (m.kind == 4) return f(DigitsInt4{});
    if (bytes) return f(DigitsInt8{});
    if (with_table<DigitsCodes>(m.kind, f)) return;
#else
    if (m.kind == 4) f(WideInt4{});
    if (m.kind == INT8_GROUPS) f(WideInt8{});
    if (m.kind == 9) f(WideBits<5>{});
    if (m.kind == 10) f(WideBits<6>{});
    if (with_table<WideCodes>(m.kind, f)) return;
#endif
    if (m.kind == 6) f(WideFloat8{});
}

void multiply(int64_t kind, int64_t threads, const Matrix& m, const void* x, void* out, int64_t stride, int64_t rows) {
    with_element(kind, m, [&](auto element) { product<decltype(element)>(kind, threads, m, x, out, stride, rows); });
}

// A part of a product, and the outputs first .. last - 1 of it that a thread computes at once.
struct Run {
    const Matrix* matrix;
    const void* x;
    char* out;
    int64_t stride, rows, first, last;
    int64_t number;  // the part's number
};

// `prepared`: the part whose rows this thread has prepared last.
template <typename Element>
void multiply_run(int64_t kind, const Run& run, int64_t& prepared) {
    const Work<Element> work{*run.matrix, kind, run.x, run.out, run.stride, run.rows};
    const Rows<Element> own = work.own(work.prepared(), work.direct || prepared == run.number);
    prepared = work.direct ? prepared : run.number;
    for (int64_t at = run.first; at < run.last; at += PIECE) work.multiply(own, at);
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
    int64_t stride = 0, at = 0;
    for (const Matrix* m = matrix; m; m = m->next) stride += m->outs;
    for (const Matrix* m = matrix; m; at += m->outs, m = m->next)
        with_type(kind, [&](auto type) { multiply(kind, threads, *m, x, (decltype(type)*)out + at, stride, rows); });
}

extern "C" void coppice_linears(int64_t kind, int64_t threads, const Product* products, int64_t count) {
    const int64_t element = kind ? 2 : 4;
    std::vector<Run> parts, runs;
    int64_t pieces = 0;
    for (const Product* p = products; p < products + count; p++) {
        if (p->rows > OWN_ROWS) {  // enough work for all threads, which prepare the rows together
            coppice_linear(kind, threads, p->matrix, p->x, p->out, p->rows);
            continue;
        }
        int64_t stride = 0, at = 0;
        for (const Matrix* m = p->matrix; m; m = m->next) stride += m->outs;
        for (const Matrix* m = p->matrix; m; at += m->outs, m = m->next) {
            parts.push_back({m, p->x, (char*)p->out + at * element, stride, p->rows, 0, m->outs, int64_t(parts.size())});
            pieces += (m->outs + PIECE - 1) / PIECE;
        }
    }
    const int64_t step = run_of(pieces, threads) * PIECE;
    for (const Run& part : parts)
        for (int64_t at = 0; at < part.last; at += step) {
            runs.push_back(part);
            runs.back().first = at, runs.back().last = std::min(at + step, part.last);
        }
#pragma omp parallel num_threads(threads) if (runs.size() > 1)
    {
        int64_t prepared = -1;
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < runs.size(); i++)
            with_element(kind, *runs[i].matrix,
                         [&](auto element) { multiply_run<decltype(element)>(kind, runs[i], prepared); });
    }
}

extern "C" void coppice_linear_kinds(int64_t* kinds) {
    *kinds = 1 | 8;
#ifdef BFLOAT16_PAIRS
    *kinds |= 2;
#endif
}
