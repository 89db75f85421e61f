// Writes keys and values into their slots on a CPU, and copies slots. A plain cache gets copies of rows; an int8 cache
// gets rows as kernels/kv_int8.py defines them, at the offsets of kernels/kv_kinds.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../operators.h"
#include "../vectors.h"

namespace {

template <typename T>
void quantise(const T* x, int64_t D, char* row, BFloat16* to) {
    const float largest = magnitude_of(x, D);
    const bool finite = std::isfinite(largest);
    const float exact = largest * (1.0f / 127.0f);
    const float scale = !finite ? INFINITY : exact < 0x1p-126f ? 0.0f : rounded(all(exact))[0];
    const float inverse = finite && scale != 0 ? 1.0f / scale : 0.0f;
    each(D, [&](int64_t d, auto n) {
        Floats some = load(x + d, n) * inverse;
        some = some > 127.0f ? all(127.0f) : some < -127.0f ? all(-127.0f) : some;
        const Ints whole = finite ? __builtin_convertvector(nearest(some), Ints) : Ints{};
        write(low_bytes(whole), row + d, n);
    });
    store(all(scale), to, 1);
}

}  // namespace

extern "C" int64_t coppice_kv_write(int64_t threads, char* k_GSD, char* v_GSD, const char* k_TGD, const char* v_TGD,
                                    const int64_t* slots_T, int64_t tokens, int64_t heads, int64_t slots, int64_t row,
                                    int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots_T[t] < 0 || slots_T[t] >= slots) return 0;
#pragma omp parallel for num_threads(threads) if (tokens * heads * row > 1 << 14)
    for (int64_t g = 0; g < heads; g++) {
        for (int64_t t = 0; t < tokens; t++)  // prefetch all lines first: stores would miss one after another
            for (int64_t b = 0; b < row; b += 64) {
                const int64_t to = (g * slots + slots_T[t]) * row + b;
                __builtin_prefetch(k_GSD + to, 1);
                __builtin_prefetch(v_GSD + to, 1);
            }
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t to = (g * slots + slots_T[t]) * row;
            std::memcpy(k_GSD + to, k_TGD + t * k_token + g * k_head, row);
            std::memcpy(v_GSD + to, v_TGD + t * v_token + g * v_head, row);
        }
    }
    return 1;
}

extern "C" int64_t coppice_kv_write_int8(int64_t kind, int64_t threads, char* k_GSD, char* v_GSD, const void* k_TGD,
                                         const void* v_TGD, const int64_t* slots_T, int64_t tokens, int64_t heads,
                                         int64_t slots, int64_t head_dim, int64_t k_token, int64_t k_head,
                                         int64_t v_token, int64_t v_head) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots_T[t] < 0 || slots_T[t] >= slots) return 0;
    const int64_t head = slots * (head_dim + SCALE_BYTES);
    auto scale = [&](char* k_SD, int64_t slot) { return (BFloat16*)(k_SD + slots * head_dim) + slot; };
    with_type(kind, [&](auto type) {
        using T = decltype(type);
#pragma omp parallel for num_threads(threads) if (tokens * heads * head_dim > 1 << 13)
        for (int64_t g = 0; g < heads; g++) {
            char *k = k_GSD + g * head, *v = v_GSD + g * head;
            for (int64_t t = 0; t < tokens; t++) {
                const int64_t slot = slots_T[t], to = slot * head_dim;
                quantise((const T*)k_TGD + t * k_token + g * k_head, head_dim, k + to, scale(k, slot));
                quantise((const T*)v_TGD + t * v_token + g * v_head, head_dim, v + to, scale(v, slot));
            }
        }
    });
    return 1;
}

extern "C" void coppice_kv_copy(int64_t threads, char* k_GSD, char* v_GSD, const int64_t* source_T,
                                const int64_t* target_T, int64_t tokens, int64_t heads, int64_t slots, int64_t row,
                                int64_t scale) {
    const int64_t tensors = v_GSD ? 2 : 1;
#pragma omp parallel num_threads(threads) if (tokens * heads * row > 1 << 17)
    {
        std::vector<char> rows(tokens * std::max(row, scale));
        auto copy = [&](char* from, int64_t size) {
            for (int64_t t = 0; t < tokens; t++) std::memcpy(&rows[t * size], from + source_T[t] * size, size);
            for (int64_t t = 0; t < tokens; t++) std::memcpy(from + target_T[t] * size, &rows[t * size], size);
        };
#pragma omp for
        for (int64_t i = 0; i < tensors * heads; i++) {
            char* head = (i % tensors ? v_GSD : k_GSD) + i / tensors * slots * (row + scale);
            copy(head, row);
            if (scale) copy(head + slots * row, scale);
        }
    }
}
