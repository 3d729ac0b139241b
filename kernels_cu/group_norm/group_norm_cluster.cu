// GroupNorm forward, strategy `cluster`: a cluster of Tile::cluster blocks per slab of whole groups of one sample, a piece
// of it in each block's shared memory.
//
//   x, y (N, C, HxW) or (N, HxW, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   grid: Tile::cluster blocks for each of the N * groups / slab_groups slabs, dealt out cluster by cluster; a block
//   writes its piece of the slab's y, the first one mean and rstd
//   shared memory: as in group_norm_block.cu
//
// Every byte of x is read once. Each block takes the moments of its piece in two passes; the blocks merge them by way of
// distributed shared memory, all in the same order. Wins for groups that are too large for one block's shared memory, up
// to some 3.6 MB, and where groups are fewer than multiprocessors. sm_90.
#include "group_norm/forward_slab.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_cluster(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                       long long N, long long C, long long HxW, long long groups, long long slab_groups,
                       long long piece_packs, double eps) {
    const GroupSlabs slabs = {x, gamma, beta, y, mean, rstd, N, C, HxW, groups, slab_groups, piece_packs, acc_t(eps)};
    slabs.run<Tile::cluster>();
}
