// GroupNorm backward, second kernel of `warp` and `block`: dgamma and dbeta from the workspace.
//
//   workspace [rows, C] pairs (dbeta, dgamma) of parts of the batch; dgamma, dbeta (C), null where not wanted
//   grid: 32 channels each; shared memory: a pair a thread
#include "parameters.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
group_norm_backward_parameters(const Pair* workspace, gamma_t* dgamma, gamma_t* dbeta, long long rows, long long C) {
    int offset = 0;
    Pair* scratch = shared_array<Pair>(offset, Tile::threads);
    const ParameterGradients results = {nullptr, dgamma, dbeta, C};
    for (long long first = static_cast<long long>(blockIdx.x) * warp_size; first < C;
         first += static_cast<long long>(gridDim.x) * warp_size) {
        sum_parameter_rows(workspace, rows, 1, first, results, scratch);
    }
}
