// The layers of a decoder for a step of few rows: the operators one after the other, as the models call them, without
// Python in between. A step of decoding evicts Python from the caches, so that its calls take longer than the smaller
// operators.
//
// Shape legend: kernels/layout.py, and E width, M MLP width.

#include <memory>

#include "../operators.h"
#include "../vectors.h"

namespace {

void normalize(const Stack& s, int64_t threads, const Norm& norm, const void* x, void* out, int64_t rows) {
    if (norm.bias)
        coppice_layer_norm(s.kind, threads, x, norm.weight, norm.bias, out, rows, s.width, s.eps);
    else
        coppice_rms_norm(s.kind, threads, x, norm.weight, out, rows, s.width, s.eps);
}

void multiply(const Stack& s, int64_t threads, const Matrix& m, const void* x, void* out, int64_t rows, int64_t width) {
    if (m.sums)
        coppice_int8_linear(s.kind, threads, x, m.packed, m.sums, m.scale, m.bias, out, rows, width, m.outs);
    else
        coppice_linear(s.kind, threads, x, m.packed, m.bias, out, rows, width * s.element / 4, m.outs);
}

void add(int64_t kind, const void* more, void* x, int64_t size) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        each(size,
             [&](int64_t i, auto n) { store(load((const T*)x + i, n) + load((const T*)more + i, n), (T*)x + i, n); });
    });
}

}  // namespace

extern "C" void coppice_stack(const Stack* stack, const Attention* attention, int64_t threads, void* x,
                              const void* cos, const void* sin, char* k, char* v, const int64_t* slots_T, char* heads_THD, void* out,
                              int64_t tokens, int64_t slots, int64_t rotary_dims) {
    const Stack& s = *stack;
    const int64_t turned = s.heads + s.kv_heads, every = turned + s.kv_heads, head = s.head_dim * s.element;
    const int64_t kv_layer = s.kv_heads * slots * head, up_width = (s.gated ? 2 : 1) * s.mlp_width;
    auto room = [&](int64_t bytes) { return std::unique_ptr<char[]>(new char[tokens * bytes]); };
    const auto normed_TE = room(s.width * s.element), sum_TE = room(s.width * s.element);
    const auto mixed_THD = room(s.heads * head);
    const auto up_TM = room(up_width * s.element), middle_TM = room(s.mlp_width * s.element);
    for (int64_t i = 0; i < s.layers; i++, k += kv_layer, v += kv_layer) {
        const Layer& layer = s.layer[i];
        const bool parallel = !layer.mlp_norm.weight;
        normalize(s, threads, layer.attention_norm, x, normed_TE.get(), tokens);
        multiply(s, threads, layer.qkv, normed_TE.get(), heads_THD, tokens, s.width);
        if (cos)
            coppice_rotary(s.kind, threads, heads_THD, cos, sin, heads_THD, tokens, turned, s.head_dim, rotary_dims,
                           every * s.head_dim, s.head_dim, every * s.head_dim);
        coppice_kv_write(threads, k, v, heads_THD + s.heads * head, heads_THD + turned * head, slots_T, tokens,
                         s.kv_heads, slots, head, every * head, head, every * head, head);
        coppice_tree_attention(attention, heads_THD, k, v, mixed_THD.get());
        multiply(s, threads, layer.out, mixed_THD.get(), sum_TE.get(), tokens, s.heads * s.head_dim);
        if (!parallel) {
            add(s.kind, sum_TE.get(), x, tokens * s.width);
            normalize(s, threads, layer.mlp_norm, x, normed_TE.get(), tokens);
        }
        multiply(s, threads, layer.up, normed_TE.get(), up_TM.get(), tokens, s.width);
        if (s.gated)
            coppice_silu_mul(s.kind, threads, up_TM.get(), middle_TM.get(), tokens, s.mlp_width);
        else
            coppice_activation(s.kind, threads, s.activation, up_TM.get(), middle_TM.get(), tokens, s.mlp_width);
        // Nobody reads the normed rows any more: the MLP's take their place.
        multiply(s, threads, layer.down, middle_TM.get(), normed_TE.get(), tokens, s.mlp_width);
        add(s.kind, normed_TE.get(), parallel ? sum_TE.get() : x, tokens * s.width);
        if (parallel) add(s.kind, sum_TE.get(), x, tokens * s.width);
    }
    normalize(s, threads, s.norm, x, out, tokens);
}
