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
constexpr int UNIT = 256;     // elements of a row that share a unit of scales
constexpr int BATCH = 60;     // rows that share a fetch from the second-level cache
constexpr int AHEAD = 8192;   // bytes
constexpr int LEAST = LANES == PANEL ? 2 : PANEL / LANES;  // vectors per row of a set
constexpr int RUNS = 4;        // of consecutive pieces, for each thread
constexpr int OWN_ROWS = 16;  // prepared by each thread for itself, as waiting for the others would take longer

// Whether the sums of a block and the vectors that it multiplies by fit into the registers, and are few enough.
template <typename Element>
constexpr bool fits(int rows, int vectors) {
    constexpr int OF_SUM = sizeof(typename Element::Sum) / sizeof(Floats);
    return (rows * OF_SUM + Element::VECTORS) * vectors + SPARE_REGISTERS <= REGISTERS &&
           rows * vectors <= Element::SUMS;
}

// Whether the steps between two roundings are written out: in a loop of so few they take a quarter longer.
template <typename Element>
constexpr bool WRITTEN_OUT = Element::SUMS < REGISTERS;

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
    Unit* units;  // for each ROUNDED elements of a group, or for a row; those of BATCH rows lie side by side
    float* sums;  // of each row's groups; null: they are not needed
    int64_t groups, each;  // units of a row

    Unit* unit(int64_t row, int64_t number) const {
        return units + (row / BATCH * each + number) * BATCH + row % BATCH;
    }
};

// Where a chunk of a set's first panel lies, bytes from one panel to the next, and from a line to what is fetched with it;
// the first of its units.
struct Chunk {
    const char* at;
    int64_t across, steps, ahead, unit;
};

// Chunks of groups, one after the other.
constexpr int MOST_CHUNKS = 8;

template <int VECTORS>
struct Chunks {
    const char* at;
    int64_t across, count, ahead, unit;
    struct {
        int64_t steps, group;  // a negative group: the sum of x is added with another chunk of the group
        int64_t place;         // of its group's scales
    } each[MOST_CHUNKS];
    // Of the groups, for LANES outputs each: sums of products are multiplied by `scales`, and by `offsets` those of
    // elements of x, if rows have them.
    Floats scales[MOST_CHUNKS][VECTORS], offsets[MOST_CHUNKS][VECTORS];
};

template <typename Element, int VECTORS, int COUNT>
[[gnu::always_inline]] inline void add_step(const char* at, int64_t across, const typename Element::Row* x,
                                            int64_t stride, typename Element::Sum (*sums)[VECTORS]) {
    constexpr int EACH = PANEL / LANES;
    typename Element::Words words[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
        words[v] = Element::load(at + v / EACH * across + v % EACH * LANES * Element::BYTES);
#pragma GCC unroll 8
    for (int p = 0; p < Element::PARTS; p++) {
        typename Element::Part part[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) part[v] = Element::part(words[v], p);
#pragma GCC unroll 32
        for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++)
                sums[row][v] =
                    Element::add(sums[row][v], part[v], x + row * stride + p * (Element::STEP / Element::PARTS));
    }
}

template <typename Element, int VECTORS, int COUNT>
void add_block(const typename Element::Row* x, int64_t stride, const Rows<Element>& rows, int64_t row0,
               const Chunk& chunk, int64_t first, int64_t last, typename Element::Total (*totals)[VECTORS]) {
    constexpr int LINE = PANEL * Element::BYTES, EACH = PANEL / LANES;
    typename Element::Sum sums[COUNT][VECTORS] = {};
    auto fetch = [&](int64_t i) {
        for (int panel = 0; panel < VECTORS / EACH; panel++)
            __builtin_prefetch(chunk.at + panel * chunk.across + (first + i) * LINE + chunk.ahead);
    };
    auto step = [&](int64_t i) {
        add_step<Element, VECTORS, COUNT>(chunk.at + i * LINE, chunk.across, x + i * Element::STEP, stride, sums);
    };
    int64_t i = 0;
    if constexpr (Element::ROUNDED > 0) {
        constexpr int STEPS = Element::ROUNDED / Element::STEP;
        const Unit* units = rows.unit(row0, chunk.unit);
        for (int64_t end; i < chunk.steps; i = end, units += BATCH) {
#pragma GCC unroll 32
            for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[row][v] = Ints{} + units[row].start;
            end = std::min<int64_t>(i + STEPS, chunk.steps);
            if (WRITTEN_OUT<Element> && end == i + STEPS) {
                for (int64_t at = i; at < std::min(end, last - first); at++) fetch(at);
                asm("" : "+r"(stride));  // or GCC keeps the place of each word of each row, most of them in memory
#pragma GCC unroll 16
                for (int s = 0; s < STEPS; s++) step(i + s);
            } else {
                int64_t at = i;
                for (; at < std::min(end, last - first); at++) fetch(at), step(at);
                for (; at < end; at++) step(at);
            }
#pragma GCC unroll 32
            for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++)
                    totals[row][v] += __builtin_convertvector(sums[row][v], Floats) * units[row].size;
        }
    } else {
        for (; i < last - first; i++) fetch(i), step(i);
        for (; i < chunk.steps; i++) step(i);
        for (int row = 0; row < COUNT; row++)
            for (int v = 0; v < VECTORS; v++) totals[row][v] += sums[row][v];
    }
}

// These loops are over vectors already. GCC would vectorise them again where 7 or 8 rows are multiplied by int4: then
// sums lie in memory, and 15 rows take twice as long.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("no-tree-vectorize")
#endif

// A chunk of one group: `steps` of it, an int64_t or a constant. `ahead`: see Chunk; 0: nothing is fetched.
template <typename Element, int VECTORS, int COUNT, typename Steps>
[[gnu::always_inline]] inline void add_chunk(const char* at, int64_t across, int64_t ahead,
                                             const typename Element::Row* x, int64_t stride, Steps steps,
                                             const Unit* units, const Floats* scales,
                                             typename Element::Total (*totals)[VECTORS]) {
    constexpr int LINE = PANEL * Element::BYTES, EACH = PANEL / LANES;
    typename Element::Sum sums[COUNT][VECTORS] = {};
    if constexpr (Element::ROUNDED > 0)
#pragma GCC unroll 32
        for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[row][v] = Element::begin(units[row].start);
    auto fetch = [&](int64_t i) __attribute__((always_inline)) {
        if (ahead)
#pragma GCC unroll 4
            for (int panel = 0; panel < VECTORS / EACH; panel++)
                __builtin_prefetch(at + panel * across + i * LINE + ahead);
    };
    auto step = [&](int64_t i) __attribute__((always_inline)) {
        add_step<Element, VECTORS, COUNT>(at + i * LINE, across, x + i * Element::STEP, stride, sums);
    };
    if constexpr (WRITTEN_OUT<Element> && !std::is_same_v<Steps, int64_t>) {
        for (int i = 0; i < Steps::value; i++) fetch(i);
#pragma GCC unroll 4
        for (int i = 0; i < Steps::value; i++) step(i);
    } else
        for (int64_t i = 0; i < steps; i++) fetch(i), step(i);
#pragma GCC unroll 32
    for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            Floats scale = scales[v];
            if constexpr (Element::ROUNDED > 0) scale *= units[row].size;
            totals[row][v] += Element::floats(sums[row][v]) * scale;
        }
}

// The same out of line, for the last chunk of a row: beside the other it would take registers from that.
template <typename Element, int VECTORS, int COUNT, typename... Arguments>
[[gnu::noinline]] void add_rest(const Arguments&... arguments) {
    add_chunk<Element, VECTORS, COUNT>(arguments...);
}

// The same for chunks of groups; `first` and `last` are those whose successors are fetched.
template <typename Element, int VECTORS, int COUNT>
void add_block(const typename Element::Row* x, int64_t stride, const Rows<Element>& rows, int64_t row0,
               const Chunks<VECTORS>& chunks, int64_t first, int64_t last,
               typename Element::Total (*totals)[VECTORS]) {
    constexpr int LINE = PANEL * Element::BYTES, STEPS = Element::CHUNK / Element::STEP;
    const char* at = chunks.at;
    const Unit* units = Element::ROUNDED ? rows.unit(row0, chunks.unit) : nullptr;
    const int64_t across = chunks.across, count = chunks.count;
    const bool summed = rows.sums;
    for (int64_t c = 0; c < count; c++, units += Element::ROUNDED ? BATCH : 0) {
        const auto& chunk = chunks.each[c];
        const int64_t ahead = c >= first && c < last ? chunks.ahead : 0;
        const Floats* scales = chunks.scales[chunk.place];
        if (chunk.steps == STEPS) {
            if (WRITTEN_OUT<Element>) asm("" : "+r"(stride));  // as above
            add_chunk<Element, VECTORS, COUNT>(at, across, ahead, x, stride,
                                               std::integral_constant<int64_t, STEPS>{}, units, scales, totals);
        } else if (WRITTEN_OUT<Element>)
            add_rest<Element, VECTORS, COUNT>(at, across, ahead, x, stride, chunk.steps, units, scales, totals);
        else
            add_chunk<Element, VECTORS, COUNT>(at, across, ahead, x, stride, chunk.steps, units, scales, totals);
        if (summed && (Element::ROUNDED || chunk.group >= 0)) {
            const float* of_x = rows.sums + row0 * rows.groups + chunk.group;
            const Floats* offsets = chunks.offsets[chunk.place];
            for (int row = 0; row < COUNT; row++) {
                const float sum = Element::ROUNDED ? units[row].size * units[row].sum : of_x[row * rows.groups];
                for (int v = 0; v < VECTORS; v++) totals[row][v] += offsets[v] * sum;
            }
        }
        at += chunk.steps * LINE, x += chunk.steps * Element::STEP;
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

template <typename Element, int VECTORS, int COUNT = max_rows<Element>(VECTORS), typename... Arguments>
void add_rows(int count, const Arguments&... arguments) {
    if (count == COUNT) return add_block<Element, VECTORS, COUNT>(arguments...);
    if constexpr (COUNT > 1) add_rows<Element, VECTORS, COUNT - 1>(count, arguments...);
}

// Scales of the groups first..last for the outputs from `out` on, a whole panel's first; offsets if they are wanted.
template <typename Element, int VECTORS>
void take_scales(const Matrix& m, int64_t out, int64_t first, int64_t last, int64_t groups, bool offsets,
                 Chunks<VECTORS>& to) {
    constexpr int EACH = PANEL / LANES;
    const Floats zero = all((m.least ? Element::DEFAULT_LEAST : Element::DEFAULT) - Element::ZERO);
    auto each = [&](auto scale, auto offset) {
        for (int v = 0; v < VECTORS; v++) {
            const int64_t panel = out / PANEL + v / EACH, lane = v % EACH * LANES;
            for (int64_t group = first; group <= last; group++) {
                const int64_t at = (panel * groups + group) * PANEL + lane;
                const Floats of_group = to.scales[group - first][v] = scale(at, group, panel, lane);
                if (offsets) to.offsets[group - first][v] = offset(of_group, at, group, panel, lane);
            }
        }
    };
    if (m.scale_kind == INT8) {
        const int of_unit = __builtin_ctzll(UNIT / m.group);
        auto counted = [&](const void* values, const void* units, int64_t at, int64_t group, int64_t panel,
                           int64_t lane) {
            const int64_t unit = (panel * (m.width / UNIT) + (group >> of_unit)) * PANEL + lane;
            return load((const int8_t*)values + at) * load((const Float16*)units + unit);
        };
        return each([&](auto... place) { return counted(m.scale, m.unit, place...); },
                    [&](Floats scale, auto... place) {
                        if (!m.least) return -zero * scale;
                        return counted(m.least, m.least_unit, place...) - zero * scale;
                    });
    }
    with_type(m.scale_kind, [&](auto type) {
        typedef decltype(type) T;
        each([&](int64_t at, auto...) { return load((const T*)m.scale + at); },
             [&](Floats scale, int64_t at, auto...) {
                 if (m.least) return load((const T*)m.least + at) - zero * scale;
                 return -(m.zero ? load((const T*)m.zero + at) - Element::ZERO : zero) * scale;
             });
    });
}

// The chunks of groups from step `at` on; returns how many steps they have.
template <typename Element, int VECTORS>
int64_t take(const Matrix& m, int64_t out, int64_t at, int64_t steps, int64_t groups, bool offsets,
             Chunks<VECTORS>& chunks) {
    constexpr int STEPS = Element::CHUNK / Element::STEP;
    const int64_t group_steps = (m.group + Element::STEP - 1) / Element::STEP, from = at, first = at / group_steps;
    int64_t last = first, begin = first * group_steps, end = std::min(steps, begin + group_steps);
    for (chunks.count = 0; chunks.count < MOST_CHUNKS && at < steps; chunks.count++) {
        if (at == end) last++, begin = end, end = std::min(steps, end + group_steps);
        auto& chunk = chunks.each[chunks.count];
        chunk.place = last - first;
        chunk.group = at == begin ? last : -1;
        chunk.steps = std::min<int64_t>(STEPS, end - at);
        at += chunk.steps;
    }
    take_scales<Element>(m, out, first, last, groups, offsets, chunks);
    return at - from;
}

// `count` rows, at most BATCH, times VECTORS vectors of outputs from `out` on; finish(row, vector, total).
template <typename Element, int VECTORS, typename Finish>
void multiply_set(const Rows<Element>& rows, int64_t row, int count, const Matrix& m, int64_t steps, int64_t out,
                  Finish finish) {
    constexpr int LINE = PANEL * Element::BYTES;
    constexpr int MOST = max_rows<Element>(VECTORS);
    typename Element::Total totals[BATCH][VECTORS];
    std::memset(totals, 0, count * sizeof totals[0]);
    const int blocks = (count + MOST - 1) / MOST;
    const char* panel = (const char*)m.panels + out * steps * Element::BYTES;
    // What follows the end of a panel is the next one of this set, which was read: the next set's is fetched instead.
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
        for (int64_t at = 0, taken; at < steps; at += taken, chunks.at += taken * LINE, chunks.unit += chunks.count) {
            taken = take<Element, VECTORS>(m, out, at, steps, rows.groups, rows.sums, chunks);
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

// Of outputs from `out` on, at most PIECE.
template <typename Element, int VECTORS = PIECE / LANES, typename Finish>
void multiply_piece(const Rows<Element>& rows, int64_t row, int count, const Matrix& m, int64_t steps, int64_t out,
                    Finish finish) {
    if (VECTORS > vectors_for<Element>(count)) {
        if constexpr (VECTORS > LEAST)
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
    int64_t stride = (width + 63) / 64 * 64 + 64;  // a whole step past the width is read
    if (stride * SIZE % 2048 == 0) stride += 64;   // or rows would share few sets of the first-level cache
    return stride;
}

// Calls f(first, last, unit) for the elements of a row that are rounded together: ROUNDED of a group, or all.
template <typename Element, typename F>
void each_unit(const Matrix& m, F f) {
    const int64_t group = Element::GROUPED ? m.group : m.width, each = Element::ROUNDED ? Element::ROUNDED : m.width;
    int64_t unit = 0;
    for (int64_t at = 0, end; at < m.width; at = end, unit++) {
        end = Element::ROUNDED ? std::min({at + each, at / group * group + group, m.width}) : m.width;
        f(at, end, unit);
    }
}

// Room that a thread keeps, for rows of a matrix.
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

// Row `row` of x as it is multiplied, with the sums of its groups. `ordered`: room for a row in another order.
template <typename Element, typename T>
void prepare(const Matrix& m, const T* x, int64_t row, const Rows<Element>& to, float* ordered) {
    typename Element::Row* prepared = to.data + row * to.stride;
    auto round = [&](const auto* from) {
        each_unit<Element>(m, [&](int64_t first, int64_t last, int64_t number) {
            Unit& unit = *to.unit(row, number);
            unit = Element::prepare(from + first, last - first, prepared + first, m.levels);
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

// One product of rows with a matrix, by an element type.
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
    const bool direct = whole && (m.width % 512 || rows <= 4);  // rows are multiplied as they lie

    Rows<Element> given() const { return {(typename Element::Row*)x, m.width, nullptr, nullptr, groups, 0}; }
    Rows<Element> prepared() const { return direct ? given() : room<Element>(rows, m, groups); }

    void prepare_row(const Rows<Element>& to, int64_t row, float* ordered) const {
        with_type(kind, [&](auto type) { prepare<Element>(m, (const decltype(type)*)x, row, to, ordered); });
    }

    // The rows as a thread multiplies them, prepared for itself unless they are already.
    Rows<Element> own(Rows<Element> to, bool ready) const {
        if (!ready) {
            std::vector<float> ordered(m.order ? m.width : 0);
            for (int64_t row = 0; row < rows; row++) prepare_row(to, row, ordered.data());
        }
        if ((floats || Element::ROUNDED) && !m.zero && !m.least) to.sums = nullptr;
        return to;
    }

    // The outputs of a piece.
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

// Pieces of a run: one stream of memory; there are enough runs for threads that lose their processor.
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
#ifdef INT8_DOTS
    if (m.kind == 4) return f(DigitsInt4{});
    if (m.kind == 5) return f(DigitsInt8{});
#endif
    if (m.kind == 4) f(WideInt4{});
    if (m.kind == 5) f(WideInt8{});
    if (m.kind == 6) f(WideFloat8{});
}

void multiply(int64_t kind, int64_t threads, const Matrix& m, const void* x, void* out, int64_t stride, int64_t rows) {
    with_element(kind, m, [&](auto element) { product<decltype(element)>(kind, threads, m, x, out, stride, rows); });
}

// A part of a product, and the pieces of it that a thread takes at once.
struct Run {
    const Matrix* matrix;
    const void* x;
    char* out;
    int64_t stride, rows, first, last;
    int64_t number;  // of the part
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
        if (p->rows > OWN_ROWS) {  // enough work for all threads, and rows that they prepare together
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
