// The moments of BatchNorm's channels: what they are relative to, and where they go.
#include "norm.cuh"

// What a channel's moments are relative to: the median of its first, middle and last element in the whole batch. A
// channel lies `step` elements from the one before it, its middle and last element `middle` and `last` from its first.
struct Shifts {
    const data_t* x;
    long long step, middle, last;

    __device__ __forceinline__ acc_t of(long long channel) const {
        const data_t* const first = x + channel * step;
        return median_shift(widen(load(first, 0)), widen(load(first, middle)), widen(load(first, last)));
    }
};

// Moments in a workspace: two aligned accesses, with a fourth value as padding.
__device__ __forceinline__ Moments load_moments(const Pair* workspace, long long part) {
    const Pair count_and_mean = load(workspace, 2 * part);
    return Moments{count_and_mean.first, count_and_mean.second, load(workspace, 2 * part + 1).first};
}

__device__ __forceinline__ void store_moments(Pair* workspace, long long part, Moments found) {
    store(workspace, 2 * part, Pair{found.count, found.mean});
    store(workspace, 2 * part + 1, Pair{found.m2, acc_t(0)});
}

// Moments relative to a channel's shift: to a place in a workspace [rows, C] that a second kernel folds, or, where
// there is only one row, to the results.
struct GivenMoments {
    Pair* workspace;
    acc_t* mean;
    acc_t* invstd;
    Shifts shifts;
    double eps;

    __device__ __forceinline__ void give(long long part, long long channel, Moments found) const {
        if (workspace != nullptr) {
            store_moments(workspace, part, found);
            return;
        }
        store(mean, channel, found.mean + shifts.of(channel));
        store(invstd, channel, reciprocal_deviation(found.m2 / found.count, acc_t(eps)));
    }
};
