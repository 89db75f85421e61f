// The layers of a gated decoder for a step of few rows: the operators one after the other, as models/llama.py calls
// them, without Python in between. A step of decoding evicts Python from the caches, so that its calls take longer than
// the smaller operators.
//
// Shape legend: kernels/layout.py, and E width, M MLP width.

#include <memory>

#include "../vectors.h"

// The operators, see their files.
extern "C" {
void coppice_rms_norm(int64_t, int64_t, const void*, const void*, void*, int64_t, int64_t, float);
void coppice_linear(int64_t, int64_t, const void*, const void*, const void*, void*, int64_t, int64_t, int64_t);
#ifdef __AVX512VNNI__
void coppice_int8_linear(int64_t, int64_t, const void*, const void*, const int32_t*, const float*, const void*, void*,
                         int64_t, int64_t, int64_t);
#endif
void coppice_rotary(int64_t, int64_t, const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t,
                    int64_t, int64_t);
void coppice_kv_write(int64_t, char*, char*, const char*, const char*, const int64_t*, int64_t, int64_t, int64_t,
                      int64_t, int64_t, int64_t, int64_t, int64_t);
void coppice_tree_attention(const void*, const void*, const void*, const void*, void*);
void coppice_silu_mul(int64_t, int64_t, const void*, void*, int64_t, int64_t);
}

// In step with the structures in __init__.py. `sums` and `scale` are those of an int8 matrix.
struct Matrix {
    const void *packed, *bias;
    const int32_t* sums;
    const float* scale;
    int64_t outs;
};

struct Layer {
    const void *attention_norm, *mlp_norm;
    Matrix qkv, out, gate_up, down;
};

struct Stack {
    int64_t kind, element, layers, heads, kv_heads, head_dim, width, mlp_width;
    const Layer* layer;
    const void* norm;
    float eps;
};

namespace {

void multiply(const Stack& s, int64_t threads, const Matrix& m, const void* x, void* out, int64_t rows, int64_t width) {
#ifdef __AVX512VNNI__
    if (m.sums)
        return coppice_int8_linear(s.kind, threads, x, m.packed, m.sums, m.scale, m.bias, out, rows, width, m.outs);
#endif
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

// x [T, E] is changed, out [T, E] takes it through the last norm. `attention` is the problem of a layer, whose queries
// will lie in turned [T, H + G, D], before the keys; k and v are [L, G, S, D].
extern "C" void coppice_stack(const Stack* stack, const void* attention, int64_t threads, void* x, const void* cos,
                              const void* sin, char* k, char* v, const int64_t* slots_T, char* turned_THD, void* out,
                              int64_t tokens, int64_t slots, int64_t rotary_dims) {
    const Stack& s = *stack;
    const int64_t turned = s.heads + s.kv_heads, every = turned + s.kv_heads, head = s.head_dim * s.element;
    const int64_t kv_layer = s.kv_heads * slots * head;
    auto room = [&](int64_t bytes) { return std::unique_ptr<char[]>(new char[tokens * bytes]); };
    const auto normed_TE = room(s.width * s.element), sum_TE = room(s.width * s.element), qkv_THD = room(every * head);
    const auto mixed_THD = room(s.heads * head), gate_up_TM = room(2 * s.mlp_width * s.element);
    const auto middle_TM = room(s.mlp_width * s.element);
    for (int64_t i = 0; i < s.layers; i++, k += kv_layer, v += kv_layer) {
        const Layer& layer = s.layer[i];
        coppice_rms_norm(s.kind, threads, x, layer.attention_norm, normed_TE.get(), tokens, s.width, s.eps);
        multiply(s, threads, layer.qkv, normed_TE.get(), qkv_THD.get(), tokens, s.width);
        coppice_rotary(s.kind, threads, qkv_THD.get(), cos, sin, turned_THD, tokens, turned, s.head_dim, rotary_dims,
                       every * s.head_dim, s.head_dim);
        coppice_kv_write(threads, k, v, turned_THD + s.heads * head, qkv_THD.get() + turned * head, slots_T, tokens,
                         s.kv_heads, slots, head, turned * head, head, every * head, head);
        coppice_tree_attention(attention, turned_THD, k, v, mixed_THD.get());
        multiply(s, threads, layer.out, mixed_THD.get(), sum_TE.get(), tokens, s.heads * s.head_dim);
        add(s.kind, sum_TE.get(), x, tokens * s.width);
        coppice_rms_norm(s.kind, threads, x, layer.mlp_norm, normed_TE.get(), tokens, s.width, s.eps);
        multiply(s, threads, layer.gate_up, normed_TE.get(), gate_up_TM.get(), tokens, s.width);
        coppice_silu_mul(s.kind, threads, gate_up_TM.get(), middle_TM.get(), tokens, s.mlp_width);
        multiply(s, threads, layer.down, middle_TM.get(), sum_TE.get(), tokens, s.mlp_width);
        add(s.kind, sum_TE.get(), x, tokens * s.width);
    }
    coppice_rms_norm(s.kind, threads, x, s.norm, out, tokens, s.width, s.eps);
}
