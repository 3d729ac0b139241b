// Destination of the moments of BatchNorm's channels.
#include "common/moments.cuh"

// store_channel() writes to a workspace [rows, C], at index `part`, for a second kernel to fold. If there is only one
// row, `workspace` is null, and it writes the results.
struct MomentsOut {
    Pair* workspace;
    acc_t* mean;
    acc_t* invstd;
    double eps;

    __device__ __forceinline__ void store_channel(long long part, long long channel, Moments found) const {
        if (workspace != nullptr) {
            store_moments(workspace, part, found);
            return;
        }
        const Statistics of = found.statistics(acc_t(eps));
        store(mean, channel, of.mean);
        store(invstd, channel, of.rstd);
    }
};
