// GroupNorm backward, the last kernel of every strategy that left sums in a workspace: dgamma and dbeta.
//
//   workspace [rows, C] pairs (dbeta, dgamma) of parts of the batch; dgamma, dbeta (C), null where not wanted
//   grid: 32 channels each; shared memory: a pair a thread
//
// Warps take rows in turn, lanes neighbouring channels; the warps' sums are added in the order of the warps.
#include "parameters.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads)
    group_norm_backward_parameters(const Pair* workspace, gamma_t* dgamma, gamma_t* dbeta, long long rows,
                                   long long C) {
    int offset = 0;
    Pair* scratch = shared_array<Pair>(offset, Tile::threads);
    const ParameterGradients results = {nullptr, dgamma, dbeta, C};
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    for (long long first = static_cast<long long>(blockIdx.x) * warp_size; first < C;
         first += static_cast<long long>(gridDim.x) * warp_size) {
        const long long channel = first + lane;
        Pair sums = {};
        if (channel < C) {
#pragma unroll 4
            for (long long row = warp; row < rows; row += block_warps) {
                sums = sums + load(workspace, row * C + channel);
            }
        }
        scratch[threadIdx.x] = sums;
        __syncthreads();
        if (warp == 0 && channel < C) {
            for (int other = 1; other < block_warps; ++other) {
                sums = sums + scratch[other * warp_size + lane];
            }
            results.give(0, channel, sums);
        }
        __syncthreads();  // scratch is taken over by the next channels
    }
}
