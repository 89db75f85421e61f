// Tree attention on a CPU. Query rows are the lanes of a vector: a score is a broadcast element of a key times a
// vector of the rows' elements, so keys and values are read where they lie, once for all rows of a tile; nothing is
// gathered, transposed or copied (but 16-bit elements and int8 are converted to floats, or the values of two keys
// interleaved, a block at a time, where no instruction multiplies them as they are). In a tile of few rows the elements
// of one row are the lanes, and rows take turns. The softmax is computed online (Milakov and Gimelshein, 2018). Where
// there are fewer tiles than threads, long trunks are cut and the results of the cuts merged.
//
// Shape legend: kernels/layout.py. A row is one query head of one token; the rows of a tile share a key/value head.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "../operators.h"
#include "../vectors.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // it does not see that only scores of taken slots are read
#endif

namespace {

constexpr int VECTORS = 4;  // the most in a tile, of rows
constexpr int MAX_SINGLE_ROWS = LANES / 4;  // of more, rows are the lanes
constexpr int BLOCK = 32;  // keys between two updates of the largest score
constexpr int KEYS = 8;    // with their scores in registers at once; divides BLOCK
constexpr int DIMS = 16;   // of the output, likewise
constexpr int MIN_CUT = 256;  // trunk tokens
constexpr int MAX_SERIAL = 1 << 14;  // vector products; only for more is it worth waking threads
const Floats NEVER = all(-INFINITY);

// Rows first .. last - 1 of a tree, counted token by token and head by head.
struct Tile {
    int tree, first, last;
};

// The state of the online softmax of a tile, over some of its keys.
struct Part {
    Floats most[VECTORS], sum[VECTORS];  // the largest score, and the sum of 2^(score - largest)
    std::vector<Floats> out_D;           // of each vector in turn: the sum of values times 2^(score - largest)
};

// Queries and output are of type T, keys and values of type C.
template <typename T, typename C>
class Worker {
  public:
    Worker(const Attention& p, const T* q, const char* k, const char* v, T* out)
        : p(p), q(q), k(k), v(v), out(out), D(p.head_dim), group(p.heads / p.kv_heads), q_words(VECTORS * D) {
#ifdef __AVX512BF16__
        pairs = std::is_same_v<C, BFloat16> && D % 2 == 0;
#endif
        part.out_D.resize(VECTORS * D);
        row_D.resize(2 * MAX_SINGLE_ROWS * depth());
        if (!std::is_same_v<C, float>) room.resize(2 * BLOCK * D);
    }

    Part part;

    // A tile's rows over one of the cuts of the trunk; the last one has the branches too.
    void run(const Tile& tile, int g, int cut, int cuts, Part& part) {
        const int rows = tile.last - tile.first, vectors = (rows + LANES - 1) / LANES;
        few = rows <= MAX_SINGLE_ROWS ? rows : 0;
        Ints seen[VECTORS], oldest[VECTORS];
        int all_see[VECTORS], none_sees[VECTORS], latest[VECTORS];  // bounds of `seen`, and the largest `oldest`
        int start = INT32_MAX, end = 0;
        for (int i = 0; i < vectors; i++) {
            part.most[i] = NEVER, part.sum[i] = Floats{};
            all_see[i] = INT32_MAX, none_sees[i] = latest[i] = 0;
            for (int lane = 0; lane < LANES; lane++) {
                const int row = row_of(tile, i, lane), token = token_of(tile, row);
                const T* from = q + token * p.q_token + (g * group + row % group) * p.q_head;
                if (few) {
                    if (lane < few) load_row(from, &row_D[2 * lane * depth()]);
                } else if (pairs) {
                    for (int d = 0; d < D / 2; d++) {
                        int32_t pair;
                        std::memcpy(&pair, from + 2 * d, sizeof pair);
                        q_words[i * D + d][lane] = pair;
                    }
                } else {
                    each(D, [&](int64_t d, auto n) {
                        const Ints some = (Ints)load(from + d, n);
                        for (int j = 0; j < n; j++) q_words[i * D + d + j][lane] = some[j];
                    });
                }
                const int sees = p.seen[token], old = oldest_of(token);
                seen[i][lane] = sees, oldest[i][lane] = old;
                all_see[i] = std::min(all_see[i], sees), none_sees[i] = std::max(none_sees[i], sees);
                start = std::min(start, old), latest[i] = std::max(latest[i], old);
            }
            std::fill_n(&part.out_D[i * D], D, Floats{});
            end = std::max(end, none_sees[i]);
        }
        start = std::min(start, end);
        const int64_t span = end - start, low = start + span * cut / cuts, high = start + span * (cut + 1) / cuts;
        int64_t place = low;  // of the first slot that waits
        auto flush = [&] {
            take(g, true);
            for (int i = 0; i < vectors; i++) {
                if (place >= none_sees[i]) continue;
                const bool masked = place + n > all_see[i] || place < latest[i];
                const Ints last = seen[i] - int32_t(place), old = oldest[i] - int32_t(place);
                attend(i, part, masked, [&](int j) { return (last <= j) | (old > j); });
            }
            place += n, n = 0;
        };
        int64_t first = 0;  // place of a run's first token
        for (int64_t r = 0; r < p.run_count && first < high; r++) {
            if (p.runs[3 * r] != tile.tree) continue;
            const int64_t slot = p.runs[3 * r + 1], length = p.runs[3 * r + 2], last = std::min(high, first + length);
            for (int64_t at = std::max(low, first); at < last;) {
                const int count = std::min<int64_t>(BLOCK - n, last - at);
                for (int j = 0; j < count; j++) slots[n + j] = slot + at - first + j;
                at += count, n += count;
                if (n == BLOCK) flush();
            }
            first += length;
        }
        if (n) flush();
        if (cut == cuts - 1)
            for (int i = 0; i < vectors; i++) branches(tile, g, i, oldest[i], part);
        for (int row = 0; row < few; row++) {
            const float* gathered = (const float*)&row_D[(2 * row + 1) * depth()];
            for (int d = 0; d < D; d++) part.out_D[d][row] = gathered[d];
        }
    }

    // Adds another cut's part.
    static void merge(const Part& from, Part& into, int vectors, int D) {
        for (int i = 0; i < vectors; i++) {
            const Floats most = larger(from.most[i], into.most[i]), base = most == NEVER ? Floats{} : most;
            const Floats theirs = exp2_of(from.most[i] - base), ours = exp2_of(into.most[i] - base);
            into.most[i] = most;
            into.sum[i] = from.sum[i] * theirs + into.sum[i] * ours;
            for (int d = i * D; d < (i + 1) * D; d++) into.out_D[d] = from.out_D[d] * theirs + into.out_D[d] * ours;
        }
    }

    void write(const Tile& tile, int g, const Part& part) {
        for (int row = tile.first; row < tile.last; row++) {
            const int i = (row - tile.first) / LANES, lane = (row - tile.first) % LANES;
            const int token = token_of(tile, row);
            const float sum = part.sum[i][lane], share = sum == 0 ? (is_blind(tile.tree, token) ? 0 : NAN) : 1 / sum;
            T* to = out + (token * p.heads + g * group + row % group) * D;
            each(D, [&](int64_t d, auto n) {
                Floats some{};
                for (int j = 0; j < n; j++) some[j] = part.out_D[i * D + d + j][lane] * share;
                store(some, to + d, n);
            });
        }
    }

  private:
    static constexpr bool QUANTISED = std::is_same_v<C, int8_t>;
    const Attention& p;
    const T* q;
    const char *k, *v;
    T* out;
    const float factor = p.cap > 0 ? p.scale / p.cap : p.scale * LOG2_E;  // of the scores; with a cap of its tanh
    const int D, group, row_bytes = D * sizeof(C);
    const int64_t head_bytes = p.slots * (row_bytes + (QUANTISED ? SCALE_BYTES : 0));
    bool pairs = false;         // keys are read as pairs of bfloat16, for which the processor has products
    std::vector<Ints> q_words;  // of each vector of rows in turn: floats or pairs
    int few = 0;                // rows, if there are at most MAX_SINGLE_ROWS
    std::vector<Floats> row_D;  // of each of these in turn: its query, floats or pairs, and its row of `Part::out_D`
    std::vector<float> room;    // for converted keys and values
    int n = 0;                  // slots that wait, or are taken
    int64_t slots[BLOCK];
    const int32_t* keys[BLOCK];  // of the taken slots: floats or pairs
    int value_rows = 0;
    const int32_t* values[BLOCK];  // of the taken slots: floats; or pairs, of two slots' elements
    const char *next_k, *next_v;   // to prefetch meanwhile

    static int row_of(const Tile& tile, int i, int lane) {
        return std::min(tile.first + i * LANES + lane, tile.last - 1);
    }
    int token_of(const Tile& tile, int row) const { return p.starts[tile.tree] + row / group; }

    int oldest_of(int token) const {
        return p.window < 0 ? 0 : std::max<int64_t>(0, p.positions[token] - p.window + 1);
    }

    // Whether a token sees nothing at all, as padding does; if it sees something, a sum of 0 is an overflow.
    bool is_blind(int tree, int token) const {
        const int oldest = oldest_of(token);
        if (p.seen[token] > oldest) return false;
        for (int column = 0; column < p.table_width; column++)
            if (p.ancestry[token * p.words + column / 32] >> column % 32 & 1 &&
                p.branch_positions[tree * p.table_width + column] >= oldest)
                return false;
        return true;
    }

    // Makes the waiting slots' keys and values ready; `ahead`: the slots behind them are prefetched.
    void take(int g, bool ahead) {
        const char *k_SD = k + g * head_bytes, *v_SD = v + g * head_bytes;
        if (pairs && !few) {
            pair_up(v_SD);
        } else {
            convert(v_SD, values, room.data());
            value_rows = n;
        }
        if (pairs) {
            for (int j = 0; j < n; j++) keys[j] = (const int32_t*)(k_SD + slots[j] * row_bytes);
        } else {
            convert(k_SD, keys, room.data() + BLOCK * D);
        }
        for (int j = n; j % KEYS; j++) keys[j] = keys[0];
        const int64_t next = ahead ? slots[n - 1] + 1 : slots[0];
        next_k = k_SD + next * row_bytes, next_v = v_SD + next * row_bytes;
    }

    // Points `at` to the waiting slots' rows as floats; neighbours are converted in one go.
    void convert(const char* rows_SD, const int32_t** at, float* to) {
        if constexpr (std::is_same_v<C, float>) {
            for (int j = 0; j < n; j++) at[j] = (const int32_t*)(rows_SD + slots[j] * row_bytes);
        } else if constexpr (QUANTISED) {
            const BFloat16* scales = (const BFloat16*)(rows_SD + p.slots * row_bytes);
            for (int j = 0; j < n; j++) {
                const int8_t* from = (const int8_t*)(rows_SD + slots[j] * row_bytes);
                const float factor = load(scales + slots[j], 1)[0];
                each(D, [&](int64_t d, auto n) { store(load(from + d, n) * factor, to + j * D + d, n); });
                at[j] = (const int32_t*)(to + j * D);
            }
        } else {
            for (int j = 0, first = 0; j < n; j++) {
                at[j] = (const int32_t*)(to + j * D);
                if (j + 1 < n && slots[j + 1] == slots[j] + 1) continue;
                const C* from = (const C*)rows_SD + slots[first] * D;
                each((j + 1 - first) * D, [&](int64_t d, auto n) { store(load(from + d, n), to + first * D + d, n); });
                first = j + 1;
            }
        }
    }

    // Two waiting slots' values at a time, element beside element.
    void pair_up(const char* rows_SD) {
        value_rows = (n + 1) / 2;
        for (int j = 0; j < n; j += 2) {
            int32_t* to = (int32_t*)room.data() + j / 2 * D;
            values[j / 2] = to;
            const C* one = (const C*)rows_SD + slots[j] * D;
            const C* two = j + 1 < n ? (const C*)rows_SD + slots[j + 1] * D : nullptr;
            each(D, [&](int64_t d, auto count) {
                Ints both = __builtin_convertvector(read<Shorts>(one + d, count), Ints);
                if (two) both |= __builtin_convertvector(read<Shorts>(two + d, count), Ints) << 16;
                ::write(both, to + d, count);
            });
        }
    }

    int depth() const { return (D + LANES - 1) / LANES; }

    // Stores the query of a single row, and an output of 0.
    void load_row(const T* from, Floats* to) {
        std::fill_n(to, 2 * depth(), Floats{});
        if (pairs)
            std::memcpy(to, from, D * sizeof(T));
        else
            each(D, [&](int64_t d, auto n) { to[d / LANES] = load(from + d, n); });
    }

    // Adds the taken slots to the state of a single row.
    template <typename Hidden>
    void attend_row(int row, Part& part, bool masked, Hidden hidden) {
        Floats scores[BLOCK / LANES], most = all(part.most[0][row]), sum{};
        float* score = (float*)scores;
        const Floats* q = &row_D[2 * row * depth()];
        for (int j = 0; j < n; j++) {
            for (int b = 0; row == 0 && b < row_bytes; b += 64) {
                __builtin_prefetch(next_k + j * row_bytes + b, 0, 1);
                __builtin_prefetch(next_v + j * row_bytes + b, 0, 1);
            }
            score[j] = masked && hidden(j)[row] ? -INFINITY : sum_of(product(q, keys[j])) * factor;
        }
        std::fill(score + n, score + BLOCK, -INFINITY);
        if (p.cap > 0)
            for (Floats& some : scores) some = some == NEVER ? NEVER : capped(some);
        for (const Floats some : scores) most = larger(some, most);
        most = all(largest_of(most));
        const Floats base = most == NEVER ? Floats{} : most, keep = exp2_of(part.most[0][row] - base);
        for (Floats& some : scores) sum += some = share_of(some - base);
        part.most[0][row] = most[0];
        part.sum[0][row] = part.sum[0][row] * keep[0] + sum_of(sum);
        Floats* out = &row_D[(2 * row + 1) * depth()];
        int d = 0;
        for (; d + 4 * LANES <= D; d += 4 * LANES) {
            Floats mixed[4];
            for (int i = 0; i < 4; i++) mixed[i] = out[d / LANES + i] * keep;
            for (int j = 0; j < n; j++)
                for (int i = 0; i < 4; i++) mixed[i] += score[j] * load((const float*)values[j] + d + i * LANES);
            for (int i = 0; i < 4; i++) out[d / LANES + i] = mixed[i];
        }
        each(D - d, [&](int64_t i, auto count) {
            Floats mixed = out[(d + i) / LANES] * keep;
            for (int j = 0; j < n; j++) mixed += score[j] * load((const float*)values[j] + d + i, count);
            out[(d + i) / LANES] = mixed;
        });
    }

    // A key's weight, 2^x. Pairs are of bfloat16, and a row's result must not depend on the number of rows.
    Floats share_of(Floats x) const { return pairs ? rounded(exp2_of(x)) : exp2_of(x); }

    // A score as a power of two, of one divided by the cap.
    Floats capped(Floats x) const { return tanh_of(x) * (p.cap * LOG2_E); }

    // Elements of a query times those of a key, to be added up.
    Floats product(const Floats* q, const int32_t* key) {
        Floats sum{};
#ifdef __AVX512BF16__
        if (pairs) {
            each(D / 2, [&](int64_t i, auto n) {
                sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q[i / LANES], (__m512bh)read<Ints>(key + i, n));
            });
            return sum;
        }
#endif
        each(D, [&](int64_t d, auto n) { sum += q[d / LANES] * load((const float*)key + d, n); });
        return sum;
    }

    // Adds the taken slots to the state of vector i. `hidden(j)`: the lanes that do not see slot j.
    template <typename Hidden>
    void attend(int i, Part& part, bool masked, Hidden hidden) {
        for (int row = 0; row < few; row++) attend_row(row, part, masked, hidden);
        if (few) return;
        Floats scores[BLOCK + 1], most = part.most[i], sum{};
        for (int j = 0; j < n; j += KEYS) {
#ifdef __AVX512BF16__
            if (pairs) {
                score<TwoBFloat16>(&q_words[i * D], D / 2, j, scores + j);
                continue;
            }
#endif
            score<Float32>(&q_words[i * D], D, j, scores + j);
        }
        if (p.cap > 0)
            for (int j = 0; j < n; j++) scores[j] = capped(scores[j]);
        if (masked)
            for (int j = 0; j < n; j++) scores[j] = hidden(j) ? NEVER : scores[j];
        for (int j = 0; j < n; j++) most = larger(scores[j], most);
        const Floats base = most == NEVER ? Floats{} : most;
        for (int j = 0; j < n; j++) sum += scores[j] = share_of(scores[j] - base);
        const Floats keep = exp2_of(part.most[i] - base);
        part.most[i] = most;
        part.sum[i] = part.sum[i] * keep + sum;
#ifdef __AVX512BF16__
        if (pairs) {
            scores[n] = Floats{};
            Ints shares[BLOCK / 2];
            for (int j = 0; j < n; j += 2) shares[j / 2] = (Ints)((Words)scores[j] >> 16) | (Ints)scores[j + 1];
            return mix<TwoBFloat16>(shares, keep, &part.out_D[i * D]);
        }
#endif
        mix<Float32>((const Ints*)scores, keep, &part.out_D[i * D]);
    }

    // Of KEYS keys, as powers of two.
    template <typename Element>
    void score(const Ints* q, int words, int first, Floats* scores) {
        Floats sum[KEYS] = {};
        const char* next = next_k + first * row_bytes;
        for (int i = 0; i < words; i++) {
            __builtin_prefetch(next + i * KEYS * 4, 0, 1);
            for (int j = 0; j < KEYS; j++) sum[j] = Element::add(sum[j], q[i], keys[first + j][i]);
        }
        for (int j = 0; j < KEYS; j++) scores[j] = sum[j] * factor;
    }

    template <typename Element>
    void mix(const Ints* shares, Floats keep, Floats* out_D) {
        int d = 0;
        for (; d + DIMS <= D; d += DIMS) mix<Element, DIMS>(shares, keep, d, out_D);
        for (; d < D; d++) mix<Element, 1>(shares, keep, d, out_D);
    }

    template <typename Element, int COUNT>
    void mix(const Ints* shares, Floats keep, int d, Floats* out_D) {
        Floats sum[COUNT];
        for (int i = 0; i < COUNT; i++) sum[i] = out_D[d + i] * keep;
        for (int j = 0; j < value_rows; j++) {
            __builtin_prefetch(next_v + (j * D + d) * (std::is_same_v<Element, Float32> ? sizeof(C) : 4), 0, 1);
            const int32_t* at = values[j] + d;
            asm("" : "+r"(at));  // or GCC keeps a register for each of at + i, of which there are not enough
            for (int i = 0; i < COUNT; i++) sum[i] = Element::add(sum[i], shares[j], at[i]);
        }
        for (int i = 0; i < COUNT; i++) out_D[d + i] = sum[i];
    }

    // Prefetches a head's row of a slot into the first-level cache.
    void fetch_row(int g, int64_t slot) {
        const char *k_D = k + g * head_bytes + slot * row_bytes, *v_D = v + g * head_bytes + slot * row_bytes;
        for (int b = 0; b < row_bytes; b += 64) {
            __builtin_prefetch(k_D + b);
            __builtin_prefetch(v_D + b);
        }
    }

    // Vector i over those branch slots that any of its rows sees.
    void branches(const Tile& tile, int g, int i, Ints oldest, Part& part) {
        const int64_t* slot_of = p.branch_slots + tile.tree * p.table_width;
        const int32_t* position_of = p.branch_positions + tile.tree * p.table_width;
        Ints visible[BLOCK];
        auto flush = [&] {
            take(g, false);
            attend(i, part, true, [&](int j) { return visible[j] == 0; });
            n = 0;
        };
        for (int c = 0; c < p.words; c++) {
            Ints words;
            uint32_t any = 0;
            for (int lane = 0; lane < LANES; lane++) {
                const uint32_t word = p.ancestry[token_of(tile, row_of(tile, i, lane)) * p.words + c];
                words[lane] = word, any |= word;
            }
            for (; any; any &= any - 1) {
                const int bit = __builtin_ctz(any), column = 32 * c + bit;
                slots[n] = slot_of[column];
                fetch_row(g, slots[n]);
                visible[n++] = ((words >> bit) & 1) & (oldest <= position_of[column]);
                if (n == BLOCK) flush();
            }
        }
        if (n) flush();
    }
};

template <typename T, typename C>
void tree_attention(const Attention& p, const T* q, const char* k, const char* v, T* out) {
    const int D = p.head_dim, G = p.kv_heads, group = p.heads / G;
    std::vector<Tile> tiles;
    int64_t keys = p.table_width;
    for (int r = 0; r < p.trees; r++) {
        const int rows = (p.starts[r + 1] - p.starts[r]) * group;
        for (int row = 0; row < rows; row += VECTORS * LANES)
            tiles.push_back({r, row, std::min(row + VECTORS * LANES, rows)});
    }
    for (int64_t r = 0; r < p.run_count; r++) keys = std::max<int64_t>(keys, p.runs[3 * r + 2]);
    const int units = tiles.size() * G;
    if (!units) return;
    const int cuts = std::clamp<int64_t>(keys / MIN_CUT, 1, (p.threads + units - 1) / units);
    std::vector<Part> parts(cuts > 1 ? units * cuts : 0);
#pragma omp parallel num_threads(p.threads) if (units * keys * D > MAX_SERIAL)
    {
        Worker<T, C> worker(p, q, k, v, out);
#pragma omp for schedule(dynamic)
        for (int u = 0; u < units * cuts; u++) {
            const Tile& tile = tiles[u / cuts % tiles.size()];
            const int g = u / cuts / tiles.size();
            if (cuts > 1) parts[u].out_D.resize(VECTORS * D);
            Part& part = cuts > 1 ? parts[u] : worker.part;
            worker.run(tile, g, u % cuts, cuts, part);
            if (cuts == 1) worker.write(tile, g, part);
        }
#pragma omp for
        for (int u = 0; u < (cuts > 1 ? units : 0); u++) {
            const Tile& tile = tiles[u % tiles.size()];
            const int vectors = (tile.last - tile.first + LANES - 1) / LANES;
            for (int cut = 1; cut < cuts; cut++) worker.merge(parts[u * cuts + cut], parts[u * cuts], vectors, D);
            worker.write(tile, u / tiles.size(), parts[u * cuts]);
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
