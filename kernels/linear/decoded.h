// Expands codes of 5 and 6 bits to bytes, for products that cannot read them directly: the codes of some chunks are
// converted to int8 panels, once for all rows.

#pragma once

#include "sums.h"

namespace {

constexpr int AHEAD = 8192;     // bytes
constexpr int INT8_GROUPS = 5;  // the kind whose codes are stored as bytes

// Expands elements [at, at + count) of `panels` panels, starting at output `out`, into `to`.
template <int BITS>
void decode(const Matrix& m, int64_t out, int64_t at, int64_t count, int panels, char* to) {
    typedef Planes<BITS> Of;
    constexpr int LINE = PANEL * 4, STEP = PANEL * Of::BYTES;
    const int64_t across = m.width / Of::STEP * STEP, ahead = AHEAD + (at + count == m.width ? (panels - 1) * across : 0);
    const uint32_t more = (128u - (m.least ? 0 : Of::MIDDLE)) * 0x01010101u;
    for (int panel = 0; panel < panels; panel++) {
        const char* from = (const char*)m.panels + (out / PANEL + panel) * across + at / Of::STEP * STEP;
        for (int64_t i = 0; i < count; i += Of::STEP, from += STEP, to += Of::STEP / 4 * LINE) {
#pragma GCC unroll 8
            for (int line = 0; line < STEP; line += LINE) __builtin_prefetch(from + line + ahead);
#pragma GCC unroll 4
            for (int lane = 0; lane < LINE; lane += LANES * 4)
#pragma GCC unroll 8
                for (int part = 0; part < Of::STEP / 4; part++)
                    write((Words)Of::codes(from + lane, part) + more, to + part * LINE + lane, LANES);
        }
    }
}

inline void decode(const Matrix& m, int64_t out, int64_t at, int64_t count, int panels, char* to) {
    (m.kind == 9 ? decode<5> : decode<6>)(m, out, at, count, panels, to);
}

}  // namespace
