// Dot products of bytes on x86, for vectors of any size, by what the including file defines:
//   Ints add_shorts(Ints x, Ints y)            products of int16, added in pairs in 32 bits
//   Ints add_bytes(Ints x, Ints y)             products of bytes and int8, added in pairs in 16 bits, which saturate
//   Ints add_fours(Ints sum, Ints x, Ints y)   with INT8_DOTS: sum, and products of bytes and int8 added in fours

#pragma once

namespace {

typedef int16_t Sixteens __attribute__((vector_size(4 * LANES)));
typedef uint16_t Unsigned __attribute__((vector_size(4 * LANES)));

// The same 32 bits of a row in all lanes.
template <typename T>
inline Ints repeated(const T* x) {
    int32_t word;
    __builtin_memcpy(&word, x, sizeof word);
    return Ints{} + word;
}

#ifdef INT8_DOTS
struct FourInt8 {
    typedef int8_t Row;
    typedef Ints Part;
    static constexpr int OFFSET = 128, VECTORS = 1, ORDER[4] = {0, 1, 2, 3};
    static Part part(Ints words) { return words; }
    static Ints add(Ints sum, Part part, const Row* x) { return add_fours(sum, part, repeated(x)); }
};

struct FourNibbles {
    typedef int8_t Row;
    typedef Ints Sum;
    static constexpr int VECTORS = 2;
    static Ints add(Ints sum, Ints numbers, const Row* x) { return FourInt8::add(sum, numbers, x); }
    static Ints exact(Ints sum) { return sum; }
};
#else
// Bytes are extended to 16 bits, and pairs of products are added in 32 bits: in 16 bits, sums of two products of bytes
// would saturate.
struct FourInt8 {
    typedef int16_t Row;
    struct Part {
        Ints even, odd;
    };
    static constexpr int OFFSET = 128, VECTORS = 2, ORDER[4] = {0, 2, 1, 3};
    static Part part(Ints words) { return {words & 0x00ff00ff, (Ints)((Unsigned)words >> 8)}; }
    static Ints add(Ints sum, Part part, const Row* x) {
        return sum + add_shorts(part.even, repeated(x)) + add_shorts(part.odd, repeated(x + 2));
    }
};

// Products of a byte up to 15 and an int8 are added in pairs in 16 bits; eight such sums (32 elements) cannot overflow.
struct FourNibbles {
    typedef int8_t Row;
    typedef Sixteens Sum;
    static constexpr int VECTORS = 2;
    static Sum add(Sum sum, Ints numbers, const Row* x) {
        sum += (Sum)add_bytes(numbers, repeated(x));
        asm volatile("" : "+v"(sum));  // else GCC stores products in memory and adds them later
        return sum;
    }
    static Ints exact(Sum sum) { return add_shorts((Ints)sum, (Ints)(Sum{} + 1)); }
};

// Four products of a byte up to 63 and an int8 can be added in 16 bits.
#define EIGHT_CODES
struct EightCodes {
    typedef int8_t Row;
    typedef Ints Sum;
    struct Part {
        Ints first, second;
    };
    static constexpr int VECTORS = 3;
    static Ints add(Ints sum, Part codes, const Row* x) {
        const Sixteens first = (Sixteens)add_bytes(codes.first, repeated(x));
        const Sixteens second = (Sixteens)add_bytes(codes.second, repeated(x + 4));
        return sum + add_shorts((Ints)(first + second), (Ints)(Sixteens{} + 1));
    }
    static Ints exact(Ints sum) { return sum; }
};
#endif

}  // namespace
