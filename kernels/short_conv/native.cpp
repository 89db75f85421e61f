// Short convolutions on a CPU. All inputs of a pass are written to the cache first; then each token reads its taps.
// Arithmetic is float32.

#include <cstdint>

#include "../operators.h"
#include "../vectors.h"

namespace {

template <typename T, typename Kept>
void convolve(int64_t threads, const T* x_TF, const T* weight_KE, const T* bias, Kept* rows, const int64_t* slots_T,
              const int64_t* ancestors_TN, T* out_TE, int64_t tokens, int64_t width, int64_t count) {
#pragma omp parallel num_threads(threads) if (tokens * width * (count + 4) > 1 << 14)
    {
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) {
            const T* x = x_TF + 3 * t * width;
            Kept* row = rows + slots_T[t] * width;
            each(width, [&](int64_t e, auto n) {
                T product[LANES];  // rounded to the dtype, then to the cache's dtype
                store(load(x + e, n) * load(x + 2 * width + e, n), product, n);
                store(load(product, n), row + e, n);
            });
        }
#pragma omp for
        for (int64_t t = 0; t < tokens; t++) {
            const T* c = x_TF + (3 * t + 1) * width;
            const Kept* own = rows + slots_T[t] * width;
            each(width, [&](int64_t e, auto n) {
                Floats sum = load(own + e, n) * load(weight_KE + count * width + e, n);
                for (int64_t i = 0; i < count; i++)
                    sum += load(rows + ancestors_TN[t * count + i] * width + e, n) *
                           load(weight_KE + (count - 1 - i) * width + e, n);
                if (bias) sum += load(bias + e, n);
                store(load(c + e, n) * sum, out_TE + t * width + e, n);
            });
        }
    }
}

}  // namespace

extern "C" int64_t coppice_short_conv(int64_t kind, int64_t kept, int64_t threads, const void* x, const void* weight,
                                      const void* bias, void* rows, const int64_t* slots_T,
                                      const int64_t* ancestors_TN, void* out, int64_t tokens, int64_t width,
                                      int64_t count, int64_t slots) {
    for (int64_t t = 0; t < tokens; t++)
        if (slots_T[t] < 0 || slots_T[t] >= slots) return 0;
    for (int64_t i = 0; i < tokens * count; i++)
        if (ancestors_TN[i] < 0 || ancestors_TN[i] >= slots) return 0;
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        with_type(kept, [&](auto stored) {
            convolve(threads, (const T*)x, (const T*)weight, (const T*)bias, (decltype(stored)*)rows, slots_T,
                     ancestors_TN, (T*)out, tokens, width, count);
        });
    });
    return 1;
}
