// How the blocks of BatchNorm's `block` kernels divide a channels-first tensor: into slabs of neighbouring channels and
// ranges of samples. The last slab may have fewer channels, the last range fewer samples.
#include "common/types.cuh"

struct SlabRange {
    long long range;       // row in a workspace [ranges, C]
    long long first;       // first channel
    long long begin, end;  // samples [begin, end)
    int own;               // channels of the slab

    static __device__ __forceinline__ long long items(long long N, long long C, long long channels, long long samples) {
        return (C + channels - 1) / channels * ((N + samples - 1) / samples);
    }
    __device__ __forceinline__ SlabRange(long long N, long long C, long long channels, long long samples,
                                         long long item) {
        const long long slabs = (C + channels - 1) / channels;
        range = item / slabs;
        first = (item - range * slabs) * channels;
        begin = range * samples;
        end = begin + samples < N ? begin + samples : N;
        own = static_cast<int>(C - first < channels ? C - first : channels);
    }
};
