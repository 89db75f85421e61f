// The element types of packed matrices. Each defines
//   Row                  the type of an element of a prepared row of x
//   STEP                 elements of a row of x that one load of the matrix meets
//   BYTES                bytes of a panel that a step takes for one output; each 4 of them are a line of their own
//   PARTS                parts in which a step is multiplied
//   CHUNK                elements of a row that are summed before the sum is added to the row's total
//   Words, Part          the types of one load and of one multiplication, for LANES outputs
//   VECTORS              registers that both need
//   Sum, Total           the types of a chunk's sum and a row's total, for LANES outputs
//   TILED                whether tiles multiply it (tiles.h)
//   GROUPED, EXPONENTS   whether groups of elements have scales, and whether these are powers of two
//   SHARE                factor of each number of the matrix
//   PLACE                factor from a sum to one of numbers: a power of two
//   EXPANDED             whether numbers are stored as floats for many rows (expanded.h); rows are floats
//   IN_BITS              whether elements are bytes which the matrix may store in fewer bits (decoded.h)
//   WRITTEN_OUT          whether the steps of a chunk are unrolled: a loop over so few takes a quarter longer
//   SUMS                 largest number of sums in a block
//   NARROW               up to so many rows use one vector of outputs, because parts are expensive to make
//   ROUNDED              elements of a row that are rounded relative to one largest magnitude and share a Unit;
//                        0: the whole row
// and functions that prepare rows, load words, convert words to parts, add products of parts and rows to sums, and
// convert totals (of scaled sums, if there are groups) to values.

#pragma once

#include "../vectors.h"
#include "rounding.h"
#include "tables.h"

namespace {

constexpr int PANEL = 16;  // outputs that are stored interleaved

struct Unit {  // of elements of x that are rounded together
    float size;     // factor from sums of products to values
    int32_t start;  // first value of these sums: compensates for an offset in the numbers of the matrix
    float sum;      // of the rounded elements
};

// The most sums in a block of int4. With AVX-512 VNNI, sums are so fast that their conversion to floats takes visible
// time, unless the processor starts the next sums meanwhile; both must fit into its window of instructions.
#ifdef INT8_DOTS
constexpr int INT4_SUMS = LANES == 16 ? 14 : REGISTERS;
#else
constexpr int INT4_SUMS = REGISTERS;
#endif

// Elements without groups: totals are values, and a step is one part.
struct Plain {
    static constexpr int PARTS = 1, ROUNDED = 0, SUMS = REGISTERS, NARROW = 0;
    static constexpr bool GROUPED = false, TILED = false;
    static Floats value(Floats sum, const Unit*, const void*, int64_t, int) { return sum; }
};

// Rows of floats.
struct WideRows {
    typedef float Row;
    typedef Floats Part, Sum;

    template <typename T>
    static Unit prepare(const T* x, int64_t width, float* row, const Levels&) {
        each(width, [&](int64_t i, auto n) { write(load(x + i, n), row + i, n); });
        for (int i = 0; i < 8; i++) row[width + i] = 0;  // rows are whole steps if these are longer
        return {};
    }
    static Sum add(Sum sum, Part part, const Row* x) { return sum + part * x[0]; }
    static float sum(const Row* row, int64_t count) {
        Floats sum{};
        each(count, [&](int64_t i, auto n) { sum += load(row + i, n); });
        return sum_of(sum);
    }
};

struct Wide : WideRows, Plain {
    typedef Floats Total;
    static constexpr int CHUNK = 64;
};

struct WideFloat32 : Wide {
    typedef Floats Words;
    static constexpr int STEP = 1, BYTES = 4, VECTORS = 1;
    static Words load(const char* at) { return read<Floats>(at, LANES); }
    static Part part(Words words, int) { return words; }
};

struct WideFloat16 : Wide {
    typedef Floats Words;
    static constexpr int STEP = 1, BYTES = 2, VECTORS = 1;
    static Words load(const char* at) { return ::load((const Float16*)at); }
    static Part part(Words words, int) { return words; }
};

// A word holds two elements, the first in its low half.
struct WideBFloat16 : Wide {
    typedef Ints Words;
    static constexpr int STEP = 2, BYTES = 4, PARTS = 2, VECTORS = 2;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) { return (Floats)(i ? words & ~0xffff : words << 16); }
};

#ifdef BFLOAT16_PAIRS
struct PairsOfBFloat16 : Plain {
    typedef BFloat16 Row;
    typedef Floats Sum, Total;
    typedef Ints Words, Part;
    static constexpr int STEP = 2, BYTES = 4, VECTORS = 1, CHUNK = 128;

    template <typename T>
    static Unit prepare(const T* x, int64_t width, BFloat16* row, const Levels&) {
        each(width, [&](int64_t i, auto n) { store(::load(x + i, n), row + i, n); });
        row[width] = {};
        return {};
    }
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int) { return words; }
    static Sum add(Sum sum, Part part, const Row* x) {
        int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return add_pairs(sum, part, pair);
    }
};
#endif

// Panels store numbers plus 128, and FourInt8 multiplies by numbers plus OFFSET. Sums of ROUNDED elements are exact;
// they are then converted to floats, relative to the largest magnitude of these elements.
struct Int8 : FourInt8, Plain {
    typedef Ints Sum;
    typedef Floats Total;
    typedef FourInt8::Part Words;
    static constexpr int STEP = 4, BYTES = 4, CHUNK = 256, ROUNDED = 64;
    static Words load(const char* at) { return FourInt8::part(read<Ints>(at, LANES)); }
    static Part part(Words words, int) { return words; }

    template <typename T>
    static Unit prepare(const T* x, int64_t width, Row* row, const Levels& levels) {
        Ints sum{};
        const float largest = rounded_row(x, width, levels, [&](int64_t i, Ints steps) {
            put_row(steps, row + i);
            sum += steps;
        });
        const FourInts sums = sums_of_fourths(sum);
        return {largest, -OFFSET * (sums[0] + sums[1] + sums[2] + sums[3]), 0};
    }
    static Floats value(Floats total, const Unit*, const void* scale_O, int64_t at, int n) {
        return total * ::load((const float*)scale_O + at, n);
    }

};

// Elements in groups. The numbers that are multiplied are codes minus ZERO. DEFAULT is the zero point of a matrix that
// has none, DEFAULT_LEAST that of a matrix with minimums.
struct Grouped {
    typedef Floats Total;
    static constexpr bool GROUPED = true, EXPONENTS = false, IN_BITS = false, WRITTEN_OUT = false, TILED = false;
    static constexpr bool EXPANDED = false;
    static constexpr float SHARE = 1, PLACE = 1;
    static constexpr int CHUNK = 32, ROUNDED = 0, SUMS = REGISTERS, NARROW = 0;
    static Floats floats(Floats sum) { return sum; }
    static Floats floats(Ints sum) { return __builtin_convertvector(sum, Floats); }
    static Floats value(Floats total, const Unit*, const void*, int64_t, int) { return total; }
};

// Codes of 5 or 6 bits: words with the low four bits, like those of int4, then one word with the bits above; each byte
// of it has the bits of every fourth element.
template <int BITS>
struct Planes {
    static constexpr int ABOVE = BITS - 4, STEP = 32 / ABOVE, LOW = STEP / 8, BYTES = 4 * (LOW + 1);
    static constexpr int MIDDLE = 1 << (BITS - 1);
    // The codes of elements 4 i to 4 i + 3 of a step.
    static Ints codes(const char* at, int i) {
        const Ints low = word(at, i / 2), above = word(at, LOW);
        const int up = 4 - ABOVE * i;
        return ((i % 2 ? low >> 4 : low) & 0x0f0f0f0f) |
               ((up < 0 ? above >> -up : above << up) & ((1 << ABOVE) - 1) * 0x10101010);
    }

    // The same codes minus MIDDLE, in the upper bits of bytes.
    static Ints numbers(const char* at, int i) {
        constexpr int SIGNS = ABOVE == 1 ? -1 : int(0xaaaaaaaa), TO = 8 - BITS;
        const Ints low = word(at, i / 2), above = word(at, LOW) ^ SIGNS;
        return ((i % 2 ? low >> (4 - TO) : low << TO) & (15 << TO) * 0x01010101) |
               (above << (8 - ABOVE * (i + 1)) & int((256u - (256u >> ABOVE)) * 0x01010101u));
    }

   private:
    static Ints word(const char* at, int i) { return read<Ints>(at + i * PANEL * 4, LANES); }
};

// Elements in groups, multiplied by rounded rows. `Four` multiplies four integers at a time; sums start with a value
// that compensates for LARGER, which is contained in the numbers of the matrix.
template <typename Four, int LARGER>
struct Rounded : Four, Grouped {
    typedef typename Four::Row Row;
    typedef typename Four::Sum Sum;
    typedef Ints Words;
    static constexpr int BYTES = 4, ROUNDED = CHUNK;
    static constexpr float ZERO = 0, DEFAULT = LARGER;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Sum begin(int32_t start) { return (Sum)(Ints{} + start); }
    static Floats floats(Sum sum) { return Grouped::floats(Four::exact(sum)); }

    template <typename T>
    static Unit prepare(const T* x, int64_t width, Row* row, const Levels& levels) {
        Ints sum{};
        const float largest = rounded_row(x, width, levels, [&](int64_t i, Ints steps) {
            put_row(steps, row + i);
            sum += steps;
        });
        for (int64_t i = (width + LANES - 1) / LANES * LANES; i % 8; i++) row[i] = 0;
        const FourInts sums = sums_of_fourths(sum);
        const int32_t halves[] = {sums[0] + sums[1], sums[2] + sums[3]}, total = halves[0] + halves[1];
        return {largest / levels.count, start(halves[0] * -LARGER, halves[1] * -LARGER), float(total)};
    }

   private:
    // With 16 bits, an output has two sums: one of the first two of every four elements, one of the last two.
    static int32_t start(int32_t first, int32_t last) {
        if constexpr (std::is_same_v<Sum, Ints>) return first + last;
        return int32_t(uint32_t(last) << 16 | (first & 0xffff));
    }
};

// Two int4 per byte; of eight elements the first four are in the low halves.
struct Int4 : Rounded<FourNibbles, 8> {
    typedef Ints Part;
    static constexpr int STEP = 8, PARTS = 2, SUMS = INT4_SUMS;
    static constexpr bool WRITTEN_OUT = SUMS < REGISTERS;
    static constexpr float DEFAULT_LEAST = 0;
    static Part part(Words words, int i) { return (i ? words >> 4 : words) & 0x0f0f0f0f; }
};

// FourInt8 with the interface that `Rounded` needs.
struct FourCodes : FourInt8 {
    typedef Ints Sum;
    static Ints exact(Ints sum) { return sum; }
};

// Codes from 0 to 255 for numbers from -128 to 127.
struct Int8Codes : Rounded<FourCodes, FourInt8::OFFSET> {
    static constexpr bool IN_BITS = true;
    static constexpr int STEP = 4, PARTS = 1;
    static constexpr float ZERO = 128 - FourInt8::OFFSET, DEFAULT = 128, DEFAULT_LEAST = 128;
    static Part part(Words words, int) { return FourInt8::part(words); }
};

// Two codes per byte, stored like int4; a table maps them to numbers.
template <typename Code>
struct Codes : Rounded<FourCodes, FourInt8::OFFSET> {
    static constexpr int STEP = 8, PARTS = 2, VECTORS = FourInt8::VECTORS + 1;
    static constexpr bool EXPONENTS = Code::EXPONENTS;
    static constexpr float SHARE = Code::SHARE;
    static constexpr float DEFAULT_LEAST = 0;
    static constexpr Table NUMBERS = table<Code>(128);
    static Part part(Words words, int i) {
        return FourInt8::part(looked_up((i ? words >> 4 : words) & 0x0f0f0f0f, NUMBERS));
    }
};

#ifdef EIGHT_CODES
// Codes of 5 or 6 bits.
template <int BITS>
struct RoundedBits : Rounded<EightCodes, Planes<BITS>::MIDDLE> {
    typedef Planes<BITS> Of;
    typedef const char* Words;
    typedef EightCodes::Part Part;
    static constexpr int STEP = Of::STEP, BYTES = Of::BYTES, PARTS = STEP / 8;
    static constexpr float DEFAULT = Of::MIDDLE, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return at; }
    static Part part(Words words, int i) { return {Of::codes(words, 2 * i), Of::codes(words, 2 * i + 1)}; }
};
#endif

// int4 multiplied by rows of floats: numbers from -8 to 7.
struct WideInt4 : Grouped, WideRows {
    typedef Ints Words;
    static constexpr int STEP = 8, BYTES = 4, PARTS = 8, VECTORS = 2;
    static constexpr bool EXPANDED = true;
    static constexpr float ZERO = 8, DEFAULT = 8, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES) ^ int(0x88888888); }
    static Part part(Words words, int i) {  // a byte holds elements i and i + 4
        return __builtin_convertvector(words << (28 - i % 4 * 8 - i / 4 * 4) >> 28, Floats);
    }
};

// uint8 multiplied by rows of floats: numbers from -128 to 127.
struct WideInt8 : Grouped, WideRows {
    typedef Ints Words;
    static constexpr int STEP = 4, BYTES = 4, PARTS = 4, VECTORS = 2;
    static constexpr bool EXPANDED = true;
    static constexpr float ZERO = 128, DEFAULT = 128, DEFAULT_LEAST = 128;
    static Words load(const char* at) { return read<Ints>(at, LANES) ^ int(0x80808080); }
    static Part part(Words words, int i) { return __builtin_convertvector(words << (24 - i * 8) >> 24, Floats); }
};

// Numbers in the upper BITS bits of bytes, multiplied by rows of floats as if they were 2^(32 - BITS) times as large:
// sums are finite for rows up to 2^90.
template <int BITS>
struct WideBytes : Grouped, WideRows {
    static constexpr int VECTORS = 2;
    static Part byte(Ints words, int i) { return __builtin_convertvector(highest(words, i), Floats); }
    static Floats floats(Floats sum) { return sum * (1.0f / (int64_t(1) << (32 - BITS))); }
};

#ifndef INT8_DOTS
// Codes of 5 or 6 bits.
template <int BITS>
struct WideBits : WideBytes<BITS> {
    typedef Planes<BITS> Of;
    typedef const char* Words;
    static constexpr int STEP = Of::STEP, BYTES = Of::BYTES, PARTS = STEP;
    static constexpr int SUMS = BITS == 5 ? REGISTERS / 2 : REGISTERS;  // of more GCC keeps some in memory
    static constexpr bool EXPANDED = true;
    static constexpr float ZERO = Of::MIDDLE, DEFAULT = Of::MIDDLE, DEFAULT_LEAST = 0;
    static constexpr float PLACE = 1.0f / (int64_t(1) << (32 - BITS));
    static Floats floats(Floats sum) { return sum; }
    static Words load(const char* at) { return at; }
    static Floats part(Words words, int i) { return WideBits::byte(Of::numbers(words, i / 4), i % 4); }
};
#endif

// Codes with a table, multiplied by rows of floats.
template <typename Code>
struct WideCodes : WideBytes<8> {
    typedef Ints Words;
    static constexpr int STEP = 8, BYTES = 4, PARTS = 8;
    static constexpr bool EXPONENTS = Code::EXPONENTS;
    static constexpr float SHARE = Code::SHARE;
    static constexpr float ZERO = 0, DEFAULT = 0, DEFAULT_LEAST = 0;
    static constexpr Table NUMBERS = table<Code>(0);
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) {
        return byte(looked_up((i < 4 ? words : words >> 4) & 0x0f0f0f0f, NUMBERS), i % 4);
    }
};

#ifdef INT8_DOTS
// Rows of floats, multiplied as integers. A row is rounded to multiples ("steps") of its largest magnitude / LEVELS, so
// that sums of products with codes are exact. A step is stored as three digits in base 256, each from -128 to 127. For
// four elements, the first digits are stored side by side, then the second, then the third.
struct Digits : Grouped {
    static constexpr int DIGITS = 3;
    static constexpr float ZERO = 0;
    static constexpr float LEVELS = 0x7f7f7f;
    struct Row {
        int8_t digits[DIGITS];
    };
    typedef FourInt8::Part Part;
    struct Sum {
        Ints of[DIGITS];
    };

    template <typename T>
    static Unit prepare(const T* x, int64_t width, Row* row, const Levels&) {
        const float largest = rounded_row(x, width, {LEVELS, 0}, [&](int64_t i, Ints steps) {
            for (int digit = DIGITS - 1; digit >= 0; digit--) {
                const Bytes least = low_bytes(steps);
                steps = (steps + 128) >> 8;
                for (int four = 0; four < LANES / 4; four++)
                    std::memcpy((int8_t*)(row + i + 4 * four) + 4 * digit, (const int8_t*)&least + 4 * four, 4);
            }
        });
        for (int64_t i = (width + LANES - 1) / LANES * LANES; i % 8; i++) row[i] = {};
        return {largest / LEVELS, 0, 0};
    }
    static Sum add(Sum sum, Part part, const Row* x) {
        for (int digit = 0; digit < DIGITS; digit++)
            sum.of[digit] = FourInt8::add(sum.of[digit], part, x->digits + 4 * digit);
        return sum;
    }
    static Floats floats(const Sum& sum) {
        return Grouped::floats(sum.of[0] * 256 + sum.of[1]) * 256 + Grouped::floats(sum.of[2]);
    }
    static float sum(const Row* row, int64_t count) {
        Sum found{};
        for (int64_t i = 0; i < count; i += 4) found = add(found, FourInt8::part(Ints{} + ONES), row + i);
        return floats(found)[0];
    }
    static Floats value(Total total, const Unit* unit, const void*, int64_t, int) { return total * unit->size; }
    static constexpr int ONES = int(0x01010101u * (129 - FourInt8::OFFSET));
};

struct DigitsInt4 : Digits {
    typedef Ints Words;
    static constexpr int STEP = 8, BYTES = 4, PARTS = 2, VECTORS = 2;
    static constexpr float ZERO = 0, DEFAULT = 8, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) { return (Part)((i ? words >> 4 : words) & 0x0f0f0f0f); }
};

struct DigitsInt8 : Digits {
    static constexpr bool IN_BITS = true;
    typedef Part Words;
    static constexpr int STEP = 4, BYTES = 4, PARTS = 1, VECTORS = 2;
    static constexpr float ZERO = 128 - FourInt8::OFFSET, DEFAULT = 128, DEFAULT_LEAST = 128;
    static Words load(const char* at) { return FourInt8::part(read<Ints>(at, LANES)); }
    static Part part(Words words, int) { return words; }
};

#ifdef MANY_REGISTERS
// Codes of 5 or 6 bits, multiplied by digits or by rounded rows. Each part reads its words again.
template <typename Row, int BITS>
struct Bits : Row, Planes<BITS> {
    typedef const char* Words;
    static constexpr int STEP = Planes<BITS>::STEP, BYTES = Planes<BITS>::BYTES, PARTS = STEP / 4, VECTORS = 4;
    static constexpr int NARROW = std::is_same_v<Row, Digits> ? 16 : 0;
    static constexpr float DEFAULT = Planes<BITS>::MIDDLE, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return at; }
    static Ints part(Words words, int i) { return Planes<BITS>::codes(words, i); }
};
template <int BITS>
using DigitsBits = Bits<Digits, BITS>;
template <int BITS>
using RoundedBits = Bits<Rounded<FourCodes, Planes<BITS>::MIDDLE>, BITS>;
#endif

// Codes with a table, multiplied by digits; bit-identical to DigitsInt8 with the same numbers.
template <typename Code>
struct DigitsCodes : Digits {
    typedef Ints Words;
    typedef typename Digits::Part Part;
    static constexpr int STEP = 8, BYTES = 4, PARTS = 2, VECTORS = 2;
    static constexpr bool EXPONENTS = Code::EXPONENTS;
    static constexpr float SHARE = Code::SHARE;
    static constexpr float ZERO = 0, DEFAULT = FourInt8::OFFSET, DEFAULT_LEAST = 0;
    static constexpr Table NUMBERS = table<Code>(FourInt8::OFFSET);
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) { return (Part)looked_up((i ? words >> 4 : words) & 0x0f0f0f0f, NUMBERS); }
};
#endif

// e4m3: shifted, the bits are those of a float with another exponent bias. NaN becomes 480.
struct WideFloat8 : Grouped, WideRows {
    typedef Ints Words;
    static constexpr int STEP = 4, BYTES = 4, PARTS = 4, VECTORS = 2;
    static constexpr float ZERO = 0, DEFAULT = 0, DEFAULT_LEAST = 0;
    static Words load(const char* at) { return read<Ints>(at, LANES); }
    static Part part(Words words, int i) {
        return (Floats)(words << (24 - i * 8) >> 4 & int(0x87f00000)) * 0x1p120f;
    }
};

}  // namespace
