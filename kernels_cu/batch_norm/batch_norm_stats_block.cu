// BatchNorm statistics, strategy `block`: one block per slab of neighbouring channels and range of samples.
//
//   x: (N, C, HxW). mean, invstd: (C).
//   Workspace: [ceil(N / samples), C] moments (moments.cuh) of a channel over a range of samples.
//   Grid: ceil(C / channels) slabs for each range, which the blocks take in turn. The last slab may have fewer
//   channels, the last range fewer samples.
//   Shared memory: the totals of each channel; moments for each thread and element of its pack.
//
// A slab is one contiguous run, so planes of 49 elements are also read 16 bytes at a time. A thread sweeps the same pack
// of several samples (sample_moments.cuh), and x is read once, into registers. The moments of a channel's elements are
// merged once per block. If there are several ranges, batch_norm_stats_fold folds the workspace. With one range the
// kernel writes the results. The strategy wins for short planes, for which a sweep would leave most lanes of a warp
// without work, and would merge the moments of its lanes for each plane.
#include "batch_norm/moments_out.cuh"
#include "batch_norm/sample_moments.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_stats_block(const data_t* x, Pair* workspace, acc_t* mean, acc_t* invstd, long long N, long long C,
                           long long HxW, long long channels, long long samples, double eps) {
    const MomentsOut results = {workspace, mean, invstd, eps};
    const int plane = static_cast<int>(HxW);
    const long long items = SlabRange::items(N, C, channels, samples);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const SlabRange at(N, C, channels, samples, item);
        int offset = 0;
        Moments* totals = shared_array<Moments>(offset, at.own);
        Moments* partials = shared_array<Moments>(offset, SlotMoments::size);
        for (int channel = threadIdx.x; channel < at.own; channel += Tile::threads) {
            totals[channel] = Moments{};  // before the first barrier of merge_into_totals
        }
        SampleColumn path(x, at, C, static_cast<int>(channels), plane);
        for (int here = 0; here < path.packs(); here += path.columns) {
            merge_into_totals(path, here, plane, at.own, partials, column_moments(path, x), totals);
            path.column += path.columns;
        }
#pragma unroll 1  // rarely a second iteration; unrolled float64 divisions and roots would not fit in registers
        for (int channel = threadIdx.x; channel < at.own; channel += Tile::threads) {
            results.store_channel(at.range * C + at.first + channel, at.first + channel, totals[channel]);
        }
        __syncthreads();  // the next item reuses the shared memory
    }
}
