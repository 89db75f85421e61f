// Converts blocks of ggml's formats to packed panels (layout: panels.py) without decoding values: codes stay codes.
// blocks.py has the definition.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../operators.h"

namespace {

constexpr int PANEL = 16;
constexpr int MOST_ELEMENTS = 256, MOST_GROUPS = 16;
constexpr uint8_t SIGN = 128;  // int8 codes are numbers plus 128

// The other content of a block: a scale and perhaps a minimum for each group. `Value` is float16 as bits, an exponent,
// or an int8 that is multiplied by a unit.
template <typename T>
struct Decoded {
    typedef T Value;
    T scale[MOST_GROUPS], least[MOST_GROUPS];
    uint16_t unit, least_unit;
    const uint8_t* codebook;  // the codes of all entries, consecutively
};

inline uint16_t half(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return bits;
}

inline uint32_t word(const uint8_t* at) {
    uint32_t four;
    std::memcpy(&four, at, sizeof four);
    return four;
}

// The negated number.
inline uint16_t negative(uint16_t half) { return half ^ 0x8000; }

inline bool finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

// Splits bytes into low halves, then high halves; eight at a time, because compilers do not vectorise loops this short.
template <int COUNT>
inline void nibbles(const uint8_t* __restrict from, uint8_t* __restrict codes) {
    constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f;
    for (int i = 0; i < COUNT; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, from + i, sizeof eight);
        const uint64_t low = eight & LOW, high = eight >> 4 & LOW;
        std::memcpy(codes + i, &low, sizeof low);
        std::memcpy(codes + i + COUNT, &high, sizeof high);
    }
}

template <int BYTES_, int SIZE_, int GROUP_, int BITS_, bool LEAST_, typename Value>
struct Format : Decoded<Value> {
    static constexpr int BYTES = BYTES_, SIZE = SIZE_, GROUP = GROUP_, BITS = BITS_;
    static constexpr bool LEAST = LEAST_, UNITS = std::is_same_v<Value, int8_t>;
};

struct Q4_0 : Format<18, 32, 32, 4, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = half(b);
        nibbles<16>(b + 2, codes);
    }
};

struct Q4_1 : Format<20, 32, 32, 4, true, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = half(b), least[0] = half(b + 2);
        nibbles<16>(b + 4, codes);
    }
};

// Adds the fifth bits of 32 codes, which are stored in four bytes: the bits of one byte go to eight codes.
inline void add_fifth(const uint8_t* bits, uint8_t* codes) {
    constexpr uint64_t ONES = 0x0101010101010101, BITS = 0x8040201008040201;
    for (int i = 0; i < 4; i++) {
        uint64_t eight;
        std::memcpy(&eight, codes + 8 * i, sizeof eight);
        const uint64_t set = (((bits[i] * ONES & BITS) + 0x7f * ONES) >> 7) & ONES;
        eight |= set << 4;
        std::memcpy(codes + 8 * i, &eight, sizeof eight);
    }
}

struct Q5_0 : Format<22, 32, 32, 5, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = half(b);
        nibbles<16>(b + 6, codes);
        add_fifth(b + 2, codes);
    }
};

struct Q5_1 : Format<24, 32, 32, 5, true, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = half(b), least[0] = half(b + 2);
        nibbles<16>(b + 8, codes);
        add_fifth(b + 4, codes);
    }
};

struct Q8_0 : Format<34, 32, 32, 8, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = half(b);
        for (int i = 0; i < 32; i++) codes[i] = b[2 + i] ^ SIGN;
    }
};

struct Q1_0 : Format<18, 128, 128, 1, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = half(b);
        for (int i = 0; i < 128; i++) codes[i] = b[2 + i / 8] >> i % 8 & 1;
    }
};

// Numbers from -1 to 2. Codes of int2 are numbers from -2 to 1, plus 2: the opposites are stored.
template <int ELEMENTS>
struct Q2_0 : Format<2 + ELEMENTS / 4, ELEMENTS, ELEMENTS, 2, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        this->scale[0] = negative(half(b));
        for (int i = 0; i < ELEMENTS; i++) codes[i] = uint8_t(3 - (b[2 + i / 4] >> 2 * (i % 4) & 3));
    }
};

struct IQ4_NL : Format<18, 32, 32, 4, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = half(b);
        nibbles<16>(b + 2, codes);
    }
};

struct MXFP4 : Format<17, 32, 32, 4, false, uint8_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = b[0];
        nibbles<16>(b + 1, codes);
    }
};

// Half of an unsigned e4m3 number, which is exact in float16; 127 is zero, as in ggml.
inline uint16_t half_of_e4m3(uint8_t bits) {
    constexpr uint16_t BELOW[8] = {0, 0x1400, 0x1800, 0x1a00, 0x1c00, 0x1d00, 0x1e00, 0x1f00};  // multiples of 2^-10
    if (bits == 127) return 0;
    return bits & 0x78 ? uint16_t((bits & 127) << 7) + (7 << 10) : BELOW[bits & 7];
}

struct NVFP4 : Format<36, 64, 16, 4, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        for (int i = 0; i < 4; i++) {
            scale[i] = half_of_e4m3(b[i]);
            nibbles<8>(b + 4 + 8 * i, codes + 16 * i);
        }
    }
};

struct Q2_K : Format<84, 256, 16, 2, true, int8_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b + 80), least_unit = negative(half(b + 82));
        for (int i = 0; i < 16; i++) scale[i] = b[i] & 15, least[i] = b[i] >> 4;
        for (int n = 0; n < 2; n++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++) codes[n * 128 + j * 32 + i] = b[16 + n * 32 + i] >> 2 * j & 3;
    }
};

// Numbers are the two low bits, minus 4 unless the mask bit is set; int4 codes are numbers plus 8.
struct Q3_K : Format<110, 256, 16, 4, false, int8_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
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

// Reads scales and minimums of six bits, packed in twelve bytes.
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
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        six_bits(b, *this);
        for (int n = 0; n < 4; n++) nibbles<32>(b + 16 + n * 32, codes + n * 64);
    }
};

struct Q5_K : Format<176, 256, 32, 5, true, int8_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        six_bits(b, *this);
        for (int n = 0; n < 4; n++) {
            nibbles<32>(b + 48 + n * 32, codes + n * 64);
            for (int half = 2 * n; half < 2 * n + 2; half++)
                for (int i = 0; i < 32; i++) codes[half * 32 + i] |= uint8_t((b[16 + i] >> half & 1) << 4);
        }
    }
};

struct Q6_K : Format<210, 256, 16, 6, false, int8_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b + 208);
        std::memcpy(scale, b + 192, 16);
        for (int n = 0; n < 2; n++) {
            nibbles<64>(b + n * 64, codes + n * 128);
            for (int part = 0; part < 4; part++)
                for (int i = 0; i < 32; i++)
                    codes[n * 128 + part * 32 + i] |= uint8_t((b[128 + n * 32 + i] >> 2 * part & 3) << 4);
        }
    }
};

struct IQ4_XS : Format<136, 256, 32, 4, false, int8_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b);
        const int high = half(b + 2);
        for (int i = 0; i < 8; i++) {
            scale[i] = int8_t((b[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4) - 32;
            nibbles<16>(b + 8 + i * 16, codes + i * 32);
        }
    }
};

// The numbers of Q2_0.
struct TQ2_0 : Format<66, 256, 256, 2, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = negative(half(b + 64));
        for (int n = 0; n < 2; n++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < 32; i++) codes[n * 128 + j * 32 + i] = uint8_t(3 - (b[n * 32 + i] >> 2 * j & 3));
    }
};

// Numbers -1, 0 and 1, five per byte: a number of five base-3 digits, scaled by 256 / 243.
struct TQ1_0 : Format<54, 256, 256, 2, false, uint16_t> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        scale[0] = half(b + 52);
        spread(b, 32, 5, codes);
        spread(b + 32, 16, 5, codes + 160);
        spread(b + 48, 4, 4, codes + 240);
    }

   private:
    static void spread(const uint8_t* from, int count, int digits, uint8_t* codes) {
        for (int i = 0; i < count; i++) {
            uint8_t rest = from[i];
            for (int n = 0; n < digits; n++, rest = uint8_t(rest * 3)) codes[n * count + i] = uint8_t((rest * 3 >> 8) + 1);
        }
    }
};

// Formats with codebooks: an entry and signs give several codes; scales are odd numbers, multiplied by a unit.
template <int BYTES, int GROUP>
struct OfCodebook : Format<BYTES, 256, GROUP, 4, false, int8_t> {
    // Writes the COUNT codes of an entry, with a sign bit for each.
    template <int COUNT>
    void put(int entry, unsigned signs, uint8_t* codes) {
        for (int k = 0; k < COUNT; k++) codes[k] = uint8_t(this->codebook[entry * COUNT + k] | (signs >> k & 1) << 3);
    }
    static int8_t odd(unsigned count) { return int8_t(2 * count + 1); }
    // Adds the eighth sign to seven: the number of negative ones is even.
    static unsigned signs(unsigned seven) { return seven | (__builtin_popcount(seven) & 1) << 7; }
    // Reads scales of four bits, two per byte.
    void nibbled(const uint8_t* from) {
        for (int i = 0; i < 256 / GROUP; i++) this->scale[i] = odd(from[i / 2] >> 4 * (i % 2) & 15);
    }
};

struct IQ2_XXS : OfCodebook<66, 32> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b);
        for (int g = 0; g < 8; g++) {
            const uint32_t more = word(b + 6 + 8 * g);
            scale[g] = odd(more >> 28);
            for (int j = 0; j < 4; j++) put<8>(b[2 + 8 * g + j], signs(more >> 7 * j & 127), codes + 32 * g + 8 * j);
        }
    }
};

struct IQ2_XS : OfCodebook<74, 16> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b);
        for (int j = 0; j < 32; j++) {
            const int more = half(b + 2 + 2 * j);
            put<8>(more & 511, signs(more >> 9), codes + 8 * j);
        }
        nibbled(b + 66);
    }
};

struct IQ2_S : OfCodebook<82, 16> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b);
        for (int j = 0; j < 32; j++) put<8>(b[2 + j] | (b[66 + j / 4] >> 2 * (j % 4) & 3) << 8, b[34 + j], codes + 8 * j);
        nibbled(b + 74);
    }
};

struct IQ3_XXS : OfCodebook<98, 32> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b);
        for (int g = 0; g < 8; g++) {
            const uint32_t more = word(b + 66 + 4 * g);
            scale[g] = odd(more >> 28);
            for (int j = 0; j < 8; j++)
                put<4>(b[2 + 8 * g + j], signs(more >> 7 * (j / 2) & 127) >> 4 * (j % 2), codes + 32 * g + 4 * j);
        }
    }
};

struct IQ3_S : OfCodebook<110, 32> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b);
        for (int j = 0; j < 64; j++)
            put<4>(b[2 + j] | (b[66 + j / 8] >> j % 8 & 1) << 8, b[74 + j / 2] >> 4 * (j % 2), codes + 4 * j);
        nibbled(b + 106);
    }
};

constexpr int LOWERED = 2048;  // from this one on, IQ1's entries repeat, with 1/8 subtracted instead of added

struct IQ1_S : OfCodebook<50, 32> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = half(b);
        for (int g = 0; g < 8; g++) {
            const int more = half(b + 34 + 2 * g);
            scale[g] = odd(more >> 12 & 7);
            for (int j = 0; j < 4; j++)
                put<8>((b[2 + 4 * g + j] | (more >> 3 * j & 7) << 8) + (more >> 15) * LOWERED, 0, codes + 32 * g + 8 * j);
        }
    }
};

struct IQ1_M : OfCodebook<56, 16> {
    void decode(const uint8_t* __restrict b, uint8_t* __restrict codes) {
        unit = 0;
        for (int i = 0; i < 4; i++) {
            const int more = half(b + 48 + 2 * i);
            unit |= uint16_t(more >> 12 << 4 * i);
            for (int j = 0; j < 4; j++) scale[4 * i + j] = odd(more >> 3 * j & 7);
        }
        for (int j = 0; j < 32; j++) {
            const int more = b[32 + j / 2] >> 4 * (j % 2) & 15;
            put<8>((b[j] | (more & 7) << 8) + (more >> 3) * LOWERED, 0, codes + 8 * j);
        }
    }
};

// Stores the codes of outputs [from, to) of a panel in its lines, one word per output. With 5 and 6 bits, words of the
// low four bits come first, then one word of the bits above.
template <int BITS, int SIZE>
inline void put(const uint8_t (*codes)[MOST_ELEMENTS], int from, int to, uint8_t* line) {
    constexpr int FIELD = BITS == 8 ? 8 : BITS < 4 ? BITS : 4, EACH = 32 / FIELD;
    constexpr uint32_t LOW = 0x01010101u * ((1 << FIELD) - 1);
    constexpr int ABOVE = BITS - FIELD, STEP = ABOVE ? 32 / ABOVE : EACH;
    for (int i = 0; i < SIZE; i += STEP) {
        for (int j = i; j < i + STEP; j += EACH, line += PANEL * 4)
            for (int lane = from; lane < to; lane++) {
                uint32_t packed = 0;
                for (int k = 0; k < 8 / FIELD; k++) packed |= (word(codes[lane] + j + 4 * k) & LOW) << FIELD * k;
                std::memcpy(line + lane * 4, &packed, sizeof packed);
            }
        if (!ABOVE) continue;
        for (int lane = from; lane < to; lane++) {
            uint32_t packed = 0;
            for (int j = 0; j < STEP / 4; j++) packed |= (word(codes[lane] + i + 4 * j) & ~LOW) >> 4 << ABOVE * j;
            std::memcpy(line + lane * 4, &packed, sizeof packed);
        }
        line += PANEL * 4;
    }
}

template <typename Block>
int64_t repack(int64_t threads, const uint8_t* rows, int64_t first, int64_t count, int64_t blocks, uint8_t* panels,
               void* scale, void* least, uint16_t* unit, uint16_t* least_unit, const uint8_t* codebook) {
    typedef typename Block::Value Value;
    constexpr int SIZE = Block::SIZE, GROUPS = SIZE / Block::GROUP, OF_PANEL = PANEL * SIZE * Block::BITS / 8;
    int64_t bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad)
    for (int64_t panel = first / PANEL; panel < (first + count + PANEL - 1) / PANEL; panel++) {
        uint8_t codes[PANEL][MOST_ELEMENTS];
        Block block;
        block.codebook = codebook;
        const int from = int(std::max(first - panel * PANEL, int64_t(0)));
        const int to = int(std::min(first + count - panel * PANEL, int64_t(PANEL)));
        for (int64_t i = 0; i < blocks; i++) {
            const int64_t place = panel * blocks + i;
            for (int lane = from; lane < to; lane++) {
                block.decode(rows + ((panel * PANEL - first + lane) * blocks + i) * Block::BYTES, codes[lane]);
                for (int g = 0; g < GROUPS; g++) {
                    const int64_t number = (place * GROUPS + g) * PANEL + lane;
                    ((Value*)scale)[number] = block.scale[g];
                    if (Block::LEAST) ((Value*)least)[number] = block.least[g];
                    if constexpr (std::is_same_v<Value, uint16_t>)
                        bad += !finite(block.scale[g]) + (Block::LEAST && !finite(block.least[g]));
                }
                if (Block::UNITS) {
                    unit[place * PANEL + lane] = block.unit;
                    if (Block::LEAST) least_unit[place * PANEL + lane] = block.least_unit;
                    bad += !finite(block.unit) + (Block::LEAST && !finite(block.least_unit));
                }
            }
            uint8_t* lines = panels + place * OF_PANEL;
            if (from == 0 && to == PANEL)
                put<Block::BITS, SIZE>(codes, 0, PANEL, lines);
            else
                put<Block::BITS, SIZE>(codes, from, to, lines);
        }
    }
    return bad;
}

}  // namespace

extern "C" int64_t coppice_repack(int64_t threads, int64_t format, const void* rows, int64_t first, int64_t count,
                                  int64_t blocks, void* panels, void* scale, void* least, void* unit,
                                  void* least_unit, const void* codebook) {
    auto run = [&](auto block) {
        return repack<decltype(block)>(threads, (const uint8_t*)rows, first, count, blocks, (uint8_t*)panels, scale,
                                       least, (uint16_t*)unit, (uint16_t*)least_unit, (const uint8_t*)codebook);
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
        case 16: return run(IQ2_XXS{});
        case 17: return run(IQ2_XS{});
        case 18: return run(IQ3_XXS{});
        case 19: return run(IQ1_S{});
        case 20: return run(IQ4_NL{});
        case 21: return run(IQ3_S{});
        case 22: return run(IQ2_S{});
        case 23: return run(IQ4_XS{});
        case 29: return run(IQ1_M{});
        case 34: return run(TQ1_0{});
        case 35: return run(TQ2_0{});
        case 39: return run(MXFP4{});
        case 40: return run(NVFP4{});
        case 41: return run(Q1_0{});
        case 42: return run(Q2_0<64>{});
        case 1042: return run(Q2_0<128>{});
    }
    return 0;
}
