// GroupNorm backward, strategy `cluster`: a cluster of Tile::cluster blocks per slab of whole groups of one sample, a
// piece of it in each block's shared memory.
//
//   dy, x, dx (N, C, HxW) or (N, HxW, C); mean, rstd (N, groups); gamma, beta (C) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   sums: workspace row n of [N, C] pairs (dbeta, dgamma), or, for N = 1, dgamma and dbeta themselves
//   grid: Tile::cluster blocks for each of the N * groups / slab_groups slabs, dealt out cluster by cluster; a block
//   writes its piece of the slab's dx, the first one its row of sums
//   shared memory: as in group_norm_backward_block.cu, and of each channel the cluster's sums
//
// Every byte of dy and x is read once. The blocks add up each other's totals by way of distributed shared memory, all in
// the same order. Wins for groups that are too large for one block's shared memory, up to some 1.8 MB, and where groups
// are fewer than multiprocessors. sm_90.
#include "group_norm/backward_slab.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(slab_threads))
    group_norm_backward_cluster(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace, gamma_t* dgamma,
                                gamma_t* dbeta, long long N, long long C, long long HxW, long long groups,
                                long long slab_groups, long long piece_packs) {
    const GroupSlabs slabs = {dy, x, mean, rstd,   gamma,       beta,       dx, {workspace, dgamma, dbeta, C},
                              N,  C, HxW,  groups, slab_groups, piece_packs};
    slabs.run<Tile::cluster>();
}
