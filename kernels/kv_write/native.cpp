// Writing keys and values into their slots on a CPU, from elsewhere or from other slots: plain copies of rows.

#include <cstdint>
#include <cstring>
#include <vector>

#include "../operators.h"

extern "C" int64_t coppice_kv_write(int64_t threads, char* k_GSD, char* v_GSD, const char* k_TGD, const char* v_TGD,
                                    const int64_t* slots_T, int64_t tokens, int64_t heads, int64_t slots, int64_t row,
                                    int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots_T[t] < 0 || slots_T[t] >= slots) return 0;
#pragma omp parallel for num_threads(threads) if (tokens * heads * row > 1 << 14)
    for (int64_t g = 0; g < heads; g++) {
        for (int64_t t = 0; t < tokens; t++)  // prefetch all lines at once; stores alone wait for one another
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

extern "C" void coppice_kv_copy(int64_t threads, char* k_GSD, char* v_GSD, const int64_t* source_T,
                                const int64_t* target_T, int64_t tokens, int64_t heads, int64_t slots, int64_t row) {
#pragma omp parallel num_threads(threads) if (tokens * heads * row > 1 << 17)
    {
        std::vector<char> rows(tokens * row);
#pragma omp for
        for (int64_t i = 0; i < 2 * heads; i++) {
            char* from = (i % 2 ? v_GSD : k_GSD) + i / 2 * slots * row;
            for (int64_t t = 0; t < tokens; t++) std::memcpy(&rows[t * row], from + source_T[t] * row, row);
            for (int64_t t = 0; t < tokens; t++) std::memcpy(from + target_T[t] * row, &rows[t * row], row);
        }
    }
}
