// Where the moments of BatchNorm's channels go.
#include "common/moments.cuh"

// To a place in a workspace [rows, C] that a second kernel folds, or, where there is only one row, to the results.
struct GivenMoments {
    Pair* workspace;
    acc_t* mean;
    acc_t* invstd;
    double eps;

    __device__ __forceinline__ void give(long long part, long long channel, Moments found) const {
        if (workspace != nullptr) {
            store_moments(workspace, part, found);
            return;
        }
        const Statistics of = found.statistics(acc_t(eps));
        store(mean, channel, of.mean);
        store(invstd, channel, of.rstd);
    }
};
