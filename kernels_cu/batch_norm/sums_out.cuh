// Destination of the sums of BatchNorm's backward: sum dy (first) and sum dy * (x - mean) (second) of a channel.
#include "common/norm.cuh"

// store_channel() writes to a workspace [rows, C], at index `part`, for a second kernel to sum. If there is only one
// row, `workspace` is null, and it writes the results. Each result has its own storage type, and is null if it is not
// wanted.
struct SumsOut {
    Pair* workspace;
    const stat_t* invstd;
    sum_dy_t* sum_dy;
    sum_dy_xmu_t* sum_dy_xmu;
    dgamma_t* dgamma;
    dbeta_t* dbeta;

    // The channel's invstd if store_channel() needs it. It may be loaded before the sums are known.
    __device__ __forceinline__ acc_t ahead(long long channel) const {
        return workspace == nullptr && dgamma != nullptr ? acc_t(widen(load(invstd, channel))) : acc_t(0);
    }
    __device__ __forceinline__ void store_channel(long long part, long long channel, Pair sums) const {
        store_channel(part, channel, sums, ahead(channel));
    }
    __device__ __forceinline__ void store_channel(long long part, long long channel, Pair sums, acc_t rstd) const {
        if (workspace != nullptr) {
            store(workspace, part, sums);
            return;
        }
        if (sum_dy != nullptr) {
            store(sum_dy, channel, narrow<sum_dy_t>(sums.first));
        }
        if (sum_dy_xmu != nullptr) {
            store(sum_dy_xmu, channel, narrow<sum_dy_xmu_t>(sums.second));
        }
        if (dgamma != nullptr) {
            store(dgamma, channel, narrow<dgamma_t>(sums.second * rstd));
        }
        if (dbeta != nullptr) {
            store(dbeta, channel, narrow<dbeta_t>(sums.first));
        }
    }
};
