// GroupNorm forward, strategy `split`: statistics first, y in a second sweep. Any size, any layout: the fallback.
//
//   x, y (N, C, HxW) or (N, HxW, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   workspace [N * chunks, C] pairs: mean and sum of squared deviations of one channel over one chunk of one sample
//
//   group_norm_split_moments  reads x (three elements of each group again), writes the workspace
//   group_norm_split_fold     a block per (n, group) merges the group's parts, writes mean and rstd
//   group_norm_split_apply    reads x, mean and rstd, writes y
//
// x is read twice, the second time in reverse so that what the first sweep read last is still in the L2 cache. Moments
// of what a thread holds in registers are taken in two passes and merged by Chan's formula in a fixed order. An element
// of y is written by the thread that has read the same element of x: y may be x.
#include "parameters.cuh"
#include "sweep.cuh"

// What the moments of a group are relative to: the median of its first, middle and last element.
__device__ __forceinline__ acc_t group_shift(const data_t* x, const Chunking& cut, long long n, long long first,
                                             long long group_channels) {
    const acc_t a = widen(load(x, sweep_t::element(cut, n, first, 0)));
    const acc_t b = widen(load(x, sweep_t::element(cut, n, first + group_channels / 2, cut.HxW / 2)));
    const acc_t c = widen(load(x, sweep_t::element(cut, n, first + group_channels - 1, cut.HxW - 1)));
    return median_shift(a, b, c);
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_split_moments(const data_t* x, Pair* workspace, long long N, long long C, long long HxW,
                             long long groups, long long chunk, long long chunks) {
    const Chunking cut = {N, C, HxW, chunk, chunks};
    const long long group_channels = C / groups;
    int offset = 0;
    Moments* partials = shared_array<Moments>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    for (long long item = blockIdx.x; item < sweep_t::items(cut); item += gridDim.x) {
        const sweep_t sweep(x, cut, item);
        acc_t shift[sweep_t::slots] = {};
        long long shifted_group = -1;
        acc_t shift_of_group = acc_t(0);
        each_slot(sweep, group_channels, [&](int slot, long long, long long group) {
            if (group != shifted_group) {
                shift_of_group = group_shift(x, cut, sweep.n, group * group_channels, group_channels);
                shifted_group = group;
            }
            shift[slot] = shift_of_group;
        });
        acc_t count = acc_t(0);           // the same for all the thread's channels
        Pair found[sweep_t::slots] = {};  // mean and m2
        sweep_moments(sweep, x, shift, count, found);
        gather_moments(sweep, partials, count, found, [&](long long channel, Moments whole) {
            store(workspace, cut.part(sweep.n, sweep.chunk, channel), Pair{whole.mean, whole.m2});
        });
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_split_fold(const data_t* x, const Pair* workspace, acc_t* mean, acc_t* rstd, long long N, long long C,
                          long long HxW, long long groups, long long chunk, long long chunks, double eps) {
    const Chunking cut = {N, C, HxW, chunk, chunks};
    const long long group_channels = C / groups;
    int offset = 0;
    Moments* scratch = shared_array<Moments>(offset, block_warps);
    for (long long item = blockIdx.x; item < N * groups; item += gridDim.x) {
        const long long n = item / groups, first_channel = (item - n * groups) * group_channels;
        const Pair* const parts = workspace + n * chunks * C + first_channel;
        Moments found = {};
        each_part(chunks, group_channels, [&](long long row, long long channel) {
            const Pair part = load(parts, row * C + channel);
            const long long left = HxW - row * chunk;
            found = merge(found, Moments{acc_t(left < chunk ? left : chunk), part.first, part.second});
        });
        found = block_fold(found, scratch, [](Moments value) { return lanes_merge(value, warp_size); });
        if (threadIdx.x == 0) {
            store(mean, item, found.mean + group_shift(x, cut, n, first_channel, group_channels));
            store(rstd, item, reciprocal_deviation(found.m2 / found.count, acc_t(eps)));
        }
        __syncthreads();  // scratch is taken over by the next group
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_split_apply(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, const acc_t* mean,
                           const acc_t* rstd, long long N, long long C, long long HxW, long long groups,
                           long long chunk, long long chunks) {
    const Chunking cut = {N, C, HxW, chunk, chunks};
    const long long items = sweep_t::items(cut);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const sweep_t sweep(x, cut, items - 1 - item);
        Affine of[sweep_t::slots] = {};
        each_slot(sweep, C / groups, [&](int slot, long long channel, long long group) {
            const long long at = sweep.n * groups + group;
            of[slot] = Affine{load(mean, at), load(rstd, at) * parameter(gamma, channel, acc_t(1)),
                              parameter(beta, channel, acc_t(0))};
        });
        const data_t* const from[1] = {x};
        sweep_write(sweep, from, y, [&](int slot, const acc_t(&v)[1]) { return normalised(v[0], of[slot]); });
    }
}
