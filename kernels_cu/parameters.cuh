// Parameters that may be absent, and the gradients of those per channel.
#include "norm.cuh"

// array[index], or `absent` where there is no array.
template <typename T>
__device__ __forceinline__ acc_t parameter(const T* array, long long index, acc_t absent) {
    return array == nullptr ? absent : acc_t(widen(load(array, index)));
}

// Where dbeta (first) and dgamma (second) of a channel go: a row of the workspace [rows, C] that a second kernel sums,
// or, where there is only one row, straight to the result.
struct ParameterGradients {
    Pair* workspace;
    gamma_t* dgamma;
    gamma_t* dbeta;
    long long C;

    __device__ __forceinline__ bool wanted() const {
        return workspace != nullptr || dgamma != nullptr || dbeta != nullptr;
    }
    __device__ __forceinline__ void give(long long row, long long channel, Pair sums) const {
        if (workspace != nullptr) {
            store(workspace, row * C + channel, sums);
            return;
        }
        if (dbeta != nullptr) {
            store(dbeta, channel, narrow<gamma_t>(sums.first));
        }
        if (dgamma != nullptr) {
            store(dgamma, channel, narrow<gamma_t>(sums.second));
        }
    }
};

// dgamma and dbeta of 32 channels: the sum of their workspace rows 0, stride, 2 * stride, ... Warps take rows in turn,
// lanes neighbouring channels; the warps' sums are added in the order of the warps. `scratch` is shared, Tile::threads
// pairs. The whole block calls; it ends with a barrier.
__device__ __forceinline__ void sum_parameter_rows(const Pair* workspace, long long rows, long long stride,
                                                   long long first_channel, const ParameterGradients& results,
                                                   Pair* scratch) {
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const long long channel = first_channel + lane;
    Pair sums = {};
    if (channel < results.C) {
#pragma unroll 4
        for (long long row = warp; row < rows; row += block_warps) {
            sums = sums + load(workspace, row * stride * results.C + channel);
        }
    }
    scratch[threadIdx.x] = sums;
    __syncthreads();
    if (warp == 0 && channel < results.C) {
        for (int other = 1; other < block_warps; ++other) {
            sums = sums + scratch[other * warp_size + lane];
        }
        results.give(0, channel, sums);
    }
    __syncthreads();
}
