// Products with codes in groups that index a table.

#include "../vectors.h"
#include "products.h"

namespace {

template <template <typename> typename Element>
const Products& by_table(int64_t kind) {
    switch (kind) {
        case 8: return PRODUCTS<Element<IQ4>>;
        case 11: return PRODUCTS<Element<IQ2>>;
        case 12: return PRODUCTS<Element<IQ3>>;
        case 13: return PRODUCTS<Element<IQ3S>>;
        case 14: return PRODUCTS<Element<FP4>>;
    }
    return PRODUCTS<Element<E2M1>>;  // 7
}

}  // namespace

const Products& of_tables(const Matrix& m) {
    if (m.levels) return by_table<Codes>(m.kind);
#ifdef INT8_DOTS
    return by_table<DigitsCodes>(m.kind);
#else
    return by_table<WideCodes>(m.kind);
#endif
}
