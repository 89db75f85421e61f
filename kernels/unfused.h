// Included first by kernels whose numbers are those of Python: no product is fused with a sum.

#pragma once

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
