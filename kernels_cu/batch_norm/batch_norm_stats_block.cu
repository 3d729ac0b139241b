// BatchNorm statistics, strategy `block`: a block per slab of neighbouring channels and a range of samples.
//
//   x (N, C, HxW); mean, invstd (C)
//   workspace [ceil(N / samples), C]: the moments of a channel over a range of samples (moments.cuh)
//   grid: ceil(C / channels) slabs for each range; the last slab may have fewer channels, the last range fewer samples
//   shared memory: per channel its moments so far and the latest, its centre, its totals and partial sums; a sample's slab
//
// A slab is one contiguous run, so planes of 49 elements are read 16 bytes at a time too. x is read once. A plane's
// moments are taken in two passes over shared memory and merged by Chan's formula in the order of the samples. Where
// there are several ranges, batch_norm_stats_fold follows; with one, its moments are the results. Wins where planes are
// short: a sweep would leave most lanes of a warp without work.
#include "batch_norm/moments_out.cuh"
#include "batch_norm/sample_slabs.cuh"

// The sums of d = x - centre and of d^2.
struct ChannelDeviations {
    const Pack<data_t>* x;
    const acc_t* centre;  // per channel of the slab

    template <typename Use>
    __device__ __forceinline__ Pair pack(int j, int channel, Use use) const {
        const Pack<data_t> held = x[j];  // in one access
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

        // What is kept per channel belongs to one thread, which needs no barrier between its own steps.
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
            for (int pass = 0; pass < 2; ++pass) {  // the first finds the centre, the second what it missed
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
#pragma unroll 1  // it rarely runs twice, and float64 divisions and roots side by side would not fit in registers
        for (int channel = threadIdx.x; channel < own; channel += Tile::threads) {
            results.store_channel(at.range * C + first + channel, first + channel, so_far[channel]);
        }
        __syncthreads();  // the next item takes over the shared memory
    }
}
