// GroupNorm forward, strategy `block`: a block per slab of whole groups of one sample, staged in shared memory.
//
//   x, y (N, C, HxW) or (N, HxW, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   grid: N * groups / slab_groups slabs, dealt out block by block; a block writes its slab of y, mean and rstd
//   shared memory: the slab of x; per channel its totals, partial sums and affine form, whose mean is at first a centre
//
// Every byte of x is read once, and before the block writes y, so y may be x. Wins from a few thousand elements a group
// up to what shared memory holds.
#include "parameters.cuh"
#include "slab.cuh"

// The sums of d = x - centre and of d^2; centre is the group's, found through the channel.
struct Deviations {
    const Pack<data_t>* x;
    const Affine* of;  // per channel of the slab; the centre is its mean so far

    template <typename Use>
    __device__ __forceinline__ Pair pack(int j, int channel, Use use) const {
        return deviations(x[j], of[channel].mean, use);
    }
    __device__ __forceinline__ Pair element(int j, int i, int channel) const {
        const acc_t d = acc_t(widen(x[j].item[i])) - of[channel].mean;
        return Pair{d, d * d};
    }
};

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_block(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                     long long N, long long C, long long HxW, long long groups, long long slab_groups, double eps) {
    const int group_channels = static_cast<int>(C / groups);
    const int channels = static_cast<int>(slab_groups) * group_channels;
    const acc_t length = acc_t(group_channels) * acc_t(HxW);
    const long long slabs = groups / slab_groups;
    for (long long item = blockIdx.x; item < N * slabs; item += gridDim.x) {
        const long long n = item / slabs;
        const long long first_group = (item - n * slabs) * slab_groups;
        const slab_t slab(x, n, C, first_group * group_channels, channels, static_cast<int>(HxW));
        int offset = 0;
        Pack<data_t>* staged = shared_array<Pack<data_t>>(offset, slab.packs());
        Pair* totals = shared_array<Pair>(offset, channels);
        Pair* partials = shared_partials(slab, totals, offset);
        Affine* affine = shared_array<Affine>(offset, channels);

        for (int channel = threadIdx.x; channel < channels; channel += Tile::threads) {
            const int group_start = channel / group_channels * group_channels;
            affine[channel].mean = usable_shift(widen(load(x, slab.first_element(group_start))));
        }
        const data_t* const from[1] = {x};
        Pack<data_t>* const to[1] = {staged};
        stage(slab, from, to);
        __syncthreads();

        const int lane = threadIdx.x % warp_size;
        channel_totals(slab, partials, totals, Deviations{staged, affine});
        group_sums(totals, static_cast<int>(slab_groups), group_channels, [&](int group, Pair sums) {
            for (int c = group * group_channels + lane; c < (group + 1) * group_channels; c += warp_size) {
                affine[c].mean += sums.first / length;
            }
        });
        __syncthreads();
        channel_totals(slab, partials, totals, Deviations{staged, affine});
        group_sums(totals, static_cast<int>(slab_groups), group_channels, [&](int group, Pair sums) {
            const Statistics found =
                corrected_statistics(affine[group * group_channels].mean, sums, length, acc_t(eps));
            __syncwarp();  // every lane has read the mean that the first now replaces
            for (int c = group * group_channels + lane; c < (group + 1) * group_channels; c += warp_size) {
                const long long channel = first_group * group_channels + c;
                affine[c] = Affine{found.mean, found.rstd * parameter(gamma, channel, acc_t(1)),
                                   parameter(beta, channel, acc_t(0))};
            }
            if (lane == 0) {
                store(mean, n * groups + first_group + group, found.mean);
                store(rstd, n * groups + first_group + group, found.rstd);
            }
        });
        __syncthreads();

        for (int j = threadIdx.x; j < slab.packs(); j += Tile::threads) {
            const Place where = slab.place(j);
            const Pack<data_t> held = staged[j];
            Pack<data_t> out = {};
            slab.each(
                where, [&](int channel) { return affine[channel]; },
                [&](int i, const Affine& k) { out.item[i] = narrow<data_t>(normalised(widen(held.item[i]), k)); });
            store_pack(y + where.row, where.first, where.length, out);
        }
        __syncthreads();  // the next slab takes over the shared memory
    }
}
