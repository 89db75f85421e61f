// The steps before and after tree attention with a latent, see `kernels.latent`. The rows of each head are gathered, so
// each head is one ordinary matrix product; the threads share the products of all heads as one piece of work.
//
// Shape legend: T tokens, H heads, N plain elements of a query, R rotated ones, C rank of the latent, V of values.

#include <cstring>
#include <memory>
#include <vector>

#include "../operators.h"
#include "../vectors.h"

namespace {

template <typename T>
std::unique_ptr<T[]> room(int64_t size) {
    return std::unique_ptr<T[]>(new T[size]);
}

// Multiplies each head's rows x [H, tokens, ins] with its matrix; out [H, tokens, outs].
template <typename T>
void multiply(int64_t kind, int64_t threads, const Matrix* matrices, const T* x, T* out, int64_t heads, int64_t tokens,
              int64_t ins, int64_t outs) {
    std::vector<Product> products;
    for (int64_t h = 0; h < heads; h++)
        products.push_back({matrices + h, x + h * tokens * ins, out + h * tokens * outs, tokens});
    coppice_linears(kind, threads, products.data(), heads);
}

// Reorders elements so that the two that are rotated together are half a row apart.
template <typename T>
void turn(const Latent& l, const T* from, T* to) {
    const int64_t half = l.rotated / 2;
    if (!l.interleaved) return (void)std::memcpy(to, from, l.rotated * sizeof(T));
    for (int64_t i = 0; i < half; i++) to[i] = from[2 * i], to[half + i] = from[2 * i + 1];
}

template <typename T>
void absorb(int64_t kind, int64_t threads, const Latent& l, const T* queries, const T* latent, T* out, int64_t tokens) {
    const int64_t H = l.heads, N = l.plain, R = l.rotated, C = l.rank, D = R + C;
    const auto plain = room<T>(H * tokens * N), made = room<T>(H * tokens * C), rows = room<T>(tokens * C);
#pragma omp parallel for num_threads(threads) if (H * tokens * N > 1 << 14)
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t h = 0; h < H; h++)
            std::memcpy(plain.get() + (h * tokens + t) * N, queries + (t * H + h) * (N + R), N * sizeof(T));
        std::memcpy(rows.get() + t * C, latent + t * D, C * sizeof(T));
    }
    multiply(kind, threads, l.keys, plain.get(), made.get(), H, tokens, N, C);
    coppice_rms_norm(kind, threads, rows.get(), l.norm, rows.get(), tokens, C, l.eps, 0);
#pragma omp parallel for num_threads(threads) if (H * tokens * C > 1 << 14)
    for (int64_t t = 0; t < tokens; t++) {
        T* to = out + t * (H + 1) * D;
        for (int64_t h = 0; h < H; h++, to += D) {
            turn(l, queries + (t * H + h) * (N + R) + N, to);
            std::memcpy(to + R, made.get() + (h * tokens + t) * C, C * sizeof(T));
        }
        turn(l, latent + t * D + C, to);
        std::memcpy(to + R, rows.get() + t * C, C * sizeof(T));
    }
}

template <typename T>
void expand(int64_t kind, int64_t threads, const Latent& l, const T* mixed, T* out, int64_t tokens) {
    const int64_t H = l.heads, R = l.rotated, C = l.rank, V = l.value;
    const auto rows = room<T>(H * tokens * C), made = room<T>(H * tokens * V);
#pragma omp parallel for num_threads(threads) if (H * tokens * C > 1 << 14)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < H; h++)
            std::memcpy(rows.get() + (h * tokens + t) * C, mixed + (t * H + h) * (R + C) + R, C * sizeof(T));
    multiply(kind, threads, l.values, rows.get(), made.get(), H, tokens, C, V);
#pragma omp parallel for num_threads(threads) if (H * tokens * V > 1 << 14)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < H; h++)
            std::memcpy(out + (t * H + h) * V, made.get() + (h * tokens + t) * V, V * sizeof(T));
}

}  // namespace

extern "C" void coppice_absorb(int64_t kind, int64_t threads, const Latent* latent, const void* queries,
                               const void* rows, void* out, int64_t tokens) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        absorb(kind, threads, *latent, (const T*)queries, (const T*)rows, (T*)out, tokens);
    });
}

extern "C" void coppice_expand(int64_t kind, int64_t threads, const Latent* latent, const void* mixed, void* out,
                               int64_t tokens) {
    with_type(kind, [&](auto type) {
        typedef decltype(type) T;
        expand(kind, threads, *latent, (const T*)mixed, (T*)out, tokens);
    });
}
