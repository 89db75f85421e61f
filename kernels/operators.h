// Declares every function and structure that Python and C++ exchange. Each native.cpp includes it, so the compiler
// checks the C++ side; operators.py parses it to derive the ctypes side. Its form is therefore strict: after `extern
// "C" {` it has only structures of plain fields, prototypes and `//` comments, with the types `int64_t`, `float`,
// `double`, earlier structures, and pointers.
//
// `kind` numbers an element type (KINDS in cpp.py, `with_type` in vectors.h; 3 is int8 where mentioned). Strides count
// elements unless bytes are mentioned. `threads` is the most that an operator uses. Shape legend: layout.py.

#pragma once

#include <cstdint>

extern "C" {

// --- rows ---

// `exact`: the weight is float32, whatever `kind` is.
void coppice_rms_norm(int64_t kind, int64_t threads, const void* x, const void* weight, void* out, int64_t rows,
                      int64_t width, float eps, int64_t exact);

void coppice_layer_norm(int64_t kind, int64_t threads, const void* x, const void* weight, const void* bias, void* out,
                        int64_t rows, int64_t width, float eps);

// Norms of heads, in place: x [tokens, heads, head_dim], tokens `token_stride` apart. A LayerNorm, or without a bias an
// RMSNorm. A head's weight and bias begin `step` elements after those of the previous head; 0: all heads share them.
// `exact`: as for coppice_rms_norm.
void coppice_head_norm(int64_t kind, int64_t threads, void* x, const void* weight, const void* bias, int64_t tokens,
                       int64_t heads, int64_t head_dim, int64_t token_stride, int64_t step, float eps, int64_t exact);

// x [tokens, heads, head_dim] with the given strides, cos and sin [tokens, dims]; heads of out are contiguous. out may
// be x.
void coppice_rotary(int64_t kind, int64_t threads, const void* x, const void* cos, const void* sin, void* out,
                    int64_t tokens, int64_t heads, int64_t head_dim, int64_t dims, int64_t token_stride,
                    int64_t head_stride, int64_t out_stride);

// x [rows, 2 * width]: gates, then the values that they scale. `number`: the index of an activation in ACTIVATIONS of
// rows/checks.py.
void coppice_activation_mul(int64_t kind, int64_t threads, int64_t number, const void* x, void* out, int64_t rows,
                            int64_t width);

void coppice_activation(int64_t kind, int64_t threads, int64_t number, const void* x, void* out, int64_t rows,
                        int64_t width);

// `curve` [4]: see `xielu` in rows/__init__.py.
void coppice_xielu(int64_t kind, int64_t threads, const void* x, const float* curve, void* out, int64_t rows,
                   int64_t width);

// x [rows, 2 * width]: gates, then the values that they scale. The mean of a row's gates plus `factor` standard
// deviations is subtracted from them; negative results become 0. out may be x.
void coppice_sparsify(int64_t kind, int64_t threads, const void* x, void* out, int64_t rows, int64_t width,
                      float factor);

// For each token: x [rows, width] + weights [rows, sources] times more [sources, width]; at most MOST_ROWS rows. out
// may be x, and more may be x.
void coppice_add_weighted(int64_t kind, int64_t threads, const void* x, const void* more, const void* weights,
                          void* out, int64_t tokens, int64_t rows, int64_t sources, int64_t width);

// x [rows, width] times the sigmoid, or the softplus, of gates; each gate belongs to `share` consecutive elements, rows
// of gates are `stride` apart. out may be x.
void coppice_sigmoid_mul(int64_t kind, int64_t threads, const void* x, const void* gates, void* out, int64_t rows,
                         int64_t width, int64_t stride, int64_t share, int64_t softplus);

void coppice_log_softmax(int64_t kind, int64_t threads, const void* x, float* out, bool* finite, float* peaks,
                         int64_t rows, int64_t width, int64_t size);

// k: 0 to the width. Writes k values of each row, then their positions.
void coppice_top_k(int64_t threads, const float* x, double* out, int64_t rows, int64_t width, int64_t k);

// k: 1 to the number of elements. `peaks` may be null.
void coppice_top_sums(const float* x, const float* peaks, const float* sums, double* out, int64_t rows, int64_t width,
                      int64_t k);

// The same for the log-probabilities of logits, separately for consecutive parts of the rows. `parts` [count, 3]: the
// number of rows and k of each part; the third field receives the number of sums above -inf. `out` has 2 k numbers for
// each part. Only the first `size` elements of a row (1 to the width) are considered.
void coppice_top_sums_of_logits(int64_t kind, int64_t threads, const void* x, bool* finite, double* out,
                                const float* sums, int64_t* parts, int64_t count, int64_t rows, int64_t width,
                                int64_t size);

// `peaks` may be null.
void coppice_at_least(const float* x, const float* peaks, double* out, int64_t rows, int64_t width, int64_t k,
                      float least);

// `keys`: two for each row.
void coppice_gumbel_argmax(int64_t threads, const float* logp, const uint32_t* keys, int64_t* tokens, int64_t rows,
                           int64_t width);

// `starts` and `sums` [rows, windows]. Sample i of a window is tape[start + i] + sum; windows with a sum of -inf are
// ignored. `out` [rows, width]: the largest sample i of each row's windows.
void coppice_window_max(int64_t threads, const float* tape, const int64_t* starts, const float* sums, float* out,
                        int64_t rows, int64_t windows, int64_t width);

// `out` [rows, windows]: how many samples of a window are at least `best` [width].
void coppice_window_wins(int64_t threads, const float* tape, const int64_t* starts, const float* sums,
                         const float* best, int64_t* out, int64_t rows, int64_t windows, int64_t width);

// --- linear ---

// A packed matrix [outs, width] (panels.py). `kind` is the type of its elements: float32, bfloat16 or float16, 3 for
// int8, 4 for int4, 5 for uint8, 6 for float8, 9 for int5, 10 for int6, 15 for int2, 16 for int1, or a kind of 4-bit
// codes with a table (tables.h).
//
// int8 has one float32 scale per output. Kinds from 4 on have groups of `group` elements, with scales [panels, groups,
// 16] and perhaps zeros or minimums (`zero`, `least`; null: none), of `scale_kind`. If that is int8, they are
// multiplied by float16 units [panels, units, 16], one for UNIT elements of a row. The scales of float4 (7) are
// exponents, uint8.
//
// `order`: the order of x's elements in the panels; null: unchanged. With `levels`, rows are rounded to multiples of
// 1 / levels of the largest magnitude of the row (`by_row`), or else of each 64 elements (int8) or each 32 elements of a
// group (other kinds, except float8); 0: they are not rounded. The elements of rows are rounded to the nearest of -128
// to 127 times `step_in`, which `levels` then keep, and those of results to `step_out`, after the bias; 0: they are not.
// `bias` has the type of the rows and may be null. The outputs of `next`, a matrix of the same width or null, follow
// those of this one.
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
    int64_t by_row;
    float step_in, step_out;
    const Matrix* next;
};

// Packs rows of `steps` words, of 2 or 4 bytes each, into panels of 16 rows; layout: linear/panels.py.
void coppice_pack(int64_t threads, int64_t bytes, const void* rows, void* panels, int64_t count, int64_t steps);

// Converts rows of ggml's blocks (`format`: its number), for `count` outputs from `first` on, to panels, scales,
// minimums and units as in `Matrix`; pointers to what the format does not have are null. A row has `blocks` blocks.
// Returns how many scales, minimums or units are not finite.
int64_t coppice_repack(int64_t threads, int64_t format, const void* rows, int64_t first, int64_t count, int64_t blocks,
                       void* panels, void* scale, void* least, void* unit, void* least_unit,
                       const void* codebook);

// x [rows, width], out [rows, outs of the matrix and all `next` ones], both of `kind`.
void coppice_linear(int64_t kind, int64_t threads, const Matrix* matrix, const void* x, void* out, int64_t rows);

// The arguments of a coppice_linear.
struct Product {
    const Matrix* matrix;
    const void* x;
    void* out;
    int64_t rows;
};

// Computes all products; the threads share them as one piece of work.
void coppice_linears(int64_t kind, int64_t threads, const Product* products, int64_t count);

// Writes the kinds of elements, as bits, for which this processor has dot products; others are converted to float32.
// Bit 8 is set if it multiplies tiles.
void coppice_linear_kinds(int64_t* kinds);

// --- low_rank ---

// A part of the second factor of a `LowRank`: `panels` multiply the results of the first factor from column `at` on,
// `rank` of them. The products, times `scale`, are added to `outs` outputs from output `first` on.
struct LowRankPart {
    int64_t at, rank, first, outs;
    const void* panels;
    float scale;
};

// An adapter of a matrix [outs, width]: `panels` map x [width] to `rank` numbers, and `count` parts map these to
// outputs. Panels have type `kind`, see low_rank/factors.py. With a rank of 0 it adds nothing.
struct LowRank {
    int64_t kind, width, outs, rank, count;
    const void* panels;
    const LowRankPart* parts;
};

// Adds to each row of out [rows, outs] the product of its row of x [rows, width] and adapter adapters_T[row].
void coppice_low_rank(int64_t kind, int64_t threads, const LowRank* adapters, const int64_t* adapters_T, const void* x,
                      void* out, int64_t rows);

// --- experts ---

// The experts of all mixtures of a model that are in mapped files. At most `limit` bytes of them stay in memory; `held`
// bytes are there now. Expert i has `sizes[i]` bytes, in the places first[i] to first[i + 1] - 1; a place is an address
// and a number of bytes, both whole pages. `used[i]` is the value of `clock` at its last use; 0: it is not in memory.
struct Keeper {
    int64_t limit, held, clock, count;
    const int64_t* first;
    const int64_t* places;
    const int64_t* sizes;
    int64_t* used;
};

// A mixture of `experts` MLPs, all `gated` or none; a token chooses `chosen` of them by the logits of `router`. Each
// has `up` [2 * inner, width] (the gate first; ungated: [inner, width]) and `down` [width, inner]. If `shared` is not
// 0, one more MLP of this inner width follows, for all tokens; its outputs are weighted by the sigmoid of `gate` (null:
// by 1). `scores` is an index into SCORES of experts/routing.py, which explains the other options; `function` is one
// into ACTIVATIONS and GATES of rows/checks.py. `bias` and `factors` [experts] may be null; factors multiply the
// weights of chosen experts. `keeper` (or null) has the mixture's experts, numbered from `kept_from` on.
struct Mixture {
    int64_t experts, chosen, width, inner, shared, scores, normalized, function, gated;
    const Matrix* router;
    const Matrix* up;
    const Matrix* down;
    const Matrix* gate;
    const float* bias;
    const float* factors;
    Keeper* keeper;
    int64_t kept_from, groups, kept, best, on_inputs;
    float epsilon, scale, jitter;
};

// x and out [rows, width], `scored` (the router's input) [rows, width of the router]; they may be the same if these are.
void coppice_experts(int64_t kind, int64_t threads, const Mixture* mixture, const void* x, const void* scored, void* out,
                     int64_t rows);

// --- latent ---

// Weights of multi-head latent attention, see `kernels.latent`: `norm` [rank] has the type of the rows; each head has
// `keys` [rank, plain] and `values` [value, rank].
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

// The same for an int8 cache (kv_kinds.py): converts rows of `kind`. Strides count elements.
int64_t coppice_kv_write_int8(int64_t kind, int64_t threads, char* k_GSD, char* v_GSD, const void* k_TGD,
                              const void* v_TGD, const int64_t* slots_T, int64_t tokens, int64_t heads, int64_t slots,
                              int64_t head_dim, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head);

// Copies slots to other slots, in each of `heads` heads (of all layers); all are read before any is written. v may be
// null. A row has `row` bytes; a head's rows are followed by its scales of `scale` bytes each (0: no scales).
void coppice_kv_copy(int64_t threads, char* k_GSD, char* v_GSD, const int64_t* source_T, const int64_t* target_T,
                     int64_t tokens, int64_t heads, int64_t slots, int64_t row, int64_t scale);

// --- short_conv ---

// x [tokens, 3 * width] is B, C and X. Row t of B * X is written to slots_T[t] of the cache `rows` [slots, width].
// `weight` [count + 1, width] multiplies the rows in slots ancestors_TN [tokens, count], the latest last, and the
// token's own row. out [tokens, width] is C times the sum of these products and the bias, which may be null. Returns 0,
// and writes nothing, if a slot is outside the cache. `kept` is the kind of the cache.
int64_t coppice_short_conv(int64_t kind, int64_t kept, int64_t threads, const void* x, const void* weight,
                           const void* bias, void* rows, const int64_t* slots_T, const int64_t* ancestors_TN, void* out,
                           int64_t tokens, int64_t width, int64_t count, int64_t slots);

// --- delta_net ---

// A gated delta net. `order`: the index of each input among the elements of the source register; null: in order; only
// the stack reads it. Strengths are below `most`, logarithms of decays above `bound`, unless that is 0.
struct Delta {
    const float* taps_KC;
    const float* decay_H;
    const float* bias_D;
    const float* norm_V;
    const int64_t* order;
    int64_t key_heads, value_heads, key_size, value_size, taps, key_decays, sigmoid;
    float eps, most, bound;
};

// The input and output of layers with a state in a pass: the tensors of a `DeltaPaths`, whose numbers are in range, and
// the rows [L, row_count, row] and states [L, state_count, H, K, V] of these layers.
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

// x [tokens, channels + values + value_heads + decays]; `paths` has the rows and states of one layer. `kept` [tokens, row]
// and `queries` [tokens, keys] are buffers.
void coppice_delta_net(int64_t kind, int64_t threads, const void* x, const Delta* delta, const Paths* paths, float* kept,
                       float* queries, void* out, int64_t tokens);

// --- scan ---

// The weights and options of a selective scan of Mamba-2, see `kernels.scan`.
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

// x [tokens, channels + values + value_heads]; paths, `kept` and `queries` as above; `sums` [tokens, values] and `products`
// [tokens, key_heads, reach + 1] are buffers.
void coppice_scan(int64_t kind, int64_t threads, const void* x, const Scan* scan, const Paths* paths, float* kept,
                  float* queries, float* sums, float* products, void* out, int64_t tokens);

// --- channel_scan ---

// A scan by channels of Mamba, see `kernels.channel_scan`: `states` numbers of each channel; the inputs of steps are made
// from `rank`.
struct ChannelScan {
    const float* taps_KC;
    const float* shift_C;
    const float* rates_KC;
    const float* bias_C;
    const float* skip_C;
    const float* norms_E;  // null: no norms
    int64_t states, channels, taps, rank;
    float eps;
};

// x [tokens, 2 * channels], out [tokens, channels]; `paths` has the rows of one layer.
void coppice_channel_conv(int64_t kind, int64_t threads, const void* x, const ChannelScan* scan, const Paths* paths,
                          void* out, int64_t tokens);

// x as above; convolved, steps and out [tokens, channels], of which the first and the last may be the same; low
// [tokens, rank + 2 * states]. `kept` [tokens, row] and `queries` [tokens, states] are room.
void coppice_channel_scan(int64_t kind, int64_t threads, const void* x, const void* convolved, const void* low,
                          const void* steps, const ChannelScan* scan, const Paths* paths, float* kept, float* queries,
                          void* out, int64_t tokens);

// --- tree_attention ---

// Sizes of the queries and of a layer's cache, the tensors of a `TreeLayout`, and options. `kind` is the type of
// queries and output, `cache` the type of keys and values: the same, or 3 for int8 (kv_kinds.py).
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
    const float* sinks;  // one for each query head; null: none
    const void* slopes;  // likewise, see tree_attention/__init__.py
    int64_t coarse;      // slopes are bfloat16; else float32
};

// Returns 1 if a layout refers only to slots of the cache, else 0; `ranges` in checks.py finds out what is wrong.
// pages_width is negative if there are no pages; write_slots may be null.
int64_t coppice_layout_fits(int64_t tokens, int64_t trees, int64_t run_count, int64_t table_width, int64_t slots,
                            int64_t page_size, int64_t pages_width, int64_t tree_stride, int64_t page_stride,
                            const int32_t* starts, const int32_t* seen, const int32_t* runs,
                            const int64_t* branch_slots, const int32_t* pages, const int64_t* write_slots);

void coppice_tree_attention(const Attention* attention, const void* q, const void* k, const void* v, void* out);

// --- suffixes ---

// A text of symbols in a ring of `capacity`, and chains of its places (suffixes/state.py). `written` is one more than
// the number of symbols ever written; `kept` of them are in the ring; `since` symbols follow the last boundary. A head
// holds the low bits of `written` at the newest place of its chain; `short_heads` and `long_heads` have `heads` of
// them, `single_heads` and `pair_heads` a quarter of that. `short_back` and its like [capacity] are the distances from
// a place to the previous one in its chain. In a text that is not fine, `single_heads`, `single_back` and `pair_back`
// are null. `token_mask` selects the bits of a symbol that hold its token.
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

// A text to search for symbols with this `mark`; its matches count as if they were `bonus` symbols longer.
struct SuffixSource {
    const Suffixes* text;
    int64_t mark, bonus;
};

// Appends symbols, with the bits of `mark` set.
void coppice_suffixes_add(Suffixes* text, const uint32_t* symbols, int64_t count, int64_t mark);

// Returns how many of the first symbols the text already contains consecutively.
int64_t coppice_suffixes_known(const Suffixes* text, const uint32_t* symbols, int64_t count, int64_t mark);

// Returns the index of the first invalid symbol, or `count`. A symbol is valid if it is a boundary, or a token below
// `vocab` whose mark (the bits from `bits` on) is less than `numbers` and `listed`.
int64_t coppice_suffixes_foreign(const uint32_t* symbols, int64_t count, int64_t vocab, int64_t bits,
                                 const uint8_t* listed, int64_t numbers);

// Writes a draft of at most `nodes` nodes with scores of at least `least`, each at most `depth` symbols after the
// `length` symbols of `tail`. Returns the number of nodes.
int64_t coppice_suffixes_propose(const SuffixSource* sources, int64_t count, const uint32_t* tail, int64_t length,
                                 int64_t nodes, int64_t depth, double least, int64_t* tokens, int64_t* parents,
                                 double* scores);

// --- stack ---

// A LayerNorm of rows of `width` elements; without a bias an RMSNorm; without a weight nothing. `exact`: the weight is
// float32, whatever the kind of the rows.
struct Norm {
    const void* weight;
    const void* bias;
    int64_t width, exact;
    float eps;
};

// Cosines and sines [positions, dims] for keys and for queries; [tokens, dims] if `positions` is 0.
struct Angles {
    const void* cos;
    const void* sin;
    const void* query_cos;
    const void* query_sin;
    int64_t dims, positions;
};

// The heads of a token, see `Heads` in stack/calls.py.
struct Heads {
    int64_t gates, queries, keys, values, size, kept;
};

// An operator of a layer. It reads registers `source` and `beside` and writes `width` elements per row to register
// `target`. stack/calls.py lists the codes and the fields that each reads. `more` is the norm of keys, `third` the norm
// of values. A negative window: none; `chunked`: windows are chunks of positions.
struct Call {
    int64_t code, source, target, beside, all_heads, own_norms, table, window, chunked, function, gated, width;
    Heads heads;
    Norm norm, more, third;
    Matrix matrix;
    const LowRank* adapters;
    const Mixture* mixture;
    const float* sinks;
    const void* slopes;
    const Delta* delta;
    const Scan* scan;
    const ChannelScan* by_channels;
    const Latent* latent;
    int64_t coarse, softplus;
    float scale, cap;
};

// The calls of all layers. `widths`: elements of a row of each register, the largest of any layer. `taps`: taps of the
// short convolutions; 0: there are none.
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

// An optional end of a pass: `head` computes logits of the tokens `asked` [rows], of which the top sums are taken; the
// other fields are those of coppice_top_sums_of_logits. The caller allocates `rows_NE` and `logits_NV`, of the stack's
// type, because it can report that memory is exhausted.
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

// Runs all layers. x [T, E] is the stream and is overwritten. `attention` is shared by all layers; a call sets heads,
// strides, window, scale, cap, sinks and slopes. `heads`, `inputs` (per-layer inputs) and `streams` are registers; the
// latter two may be null. `caches` are indexed by the layer's number. Layers with convolutions use `rows` [L, S, E], of kind
// `kept`, and ancestors_TN; layers with a state use `paths`. adapters_T [T]: adapter numbers; null: no token has one.
// `tail` may be null. `tapped` [T, N, E] receives the N rows of each token that calls copy; null: none. Returns 0, and
// computes nothing, if a token's position has no angles; -1 if memory ran out on the way.
int64_t coppice_stack(const Stack* stack, const Attention* attention, const Angles* angles, int64_t tables,
                      int64_t threads, void* x, const LayerCache* caches, const int64_t* slots_T, char* heads,
                      char* inputs, char* streams, int64_t tokens, int64_t slots, char* rows, int64_t kept,
                      const int64_t* ancestors_TN, const Paths* paths, const int64_t* adapters_T, const Tail* tail,
                      char* tapped, int64_t copies);

// Writes the nanoseconds spent since the library was loaded: for each code, then for the tail's product and top sums.
void coppice_stack_clocks(int64_t* nanoseconds);
}
