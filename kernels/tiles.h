// What products by tiles share (processors/amx.h); without tiles, nothing is allowed and nothing happens.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

constexpr int TILE_WORDS = TILE_BYTES / 4;

#ifdef TILES
constexpr int TO_L2 = 2;  // prefetching into the first level would take the buffers through which tiles are loaded

// Calls f(0), ..., f(COUNT - 1) with compile-time constants.
template <int COUNT, int AT = 0, typename F>
[[gnu::always_inline]] inline void each_tile(F f) {
    f(std::integral_constant<int, AT>{});
    if constexpr (AT + 1 < COUNT) each_tile<COUNT, AT + 1>(f);
}

// Denormal numbers are zeros while it lives, as for tiles of bfloat16, unless `tiled` is false.
class AsTiles {
  public:
    explicit AsTiles(bool tiled = true) { _mm_setcsr(before | (tiled ? 0x8040 : 0)); }
    ~AsTiles() { _mm_setcsr(before); }

  private:
    const unsigned before = _mm_getcsr();
};

inline void leave_tiles() { shape_tiles(0); }
#else
struct AsTiles {
    explicit AsTiles(bool) {}
};

inline bool tiles_allowed() { return false; }
inline void leave_tiles() {}
#endif

}  // namespace
