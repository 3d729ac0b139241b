// BatchNorm statistics, strategy `block`: one block per slab of neighbouring channels and range of samples.
//
//   x: (N, C, HxW). mean, invstd: (C).
//   Workspace: [ceil(N / samples), C] moments (moments.cuh) of a channel over a range of samples.
//   Grid: ceil(C / channels) slabs for each range, which the blocks take in turn. The last slab may have fewer
//   channels, the last range fewer samples.
//   Shared memory: per channel the moments so far, the latest moments, the centre and the totals; partial sums; the
//   slab of one sample.
//
// A slab is one contiguous run, so planes of 49 elements are also read 16 bytes at a time. x is read once. The moments
// of a plane are computed in two passes over shared memory and merged by Chan's formula in the order of the samples. If
// there are several ranges, batch_norm_stats_fold folds the workspace. With one range the kernel writes the results.
// The strategy wins for short planes, for which a sweep would leave most lanes of a warp without work.
#include "batch_norm/moments_out.cuh"
#include "batch_norm/sample_slabs.cuh"

// Terms of the sums of d = x - centre and of d^2.
struct ChannelDeviations {
    const Pack<data_t>* x;
    const acc_t* centre;  // per channel of the slab

    template <typename Use>
    __device__ __forceinline__ Pair pack(int j, int channel, Use use) const {
        const Pack<data_t> held = x[j];  // one 16-byte access
        return deviations(held, centre[channel], use);
    }
};

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    batch_norm_stats_block(const data_t* x, Pair* workspace, acc_t* mean, acc_t* invstd, long long N, long long C,
                           long long HxW, long long channels, long long samples, double eps) {
    const MomentsOut results = {workspace, mean, invstd, eps};
    const acc_t length = acc_t(HxW), inverse = acc_t(1) / length;
    const long long items = SlabRange::items(N, C, channels, samples);
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const SlabRange at(N, C, channels, samples, item);
        const long long first = at.first, begin = at.begin, end = at.end;
        const int own = at.own;
        int offset = 0;
        Moments* so_far = shared_array<Moments>(offset, own);
        Moments* latest = shared_array<Moments>(offset, own);
        acc_t* centre = shared_array<acc_t>(offset, own);
        Pair* totals = shared_array<Pair>(offset, own);
        Pair* partials = shared_array<Pair>(offset, Tile::partial_sums);

        // so_far and latest of a channel are accessed by one thread only, so no barrier is needed between its steps.
        for (int channel = threadIdx.x; channel < own; channel += Tile::threads) {
            so_far[channel] = latest[channel] = Moments{};
        }
        for (long long n = begin; n < end; ++n) {
            const slab_t slab(x, n, C, first, own, static_cast<int>(HxW));
            int behind = offset;
            Pack<data_t>* staged = shared_array<Pack<data_t>>(behind, slab.packs());
            const data_t* const from[1] = {x};
            Pack<data_t>* const to[1] = {staged};
            stage(slab, from, to);
            __syncthreads();
            for (int channel = threadIdx.x; channel < own; channel += Tile::threads) {
                centre[channel] = usable_shift(slab.first_of(staged, channel));
            }
            const int nth = static_cast<int>((n - begin) % chain);
            const bool join = nth + 1 == chain || n + 1 == end;
#pragma unroll 1
            for (int pass = 0; pass < 2; ++pass) {  // pass 0 finds the centre, pass 1 the moments about it
                channel_totals(slab, partials, totals, ChannelDeviations{staged, centre});
                for (int channel = threadIdx.x; channel < own; channel += Tile::threads) {
                    const Pair sums = totals[channel];
                    if (pass == 0) {
                        centre[channel] = second_centre(centre[channel], sums, inverse, 1);
                        continue;
                    }
                    const Moments found = moments_about(length, inverse, centre[channel], sums);
                    latest[channel] = merge(latest[channel], found);
                    if (join) {
                        so_far[channel] = merge(so_far[channel], latest[channel]);
                        latest[channel] = Moments{};
                    }
                }
            }
        }
#pragma unroll 1  // rarely a second iteration; unrolled float64 divisions and roots would not fit in registers
        for (int channel = threadIdx.x; channel < own; channel += Tile::threads) {
            results.store_channel(at.range * C + first + channel, first + channel, so_far[channel]);
        }
        __syncthreads();  // the next item reuses the shared memory
    }
}
