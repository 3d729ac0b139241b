// GroupNorm backward, strategy `block`: a block per slab of whole groups of one sample, staged in shared memory.
//
//   dy, x, dx (N, C, HxW) or (N, HxW, C); mean, rstd (N, groups); gamma (C) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   sums: workspace row n of [N, C] pairs (dbeta, dgamma), or, for N = 1, dgamma and dbeta themselves
//   grid: N * groups / slab_groups slabs, dealt out block by block; a block writes its slab of dx and its row of sums
//   shared memory: the slabs of dy and x; per channel its totals, partial sums, gamma and group; per group its
//   statistics and sums
//
// Every byte of dy and x is read once, and before the block writes dx, so dx may be dy or x. Wins from a few thousand
// elements a group up to what shared memory holds.
#include "parameters.cuh"
#include "slab.cuh"

// What the block knows of a channel and of a group of its slab: one access to shared memory each.
struct alignas(2 * sizeof(acc_t)) SlabChannel {
    acc_t gamma;
    int group;
};
struct alignas(16) SlabGroup {
    acc_t mean;
    acc_t rstd;
    acc_t a;
    acc_t b;
};

struct GradientTerms {
    const Pack<data_t>* dy;
    const Pack<data_t>* x;
    const SlabChannel* channels;
    const SlabGroup* groups;

    __device__ __forceinline__ acc_t mean(int channel) const { return groups[channels[channel].group].mean; }
    template <typename Use>
    __device__ __forceinline__ Pair pack(int j, int channel, Use use) const {
        return gradient_sums(dy[j], x == nullptr ? Pack<data_t>{} : x[j], mean(channel), use);
    }
    __device__ __forceinline__ Pair element(int j, int i, int channel) const {
        const acc_t gradient = widen(dy[j].item[i]);
        const acc_t deviation = x == nullptr ? acc_t(0) : acc_t(widen(x[j].item[i])) - mean(channel);
        return Pair{gradient, gradient * deviation};
    }
};

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_backward_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                              const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                              long long N, long long C, long long HxW, long long groups, long long slab_groups) {
    const int group_channels = static_cast<int>(C / groups);
    const int channels = static_cast<int>(slab_groups) * group_channels;
    const acc_t length = acc_t(group_channels) * acc_t(HxW);
    const ParameterGradients parameters = {workspace, dgamma, dbeta, C};
    const long long slabs = groups / slab_groups;
    for (long long item = blockIdx.x; item < N * slabs; item += gridDim.x) {
        const long long n = item / slabs;
        const long long first_group = (item - n * slabs) * slab_groups;
        const long long first_channel = first_group * group_channels;
        const slab_t slab(dy, n, C, first_channel, channels, static_cast<int>(HxW));
        int offset = 0;
        Pack<data_t>* staged_dy = shared_array<Pack<data_t>>(offset, slab.packs());
        Pack<data_t>* staged_x = x == nullptr ? nullptr : shared_array<Pack<data_t>>(offset, slab.packs());
        Pair* totals = shared_array<Pair>(offset, channels);
        Pair* partials = shared_partials(slab, totals, offset);
        SlabChannel* of_channel = shared_array<SlabChannel>(offset, channels);
        SlabGroup* of_group = shared_array<SlabGroup>(offset, static_cast<int>(slab_groups));

        for (int channel = threadIdx.x; channel < channels; channel += Tile::threads) {
            of_channel[channel] =
                SlabChannel{parameter(gamma, first_channel + channel, acc_t(1)), channel / group_channels};
        }
        for (int group = threadIdx.x; group < slab_groups; group += Tile::threads) {
            const long long at = n * groups + first_group + group;
            of_group[group] = SlabGroup{widen(load(mean, at)), widen(load(rstd, at)), acc_t(0), acc_t(0)};
        }
        const data_t* const from[2] = {dy, x};
        Pack<data_t>* const to[2] = {staged_dy, staged_x};
        stage(slab, from, to);
        __syncthreads();

        channel_totals(slab, partials, totals, GradientTerms{staged_dy, staged_x, of_channel, of_group});
        for (int channel = threadIdx.x; channel < channels; channel += Tile::threads) {
            const SlabChannel k = of_channel[channel];
            const Pair sums = {totals[channel].first, totals[channel].second * of_group[k.group].rstd};
            if (parameters.wanted()) {
                parameters.give(n, first_channel + channel, sums);
            }
            totals[channel] = Pair{k.gamma * sums.first, k.gamma * sums.second};
        }
        __syncthreads();
        if (dx == nullptr) {
            continue;
        }
        group_sums(totals, static_cast<int>(slab_groups), group_channels, [&](int group, Pair sums) {
            if (threadIdx.x % warp_size == 0) {
                of_group[group].a = sums.first / length;
                of_group[group].b = sums.second / length;
            }
        });
        __syncthreads();

        for (int j = threadIdx.x; j < slab.packs(); j += Tile::threads) {
            const Place where = slab.place(j);
            const Pack<data_t> held_dy = staged_dy[j], held_x = staged_x[j];
            Pack<data_t> out = {};
            const auto coefficients = [&](int channel) {
                const SlabChannel c = of_channel[channel];
                const SlabGroup g = of_group[c.group];
                return Coefficients{c.gamma, g.mean, g.rstd, g.a, g.b};
            };
            slab.each(where, coefficients, [&](int i, const Coefficients& k) {
                out.item[i] = narrow<data_t>(input_gradient(widen(held_dy.item[i]), widen(held_x.item[i]), k));
            });
            store_pack(dx + where.row, where.first, where.length, out);
        }
        __syncthreads();  // the next slab takes over the shared memory
    }
}
