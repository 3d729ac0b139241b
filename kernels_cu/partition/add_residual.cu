// The first kernel of a `split` forward with a residual: h = x + residual, rounded once to data_t.
//
//   x, residual, h: (count). An element of h is written by the thread that has read the same element of x and residual,
//   so h may be one of them. Grid: any number of blocks, which take the packs in turn.
//
// The later kernels of the strategy read h. A strategy that holds a row in registers adds the residual there instead.
#include "partition/row_norms.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    add_residual(const data_t* x, const data_t* residual, data_t* h, long long count) {
    const long long stride = static_cast<long long>(gridDim.x) * Tile::threads * pack_size;
    for (long long at = (static_cast<long long>(blockIdx.x) * Tile::threads + threadIdx.x) * pack_size; at < count;
         at += stride) {
        const int length = count - at < pack_size ? static_cast<int>(count - at) : pack_size;
        store_pack(h, at, 0, length, joined(load_pack(x, at, 0, length), load_pack(residual, at, 0, length)));
    }
}
