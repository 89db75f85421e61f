// Products with codes in groups that share a scale.

#include "../vectors.h"
#include "few_bits.h"
#include "products.h"

const Products& of_groups(const Matrix& m) {
    if (m.levels) {
        if (m.kind == 4) return PRODUCTS<Int4>;
        if (m.kind == 15) return PRODUCTS<Int2>;
        if (m.kind == 16) return PRODUCTS<Int1>;
#if defined(MANY_REGISTERS) || defined(EIGHT_CODES)
        if (m.kind == 9) return PRODUCTS<RoundedBits<5>>;
        if (m.kind == 10) return PRODUCTS<RoundedBits<6>>;
#endif
        return PRODUCTS<Int8Codes>;
    }
#ifdef MANY_REGISTERS
    if (m.kind == 9) return PRODUCTS<DigitsBits<5>>;
    if (m.kind == 10) return PRODUCTS<DigitsBits<6>>;
#endif
#ifdef INT8_DOTS
    if (m.kind == 4) return PRODUCTS<DigitsInt4>;
    if (m.kind == 15) return PRODUCTS<DigitsInt2>;
    if (m.kind == 16) return PRODUCTS<DigitsInt1>;
    return PRODUCTS<DigitsInt8>;
#else
    if (m.kind == 4) return PRODUCTS<WideInt4>;
    if (m.kind == 15) return PRODUCTS<WideInt2>;
    if (m.kind == 16) return PRODUCTS<WideInt1>;
    if (m.kind == 9) return PRODUCTS<WideBits<5>>;
    if (m.kind == 10) return PRODUCTS<WideBits<6>>;
    return PRODUCTS<WideInt8>;
#endif
}
