// BatchNorm backward sums, strategy `cluster`: a cluster of blocks per channel, channels-first.
//
//   dy, x: (N, C, HxW). mean, invstd: (C). x is null if only dbeta is wanted.
//   sum_dy, sum_dy_xmu, dgamma, dbeta: (C), null if not wanted.
//   Grid: one cluster per channel; the clusters take the channels in turn.
//   Shared memory: of a cluster's first block, the pairs (sum dy, sum dy * (x - mean)) of each warp of the cluster.
//
// The threads of the cluster divide the packs of the channel's planes (channel_run.cuh), and read dy and x once. The
// first block adds up the sums of the warps and writes the results, in a fixed order: one launch, and no workspace. It
// is for the same tensors as batch_norm_stats_cluster.
#include "batch_norm/channel_run.cuh"
#include "batch_norm/sums_out.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(768))
    batch_norm_backward_reduce_cluster(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* invstd,
                                       sum_dy_t* sum_dy, sum_dy_xmu_t* sum_dy_xmu, dgamma_t* dgamma, dbeta_t* dbeta,
                                       long long N, long long C, long long HxW) {
    const SumsOut results = {nullptr, invstd, sum_dy, sum_dy_xmu, dgamma, dbeta};
    int offset = 0;
    const WarpResults<Pair> warps = {shared_array<Pair>(offset, WarpResults<Pair>::count)};
    for (long long channel = blockIdx.x / Tile::cluster; channel < C; channel += gridDim.x / Tile::cluster) {
        warps.begin();
        const ChannelRun run(dy, N, C, HxW, channel);
        const acc_t mean_of[1] = {widen(load(mean, channel))};
        const acc_t rstd = results.ahead(channel);
        Pair sums[1] = {};
        sweep_gradient_sums(run, dy, x, mean_of, sums);
        warps.gather(warp_sum(sums[0]), [&] {
            const int lane = threadIdx.x % warp_size;
            Pair whole = {};
            for (int at = lane; at < warps.count; at += warp_size) {
                whole = whole + warps.results[at];
            }
            whole = warp_sum(whole);
            if (lane == 0) {
                results.store_channel(0, channel, whole, rstd);
            }
        });
    }
}
