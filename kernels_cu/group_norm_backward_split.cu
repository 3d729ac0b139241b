// GroupNorm backward, strategy `split`: sums first, dx in a second sweep. Any size, any layout: the fallback.
//
//   dy, x, dx (N, C, HxW) or (N, HxW, C); mean, rstd (N, groups); gamma (C) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   workspace [N * chunks, C] pairs: sum dy and sum dy * xhat of one channel over one chunk of one sample
//
//   group_norm_backward_split_sums   reads dy and x, writes the workspace
//   group_norm_backward_split_fold   one thread per (n, c): adds the chunks of a sample, in order, into its first row
//   group_norm_backward_split_input  reads dy, x and the first rows, writes dx; its first blocks write dgamma and dbeta
//
// dy and x are read twice, the second time in reverse so that what the first sweep read last is still in the L2 cache.
// An element of dx is written by the thread that has read the same elements of dy and x: dx may be dy or x.
#include "parameters.cuh"
#include "sweep.cuh"

// Write a chunk's sums to the workspace. A channels-first warp adds its lanes; a channels-last block adds its rows, by
// way of partials[part][column][slot], in the order of the parts.
__device__ __forceinline__ void give_sums(const Sweep<ChannelsFirst>& sweep, Pair (&sums)[1], Pair*, Pair* workspace,
                                          const Chunking& cut, const acc_t (&rstd)[1]) {
    sums[0] = warp_sum(sums[0]);
    if (sweep.live() && threadIdx.x % warp_size == 0) {
        const long long row = sweep.n * cut.chunks + sweep.chunk;
        store(workspace, row * cut.C + sweep.channel, Pair{sums[0].first, sums[0].second * rstd[0]});
    }
}

__device__ __forceinline__ void give_sums(const Sweep<ChannelsLast>& sweep, Pair (&sums)[pack_size], Pair* partials,
                                          Pair* workspace, const Chunking& cut, const acc_t (&rstd)[pack_size]) {
    const int width = sweep.columns * pack_size;
    if (sweep.part < sweep.parts) {
#pragma unroll
        for (int slot = 0; slot < pack_size; ++slot) {
            partials[sweep.part * width + sweep.column * pack_size + slot] =
                Pair{sums[slot].first, sums[slot].second * rstd[slot]};
        }
    }
    __syncthreads();
    const long long base = sweep.block_channel();
    const long long row = sweep.n * cut.chunks + sweep.chunk;
    for (int at = threadIdx.x; at < width; at += Tile::threads) {
        if (base + at < cut.C) {
            Pair total = {};
            for (int part = 0; part < sweep.parts; ++part) {
                total = total + partials[part * width + at];
            }
            store(workspace, row * cut.C + base + at, total);
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
group_norm_backward_split_sums(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                               Pair* workspace, long long N, long long C, long long HxW, long long groups,
                               long long chunk, long long chunks) {
    const Chunking cut = {N, C, HxW, chunk, chunks};
    int offset = 0;
    Pair* partials = shared_array<Pair>(offset, sweep_t::slots == 1 ? 0 : Tile::threads * pack_size);
    for (long long item = blockIdx.x; item < sweep_t::items(cut); item += gridDim.x) {
        const sweep_t sweep(dy, cut, item);
        acc_t mean_of[sweep_t::slots] = {}, rstd_of[sweep_t::slots] = {};
#pragma unroll
        for (int slot = 0; slot < sweep_t::slots; ++slot) {
            if (sweep.has(slot)) {
                const long long at = sweep.n * groups + sweep.channel_of(slot) / (C / groups);
                mean_of[slot] = widen(load(mean, at));
                rstd_of[slot] = widen(load(rstd, at));
            }
        }
        Pair sums[sweep_t::slots] = {};
        const data_t* const from[2] = {dy, x};
        sweep_packs(sweep, from, [&](const Pack<data_t>(&batch)[2][sweep_loads], const Place(&places)[sweep_loads]) {
#pragma unroll
            for (int k = 0; k < sweep_loads; ++k) {
                Pair of_pack[sweep_t::slots] = {};
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    const int slot = sweep_t::slot(i);
                    const bool in = places[k].holds(i);
                    const acc_t gradient = in ? acc_t(widen(batch[0][k].item[i])) : acc_t(0);
                    const acc_t deviation =
                        in && x != nullptr ? acc_t(widen(batch[1][k].item[i])) - mean_of[slot] : acc_t(0);
                    of_pack[slot] = of_pack[slot] + Pair{gradient, gradient * deviation};
                }
#pragma unroll
                for (int slot = 0; slot < sweep_t::slots; ++slot) {
                    sums[slot] = sums[slot] + of_pack[slot];
                }
            }
        });
        give_sums(sweep, sums, partials, workspace, cut, rstd_of);
    }
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
group_norm_backward_split_fold(Pair* workspace, long long N, long long C, long long chunks) {
    const long long stride = static_cast<long long>(gridDim.x) * Tile::threads;
    for (long long at = static_cast<long long>(blockIdx.x) * Tile::threads + threadIdx.x; at < N * C; at += stride) {
        const long long n = at / C, channel = at - n * C;
        const long long first = n * chunks * C + channel;
        Pair total = load(workspace, first);
#pragma unroll 4
        for (long long other = 1; other < chunks; ++other) {
            total = total + load(workspace, first + other * C);
        }
        store(workspace, first, total);
    }
}

// A and B of a group over L, from the sums of its channels; the whole warp calls, every lane has them.
__device__ __forceinline__ Pair group_means(const Pair* totals, const gamma_t* gamma, long long first_channel,
                                            int group_channels, acc_t length) {
    Pair sums = {};
    for (int c = threadIdx.x % warp_size; c < group_channels; c += warp_size) {
        const Pair of_channel = load(totals, first_channel + c);
        const acc_t weight = parameter(gamma, first_channel + c, acc_t(1));
        sums = sums + Pair{weight * of_channel.first, weight * of_channel.second};
    }
    sums = warp_sum(sums);
    return Pair{sums.first / length, sums.second / length};
}

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
group_norm_backward_split_input(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                const gamma_t* gamma, data_t* dx, const Pair* workspace, gamma_t* dgamma,
                                gamma_t* dbeta, long long N, long long C, long long HxW, long long groups,
                                long long chunk, long long chunks, long long parameter_blocks) {
    const Chunking cut = {N, C, HxW, chunk, chunks};
    int offset = 0;
    Pair* means = shared_array<Pair>(offset, Tile::threads * sweep_t::slots);  // of the block's groups, or scratch
    if (blockIdx.x < parameter_blocks) {
        const ParameterGradients results = {nullptr, dgamma, dbeta, C};
        const long long first = static_cast<long long>(blockIdx.x) * warp_size;
        for (long long channel = first; channel < C; channel += parameter_blocks * warp_size) {
            sum_parameter_rows(workspace, N, chunks, channel, results, means);
        }
        return;
    }
    const int group_channels = static_cast<int>(C / groups);
    const acc_t length = acc_t(group_channels) * acc_t(HxW);
    const long long items = sweep_t::items(cut);
    for (long long item = blockIdx.x - parameter_blocks; item < items; item += gridDim.x - parameter_blocks) {
        const sweep_t sweep(dy, cut, items - 1 - item);
        const Pair* totals = workspace + sweep.n * chunks * C;
        // Channels-first a warp needs one group; channels-last a block needs those of all its channels.
        long long first_group = sweep.channel_of(0) / group_channels;
        Pair own = {};
        if (sweep_t::slots == 1) {
            own = group_means(totals, gamma, first_group * group_channels, group_channels, length);
        } else {
            first_group = sweep.block_channel() / group_channels;
            const long long last_group = (sweep.block_end() - 1) / group_channels;
            for (long long group = first_group + threadIdx.x / warp_size; group <= last_group; group += block_warps) {
                const Pair found = group_means(totals, gamma, group * group_channels, group_channels, length);
                if (threadIdx.x % warp_size == 0) {
                    means[group - first_group] = found;
                }
            }
            __syncthreads();
        }
        Coefficients of[sweep_t::slots];
#pragma unroll
        for (int slot = 0; slot < sweep_t::slots; ++slot) {
            of[slot] = Coefficients{};
            if (sweep.has(slot)) {
                const long long channel = sweep.channel_of(slot), group = channel / group_channels;
                const Pair found = sweep_t::slots == 1 ? own : means[group - first_group];
                of[slot] = Coefficients{parameter(gamma, channel, acc_t(1)), widen(load(mean, sweep.n * groups + group)),
                                        widen(load(rstd, sweep.n * groups + group)), found.first, found.second};
            }
        }
        const data_t* const from[2] = {dy, x};
        sweep_packs(sweep, from, [&](const Pack<data_t>(&batch)[2][sweep_loads], const Place(&places)[sweep_loads]) {
#pragma unroll
            for (int k = 0; k < sweep_loads; ++k) {
                Pack<data_t> out;
#pragma unroll
                for (int i = 0; i < pack_size; ++i) {
                    out.item[i] = narrow<data_t>(input_gradient(widen(batch[0][k].item[i]), widen(batch[1][k].item[i]),
                                                                of[sweep_t::slot(i)]));
                }
                store_pack(dx + places[k].row, places[k].first, places[k].length, out);
            }
        });
        __syncthreads();  // means are taken over by the next item
    }
}
