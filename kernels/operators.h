// Every function and structure that crosses the border between Python and C++. All native.cpp include it, so that the
// compiler compares, and operators.py derives the ctypes side from it. So its form is strict: after `extern "C" {` only
// structures of plain fields and prototypes, types from `int64_t`, `float`, `double`, earlier structures and pointers,
// and `//` comments.
//
// `kind` numbers element types (KINDS in cpp.py, `with_type` in vectors.h), 3 is int8 where it says so; strides count
// elements unless bytes are mentioned; `threads` is the most that an operator uses. Shape legend: layout.py.

#pragma once

#include <cstdint>

extern "C" {

// --- rows ---

// `exact`: the weight is float32, whatever the kind.
void coppice_rms_norm(int64_t kind, int64_t threads, const void* x, const void* weight, void* out, int64_t rows,
                      int64_t width, float eps, int64_t exact);

void coppice_layer_norm(int64_t kind, int64_t threads, const void* x, const void* weight, const void* bias, void* out,
                        int64_t rows, int64_t width, float eps);

// Norms of heads, in place: x [tokens, heads, head_dim], `token_stride` apart. Without a bias RMSNorms. A head's vectors
// begin `step` elements after those of the one before; 0: all have the same. `exact`: as of RMSNorms of rows.
void coppice_head_norm(int64_t kind, int64_t threads, void* x, const void* weight, const void* bias, int64_t tokens,
                       int64_t heads, int64_t head_dim, int64_t token_stride, int64_t step, float eps, int64_t exact);

// x [tokens, heads, head_dim] with strides of its own, cos and sin [tokens, dims]; heads of out are contiguous. It may
// be x.
void coppice_rotary(int64_t kind, int64_t threads, const void* x, const void* cos, const void* sin, void* out,
                    int64_t tokens, int64_t heads, int64_t head_dim, int64_t dims, int64_t token_stride,
                    int64_t head_stride, int64_t out_stride);

// x [rows, 2 * width]: gates, then the values that they scale. `number`: the place of a name in ACTIVATIONS of
// rows/checks.py.
void coppice_activation_mul(int64_t kind, int64_t threads, int64_t number, const void* x, void* out, int64_t rows,
                            int64_t width);

void coppice_activation(int64_t kind, int64_t threads, int64_t number, const void* x, void* out, int64_t rows,
                        int64_t width);

// `curve` [4]: see `xielu` in rows/__init__.py.
void coppice_xielu(int64_t kind, int64_t threads, const void* x, const float* curve, void* out, int64_t rows,
                   int64_t width);

// x [rows, 2 * width]: gates, then what they scale. Gates lose their mean plus `factor` standard deviations, and what is
// then negative becomes 0; out may be x.
void coppice_sparsify(int64_t kind, int64_t threads, const void* x, void* out, int64_t rows, int64_t width,
                      float factor);

// x [tokens, rows, width] plus weights [tokens, rows, sources] times more [tokens, sources, width], of each token; at most
// MOST_ROWS rows. out may be x, and more too.
void coppice_add_weighted(int64_t kind, int64_t threads, const void* x, const void* more, const void* weights,
                          void* out, int64_t tokens, int64_t rows, int64_t sources, int64_t width);

// x [rows, width] times the logistic function of gates, one for each `share` elements side by side, whose rows are `stride`
// apart; out may be x.
void coppice_sigmoid_mul(int64_t kind, int64_t threads, const void* x, const void* gates, void* out, int64_t rows,
                         int64_t width, int64_t stride, int64_t share);

void coppice_log_softmax(int64_t kind, int64_t threads, const void* x, float* out, bool* finite, float* peaks,
                         int64_t rows, int64_t width, int64_t size);

// k of 0 to the width. Of each row k values, then their positions.
void coppice_top_k(int64_t threads, const float* x, double* out, int64_t rows, int64_t width, int64_t k);

// k of 1 to the number of elements. `peaks` may be null.
void coppice_top_sums(const float* x, const float* peaks, const float* sums, double* out, int64_t rows, int64_t width,
                      int64_t k);

// The same of the log-probabilities of logits, of parts of their rows one after the other. `parts` [count, 3]: the rows
// of each part, its k, and, written, how many of its sums are more than -inf; `out` has 2 k numbers for each. Elements
// from the size-th on, of 1 to the width, are left out.
void coppice_top_sums_of_logits(int64_t kind, int64_t threads, const void* x, bool* finite, double* out,
                                const float* sums, int64_t* parts, int64_t count, int64_t rows, int64_t width,
                                int64_t size);

// `peaks` may be null.
void coppice_at_least(const float* x, const float* peaks, double* out, int64_t rows, int64_t width, int64_t k,
                      float least);

// Two keys of each row.
void coppice_gumbel_argmax(int64_t threads, const float* logp, const uint32_t* keys, int64_t* tokens, int64_t rows,
                           int64_t width);

// `starts` and `sums` [rows, windows]; samples are tape[start + i] + sum, windows with a sum of -inf count for nothing.
// `out` [rows, width]: the largest of each row.
void coppice_window_max(int64_t threads, const float* tape, const int64_t* starts, const float* sums, float* out,
                        int64_t rows, int64_t windows, int64_t width);

// `out` [rows, windows]: in how many of its samples a window is at least `best` [width].
void coppice_window_wins(int64_t threads, const float* tape, const int64_t* starts, const float* sums,
                         const float* best, int64_t* out, int64_t rows, int64_t windows, int64_t width);

// --- linear ---

// A packed matrix [outs, width]. `kind` is that of its elements: 3 for int8, 4 for int4, 5 for uint8, 6 for float8, 7 for
// float4, 8 for iq4, 9 for int5, 10 for int6. The last seven lie in groups of `group` elements; `scale` [panels, groups,
// 16], `zero` and `least`, of which either may be null, are of `scale_kind`; if that is int8, they count in units, float16
// [panels, units, 16], one for UNIT elements of a row. The scales of float4 are exponents, uint8. int8 has no groups, and a
// scale for each output, float32. `order` (null: as they are) are the elements of x that are multiplied. Rows are rounded to 1 / `levels` of the
// largest magnitude of each 64 elements (int8), or of each 32 of a group (all others but float8); 0: they are not. `bias`,
// of the kind of the rows, may be null. The outputs of `next`, a matrix of the same width, or null, follow those of this
// one.
struct Matrix {
    int64_t kind, group, scale_kind;
    const void* panels;
    const void* scale;
    const void* zero;
    const void* least;
    const void* unit;
    const void* least_unit;
    const int32_t* order;
    const void* bias;
    int64_t outs, width;
    float levels;
    const Matrix* next;
};

// Rows of `steps` words, 2 or 4 bytes each, to panels of 16 rows; layout: linear/panels.py.
void coppice_pack(int64_t threads, int64_t bytes, const void* rows, void* panels, int64_t count, int64_t steps);

// Rows of blocks as ggml's format of this number stores them, `count` for outputs from `first` on, to panels, scales,
// minimums and units (null where the format has none), all as `Matrix` has them; a row has `blocks` blocks. Returns how
// many scales, minimums or units are no finite numbers.
int64_t coppice_repack(int64_t threads, int64_t format, const void* rows, int64_t first, int64_t count, int64_t blocks,
                       void* panels, void* scale, void* least, void* unit, void* least_unit,
                       const void* codebook);

// x [rows, width], out [rows, outs of all], both of `kind`.
void coppice_linear(int64_t kind, int64_t threads, const Matrix* matrix, const void* x, void* out, int64_t rows);

// A product as of coppice_linear.
struct Product {
    const Matrix* matrix;
    const void* x;
    void* out;
    int64_t rows;
};

// All of them, their work shared between the threads as one.
void coppice_linears(int64_t kind, int64_t threads, const Product* products, int64_t count);

// Writes for which elements of rows and matrix this processor has dot products, bits as `kind` and 3 for int8; it
// converts the others to float32.
void coppice_linear_kinds(int64_t* kinds);

// --- low_rank ---

// The products of `rank` columns from column `at` of the first factor of a `LowRank` with `panels`, times `scale`, are
// added to `outs` outputs from output `first` on.
struct LowRankPart {
    int64_t at, rank, first, outs;
    const void* panels;
    float scale;
};

// An adapter of a matrix [outs, width]: `panels` make x [width] to `rank` numbers, `count` parts make these to outputs.
// Panels are of `kind`, see low_rank/factors.py. A rank of 0: it adds nothing.
struct LowRank {
    int64_t kind, width, outs, rank, count;
    const void* panels;
    const LowRankPart* parts;
};

// Adds to each row of out [rows, outs] what its adapter, number adapters_T[row], makes of its row of x [rows, width].
void coppice_low_rank(int64_t kind, int64_t threads, const LowRank* adapters, const int64_t* adapters_T, const void* x,
                      void* out, int64_t rows);

// --- experts ---

// The experts of all mixtures of a model that lie in mapped files, of which at most `limit` bytes stay in memory: `held`
// are. Expert i has `sizes[i]` bytes in the places `first[i]` to `first[i + 1]`, each an address and bytes, whole pages;
// `used[i]` is the time of its last use by `clock`, 0: it is not in memory.
struct Keeper {
    int64_t limit, held, clock, count;
    const int64_t* first;
    const int64_t* places;
    const int64_t* sizes;
    int64_t* used;
};

// `experts` MLPs, all `gated` or none, of which a token chooses `chosen` by the logits of `router`: `up` [2 * inner, width], the gate
// first, or [inner, width], and `down` [width, inner] of each, then of the shared one, if `shared` is not 0, which is its inner width and
// whose outputs are weighted by the sigmoid of `gate` (null: by 1). `scores` numbers SCORES of experts/routing.py, which
// explains the rest, `function` ACTIVATIONS and GATES of rows/checks.py. `bias` and `factors` [experts], of which the
// latter multiply the weights of chosen experts, may be null. `keeper`, or null, has the experts from number `kept_from`
// on.
struct Mixture {
    int64_t experts, chosen, width, inner, shared, scores, normalized, function, gated;
    const Matrix* router;
    const Matrix* up;
    const Matrix* down;
    const Matrix* gate;
    const float* bias;
    const float* factors;
    Keeper* keeper;
    int64_t kept_from, groups, kept, best;
    float epsilon, scale, jitter;
};

// x, what the router reads, and out [rows, width]; they may be the same.
void coppice_experts(int64_t kind, int64_t threads, const Mixture* mixture, const void* x, const void* scored, void* out,
                     int64_t rows);

// --- latent ---

// Weights of multi-head latent attention, see `kernels.latent`: `norm` [rank], of the kind of the rows; `keys` [rank,
// plain] and `values` [value, rank] of each head.
struct Latent {
    int64_t heads, plain, rotated, rank, value, interleaved;
    const void* norm;
    const Matrix* keys;
    const Matrix* values;
    float eps;
};

// queries [tokens, heads, plain + rotated], rows [tokens, rank + rotated], out [tokens, heads + 1, rotated + rank].
void coppice_absorb(int64_t kind, int64_t threads, const Latent* latent, const void* queries, const void* rows,
                    void* out, int64_t tokens);

// mixed [tokens, heads, rotated + rank], out [tokens, heads, value].
void coppice_expand(int64_t kind, int64_t threads, const Latent* latent, const void* mixed, void* out, int64_t tokens);

// --- kv_write ---

// Sizes and strides are in bytes. Returns 0, and writes nothing, if a slot is outside the cache.
int64_t coppice_kv_write(int64_t threads, char* k_GSD, char* v_GSD, const char* k_TGD, const char* v_TGD,
                         const int64_t* slots_T, int64_t tokens, int64_t heads, int64_t slots, int64_t row,
                         int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head);

// The same of rows of `kind` into an int8 cache (kv_kinds.py); strides in elements.
int64_t coppice_kv_write_int8(int64_t kind, int64_t threads, char* k_GSD, char* v_GSD, const void* k_TGD,
                              const void* v_TGD, const int64_t* slots_T, int64_t tokens, int64_t heads, int64_t slots,
                              int64_t head_dim, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head);

// Copies slots to others, in each of `heads` heads (of all layers); all are read before any is written. v may be null.
// Rows are of `row` bytes, and the scales that follow those of a head of `scale` bytes, which may be 0.
void coppice_kv_copy(int64_t threads, char* k_GSD, char* v_GSD, const int64_t* source_T, const int64_t* target_T,
                     int64_t tokens, int64_t heads, int64_t slots, int64_t row, int64_t scale);

// --- short_conv ---

// x [tokens, 3 * width] is B, C and X; row t of B * X goes to slots_T[t] of the cache [slots, width]; `weight`
// [count + 1, width] multiplies the rows of slots ancestors_TN [tokens, count], the latest last, and the token's own.
// out [tokens, width] is C times their sum and the bias, which may be null. Returns 0, and writes nothing, if a slot is
// outside the cache. `kept` is the kind of the cache's elements.
int64_t coppice_short_conv(int64_t kind, int64_t kept, int64_t threads, const void* x, const void* weight,
                           const void* bias, void* rows, const int64_t* slots_T, const int64_t* ancestors_TN, void* out,
                           int64_t tokens, int64_t width, int64_t count, int64_t slots);

// --- delta_net ---

// See `kernels.delta_net` for tensors: x [tokens, channels + values + 2 * value_heads], rows and states of a layer, the
// tensors of a `DeltaPaths`, whose numbers are in range. `kept` [tokens, row] and `queries` [tokens, keys] are room.
// Strengths lie below `most`.
void coppice_delta_net(int64_t kind, int64_t threads, const void* x, const float* taps_KC, const float* decay_H,
                       const float* bias_H, const float* norm_V, float* rows, float* states, const int64_t* rows_T,
                       const int64_t* paths_TN, const int64_t* lengths_T, const int64_t* bases_T,
                       const int64_t* folds_T, float* kept, float* queries, void* out, int64_t tokens,
                       int64_t key_heads, int64_t value_heads, int64_t key_size, int64_t value_size, int64_t taps,
                       int64_t reach, float eps, float most);

// --- scan ---

// A selective scan of Mamba-2, see `kernels.scan`.
struct Scan {
    const float* taps_KC;
    const float* shift_C;
    const float* decay_H;
    const float* bias_H;
    const float* skip_H;
    const float* norm_E;  // null: no norm
    int64_t key_heads, value_heads, key_size, value_size, taps;
    float eps, least, most, gate, step;
};

// What layers with a state read and write in a pass: the tensors of a `DeltaPaths`, whose numbers are in range, and the
// rows [L, row_count, row] and states [L, state_count, H, K, V] of the layers with such.
struct Paths {
    const int64_t* rows_T;
    const int64_t* paths_TN;
    const int64_t* lengths_T;
    const int64_t* bases_T;
    const int64_t* folds_T;
    float* rows;
    float* states;
    int64_t reach, row_count, state_count;
};

// x [tokens, channels + values + value_heads]; `paths` has the rows and states of one layer. `kept` [tokens, row], `queries`
// [tokens, keys], `sums` [tokens, values] and `products` [tokens, key_heads, reach + 1] are room.
void coppice_scan(int64_t kind, int64_t threads, const void* x, const Scan* scan, const Paths* paths, float* kept,
                  float* queries, float* sums, float* products, void* out, int64_t tokens);

// --- tree_attention ---

// Sizes of the queries and of a layer's cache, the tensors of a `TreeLayout`, and options. `kind` is that of queries
// and output, `cache` that of keys and values: the same, or 3 for int8 (kv_kinds.py).
struct Attention {
    int64_t kind, cache, heads, kv_heads, head_dim, slots, trees, run_count, table_width, words, q_token, q_head;
    int64_t window, threads;  // a negative window: none
    const int64_t* positions;
    const int32_t* starts;
    const int32_t* seen;
    const int32_t* runs;
    const int64_t* branch_slots;
    const int32_t* branch_positions;
    const uint32_t* ancestry;
    float scale, cap;  // a cap of 0: none
    const float* sinks;  // of the query heads; null: none
};

// Returns 1 if a layout leads to slots of the cache only, else 0; `ranges` in checks.py finds out what is wrong.
// A negative pages_width: there are no pages; write_slots may be null.
int64_t coppice_layout_fits(int64_t tokens, int64_t trees, int64_t run_count, int64_t table_width, int64_t slots,
                            int64_t page_size, int64_t pages_width, int64_t tree_stride, int64_t page_stride,
                            const int32_t* starts, const int32_t* seen, const int32_t* runs,
                            const int64_t* branch_slots, const int32_t* pages, const int64_t* write_slots);

void coppice_tree_attention(const Attention* attention, const void* q, const void* k, const void* v, void* out);

// --- suffixes ---

// A text of symbols in a ring of `capacity`, and chains of its places (suffixes/state.py). `written` counts what was ever
// written, plus one; `kept` of it is in the ring; `since` symbols follow the last boundary. Heads, of which there are
// `heads` and a quarter of that for pairs and single symbols, are the low bits of `written` at the newest place of a
// chain; `short_back` and the others like it [capacity] are the distances from a place to the one before it in its
// chain. A text that is not fine has no `single_heads`, `single_back` and `pair_back`: they are null. `token_mask` has
// the bits of a symbol that are its token.
struct Suffixes {
    int64_t capacity, heads, token_mask, written, kept, since;
    uint32_t* symbols;
    uint32_t* short_back;
    uint32_t* long_back;
    uint32_t* pair_back;
    uint32_t* single_back;
    uint32_t* single_heads;
    uint32_t* pair_heads;
    uint32_t* short_heads;
    uint32_t* long_heads;
};

// A text that is searched, for symbols of this `mark`; its matches count as if they were `bonus` symbols longer.
struct SuffixSource {
    const Suffixes* text;
    int64_t mark, bonus;
};

// Appends symbols, with the bits of `mark` set.
void coppice_suffixes_add(Suffixes* text, const uint32_t* symbols, int64_t count, int64_t mark);

// Returns how many of the first symbols are in the text already, one after the other.
int64_t coppice_suffixes_known(const Suffixes* text, const uint32_t* symbols, int64_t count, int64_t mark);

// Returns the place of the first symbol that is neither a boundary nor a token below `vocab` with a mark whose number,
// the bits from `bits` on, is less than `numbers` and `listed`; `count` if there is none.
int64_t coppice_suffixes_foreign(const uint32_t* symbols, int64_t count, int64_t vocab, int64_t bits,
                                 const uint8_t* listed, int64_t numbers);

// Writes a draft of at most `nodes` nodes, each at most `depth` symbols after the `length` symbols of `tail`, with
// scores of `least` at least. Returns how many there are.
int64_t coppice_suffixes_propose(const SuffixSource* sources, int64_t count, const uint32_t* tail, int64_t length,
                                 int64_t nodes, int64_t depth, double least, int64_t* tokens, int64_t* parents,
                                 double* scores);

// --- stack ---

// A LayerNorm, or, without a bias, an RMSNorm, of rows of a width; or, without a weight, nothing. `exact`: its weight is
// float32, whatever the kind of the rows.
struct Norm {
    const void* weight;
    const void* bias;
    int64_t width, exact;
    float eps;
};

// Cosines and sines [positions, dims], of keys and of queries; if `positions` is 0, they are [tokens, dims].
struct Angles {
    const void* cos;
    const void* sin;
    const void* query_cos;
    const void* query_sin;
    int64_t dims, positions;
};

// A gated delta net. `order`: where its inputs stand among the elements of the register that it reads; null: in their
// places.
struct Delta {
    const float* taps_KC;
    const float* decay_H;
    const float* bias_H;
    const float* norm_V;
    const int64_t* order;
    int64_t key_heads, value_heads, key_size, value_size, taps;
    float eps, most;
};

// The heads of a token, see `Heads` of stack/calls.py.
struct Heads {
    int64_t gates, queries, keys, values, size, kept;
};

// An operator of a layer, which reads registers `source` and `beside` and writes register `target`, whose rows it leaves
// with `width` elements; stack/calls.py has the codes, and which of the fields a code reads. `more` is the norm of keys,
// `third` that of values. A negative window: none.
struct Call {
    int64_t code, source, target, beside, all_heads, own_norms, table, window, function, gated, width;
    Heads heads;
    Norm norm, more, third;
    Matrix matrix;
    const LowRank* adapters;
    const Mixture* mixture;
    const float* sinks;
    const Delta* delta;
    const Scan* scan;
    const Latent* latent;
    float scale, cap;
};

// `widths` has the elements of a row of each register, the most of any layer; `taps` are those of short convolutions, 0:
// there are none.
struct Stack {
    int64_t kind, element, width, taps, count;
    const int64_t* widths;
    const Call* calls;
};

// The keys and values [G, S, D] of a layer; layers may share them.
struct LayerCache {
    char* k;
    char* v;
};

// What may follow the layers: logits of the tokens `asked` [rows], by `head`, and their top sums; the rest is as of
// coppice_top_sums_of_logits. Room for these tokens' rows and for their logits, in the stack's type, comes from the
// caller, who can report that there is none.
struct Tail {
    const Matrix* head;
    const int64_t* asked;
    void* rows_NE;
    void* logits_NV;
    const float* sums;
    bool* finite;
    double* out;
    int64_t* parts;
    int64_t count, rows, size;
};

// x [T, E] is the stream and is changed. `attention` is that of every layer but for heads, strides, window, scale, cap and
// sinks; `heads` is the register of heads, `inputs` that of inputs of layers and `streams` that of streams, which may
// be null. `caches` are those of layers by their numbers, rows [L, S, E], of kind `kept`, and ancestors_TN are those of
// the layers with convolutions, `paths` those of layers with a state. adapters_T [T] are numbers of adapters; null: no
// token has one. `tail` may be null. `tapped` [T, N, E] gets the N rows of each token that calls copy; null: none.
// Returns 0, and computes nothing, if a token's position has no angles.
int64_t coppice_stack(const Stack* stack, const Attention* attention, const Angles* angles, int64_t tables,
                      int64_t threads, void* x, const LayerCache* caches, const int64_t* slots_T, char* heads,
                      char* inputs, char* streams, int64_t tokens, int64_t slots, char* rows, int64_t kept,
                      const int64_t* ancestors_TN, const Paths* paths, const int64_t* adapters_T, const Tail* tail,
                      char* tapped, int64_t copies);

// Writes the nanoseconds that calls took since the library was loaded, of each code, then of the tail's product and of
// its top sums.
void coppice_stack_clocks(int64_t* nanoseconds);
}
