// Writing keys and values into their slots on a CPU: plain copies of rows.

#include <omp.h>

#include <cstdint>
#include <cstring>

// In step with `Rows` in cpp.py. Sizes and strides are in bytes.
struct Rows {
    int64_t tokens, heads, row, slots, threads;
    int64_t k_token, k_head, v_token, v_head;
    const int64_t* slot_of;
};

extern "C" void coppice_kv_write(const Rows* p, char* k_GSD, char* v_GSD, const char* k_TGD, const char* v_TGD) {
#pragma omp parallel for num_threads(p->threads) if (p->tokens * p->heads * p->row > 1 << 14)
    for (int64_t g = 0; g < p->heads; g++) {
        for (int64_t t = 0; t < p->tokens; t++)  // all lines on their way at once; stores alone wait for one another
            for (int64_t b = 0; b < p->row; b += 64) {
                const int64_t to = (g * p->slots + p->slot_of[t]) * p->row + b;
                __builtin_prefetch(k_GSD + to, 1);
                __builtin_prefetch(v_GSD + to, 1);
            }
        for (int64_t t = 0; t < p->tokens; t++) {
            const int64_t to = (g * p->slots + p->slot_of[t]) * p->row;
            std::memcpy(k_GSD + to, k_TGD + t * p->k_token + g * p->k_head, p->row);
            std::memcpy(v_GSD + to, v_TGD + t * p->v_token + g * p->v_head, p->row);
        }
    }
}
