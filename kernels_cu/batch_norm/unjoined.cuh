// The index of a channel's parameters.
#include "common/parameters.cuh"

// The same index, of which the compiler does not know that it is next to others. It would join the loads of neighbouring
// 16-bit parameters, and wait for each joined load in order to split it into elements.
__device__ __forceinline__ long long unjoined(long long channel) {
    int zero = 0;
    make_opaque(zero);
    return channel + zero;
}
