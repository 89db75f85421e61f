// Blocks of ggml's formats to packed panels (layout: panels.py), without a look at their values: codes stay codes, or
// become the whole numbers that a table has for them. blocks.py has the definition.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../operators.h"

namespace {

constexpr int PANEL = 16;
constexpr int MOST_ELEMENTS = 256, MOST_GROUPS = 16;
constexpr uint8_t SIGN = 128;  // int8 codes are so much more than their numbers

// A block: codes, and of each group a scale and perhaps a minimum. `Value` is float16 as bits, float, or int8, which
// counts in units.
template <typename T>
struct Decoded {
    typedef T Value;
    uint8_t codes[MOST_ELEMENTS];
    T scale[MOST_GROUPS], least[MOST_GROUPS];
    uint16_t unit, least_unit;
};

inline uint16_t half(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return bits;
}

// The same number, negative.
inline uint16_t negative(uint16_t half) { return half ^ 0x8000; }

// Low halves of `count` bytes, then their high halves.
inline void nibbles(const uint8_t* from, int count, uint8_t* codes) {
    for (int i = 0; i < count; i++) codes[i] = from[i] & 15, codes[i + count] = from[i] >> 4;
}

inline void look_up(uint8_t* codes, int count, const int8_t (&table)[16]) {
    for (int i = 0; i < count; i++) codes[i] = uint8_t(table[codes[i]]) ^ SIGN;
}

constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

template <int BYTES_, int SIZE_, int GROUP_, int BITS_, bool LEAST_, typename Value>
struct Format : Decoded<Value> {
    static constexpr int BYTES = BYTES_, SIZE = SIZE_, GROUP = GROUP_, BITS = BITS_;
    static constexpr bool LEAST = LEAST_, UNITS = std::is_same_v<Value, int8_t>;
};

struct Q4_0 : Format<18, 32, 32, 4, false, uint16_t> {
    void decode(const uint8_t* b) {
        scale[0] = half(b);
        nibbles(b + 2, 16, codes);
    }
};

struct Q4_1 : Format<20, 32, 32, 4, true, uint16_t> {
    void decode(const uint8_t* b) {
        scale[0] = half(b), least[0] = half(b + 2);
        nibbles(b + 4, 16, codes);
    }
};

// The fifth bits of 32 codes lie in four bytes.
inline void add_fifth(const uint8_t* bits, uint8_t* codes, uint8_t more) {
    for (int i = 0; i < 32; i++) codes[i] = uint8_t((codes[i] | (bits[i / 8] >> (i % 8) & 1) << 4) + more);
}

struct Q5_0 : Format<22, 32, 32, 8, false, uint16_t> {
    void decode(const uint8_t* b) {
        scale[0] = half(b);
        nibbles(b + 6, 16, codes);
        add_fifth(b + 2, codes, SIGN - 16);
    }
};

struct Q5_1 : Format<24, 32, 32, 8, true, uint16_t> {
    void decode(const uint8_t* b) {
        scale[0] = half(b), least[0] = half(b + 2);
        nibbles(b + 8, 16, codes);
        add_fifth(b + 4, codes, SIGN);
    }
};

struct Q8_0 : Format<34, 32, 32, 8, false, uint16_t> {
    void decode(const uint8_t* b) {
        scale[0] = half(b);
        for (int i = 0; i < 32; i++) codes[i] = b[2 + i] ^ SIGN;
    }
};

struct IQ4_NL : Format<18, 32, 32, 8, false, uint16_t> {
    void decode(const uint8_t* b) {
        scale[0] = half(b);
        nibbles(b + 2, 16, codes);
        look_up(codes, 32, IQ4);
    }
};

struct MXFP4 : Format<17, 32, 32, 8, false, float> {
    void decode(const uint8_t* b) {
        const uint32_t bits = b[0] < 2 ? 0x00200000u << b[0] : uint32_t(b[0] - 1) << 23;  // 2^(b - 128)
        std::memcpy(scale, &bits, sizeof bits);
        nibbles(b + 1, 16, codes);
        look_up(codes, 32, E2M1);
    }
};

struct Q2_K : Format<84, 256, 16, 4, true, int8_t> {
    void decode(const uint8_t* b) {
        unit = half(b + 80), least_unit = negative(half(b + 82));
        for (int i = 0; i < 16; i++) scale[i] = b[i] & 15, least[i] = b[i] >> 4;
        for (int n = 0; n < 2; n++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++) codes[n * 128 + j * 32 + i] = b[16 + n * 32 + i] >> 2 * j & 3;
    }
};

// A bit of the mask says that 4 is not taken away; codes of int4 stand around 8.
struct Q3_K : Format<110, 256, 16, 4, false, int8_t> {
    void decode(const uint8_t* b) {
        unit = half(b + 108);
        for (int i = 0; i < 16; i++) {
            const int low = i < 8 ? b[96 + i] & 15 : b[96 + i - 8] >> 4, high = b[104 + i % 4] >> 2 * (i / 4) & 3;
            scale[i] = int8_t((low | high << 4) - 32);
        }
        for (int n = 0; n < 2; n++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++)
                    codes[n * 128 + j * 32 + i] =
                        uint8_t((b[32 + n * 32 + i] >> 2 * j & 3) + 4 + (b[i] >> (n * 4 + j) & 1) * 4);
    }
};

// Scales and minimums of six bits in twelve bytes.
template <typename Block>
void six_bits(const uint8_t* b, Block& block) {
    block.unit = half(b), block.least_unit = negative(half(b + 2));
    for (int i = 0; i < 4; i++) {
        const uint8_t first = b[4 + i], second = b[8 + i], rest = b[12 + i];
        block.scale[i] = first & 63, block.scale[i + 4] = (rest & 15) | (first >> 2 & 48);
        block.least[i] = second & 63, block.least[i + 4] = rest >> 4 | (second >> 2 & 48);
    }
}

struct Q4_K : Format<144, 256, 32, 4, true, int8_t> {
    void decode(const uint8_t* b) {
        six_bits(b, *this);
        for (int n = 0; n < 4; n++) nibbles(b + 16 + n * 32, 32, codes + n * 64);
    }
};

struct Q5_K : Format<176, 256, 32, 8, true, int8_t> {
    void decode(const uint8_t* b) {
        six_bits(b, *this);
        for (int n = 0; n < 4; n++) nibbles(b + 48 + n * 32, 32, codes + n * 64);
        for (int i = 0; i < 256; i++) codes[i] = uint8_t((codes[i] | (b[16 + i % 32] >> i / 32 & 1) << 4) + SIGN);
    }
};

struct Q6_K : Format<210, 256, 16, 8, false, int8_t> {
    void decode(const uint8_t* b) {
        unit = half(b + 208);
        std::memcpy(scale, b + 192, 16);
        for (int n = 0; n < 2; n++) {
            nibbles(b + n * 64, 64, codes + n * 128);
            for (int i = 0; i < 128; i++) {
                uint8_t& code = codes[n * 128 + i];
                code = uint8_t((code | (b[128 + n * 32 + i % 32] >> 2 * (i / 32) & 3) << 4) + SIGN - 32);
            }
        }
    }
};

struct IQ4_XS : Format<136, 256, 32, 8, false, int8_t> {
    void decode(const uint8_t* b) {
        unit = half(b);
        const int high = half(b + 2);
        for (int i = 0; i < 8; i++) {
            scale[i] = int8_t((b[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4) - 32;
            nibbles(b + 8 + i * 16, 16, codes + i * 32);
        }
        look_up(codes, 256, IQ4);
    }
};

// Codes to the words of one output, which lie a line apart.
template <int BITS, int SIZE>
void put(const uint8_t* codes, uint8_t* words) {
    constexpr int LINE = PANEL * 4;
    if constexpr (BITS == 4)
        for (int i = 0; i < SIZE; i += 8, words += LINE) {
            uint8_t word[4];
            for (int j = 0; j < 4; j++) word[j] = uint8_t(codes[i + j] | codes[i + 4 + j] << 4);
            std::memcpy(words, word, 4);
        }
    else
        for (int i = 0; i < SIZE; i += 4, words += LINE) std::memcpy(words, codes + i, 4);
}

template <typename Block>
void repack(int64_t threads, const uint8_t* rows, int64_t first, int64_t count, int64_t blocks, uint8_t* panels,
            void* scale, void* least, uint16_t* unit, uint16_t* least_unit) {
    typedef typename Block::Value Value;
    constexpr int GROUPS = Block::SIZE / Block::GROUP, OF_PANEL = PANEL * Block::SIZE * Block::BITS / 8;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = first / PANEL; panel < (first + count + PANEL - 1) / PANEL; panel++) {
        Block block;
        const int64_t from = std::max(first, panel * PANEL), to = std::min(first + count, (panel + 1) * PANEL);
        for (int64_t out = from; out < to; out++) {
            const uint8_t* at = rows + (out - first) * blocks * Block::BYTES;
            const int64_t lane = out % PANEL;
            for (int64_t i = 0; i < blocks; i++, at += Block::BYTES) {
                const int64_t place = panel * blocks + i;
                block.decode(at);
                put<Block::BITS, Block::SIZE>(block.codes, panels + place * OF_PANEL + lane * 4);
                for (int g = 0; g < GROUPS; g++) {
                    const int64_t number = (place * GROUPS + g) * PANEL + lane;
                    ((Value*)scale)[number] = block.scale[g];
                    if (Block::LEAST) ((Value*)least)[number] = block.least[g];
                }
                if (Block::UNITS) unit[place * PANEL + lane] = block.unit;
                if (Block::UNITS && Block::LEAST) least_unit[place * PANEL + lane] = block.least_unit;
            }
        }
    }
}

}  // namespace

extern "C" void coppice_repack(int64_t threads, int64_t format, const void* rows, int64_t first, int64_t count,
                               int64_t blocks, void* panels, void* scale, void* least, void* unit, void* least_unit) {
    auto run = [&](auto block) {
        repack<decltype(block)>(threads, (const uint8_t*)rows, first, count, blocks, (uint8_t*)panels, scale, least,
                                (uint16_t*)unit, (uint16_t*)least_unit);
    };
    switch (format) {
        case 2: return run(Q4_0{});
        case 3: return run(Q4_1{});
        case 6: return run(Q5_0{});
        case 7: return run(Q5_1{});
        case 8: return run(Q8_0{});
        case 10: return run(Q2_K{});
        case 11: return run(Q3_K{});
        case 12: return run(Q4_K{});
        case 13: return run(Q5_K{});
        case 14: return run(Q6_K{});
        case 20: return run(IQ4_NL{});
        case 23: return run(IQ4_XS{});
        case 39: return run(MXFP4{});
    }
}
