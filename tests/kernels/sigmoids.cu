// gate: sm_80
// The sigmoid of every number, as kernels of data_t compute it.
#include "common/types.cuh"

typedef float stat_t;
typedef Silu activation_t;
#include "common/activation.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads) sigmoids(const float* x, float* y) {
    const long long i = blockIdx.x * static_cast<long long>(Tile::threads) + threadIdx.x;
    store(y, i, sigmoid(load(x, i)));
}
