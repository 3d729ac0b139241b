// BatchNorm backward sums, strategy `block`: one block per slab of neighbouring channels and range of samples.
//
//   dy, x: (N, C, HxW). mean, invstd: (C). x is null if only dbeta is wanted.
//   Workspace: [ceil(N / samples), C] pairs (sum dy, sum dy * (x - mean)) over a range of samples.
//   sum_dy, sum_dy_xmu, dgamma, dbeta: (C), null if not wanted.
//   Grid: ceil(C / channels) slabs for each range, which the blocks take in turn. The last slab may have fewer
//   channels, the last range fewer samples.
//   Shared memory: per channel the sums so far, the latest sums, the mean and the totals; partial sums; the slabs of dy
//   and x of one sample.
//
// A slab is one contiguous run, so planes of 49 elements are also read 16 bytes at a time. dy and x are read once. The
// sums of planes are added in the order of the samples. If there are several ranges, batch_norm_backward_reduce_fold
// folds the workspace. With one range the kernel writes the results. The strategy wins for short planes, for which a
// sweep would leave most lanes of a warp without work.
#include "batch_norm/sums_out.cuh"
#include "batch_norm/sample_slabs.cuh"

struct ChannelGradients {
    const Pack<data_t>* dy;
    const Pack<data_t>* x;
    const acc_t* mean;  // per channel of the slab

    template <typename Use>
    __device__ __forceinline__ Pair pack(int j, int channel, Use use) const {
        const Pack<data_t> held_dy = dy[j], held_x = x == nullptr ? Pack<data_t>{} : x[j];  // one 16-byte access each
        return gradient_sums(held_dy, held_x, mean[channel], use);
    }
};

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_backward_reduce_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* invstd,
                                     Pair* workspace, sum_dy_t* sum_dy, sum_dy_xmu_t* sum_dy_xmu, dgamma_t* dgamma,
                                     dbeta_t* dbeta, long long N, long long C, long long HxW, long long channels,
                                     long long samples) {
    const SumsOut results = {workspace, invstd, sum_dy, sum_dy_xmu, dgamma, dbeta};
    const long long items = SlabRange::items(N, C, channels, samples);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const SlabRange at(N, C, channels, samples, item);
        const long long first = at.first, begin = at.begin, end = at.end;
        const int own = at.own;
        int offset = 0;
        Pair* so_far = shared_array<Pair>(offset, own);
        Pair* latest = shared_array<Pair>(offset, own);
        acc_t* mean_of = shared_array<acc_t>(offset, own);
        Pair* totals = shared_array<Pair>(offset, own);
        Pair* partials = shared_array<Pair>(offset, Tile::partial_sums);

        for (int channel = threadIdx.x; channel < own; channel += Tile::threads) {
            so_far[channel] = latest[channel] = Pair{};
            mean_of[channel] = widen(load(mean, first + channel));
        }
        for (long long n = begin; n < end; ++n) {
            const slab_t slab(dy, n, C, first, own, static_cast<int>(HxW));
            int behind = offset;
            Pack<data_t>* staged_dy = shared_array<Pack<data_t>>(behind, slab.packs());
            Pack<data_t>* staged_x = x == nullptr ? nullptr : shared_array<Pack<data_t>>(behind, slab.packs());
            const data_t* const from[2] = {dy, x};
            Pack<data_t>* const to[2] = {staged_dy, staged_x};
            stage(slab, from, to);
            channel_totals(slab, partials, totals, ChannelGradients{staged_dy, staged_x, mean_of});
            const bool join = (n - begin + 1) % chain == 0 || n + 1 == end;
            for (int channel = threadIdx.x; channel < own; channel += Tile::threads) {
                latest[channel] = latest[channel] + totals[channel];
                if (join) {
                    so_far[channel] = so_far[channel] + latest[channel];
                    latest[channel] = Pair{};
                }
            }
        }
        for (int channel = threadIdx.x; channel < own; channel += Tile::threads) {
            results.store_channel(at.range * C + first + channel, first + channel, so_far[channel]);
        }
        __syncthreads();  // the next item reuses the shared memory
    }
}
