// The layers of a decoder: the operators one after the other, as the models call them, without
// Python in between. A step of decoding evicts Python from the caches, so that its calls take longer than the smaller
// operators.
//
// Shape legend: kernels/layout.py, and E width, M MLP width.

#include <memory>

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

// One pass: sizes, and room for what a layer computes.
struct Pass {
    const Stack& s;
    Attention attention;
    const Angles* angles;
    const int64_t* slots_T;
    char* heads_THD;
    const int64_t threads, tokens, slots;
    const int64_t turned = s.heads + s.kv_heads, every = turned + s.kv_heads, head = s.head_dim * s.element;
    const std::unique_ptr<char[]> normed_TE = room(s.width), sum_TE = room(s.width);
    const std::unique_ptr<char[]> mixed_THD = room(s.taps ? std::max(s.heads * s.head_dim, s.width) : s.heads * s.head_dim);
    const std::unique_ptr<char[]> gates_TF = room(s.taps ? 3 * s.width : 0);
    const std::unique_ptr<char[]> up_TM = room((s.gated ? 2 : 1) * s.mlp_width), middle_TM = room(s.mlp_width);

    std::unique_ptr<char[]> room(int64_t width) const {
        return std::unique_ptr<char[]>(new char[tokens * width * s.element]);
    }

    void normalize(const Norm& norm, const void* x, void* out) const {
        if (norm.bias)
            coppice_layer_norm(s.kind, threads, x, norm.weight, norm.bias, out, tokens, s.width, s.eps);
        else
            coppice_rms_norm(s.kind, threads, x, norm.weight, out, tokens, s.width, s.eps);
    }

    void multiply(const Matrix& m, const void* x, void* out) const {
        coppice_linear(s.kind, threads, &m, x, out, tokens);
    }

    void normalize_heads(const Layer& layer) const {
        const int64_t D = s.head_dim;
        auto run = [&](const Norm& norm, char* x, int64_t heads) {
            const int64_t rows = layer.all_heads ? 1 : heads, size = layer.all_heads ? heads * D : D;
            if (norm.weight)
                coppice_head_norm(s.kind, threads, x, norm.weight, norm.bias, tokens, rows, size, every * D, s.eps);
        };
        run(layer.q_norm, heads_THD, s.heads);
        run(layer.k_norm, heads_THD + s.heads * head, s.kv_heads);
    }

    void rotate(char* x, const void* cos, const void* sin, int64_t dims, int64_t rows) const {
        const int64_t D = s.head_dim, token = every * D;
        coppice_rotary(s.kind, threads, x, cos, sin, x, tokens, rows, D, dims, token, D, token);
    }

    void write(char* k, char* v, const char* k_TGD, const char* v_TGD) const {
        const int64_t D = s.head_dim, token = every * D;
        if (attention.cache == INT8)
            coppice_kv_write_int8(s.kind, threads, k, v, k_TGD, v_TGD, slots_T, tokens, s.kv_heads, slots, D, token, D,
                                  token, D);
        else
            coppice_kv_write(threads, k, v, k_TGD, v_TGD, slots_T, tokens, s.kv_heads, slots, head, every * head, head,
                             every * head, head);
    }

    // From `read` to sum_TE; k and v are the layer's.
    void attend(const Layer& layer, const void* read, char* k, char* v) {
        multiply(layer.qkv, read, heads_THD);
        if (!layer.norms_last) normalize_heads(layer);
        if (layer.table >= 0) {
            const Angles& a = angles[layer.table];
            const bool alike = a.query_cos == a.cos;
            if (!alike) rotate(heads_THD, a.query_cos, a.query_sin, a.dims, s.heads);
            rotate(alike ? heads_THD : heads_THD + s.heads * head, a.cos, a.sin, a.dims, alike ? turned : s.kv_heads);
        }
        if (layer.norms_last) normalize_heads(layer);
        write(k, v, heads_THD + s.heads * head, heads_THD + turned * head);
        attention.window = layer.window, attention.scale = layer.scale, attention.cap = layer.cap;
        coppice_tree_attention(&attention, heads_THD, k, v, mixed_THD.get());
        multiply(layer.out, mixed_THD.get(), sum_TE.get());
    }

    // The same by a short convolution; rows are the layer's.
    void convolve(const Layer& layer, const void* read, char* rows, int64_t kept, const int64_t* ancestors_TN) const {
        multiply(layer.qkv, read, gates_TF.get());
        coppice_short_conv(s.kind, kept, threads, gates_TF.get(), layer.conv.weight, layer.conv.bias, rows, slots_T,
                           ancestors_TN, mixed_THD.get(), tokens, s.width, s.taps - 1, slots);
        multiply(layer.out, mixed_THD.get(), sum_TE.get());
    }

    // From `read` to normed_TE, which may be the same: its rows are in up_TM when they are overwritten.
    void feed(const Layer& layer, const void* read) const {
        multiply(layer.up, read, up_TM.get());
        if (s.gated)
            coppice_activation_mul(s.kind, threads, s.activation, up_TM.get(), middle_TM.get(), tokens, s.mlp_width);
        else
            coppice_activation(s.kind, threads, s.activation, up_TM.get(), middle_TM.get(), tokens, s.mlp_width);
        multiply(layer.down, middle_TM.get(), normed_TE.get());
    }

    // What a part of a layer reads: x, or its norm in normed_TE.
    const void* read(const Norms& norms, void* x) const {
        if (!norms.input.weight) return x;
        normalize(norms.input, x, normed_TE.get());
        return normed_TE.get();
    }

    // Makes a part's output what is added to the stream.
    void leave(const Layer& layer, const Norms& norms, void* out) const {
        if (norms.output.weight) normalize(norms.output, out, out);
        if (layer.residual_scale != 1)
            with_type(s.kind, [&](auto type) {
                multiply_by(layer.residual_scale, (decltype(type)*)out, tokens * s.width);
            });
    }

    // `mix` goes from what attention reads to sum_TE.
    template <typename Mix>
    void run(const Layer& layer, void* x, Mix mix) {
        const int64_t size = tokens * s.width;
        const void* from = read(layer.attention_norms, x);
        mix(from);
        leave(layer, layer.attention_norms, sum_TE.get());
        if (layer.parallel) {
            feed(layer, from);
            leave(layer, layer.mlp_norms, normed_TE.get());
            add(s.kind, normed_TE.get(), sum_TE.get(), size);
            add(s.kind, sum_TE.get(), x, size);
            return;
        }
        add(s.kind, sum_TE.get(), x, size);
        if (layer.attention_norms.sum.weight) normalize(layer.attention_norms.sum, x, x);
        feed(layer, read(layer.mlp_norms, x));
        leave(layer, layer.mlp_norms, normed_TE.get());
        add(s.kind, normed_TE.get(), x, size);
        if (layer.mlp_norms.sum.weight) normalize(layer.mlp_norms.sum, x, x);
    }
};

}  // namespace

extern "C" void coppice_stack(const Stack* stack, const Attention* attention, const Angles* angles, int64_t threads,
                              void* x, char* k, char* v, const int64_t* slots_T, char* heads_THD, void* out,
                              int64_t tokens, int64_t slots, char* rows, int64_t kept, const int64_t* ancestors_TN) {
    const Stack& s = *stack;
    Pass pass{s, *attention, angles, slots_T, heads_THD, threads, tokens, slots};
    const int64_t row = attention->cache == INT8 ? s.head_dim + SCALE_BYTES : s.head_dim * s.element;
    const int64_t kv_layer = s.kv_heads * slots * row;
    const int64_t rows_layer = slots * s.width * (kept ? 2 : 4);  // float32 is the only kind of 4 bytes
    for (int64_t i = 0; i < s.layers; i++) {
        const Layer& layer = s.layer[i];
        if (layer.conv.weight)
            pass.run(layer, x, [&](const void* from) {
                pass.convolve(layer, from, rows + layer.place * rows_layer, kept, ancestors_TN);
            });
        else
            pass.run(layer, x, [&](const void* from) {
                pass.attend(layer, from, k + layer.place * kv_layer, v + layer.place * kv_layer);
            });
    }
    if (s.norm.weight)
        pass.normalize(s.norm, x, out);
    else
        std::memcpy(out, x, tokens * s.width * s.element);
}
