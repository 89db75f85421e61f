// Tiles of AMX: registers of at most 16 rows of 64 bytes, of which one instruction multiplies two. Names of registers
// are template arguments. Linux lets a process use tiles that has asked for them (`tiles_allowed`), and each thread
// chooses the shape of its tiles with `shape_tiles` before it uses them.
//   load_tile, store_tile   rows `stride` bytes apart
//   clear_tile              zeros
//   add_tile<SUM, X, Y>     SUM += X * Y: rows of X, and lines of Y that have as many words as a row of SUM; a word holds
//                           two bfloat16 or four bytes, int8 in X and uint8 in Y

#pragma once

#include <cstdint>

#define TILES

// Rows of this thread's tiles of x and of sums, for all files; 0: it has none.
inline int& tile_rows() {
    static thread_local int rows = 0;
    return rows;
}

namespace {

// Tiles below X_TILE are sums, those from Y_TILE on lines of a matrix.
constexpr int X_TILE = 4, Y_TILE = 5, TILES_USED = 7;

// Without a header: unistd.h has a `write` of its own.
inline bool tiles_allowed() {
    static const bool allowed = [] {
        long result = 158;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
        asm volatile("syscall" : "+a"(result) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
        return result == 0;
    }();
    return allowed;
}

struct alignas(64) TileShapes {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

// Gives this thread's tiles of x and of sums so many rows; with 0 the thread gives its tiles back.
inline void shape_tiles(int rows) {
    if (tile_rows() == rows) return;
    tile_rows() = rows;
    if (!rows) {
        asm volatile("tilerelease" : : : "memory");
        return;
    }
    TileShapes shapes{1, 0, {}, {}, {}};
    for (int tile = 0; tile < TILES_USED; tile++) {
        shapes.bytes[tile] = TILE_BYTES;
        shapes.rows[tile] = uint8_t(tile < Y_TILE ? rows : TILE_ROWS);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
}

template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}

template <bool BFLOAT16, int SUM, int X, int Y>
inline void add_tile() {
    if constexpr (BFLOAT16)
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(Y));
    else
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(Y));
}

}  // namespace
