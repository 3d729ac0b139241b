// Copies through load and store. Only element `raw` is read by a raw dereference.
#include "common/types.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads) bypass(const data_t* x, data_t* y, long long raw) {
    const int at = threadIdx.x;
    if (at == raw) {
        store(y, at, x[at]);
        return;
    }
    store(y, at, load(x, at));
}
