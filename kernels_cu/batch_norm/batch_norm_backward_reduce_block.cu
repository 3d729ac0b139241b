// BatchNorm backward sums, strategy `block`: one block per slab of neighbouring channels and range of samples.
//
//   dy, x: (N, C, HxW). mean, invstd: (C). x is null if only dbeta is wanted.
//   Workspace: [ceil(N / samples), C] pairs (sum dy, sum dy * (x - mean)) over a range of samples.
//   sum_dy, sum_dy_xmu, dgamma, dbeta: (C), null if not wanted.
//   Grid: ceil(C / channels) slabs for each range, which the blocks take in turn. The last slab may have fewer
//   channels, the last range fewer samples.
//   Shared memory: the totals of each channel; one pair per thread and element of its pack.
//
// A slab is one contiguous run, so planes of 49 elements are also read 16 bytes at a time. A thread sweeps the same pack
// of several samples (sample_columns.cuh), and dy and x are read once, into registers. If there are several ranges,
// batch_norm_backward_reduce_fold folds the workspace. With one range the kernel writes the results. The strategy wins
// for short planes, for which a sweep would leave most lanes of a warp without work.
#include "batch_norm/sample_columns.cuh"
#include "batch_norm/sums_out.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_backward_reduce_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* invstd,
                                     Pair* workspace, sum_dy_t* sum_dy, sum_dy_xmu_t* sum_dy_xmu, dgamma_t* dgamma,
                                     dbeta_t* dbeta, long long N, long long C, long long HxW, long long channels,
                                     long long samples) {
    const SumsOut results = {workspace, invstd, sum_dy, sum_dy_xmu, dgamma, dbeta};
    const int plane = static_cast<int>(HxW);
    const long long items = SlabRange::items(N, C, channels, samples);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const SlabRange at(N, C, channels, samples, item);
        int offset = 0;
        Pair* totals = shared_array<Pair>(offset, at.own);
        Pair* partials = shared_array<Pair>(offset, Tile::threads * pack_size);
        acc_t rstd = acc_t(0);  // of the first channel that this thread stores
        for (int channel = threadIdx.x; channel < at.own; channel += Tile::threads) {
            totals[channel] = Pair{};  // before the first barrier of add_to_totals
            rstd = channel < Tile::threads ? results.ahead(at.first + channel) : rstd;
        }
        SampleColumn path(dy, at, C, static_cast<int>(channels), plane);
        for (int here = 0; here < path.packs(); here += path.columns) {
            acc_t mean_of[pack_size] = {};
            each_channel(path, plane,
                         [&](int slot, int channel) { mean_of[slot] = widen(load(mean, at.first + channel)); });
            Pair sums[pack_size] = {};
            sweep_gradient_sums(path, dy, x, mean_of, sums);
            add_to_totals(path, here, plane, at.own, partials, sums, totals);
            path.column += path.columns;
        }
        for (int channel = threadIdx.x; channel < at.own; channel += Tile::threads) {
            const acc_t ahead = channel < Tile::threads ? rstd : results.ahead(at.first + channel);
            results.store_channel(at.range * C + at.first + channel, at.first + channel, totals[channel], ahead);
        }
        __syncthreads();  // the next item reuses the shared memory
    }
}
