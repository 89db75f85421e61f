// The most products per second of this processor: sums that do not wait for each other, of numbers in its nearest cache.

#include "../../kernels/vectors.h"

namespace {

constexpr int SUMS = 12;  // as many as hide how long a product takes, and fit into 16 registers with what they multiply

FourInt8::Row row[4 * SUMS];
int32_t words[SUMS];
Floats numbers[SUMS];
volatile double kept;

template <typename Sum, typename Add>
double run(int64_t rounds, Add add) {
    Sum sums[SUMS] = {};
    for (int64_t i = 0; i < rounds; i++) {
        asm volatile("" : "+m"(row), "+m"(words), "+m"(numbers));  // or products of the same numbers would be made once
#pragma GCC unroll 16
        for (int s = 0; s < SUMS; s++) sums[s] = add(sums[s], s);
    }
    double found = 0;
#pragma GCC unroll 16
    for (int s = 0; s < SUMS; s++) found += sums[s][0];
    return found;
}

}  // namespace

// Makes so many rounds of products in this thread; returns the operations of a round: multiplications and additions.
extern "C" int64_t peak(int64_t kind, int64_t rounds) {
    const Ints given = Ints{} + words[0];
    if (kind == INT8) {
        const auto part = FourInt8::part(given);
        kept = run<Ints>(rounds, [&](Ints sum, int s) { return FourInt8::add(sum, part, row + 4 * s); });
        return SUMS * LANES * 4 * 2;
    }
#ifdef BFLOAT16_PAIRS
    if (kind == 1) {
        kept = run<Floats>(rounds, [&](Floats sum, int s) { return TwoBFloat16::add(sum, given, words[s]); });
        return SUMS * LANES * 2 * 2;
    }
#endif
    kept = run<Floats>(rounds, [&](Floats sum, int s) { return fused((Floats)given, numbers[s], sum); });
    return SUMS * LANES * 2;
}
