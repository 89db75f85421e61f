// Tables of the integers that 4-bit codes index (panels.py); SHARE is their unit. E2M1's are twice its values.

#pragma once

#include "../vectors.h"

namespace {

struct E2M1 {
    static constexpr bool EXPONENTS = true;
    static constexpr float SHARE = 1;
    static constexpr int NUMBERS[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};
struct FP4 : E2M1 {  // scales are not exponents
    static constexpr bool EXPONENTS = false;
};
struct IQ4 {
    static constexpr bool EXPONENTS = false;
    static constexpr float SHARE = 1;
    static constexpr int NUMBERS[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};
struct IQ2 {  // the numbers of IQ2, then those of IQ1
    static constexpr bool EXPONENTS = false;
    static constexpr float SHARE = 1 / 8.0f;
    static constexpr int NUMBERS[] = {8, 25, 43, 1, 7, 9, 0, 0, -8, -25, -43, -1, -7, -9, 0, 0};
};
struct IQ3 {
    static constexpr bool EXPONENTS = false;
    static constexpr float SHARE = 1 / 2.0f;
    static constexpr int NUMBERS[] = {2, 6, 10, 14, 18, 22, 26, 31, -2, -6, -10, -14, -18, -22, -26, -31};
};
struct IQ3S {
    static constexpr bool EXPONENTS = false;
    static constexpr float SHARE = 1;
    static constexpr int NUMBERS[] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
};

// The numbers plus `more`, as bytes.
template <typename Code>
constexpr Table table(int more) {
    Table found{};
    for (int i = 0; i < 16; i++) found.of[i] = int8_t(Code::NUMBERS[i] + more);
    return found;
}

}  // namespace
