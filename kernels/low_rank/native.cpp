// Low-rank products that are added to the outputs of a matrix. Both factors are stored in panels of 16 outputs (see
// factors.py), so each is read as one stream.
//
// The inputs of a row are summed in chunks of CHUNK, by any thread, and chunks are added in order: a row's sums depend
// neither on the rows beside it nor on the number of threads.

#include <algorithm>
#include <vector>

#include "../operators.h"
#include "../vectors.h"

namespace {

constexpr int PANEL = 16, SETS = PANEL / LANES;
constexpr int BLOCK = std::max(1, REGISTERS / (4 * SETS));  // rows that share a load of the panels, with two sums each
constexpr int CHUNK = 256;               // inputs of a sum; an even number
constexpr int AHEAD = 2048;              // bytes
constexpr int64_t MAX_SERIAL = 1 << 15;  // multiplications; waking threads pays only for more than these

// Some rows with the same adapter.
struct Block {
    const LowRank* adapter;
    int64_t rows[BLOCK];
    int count;
    int64_t sums;  // index of its chunks' sums
};

// The rows that are multiplied, as floats; an odd number of inputs is followed by a 0.
typedef float Inputs[BLOCK][CHUNK];

// Multiplies `inputs` rows of a panel with COUNT rows of x and calls finish(row, set, sum). Even and odd inputs have
// separate sums, so that two additions are in flight.
template <typename Element, int COUNT, typename Finish>
inline void multiply(const Element* panel, int64_t inputs, const Inputs& x, Finish finish) {
    Floats parts[2][COUNT][SETS] = {};
    for (int64_t i = 0; i < inputs; i += 2) {
        for (int line = 0; line < 2 * PANEL * (int)sizeof(Element); line += 64)
            __builtin_prefetch((const char*)(panel + i * PANEL) + line + AHEAD);
        for (int part = 0; part < 2; part++)
            for (int set = 0; set < SETS; set++) {
                const Floats weights = load(panel + (i + part) * PANEL + set * LANES);
                for (int row = 0; row < COUNT; row++) parts[part][row][set] += weights * x[row][i + part];
            }
    }
    for (int row = 0; row < COUNT; row++)
        for (int set = 0; set < SETS; set++) finish(row, set, parts[0][row][set] + parts[1][row][set]);
}

template <typename Element, int COUNT = BLOCK, typename Finish>
void multiply_rows(int count, const Element* panel, int64_t inputs, const Inputs& x, Finish finish) {
    if (count == COUNT) return multiply<Element, COUNT>(panel, inputs, x, finish);
    if constexpr (COUNT > 1) multiply_rows<Element, COUNT - 1>(count, panel, inputs, x, finish);
}

int64_t padded(int64_t rank) { return (rank + PANEL - 1) / PANEL * PANEL; }

// Multiplies one chunk of x with the first factor; out [BLOCK, padded rank].
template <typename Element, typename T>
void reduce(const LowRank& a, const Block& block, const T* x, int64_t first, float* out) {
    Inputs rows;
    const int64_t inputs = std::min<int64_t>(CHUNK, a.width - first), wide = padded(a.rank);
    for (int row = 0; row < block.count; row++) {
        const T* from = x + block.rows[row] * a.width + first;
        each(inputs, [&](int64_t i, auto n) { store(load(from + i, n), rows[row] + i, n); });
        if (inputs % 2) rows[row][inputs] = 0;
    }
    for (int64_t at = 0; at < wide; at += PANEL) {
        const Element* panel = (const Element*)a.panels + at * a.width + first * PANEL;
        multiply_rows<Element>(block.count, panel, inputs, rows, [&](int row, int set, Floats sum) {
            store(sum, out + row * wide + at + set * LANES);
        });
    }
}

// Multiplies with panels `panel` to `last` of a part of the second factor; a rank above CHUNK is processed in pieces.
template <typename Element, typename T>
void expand(const LowRank& a, const LowRankPart& part, const Block& block, const float* chunks, int64_t panel,
            int64_t last, T* out) {
    const int64_t wide = padded(a.rank), count = (a.width + CHUNK - 1) / CHUNK, begin = panel;
    for (int64_t first = 0; first < part.rank; first += CHUNK) {
        Inputs reduced;
        const int64_t rank = std::min<int64_t>(CHUNK, part.rank - first);
        for (int row = 0; row < block.count; row++) {
            each(rank, [&](int64_t i, auto n) {
                Floats sum{};
                for (int64_t chunk = 0; chunk < count; chunk++)
                    sum += load(chunks + (chunk * BLOCK + row) * wide + part.at + first + i, n);
                store(sum * part.scale, reduced[row] + i, n);
            });
            if (rank % 2) reduced[row][rank] = 0;
        }
        for (panel = begin; panel < last; panel++) {
            const Element* weights = (const Element*)part.panels + (panel * part.rank + first) * PANEL;
            multiply_rows<Element>(block.count, weights, rank, reduced, [&](int row, int set, Floats sum) {
                const int64_t at = panel * PANEL + set * LANES;
                const int n = std::min<int64_t>(LANES, part.outs - at);
                T* to = out + block.rows[row] * a.outs + part.first + at;
                if (n == LANES) store(load(to) + sum, to);
                else if (n > 0) store(load(to, n) + sum, to, n);
            });
        }
    }
}

// A unit of work: a chunk of a block for the first factor, or some panels of a part of a block for the second.
struct Piece {
    const Block* block;
    const LowRankPart* part;  // null: first factor
    int64_t first, last;
};

template <typename T>
void run(int64_t threads, const std::vector<Piece>& chunks, const std::vector<Piece>& pieces, float* sums, const T* x,
         T* out, bool serial) {
#pragma omp parallel num_threads(threads) if (!serial)
    {
#pragma omp for schedule(static)
        for (size_t i = 0; i < chunks.size(); i++) {
            const Block& block = *chunks[i].block;
            const LowRank& a = *block.adapter;
            float* to = sums + block.sums + chunks[i].first / CHUNK * BLOCK * padded(a.rank);
            with_type(a.kind, [&](auto type) { reduce<decltype(type)>(a, block, x, chunks[i].first, to); });
        }
#pragma omp for schedule(static)
        for (size_t i = 0; i < pieces.size(); i++) {
            const Block& block = *pieces[i].block;
            const LowRank& a = *block.adapter;
            with_type(a.kind, [&](auto type) {
                expand<decltype(type)>(a, *pieces[i].part, block, sums + block.sums, pieces[i].first, pieces[i].last,
                                       out);
            });
        }
    }
}

}  // namespace

extern "C" void coppice_low_rank(int64_t kind, int64_t threads, const LowRank* adapters, const int64_t* adapters_T,
                                 const void* x, void* out, int64_t rows) {
    std::vector<Block> blocks;
    std::vector<int> open;  // by adapter: 1 + the block that has room
    for (int64_t row = 0; row < rows; row++) {
        const int64_t number = adapters_T[row];
        if (!adapters[number].rank) continue;
        if ((int64_t)open.size() <= number) open.resize(number + 1);
        if (!open[number] || blocks[open[number] - 1].count == BLOCK) {
            blocks.push_back({adapters + number, {}, 0, 0});
            open[number] = blocks.size();
        }
        Block& block = blocks[open[number] - 1];
        block.rows[block.count++] = row;
    }
    if (blocks.empty()) return;
    std::vector<Piece> chunks, pieces;
    int64_t room = 0, work = 0;
    for (Block& block : blocks) {
        const LowRank& a = *block.adapter;
        block.sums = room;
        room += (a.width + CHUNK - 1) / CHUNK * BLOCK * padded(a.rank);
        work += block.count * a.rank * (a.width + a.outs);
        for (int64_t first = 0; first < a.width; first += CHUNK) chunks.push_back({&block, nullptr, first, 0});
        for (int64_t i = 0; i < a.count; i++) {
            const int64_t panels = (a.parts[i].outs + PANEL - 1) / PANEL;
            for (int64_t at = 0; at < threads; at++)
                pieces.push_back({&block, a.parts + i, panels * at / threads, panels * (at + 1) / threads});
        }
    }
    static thread_local std::vector<float> sums;
    if ((int64_t)sums.size() < room) sums.resize(room);
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        run<T>(threads, chunks, pieces, sums.data(), (const T*)x, (T*)out, work <= MAX_SERIAL);
    });
}
