// BatchNorm statistics, strategy `cluster`: a cluster of blocks per channel, channels-first.
//
//   x: (N, C, HxW). mean, invstd: (C).
//   Grid: one cluster per channel; the clusters take the channels in turn.
//   Shared memory: of a cluster's first block, the moments of each warp of the cluster.
//
// The threads of the cluster divide the packs of the channel's planes (channel_run.cuh), and read x once. The first
// block merges the moments of the warps and writes the results, in a fixed order: one launch, and no workspace. The
// strategy is for tensors of up to some tens of megabytes: there the second launch of the other strategies takes a large
// part of the time.
#include "batch_norm/channel_run.cuh"
#include "batch_norm/moments_out.cuh"
#include "partition/sweep_moments.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(768))
    batch_norm_stats_cluster(const data_t* x, acc_t* mean, acc_t* invstd, long long N, long long C, long long HxW,
                             double eps) {
    const MomentsOut results = {nullptr, mean, invstd, eps};
    int offset = 0;
    const WarpResults<Moments> warps = {shared_array<Moments>(offset, WarpResults<Moments>::count)};
    for (long long channel = blockIdx.x / Tile::cluster; channel < C; channel += gridDim.x / Tile::cluster) {
        warps.begin();
        const ChannelRun run(x, N, C, HxW, channel);
        const Moments found = run_moments(run, x), own = found.count == acc_t(0) ? Moments{} : found;
        // warp_merge would begin with the first lane, which may have only packs without elements.
        const unsigned some = __ballot_sync(whole_warp, own.count > acc_t(0));
        const acc_t near = __shfl_sync(whole_warp, own.mean, some == 0 ? 0 : __ffs(some) - 1);
        const Moments of_warp = merge_sets(warp_sum(own.count), near, 1, [&](auto use) { use(own); });
        warps.gather(some == 0 ? Moments{} : of_warp, [&] {
            const int lane = threadIdx.x % warp_size;
            const Moments whole = merge_sets(acc_t(N * HxW), warps.results[0].mean, 1, [&](auto use) {
                for (int at = lane; at < warps.count; at += warp_size) {
                    use(warps.results[at]);
                }
            });
            if (lane == 0) {
                results.store_channel(0, channel, whole);
            }
        });
    }
}
