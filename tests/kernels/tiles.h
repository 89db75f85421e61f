// The tiles of processors/amx.h in C++, for processors without them: as Intel's manual describes the instructions, except
// that denormal numbers are not replaced by zeros.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define TILES

namespace {

constexpr int X_TILE = 4, Y_TILE = 5, TILES_USED = 7;
constexpr int LINES = 16, WORDS = 16;

struct Tiles {
    int rows;
    uint32_t words[TILES_USED][LINES][WORDS];
};
thread_local Tiles tiles;

inline bool tiles_allowed() { return true; }
inline void shape_tiles(int rows) { tiles.rows = rows; }
inline int lines_of(int tile) { return tile < Y_TILE ? tiles.rows : LINES; }

template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
    for (int line = 0; line < lines_of(TILE); line++)
        std::memcpy(tiles.words[TILE][line], (const char*)from + line * stride, sizeof tiles.words[TILE][line]);
}

template <int TILE>
inline void store_tile(void* to, int64_t stride) {
    for (int line = 0; line < lines_of(TILE); line++)
        std::memcpy((char*)to + line * stride, tiles.words[TILE][line], sizeof tiles.words[TILE][line]);
}

template <int TILE>
inline void clear_tile() {
    std::memset(tiles.words[TILE], 0, sizeof tiles.words[TILE]);
}

inline float half_of(uint32_t word, int i) {
    const uint32_t bits = i ? word & 0xffff0000 : word << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

template <bool BFLOAT16, int SUM, int X, int Y>
inline void add_tile() {
    for (int row = 0; row < tiles.rows; row++)
        for (int out = 0; out < WORDS; out++) {
            uint32_t& sum = tiles.words[SUM][row][out];
            float first = 0, second = 0, total;
            for (int k = 0; k < LINES; k++) {
                const uint32_t x = tiles.words[X][row][k], y = tiles.words[Y][k][out];
                if (BFLOAT16) {
                    first = std::fma(half_of(x, 0), half_of(y, 0), first);
                    second = std::fma(half_of(x, 1), half_of(y, 1), second);
                } else
                    for (int byte = 0; byte < 32; byte += 8) sum += uint32_t(int8_t(x >> byte) * uint8_t(y >> byte));
            }
            if (!BFLOAT16) continue;
            std::memcpy(&total, &sum, sizeof total);
            total += first + second;
            std::memcpy(&sum, &total, sizeof total);
        }
}

}  // namespace
