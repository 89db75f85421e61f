// Tree attention on a CPU. A row's result is bit-identical whatever rows are computed beside it, wherever its keys are
// stored, and with any number of threads. Keys are processed in blocks of fixed positions (keys.h). A block is
// converted once for all rows of a tile that see it (ready.h); then one small matrix product computes scores from
// queries and keys, and another computes outputs from weights and values (products.h, tiles.h). The sums of a row have
// one order: elements of a head, then lanes of a block, then blocks. A key that a row does not see has weight 0, which
// changes no bit. The softmax is computed online (Milakov and Gimelshein, 2018), separately for every CUT positions;
// the parts are then merged in order, so several threads can share a long trunk.
//
// Shape legend: kernels/layout.py. A row is one query head of one token; the rows of a tile share a key/value head.

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "../operators.h"
#include "../vectors.h"
#include "keys.h"
#include "products.h"
#include "ready.h"
#include "tiles.h"

namespace {

constexpr int CUT = 256;             // positions; a multiple of BLOCK
constexpr int MAX_SERIAL = 1 << 14;  // vector products; waking threads pays only for more than these
constexpr int MIN_UNITS = 4;         // per thread; with fewer units, threads share the cuts of a unit
const Floats NEVER = all(-INFINITY);

// Tokens first .. last - 1 of a tree and query heads head .. head + heads - 1 of a group: one row for each pair. The
// tokens see keys in cuts first_cut .. last_cut - 1.
struct Tile {
    int tree, first, last, head, heads;
    int64_t first_cut, last_cut;

    int rows() const { return (last - first) * heads; }
};

// The state of the online softmax of some rows over some of their keys.
struct Part {
    float* most_R;   // the largest score
    Floats* sum_R;   // the sum of 2^(score - largest), one per lane
    Floats* out_RD;  // the sum of values times 2^(score - largest)

    static int64_t size(int rows, int vectors) { return (rows + LANES - 1) / LANES + rows * (1 + vectors); }

    Part(Floats* room, int rows)
        : most_R((float*)room), sum_R(room + (rows + LANES - 1) / LANES), out_RD(sum_R + rows) {}
};

// Attention of one tile at a time, used by one thread. Queries and outputs have type T, keys and values type C.
template <typename T, typename C>
class Worker {
  public:
    Worker(const Attention& p, const Keys& keys, const T* q, const char* k, const char* v, T* out)
        : p(p), keys(keys), ready(p, k, v), q(q), out(out), D(p.head_dim), group(p.heads / p.kv_heads),
          vectors(ready.value_width / LANES), q_words(new int32_t[ready.lines * MAX_ROWS]()) {}

    // Reads the queries of a tile.
    void begin(const Tile& tile, int g) {
        ready.forget();
        tile_rows = tile.rows();
        queries = ready.tiled ? Queries{q_words.get(), ready.lines, 1} : Queries{q_words.get(), 1, tile_rows};
        for (int row = 0; row < tile.rows(); row++) {
            if (p.slopes) slopes.begin(row, token_of(tile, row), head_of(tile, g, row));
            const T* from = q + token_of(tile, row) * p.q_token + head_of(tile, g, row) * p.q_head;
            int32_t* to = &q_words[row * queries.row];
            if (ready.pairs)
                for (int d = 0; d < D / 2; d++) std::memcpy(to + d * queries.word, from + 2 * d, 4);
            else
                each(D, [&](int64_t d, auto n) {
                    const Ints some = (Ints)load(from + d, n);
                    for (int j = 0; j < n; j++) to[(d + j) * queries.word] = some[j];
                });
        }
    }

    // Computes the part of a cut for the rows of the tile that `begin` has read.
    void run(const Tile& tile, int g, int64_t cut, const Part& part) {
        const AsTiles mode(ready.tiled);
        const int rows = tile.rows();
        std::fill_n(part.most_R, rows, -INFINITY);
        std::fill_n(part.sum_R, rows * (1 + vectors), Floats{});
        const int64_t low = cut * CUT, high = low + CUT;
        int64_t start = high, end = low;
        for (int t = tile.first; t < tile.last; t++)
            start = std::min<int64_t>(start, keys[t].oldest), end = std::max<int64_t>(end, keys[t].shared);
        for (int64_t at = std::max(low, start / BLOCK * BLOCK); at < std::min(end, high); at += BLOCK)
            share_block(tile, g, at, part);
        int token = tile.first;  // the owner of `waiting`, a block that is computed while the next one is fetched
        const OwnBlock* waiting = nullptr;
        for (int t = tile.first; t < tile.last; t++)
            for (int i = keys[t].first; i < keys[t].last; i++) {
                if (keys.own(i)->number / (CUT / BLOCK) != cut) continue;
                ready.fetch(g, *keys.own(i), waiting);
                if (waiting) own_block(tile, g, token, *waiting, part);
                token = t, waiting = keys.own(i);
            }
        if (waiting) own_block(tile, g, token, *waiting, part);
    }

    // Merges the part of a later cut into `into`.
    __attribute__((noinline)) static void merge(const Part& from, const Part& into, int rows, int vectors) {
        for (int row = 0; row < rows; row++) {
            const float most = std::max(from.most_R[row], into.most_R[row]), base = most == -INFINITY ? 0 : most;
            const Floats theirs = exp2_of(all(from.most_R[row] - base)), ours = exp2_of(all(into.most_R[row] - base));
            into.most_R[row] = most;
            into.sum_R[row] = into.sum_R[row] * ours + from.sum_R[row] * theirs;
            for (int i = row * vectors; i < (row + 1) * vectors; i++)
                into.out_RD[i] = into.out_RD[i] * ours + from.out_RD[i] * theirs;
        }
    }

    void write(const Tile& tile, int g, const Part& part) {
        for (int row = 0; row < tile.rows(); row++) {
            const int token = token_of(tile, row);
            const int head = head_of(tile, g, row);
            const float sum = sum_of(part.sum_R[row]);
            float share = sum == 0 ? (keys[token].end ? NAN : 0) : 1 / sum;
            if (p.sinks && sum != 0) share = beside(p.sinks[head], part.most_R[row], sum);
            T* to = out + (int64_t(token) * p.heads + head) * D;
            each(D, [&](int64_t d, auto n) { store(part.out_RD[row * vectors + d / LANES] * share, to + d, n); });
        }
    }

  private:
    const Attention& p;
    const Keys& keys;
    Ready<T, C> ready;
    const T* q;
    T* out;
    const float factor = p.cap > 0 ? p.scale / p.cap : p.scale * LOG2_E;  // of scores, or of tanh's argument
    const int D, group, vectors;
    std::unique_ptr<int32_t[]> q_words;  // floats or pairs of bfloat16
    int tile_rows = 0;
    Queries queries;
    alignas(64) Floats scores_RS[MAX_ROWS * KEY_VECTORS];  // later the weights: floats or bfloat16
    uint32_t seen_R[MAX_ROWS];  // a bit for each lane that a row sees
    int32_t block_at = 0;       // position of the first lane
    Slopes slopes{p};

    static constexpr bool QUANTISED = Ready<T, C>::QUANTISED;

    static int token_of(const Tile& tile, int row) { return tile.first + row / tile.heads; }
    int head_of(const Tile& tile, int g, int row) const { return g * group + tile.head + row % tile.heads; }

    // Returns the factor of the outputs when a sink's exponential joins the sum, which is relative to `most`.
    static float beside(float sink, float most, float sum) {
        const float above = double(sink) * M_LOG2E - most, power = exp2_of(all(-std::abs(above)))[0];
        return above > 0 ? power / (sum * power + 1) : 1 / (sum + power);
    }

    // The lanes of the trunk block at position `at` that a token sees: first .. last - 1.
    static std::pair<int, int> lanes_of(const Token& token, int64_t at) {
        return {std::max<int64_t>(0, token.oldest - at), std::min<int64_t>(BLOCK, token.shared - at)};
    }

    // Attends to the trunk block at position `at`, for all rows that see any of it.
    void share_block(const Tile& tile, int g, int64_t at, const Part& part) {
        int first = tile.last, last = first, from = BLOCK, to = 0;
        bool whole = true;
        for (int t = tile.first; t < tile.last; t++) {
            const auto [old, end] = lanes_of(keys[t], at);
            if (t >= first && old >= end) whole = false;
            if (old >= end) continue;
            first = std::min(first, t), last = t + 1;
            from = std::min(from, old), to = std::max(to, end);
            whole &= end - old == BLOCK;
        }
        if (first == tile.last) return;
        for (int t = first; !whole && t < last; t++) {
            const auto [old, end] = lanes_of(keys[t], at);
            const uint32_t seen = old >= end ? 0 : ~uint32_t(0) >> (BLOCK - end) & ~uint32_t(0) << old;
            std::fill_n(&seen_R[(t - tile.first) * tile.heads], tile.heads, seen);
        }
        keys.trunk_slots(tile.tree, at + from, at + to, ready.slots + from);
        std::fill(ready.slots, ready.slots + from, ready.slots[from]);
        std::fill(ready.slots + to, ready.slots + BLOCK, ready.slots[from]);
        ready.begin(g, to, true);
        block_at = at;
        attend((first - tile.first) * tile.heads, (last - first) * tile.heads, from, to, !whole, part);
    }

    // Attends to a token's own block, for the rows of this token.
    void own_block(const Tile& tile, int g, int t, const OwnBlock& block, const Part& part) {
        const int from = __builtin_ctz(block.there), to = BLOCK - __builtin_clz(block.there);
        for (int j = 0; j < BLOCK; j++) ready.slots[j] = block.slots[block.there >> j & 1 ? j : from];
        std::fill_n(&seen_R[(t - tile.first) * tile.heads], tile.heads, block.there);
        ready.begin(g, to, false);
        block_at = block.number * BLOCK;
        attend((t - tile.first) * tile.heads, tile.heads, from, to, true, part);
    }

    // Adds the keys of lanes from .. to - 1, which are ready, to the state of rows row .. row + rows - 1.
    void attend(int row, int rows, int from, int to, bool masked, const Part& part) {
#ifdef BFLOAT16_PAIRS
        if constexpr (Ready<T, C>::PAIRABLE) {
#ifdef TILES
            if (ready.tiled) return attend<ByTiles>(row, rows, from, to, masked, part);
#endif
            if (ready.pairs) return attend<ByVectors<TwoBFloat16, 2>>(row, rows, from, to, masked, part);
        }
#endif
        attend<ByVectors<Float32, 1>>(row, rows, from, to, masked, part);
    }

    template <typename Products>
    void attend(int row, int rows, int from, int to, bool masked, const Part& part) {
        constexpr int EACH = Products::EACH;
        if (Products::whole(rows, tile_rows)) from = 0, to = BLOCK;
        const int first = from / LANES, last = (to + LANES - 1) / LANES;
        Products::score(queries.from(row), rows, tile_rows, ready, from, to, scores_RS);
        ready.take_values(from, to);
        float keep[MAX_ROWS];
        if (p.slopes)
            weigh<EACH, true>(row, rows, first, last, masked, part, keep);
        else
            weigh<EACH, false>(row, rows, first, last, masked, part, keep);
        Products::mix((int32_t*)scores_RS, rows, tile_rows, ready, from, to, part.out_RD + row * vectors, keep);
    }

    // Stores vector i of a block's weights. Rounded weights are also returned, so that the sum of the softmax adds what
    // is multiplied with the values.
    template <int EACH>
    void put(Floats& weights, int i, int at) {
        const Floats scales = QUANTISED ? ready.value_scales[i] : Floats{};
#ifdef BFLOAT16_PAIRS
        if constexpr (EACH == 2) {
            Shorts near = nearest_bfloat16(weights);
            weights = floats_of(near);
            if (QUANTISED) near = nearest_bfloat16(weights * scales);
            return ::write(near, (BFloat16*)scores_RS + at, LANES);
        }
#endif
        store(QUANTISED ? weights * scales : weights, (float*)scores_RS + at);
    }

    // Replaces vectors first .. last - 1 of the scores by weights. `keep` receives the factor of each row's earlier
    // sums.
    template <int EACH, bool SLOPED>
    void weigh(int row, int rows, int first, int last, bool masked, const Part& part, float* keep) {
        float base[MAX_ROWS];
        Floats tops[LANES];
        Ints lanes[KEY_VECTORS];
        for (int i = 0; i < BLOCK; i++) lanes[i / LANES][i % LANES] = i;
        for (int r = 0; r < rows; r++) {
            Floats* scores = &scores_RS[r * KEY_VECTORS];
            Floats most = NEVER;
            for (int i = first; i < last; i++) {
                if constexpr (SLOPED) {
                    if (QUANTISED) scores[i] *= ready.key_scales[i];
                    const Floats places = __builtin_convertvector(lanes[i] + block_at, Floats);
                    scores[i] = (scores[i] + slopes.biases(row + r, places)) * factor;
                } else {
                    scores[i] *= QUANTISED ? ready.key_scales[i] * factor : all(factor);
                }
                if (p.cap > 0) scores[i] = tanh_of(scores[i]) * (p.cap * LOG2_E);
                if (masked) scores[i] = (Ints{} + int32_t(seen_R[row + r])) >> lanes[i] & 1 ? scores[i] : NEVER;
                most = larger(scores[i], most);
            }
            tops[r % LANES] = most;
            if (r == rows - 1 && r % LANES < LANES / 4)
                for (int i = r / LANES * LANES; i <= r; i++) base[i] = largest_of(tops[i % LANES]);
            else if (r == rows - 1 || r % LANES == LANES - 1)
                store(largest_of_each(tops), base + r / LANES * LANES);
        }
        each(rows, [&](int64_t r, auto n) {
            const Floats before = load(part.most_R + row + r, n), most = larger(load(base + r, n), before);
            store(most, part.most_R + row + r, n);
            const Floats from = most == NEVER ? Floats{} : most;
            store(from, base + r, n);
            store(exp2_of(before - from), keep + r, n);
        });
        for (int r = 0; r < rows; r++) {
            const Floats* scores = &scores_RS[r * KEY_VECTORS];
            Floats sum{};
            for (int i = first; i < last; i++) {
                Floats weights = exp2_of(scores[i] - base[r]);
                put<EACH>(weights, i, r * BLOCK + i * LANES);
                sum += weights;
            }
            part.sum_R[row + r] = part.sum_R[row + r] * keep[r] + sum;
        }
    }
};

std::vector<Tile> tiles_of(const Attention& p, const Keys& keys) {
    const int group = p.heads / p.kv_heads, heads = std::min(group, MAX_ROWS), tokens = MAX_ROWS / heads;
    std::vector<Tile> tiles;
    for (int r = 0; r < p.trees; r++)
        for (int first = p.starts[r]; first < p.starts[r + 1]; first += tokens) {
            const int last = std::min<int>(first + tokens, p.starts[r + 1]);
            int64_t start = INT64_MAX, end = 0;
            for (int t = first; t < last; t++)
                start = std::min<int64_t>(start, keys[t].oldest), end = std::max(end, keys[t].end);
            start = std::min(start / CUT, end / CUT);
            for (int head = 0; head < group; head += heads)
                tiles.push_back({r, first, last, head, std::min(heads, group - head), start, (end + CUT - 1) / CUT});
        }
    return tiles;
}

template <typename T, typename C>
void tree_attention(const Attention& p, const T* q, const char* k, const char* v, T* out) {
    const Keys keys(p);
    const std::vector<Tile> tiles = tiles_of(p, keys);
    const int units = tiles.size() * p.kv_heads;
    int64_t longest = 1, work = 0;
    int most = 0;  // rows of the largest tile
    for (const Tile& tile : tiles) {
        most = std::max(most, tile.rows());
        longest = std::max(longest, tile.last_cut - tile.first_cut);
        work += tile.rows() * (tile.last_cut - tile.first_cut) * CUT * p.kv_heads;
    }
    const int vectors = (p.head_dim + LANES - 1) / LANES;
    const bool shared = units < MIN_UNITS * p.threads && p.threads > 1;
    const int64_t size = Part::size(most, vectors), parts = shared ? longest : 1;
    const std::unique_ptr<Floats[]> room(parts > 1 ? new Floats[units * parts * size] : nullptr);
#pragma omp parallel num_threads(p.threads) if (work * p.head_dim / LANES > MAX_SERIAL)
    {
        Worker<T, C> worker(p, keys, q, k, v, out);
        const std::unique_ptr<Floats[]> own(new Floats[2 * size]);
#pragma omp for schedule(dynamic)
        for (int64_t u = 0; u < units * parts; u++) {
            const Tile& tile = tiles[u / parts % tiles.size()];
            const int g = u / parts / tiles.size(), rows = tile.rows();
            if (parts > 1) {
                const int64_t cut = tile.first_cut + u % parts;
                if (cut >= tile.last_cut) continue;
                worker.begin(tile, g);
                worker.run(tile, g, cut, Part(room.get() + u * size, rows));
                continue;
            }
            const Part all(own.get(), rows), next(own.get() + size, rows);
            worker.begin(tile, g);
            worker.run(tile, g, tile.first_cut, all);
            for (int64_t cut = tile.first_cut + 1; cut < tile.last_cut; cut++) {
                worker.run(tile, g, cut, next);
                worker.merge(next, all, rows, vectors);
            }
            worker.write(tile, g, all);
        }
        leave_tiles();
#pragma omp for
        for (int u = 0; u < (parts > 1 ? units : 0); u++) {
            const Tile& tile = tiles[u % tiles.size()];
            const int g = u / tiles.size(), rows = tile.rows();
            const Part all(room.get() + u * parts * size, rows);
            if (tile.first_cut >= tile.last_cut) worker.run(tile, g, tile.first_cut, all);
            for (int64_t i = 1; i < tile.last_cut - tile.first_cut; i++)
                worker.merge(Part(room.get() + (u * parts + i) * size, rows), all, rows, vectors);
            worker.write(tile, g, all);
        }
    }
}

}  // namespace

extern "C" int64_t coppice_layout_fits(int64_t tokens, int64_t trees, int64_t run_count, int64_t table_width,
                                       int64_t slots, int64_t page_size, int64_t pages_width, int64_t tree_stride,
                                       int64_t page_stride, const int32_t* starts, const int32_t* seen,
                                       const int32_t* runs, const int64_t* branch_slots, const int32_t* pages,
                                       const int64_t* write_slots) {
    if (starts[0] != 0 || starts[trees] != tokens) return 0;
    std::vector<int64_t> lengths(trees);
    for (const int32_t* run = runs; run < runs + 3 * run_count; run += 3) {
        if (run[0] < 0 || run[0] >= trees || run[1] < 0 || run[2] < 0 || int64_t(run[1]) + run[2] > slots) return 0;
        lengths[run[0]] += run[2];
    }
    for (int64_t r = 0; r < trees; r++)
        if (starts[r] > starts[r + 1]) return 0;
    for (int64_t r = 0; r < trees; r++) {
        int64_t most = 0;
        for (int64_t t = starts[r]; t < starts[r + 1]; t++) {
            if (seen[t] < 0) return 0;
            most = std::max<int64_t>(most, seen[t]);
        }
        if (most > lengths[r] || (pages_width >= 0 && most > pages_width * page_size)) return 0;
        for (int64_t i = 0; pages_width >= 0 && i * page_size < most; i++) {
            const int32_t page = pages[r * tree_stride + i * page_stride];
            if (page < 0 || page >= slots / page_size) return 0;
        }
    }
    const auto none = [&](int64_t slot) { return slot < 0 || slot >= slots; };
    return std::none_of(branch_slots, branch_slots + trees * table_width, none) &&
           (!write_slots || std::none_of(write_slots, write_slots + tokens, none));
}

extern "C" void coppice_tree_attention(const Attention* p, const void* q, const void* k, const void* v, void* out) {
    with_type(p->kind, [&](auto type) {
        using T = decltype(type);
        const auto run = p->cache == INT8 ? tree_attention<T, int8_t> : tree_attention<T, T>;
        run(*p, (const T*)q, (const char*)k, (const char*)v, (T*)out);
    });
}
