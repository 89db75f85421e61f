// Runs all layers of a decoder: the operator calls of their list, without Python in between. A decoding step evicts
// Python from the caches, so a call from Python takes longer than the smaller operators themselves.
//
// Shape legend: kernels/layout.py, and E width, M MLP width.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "../operators.h"
#include "../vectors.h"

namespace {

void add(int64_t kind, const void* more, void* x, int64_t size) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        each(size,
             [&](int64_t i, auto n) { store(load((const T*)x + i, n) + load((const T*)more + i, n), (T*)x + i, n); });
    });
}

template <typename T>
void multiply_by(float factor, T* x, int64_t size) {
    each(size, [&](int64_t i, auto n) { store(load(x + i, n) * factor, x + i, n); });
}

// Limits elements to -most .. most; NaN is kept.
template <typename T>
void clip(float most, T* x, int64_t size) {
    each(size, [&](int64_t i, auto n) {
        const Floats found = load(x + i, n), bound = Floats{} + most;
        store(found > bound ? bound : found < -bound ? -bound : found, x + i, n);
    });
}

// Calls f with a value of the unsigned type that is as wide as an element.
template <typename F>
void with_element(int64_t bytes, F f) {
    bytes == 2 ? f(uint16_t()) : f(uint32_t());
}

// The registers and codes of stack/calls.py, in its order. MIXED and CONVOLVED are never used by the same layer.
enum Register { STREAM, READ, OUT, HEADS, MIXED, GATES, CONVOLVED, UP, MIDDLE, LOW, QUERIES, LATENT, VALUES, NARROW, INPUTS, STREAMS, WEIGHTS, STEPS, ROOMS };
enum Code { NORM, PRODUCT, HEAD_NORMS, ROTATE, WRITE, ATTEND, CONVOLVE, ACTIVATE, SCALE, ADD, ADAPT, MIX, GATE, RECUR, SCAN, ABSORB, EXPAND, TAP, INJECT, XIELU, SPARSIFY, PREDICT, CORRECT, SPREAD, CLIP, CHANNEL_CONV, PART, CHANNEL_SCAN, JOIN, CODES };

// Clocks: one for each code, then one for the product with the head and one for top sums.
constexpr int HEAD = CODES, TOP_SUMS = CODES + 1, CLOCKS = CODES + 2;
std::atomic<int64_t> clocks[CLOCKS];  // nanoseconds

// Adds the time since its last call to a clock.
class Stopwatch {
  public:
    void book(int clock) {
        const auto now = std::chrono::steady_clock::now();
        clocks[clock].fetch_add((now - last) / std::chrono::nanoseconds(1), std::memory_order_relaxed);
        last = now;
    }

  private:
    std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
};

// One forward pass: sizes, and the registers that the operators of a layer read and write.
struct Pass {
    const Stack& s;
    Attention attention;
    const Angles* angles;
    const LayerCache* caches;
    const int64_t* slots_T;
    const int64_t threads, tokens, slots;
    char* rows;  // of the next layer with a convolution
    const int64_t kept;
    const int64_t *ancestors_TN, *adapters_T;
    const Paths* paths;
    float *delta_rows, *states;  // of the next layer with a state
    char* const tapped;
    const int64_t copies;  // rows of a token in `tapped`
    char* at[ROOMS];
    std::unique_ptr<char[]> rooms[ROOMS]{}, pairs{};

    // Allocates the registers that the caller did not provide.
    void make_rooms() {
        for (int i = 0; i < ROOMS; i++)
            if (!at[i] && i != CONVOLVED) rooms[i] = room(s.widths[i]), at[i] = rooms[i].get();
        at[CONVOLVED] = at[MIXED];
    }

    std::unique_ptr<char[]> room(int64_t width) const {
        return std::unique_ptr<char[]>(new char[tokens * width * s.element]);
    }

    // Buffers of layers with a state: rows and queries of the tokens, reordered inputs; `sums` and `products` of scans.
    std::unique_ptr<float[]> fresh{}, delta_queries{}, sums{}, products{};
    std::unique_ptr<char[]> ordered{};
    std::vector<int64_t> ends{};

    void recur(const Delta& d, const char* x, char* out) {
        const int64_t keys = d.key_heads * d.key_size, values = d.value_heads * d.value_size;
        const int64_t decays = d.value_heads * (d.key_decays ? d.key_size : 1);
        const int64_t row = 3 * keys + 2 * values + decays, width = 2 * keys + 2 * values + d.value_heads + decays;
        if (!fresh) fresh.reset(new float[tokens * row]), delta_queries.reset(new float[tokens * keys]);
        if (d.order) {
            if (!ordered) ordered = room(width);
            with_element(s.element, [&](auto type) {
                auto to = (decltype(type)*)ordered.get();
                auto from = (const decltype(type)*)x;
#pragma omp parallel for num_threads(threads) if (tokens * width > 1 << 14)
                for (int64_t t = 0; t < tokens; t++)
                    for (int64_t i = 0; i < width; i++) to[t * width + i] = from[t * width + d.order[i]];
            });
            x = ordered.get();
        }
        const Paths own = layer();
        coppice_delta_net(s.kind, threads, x, &d, &own, fresh.get(), delta_queries.get(), out, tokens);
        delta_rows += own.row_count * row, states += own.state_count * values * d.key_size;
    }

    void recur(const Scan& d, const char* x, char* out) {
        const int64_t keys = d.key_heads * d.key_size, values = d.value_heads * d.value_size;
        const int64_t row = 3 * keys + 2 * values + d.value_heads;
        if (!fresh) {
            fresh.reset(new float[tokens * row]), delta_queries.reset(new float[tokens * keys]);
            sums.reset(new float[tokens * values]);
            products.reset(new float[tokens * d.key_heads * (paths->reach + 1)]);
        }
        const Paths own = layer();
        coppice_scan(s.kind, threads, x, &d, &own, fresh.get(), delta_queries.get(), sums.get(), products.get(), out,
                     tokens);
        delta_rows += own.row_count * row, states += own.state_count * values * d.key_size;
    }

    Paths layer() const {
        Paths found = *paths;
        found.rows = delta_rows, found.states = states;
        return found;
    }

    // The first elements of each row, and no B and C.
    void take_part(const ChannelScan& d, const char* x, char* out) const {
        const int64_t part = d.rank * s.element, row = part + 2 * d.states * s.element;
        for (int64_t t = 0; t < tokens; t++) std::memcpy(out + t * part, x + t * row, part);
    }

    void recur(const ChannelScan& d, const char* x, char* out) {
        const int64_t row = 3 * d.channels + d.states;
        if (!fresh) fresh.reset(new float[tokens * row]), delta_queries.reset(new float[tokens * d.states]);
        const Paths own = layer();
        coppice_channel_scan(s.kind, threads, x, at[CONVOLVED], at[LOW], at[STEPS], &d, &own, fresh.get(),
                             delta_queries.get(), out, tokens);
        delta_rows += own.row_count * row, states += own.state_count * d.states * d.channels;
    }

    // Puts the elements of each row of x after those of `to`, whose rows grow in place: the last first.
    void join(const Call& c, const char* x, char* to) const {
        const int64_t before = c.table * s.element, row = c.width * s.element, more = row - before;
        for (int64_t t = tokens - 1; t >= 0; t--) {
            std::memmove(to + t * row, to + t * before, before);
            std::memcpy(to + t * row + before, x + t * more, more);
        }
    }

    void normalize(const Norm& norm, const void* x, void* out) const {
        if (norm.bias)
            coppice_layer_norm(s.kind, threads, x, norm.weight, norm.bias, out, tokens, norm.width, norm.eps);
        else
            coppice_rms_norm(s.kind, threads, x, norm.weight, out, tokens, norm.width, norm.eps, norm.exact);
    }

    // The first head of each kind in the register of heads, and the elements between two tokens.
    char* head_at(const Heads& h, int64_t before) const { return at[HEADS] + before * h.size * s.element; }
    char* queries(const Heads& h) const { return head_at(h, h.gates); }
    char* keys(const Heads& h) const { return head_at(h, h.gates + h.queries); }
    char* values(const Heads& h) const { return h.values ? head_at(h, h.gates + h.queries + h.keys) : keys(h); }
    static int64_t every(const Heads& h) { return (h.gates + h.queries + h.keys + h.values) * h.size; }

    void normalize_heads(const Norm& norm, const Call& c, char* x, int64_t heads) const {
        if (!norm.weight) return;
        const int64_t D = c.heads.size, count = c.all_heads ? 1 : heads, size = c.all_heads ? heads * D : D;
        const int64_t step = c.own_norms ? D : 0;
        coppice_head_norm(s.kind, threads, x, norm.weight, norm.bias, tokens, count, size, every(c.heads), step,
                          norm.eps, norm.exact);
    }

    void rotate(const Heads& h, char* x, const void* cos, const void* sin, int64_t dims, int64_t heads) const {
        const int64_t token = every(h);
        coppice_rotary(s.kind, threads, x, cos, sin, x, tokens, heads, h.size, dims, token, h.size, token);
    }

    void write(const Heads& h, const LayerCache& cache) const {
        const int64_t D = h.size, token = every(h), e = s.element;
        if (attention.cache == INT8)
            coppice_kv_write_int8(s.kind, threads, cache.k, cache.v, keys(h), values(h), slots_T, tokens, h.keys, slots,
                                  D, token, D, token, D);
        else
            coppice_kv_write(threads, cache.k, cache.v, keys(h), values(h), slots_T, tokens, h.keys, slots, D * e,
                             token * e, D * e, token * e, D * e);
    }

    void attend(const Call& c, void* out) {
        const Heads& h = c.heads;
        const LayerCache& cache = caches[c.table];
        attention.heads = h.queries, attention.kv_heads = h.kept, attention.head_dim = h.size;
        attention.q_token = every(h), attention.q_head = h.size;
        attention.window = c.window, attention.scale = c.scale, attention.cap = c.cap;
        attention.sinks = c.sinks, attention.slopes = c.slopes, attention.coarse = c.coarse;
        const int64_t* const positions = attention.positions;
        if (c.chunked) attention.positions = ends_of_chunks(c.window);
        coppice_tree_attention(&attention, queries(h), cache.k, cache.v, out);
        attention.positions = positions;
    }

    // The last position of each token's chunk, from which a window of a chunk's size reaches back to its first.
    const int64_t* ends_of_chunks(int64_t size) {
        ends.assign(attention.positions, attention.positions + tokens);
        for (int64_t& end : ends) end = end / size * size + size - 1;
        return ends.data();
    }

    // Multiplies an activation by the layer's input; copies both side by side, as the operator expects them.
    void inject(const Call& c, const char* x, const char* inputs, void* out) {
        const int64_t row = c.width * s.element, all = s.widths[c.beside] * s.element;
        if (!pairs) pairs = room(2 * c.width);
        for (int64_t t = 0; t < tokens; t++) {
            std::memcpy(pairs.get() + 2 * t * row, x + t * row, row);
            std::memcpy(pairs.get() + (2 * t + 1) * row, inputs + t * all + c.table * row, row);
        }
        coppice_activation_mul(s.kind, threads, c.function, pairs.get(), out, tokens, c.width);
    }

    // Adds weighted sources to each token's streams.
    void update_streams(const char* more, const char* weights, int64_t sources) const {
        coppice_add_weighted(s.kind, threads, at[STREAMS], more, weights, at[STREAMS], tokens,
                             s.widths[STREAMS] / s.width, sources, s.width);
    }

    // Adds the change made by the layer, times 1 + weight, to each stream; overwrites the stream and the weights.
    template <typename T>
    void add_innovation(const Call& c, T* weights) const {
        const int64_t all = s.widths[STREAMS], E = s.width;
        T* stream = (T*)at[STREAM];
        for (int64_t t = 0; t < tokens; t++) {
            const T* before = (const T*)at[STREAMS] + t * all + c.table * E;
            each(E, [&](int64_t i, auto n) {
                store(load(stream + t * E + i, n) - load(before + i, n), stream + t * E + i, n);
            });
        }
        each(tokens * (all / E), [&](int64_t i, auto n) { store(load(weights + i, n) + 1, weights + i, n); });
        update_streams(at[STREAM], (const char*)weights, 1);
    }

    // Adds rows to all streams but the first.
    template <typename T>
    void spread(const T* more) const {
        const int64_t all = s.widths[STREAMS], E = s.width;
        for (int64_t t = 0; t < tokens; t++)
            for (T* x = (T*)at[STREAMS] + t * all + E; x < (T*)at[STREAMS] + (t + 1) * all; x += E)
                each(E, [&](int64_t i, auto n) { store(load(x + i, n) + load(more + t * E + i, n), x + i, n); });
    }

    // Copies stream `table`, multiplied by the weight of `norm` if there is one.
    void copy_stream(const Call& c, char* out) const {
        with_type(s.kind, [&](auto type) {
            using T = decltype(type);
            const T* factors = (const T*)c.norm.weight;
            for (int64_t t = 0; t < tokens; t++)
                each(s.width, [&](int64_t i, auto n) {
                    const Floats x = load((const T*)at[STREAMS] + t * s.widths[STREAMS] + c.table * s.width + i, n);
                    store(factors ? x * load(factors + i, n) : x, (T*)out + t * s.width + i, n);
                });
        });
    }

    void finish(const Tail& tail, Stopwatch& watch) const {
        const int64_t row = s.width * s.element;
        for (int64_t n = 0; n < tail.rows; n++)
            std::memcpy((char*)tail.rows_NE + n * row, at[STREAM] + tail.asked[n] * row, row);
        int64_t outs = 0;
        for (const Matrix* part = tail.head; part; part = part->next) outs += part->outs;
        coppice_linear(s.kind, threads, tail.head, tail.rows_NE, tail.logits_NV, tail.rows);
        watch.book(HEAD);
        coppice_top_sums_of_logits(s.kind, threads, tail.logits_NV, tail.finite, tail.out, tail.sums, tail.parts,
                                   tail.count, tail.rows, outs, tail.size);
        watch.book(TOP_SUMS);
    }

    void run(const Call& c) {
        char *source = at[c.source], *target = at[c.target];
        switch (c.code) {
            case NORM:
                return normalize(c.norm, source, target);
            case PRODUCT:
                return coppice_linear(s.kind, threads, &c.matrix, source, target, tokens);
            case HEAD_NORMS:
                normalize_heads(c.norm, c, queries(c.heads), c.heads.queries);
                normalize_heads(c.more, c, keys(c.heads), c.heads.keys);
                return normalize_heads(c.third, c, values(c.heads), c.heads.values);
            case ROTATE: {
                const Angles& a = angles[c.table];
                const Heads& h = c.heads;
                if (a.query_cos == a.cos) return rotate(h, queries(h), a.cos, a.sin, a.dims, h.queries + h.keys);
                rotate(h, queries(h), a.query_cos, a.query_sin, a.dims, h.queries);
                return rotate(h, keys(h), a.cos, a.sin, a.dims, h.keys);
            }
            case WRITE:
                return write(c.heads, caches[c.table]);
            case ATTEND:
                return attend(c, target);
            case CONVOLVE:
                coppice_short_conv(s.kind, kept, threads, source, c.norm.weight, c.norm.bias, rows, slots_T,
                                   ancestors_TN, target, tokens, s.width, s.taps - 1, slots);
                rows += slots * s.width * (kept ? 2 : 4);  // float32 is the only kind of 4 bytes
                return;
            case ACTIVATE:
                if (c.gated)
                    coppice_activation_mul(s.kind, threads, c.function, source, target, tokens, c.width);
                else
                    coppice_activation(s.kind, threads, c.function, source, target, tokens, c.width);
                return;
            case SCALE:
                return with_type(s.kind, [&](auto type) {
                    multiply_by(c.scale, (decltype(type)*)target, tokens * c.width);
                });
            case ADD:
                return add(s.kind, source, target, tokens * c.width);
            case ADAPT:
                if (adapters_T) coppice_low_rank(s.kind, threads, c.adapters, adapters_T, source, target, tokens);
                return;
            case MIX:
                return coppice_experts(s.kind, threads, c.mixture, source, at[c.beside], target, tokens);
            case GATE:
                return c.heads.gates ? coppice_sigmoid_mul(s.kind, threads, target, source, target, tokens, c.width,
                                                           every(c.heads), 1, c.softplus)
                                     : coppice_sigmoid_mul(s.kind, threads, target, source, target, tokens, c.width,
                                                           c.heads.queries, c.heads.size, c.softplus);
            case RECUR:
                return recur(*c.delta, source, target);
            case SCAN:
                return recur(*c.scan, source, target);
            case ABSORB:
                return coppice_absorb(s.kind, threads, c.latent, source, at[LATENT], target, tokens);
            case EXPAND:
                return coppice_expand(s.kind, threads, c.latent, source, target, tokens);
            case TAP: {
                const int64_t row = s.width * s.element;
                for (int64_t t = 0; tapped && t < tokens; t++)
                    std::memcpy(tapped + (t * copies + c.table) * row, source + t * row, row);
                return;
            }
            case INJECT:
                return inject(c, source, at[c.beside], target);
            case XIELU:
                return coppice_xielu(s.kind, threads, source, (const float*)c.norm.weight, target, tokens, c.width);
            case SPARSIFY:
                return coppice_sparsify(s.kind, threads, source, target, tokens, c.width / 2, c.scale);
            case PREDICT:
                update_streams(at[STREAMS], source, s.widths[STREAMS] / s.width);
                return copy_stream(c, target);
            case CORRECT:
                with_type(s.kind, [&](auto type) { add_innovation(c, (decltype(type)*)source); });
                return copy_stream(c, target);
            case SPREAD:
                with_type(s.kind, [&](auto type) { spread((const decltype(type)*)source); });
                return copy_stream(c, target);
            case CLIP:
                return with_type(s.kind, [&](auto type) { clip(c.scale, (decltype(type)*)target, tokens * c.width); });
            case CHANNEL_CONV: {
                const Paths own = layer();
                return coppice_channel_conv(s.kind, threads, source, c.by_channels, &own, target, tokens);
            }
            case PART:
                return take_part(*c.by_channels, source, target);
            case CHANNEL_SCAN:
                return recur(*c.by_channels, source, target);
            case JOIN:
                return join(c, source, target);
        }
    }
};

// The rotary angles of the tokens of a pass, gathered from tables of positions; the operator reads one row per token.
class Turns {
  public:
    Turns(const Angles* tables, int64_t count, const int64_t* positions, int64_t tokens, int64_t element)
        : angles(tables, tables + count) {
        for (Angles& a : angles) {
            if (!a.positions) continue;
            for (int64_t t = 0; t < tokens; t++) fit = fit && positions[t] >= 0 && positions[t] < a.positions;
            if (!fit) return;
            const bool shared = a.query_cos == a.cos;
            const int64_t row = a.dims * element;
            for (const void** table : {&a.cos, &a.sin, &a.query_cos, &a.query_sin}) {
                if (shared && table == &a.query_cos) break;
                memory.emplace_back(new char[tokens * row]);
                for (int64_t t = 0; t < tokens; t++)
                    std::memcpy(memory.back().get() + t * row, (const char*)*table + positions[t] * row, row);
                *table = memory.back().get();
            }
            if (shared) a.query_cos = a.cos, a.query_sin = a.sin;
        }
    }

    std::vector<Angles> angles;
    bool fit = true;  // all positions are in the tables

  private:
    std::vector<std::unique_ptr<char[]>> memory;
};

}  // namespace

extern "C" int64_t coppice_stack(const Stack* stack, const Attention* attention, const Angles* angles, int64_t tables,
                                 int64_t threads, void* x, const LayerCache* caches, const int64_t* slots_T, char* heads,
                                 char* inputs, char* streams, int64_t tokens, int64_t slots, char* rows, int64_t kept,
                                 const int64_t* ancestors_TN, const Paths* paths, const int64_t* adapters_T,
                                 const Tail* tail, char* tapped, int64_t copies) try {
    const Turns turns(angles, tables, attention->positions, tokens, stack->element);
    if (!turns.fit) return 0;
    Pass pass{*stack,       *attention,
              turns.angles.data(), caches,
              slots_T,      threads,
              tokens,       slots,
              rows,         kept,
              ancestors_TN, adapters_T,
              paths,        paths ? paths->rows : nullptr,
              paths ? paths->states : nullptr, tapped,
              copies,       {}};
    pass.at[STREAM] = (char*)x, pass.at[HEADS] = heads, pass.at[INPUTS] = inputs, pass.at[STREAMS] = streams;
    pass.make_rooms();
    Stopwatch watch;
    for (int64_t i = 0; i < stack->count; i++) {
        pass.run(stack->calls[i]);
        watch.book(int(stack->calls[i].code));
    }
    if (tail) pass.finish(*tail, watch);
    return 1;
} catch (const std::bad_alloc&) {  // ctypes cannot pass it on
    return -1;
}

extern "C" void coppice_stack_clocks(int64_t* nanoseconds) {
    for (int i = 0; i < CLOCKS; i++) nanoseconds[i] = clocks[i].load(std::memory_order_relaxed);
}
