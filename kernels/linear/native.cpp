// Products of rows and packed matrices, and the packing (products.h has the computation).

#include <algorithm>
#include <memory>

#include "../vectors.h"
#include "products.h"

namespace {

constexpr int64_t FEW_ROWS = 8;  // of int8, which vectors multiply faster than tiles, with the same bits

// The products of `rows` rows of `kind` and a matrix.
const Products& products_of([[maybe_unused]] int64_t kind, const Matrix& m, int64_t rows) {
    switch (m.kind) {
        case 0: return PRODUCTS<WideFloat32>;
        case 1:
#ifdef BFLOAT16_PAIRS
            if (kind == 1) return tiled<PairsOfBFloat16>();
#endif
            return PRODUCTS<WideBFloat16>;
        case 2: return PRODUCTS<WideFloat16>;
        case 3: return rows > FEW_ROWS ? tiled<Int8>() : PRODUCTS<Int8>;
        case 6: return PRODUCTS<WideFloat8>;
        case 4:
        case INT8_GROUPS:
        case 9:
        case 10:
        case 15:
        case 16: return of_groups(m);
    }
    return of_tables(m);
}

// Rounds rows [rows, width] to -128 to 127 times `step`; NaN is kept. x and out may be the same.
void round_to(float step, int64_t kind, int64_t threads, const void* x, int64_t x_row, void* out, int64_t out_row,
              int64_t rows, int64_t width) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
#pragma omp parallel for num_threads(threads) if (rows * width > 1 << 14)
        for (int64_t row = 0; row < rows; row++)
            each(width, [&](int64_t i, auto n) {
                const Floats steps = load((const T*)x + row * x_row + i, n) / step;
                const Floats low = all(-128), high = all(127);
                store(nearest(steps > high ? high : steps < low ? low : steps) * step, (T*)out + row * out_row + i, n);
            });
    });
}

bool has_steps(const Matrix* m) {
    while (m && !m->step_in && !m->step_out) m = m->next;
    return m;
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
    const int64_t element = kind ? 2 : 4;
    int64_t stride = 0, at = 0;
    for (const Matrix* m = matrix; m; m = m->next) stride += m->outs;
    std::unique_ptr<char[]> rounded;
    for (const Matrix* m = matrix; m; at += m->outs, m = m->next) {
        char* const own = (char*)out + at * element;
        if (m->step_in) {
            if (!rounded) rounded.reset(new char[rows * m->width * element]);
            round_to(m->step_in, kind, threads, x, m->width, rounded.get(), m->width, rows, m->width);
        }
        const void* const from = m->step_in ? rounded.get() : x;
        products_of(kind, *m, rows).whole(kind, threads, *m, from, own, stride, rows);
        if (m->step_out) round_to(m->step_out, kind, threads, own, stride, own, stride, rows, m->outs);
    }
}

extern "C" void coppice_linears(int64_t kind, int64_t threads, const Product* products, int64_t count) {
    const int64_t element = kind ? 2 : 4;
    std::vector<Run> parts, runs;
    int64_t pieces = 0;
    for (const Product* p = products; p < products + count; p++) {
        // With many rows there is enough work for all threads, which prepare the rows together.
        if (p->rows > OWN_ROWS || has_steps(p->matrix)) {
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
            products_of(kind, *runs[i].matrix, runs[i].rows).part(kind, runs[i], prepared);
        leave_tiles();
    }
}

extern "C" void coppice_linear_kinds(int64_t* kinds) {
    *kinds = 1 | 8;
#ifdef BFLOAT16_PAIRS
    *kinds |= 2;
#endif
    if (tiles_allowed()) *kinds |= 1 << 8;
}
