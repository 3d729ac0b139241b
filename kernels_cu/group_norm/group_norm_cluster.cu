// GroupNorm forward, strategy `cluster`: a cluster of Tile::cluster blocks per slab of whole groups of one sample. Each
// block stages a piece of the slab in its shared memory.
//
//   x, y: (N, C, HxW) or (N, HxW, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   Grid: Tile::cluster blocks per cluster; the clusters take the N * groups / slab_groups slabs in turn. A block
//   writes y of its piece. The first block of the cluster writes mean and rstd.
//   Shared memory: same as group_norm_block.cu.
//
// Every byte of x is read once. Each block computes the moments of its piece in two passes. Each block then merges the
// moments of all blocks of the cluster, which it reads through distributed shared memory. All blocks merge them in the
// same order. The strategy wins for groups that are too large for one block's shared memory, up to about 3.6 MB. It
// also wins if there are fewer groups than multiprocessors. Requires sm_90.
#include "group_norm/forward_slab.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_cluster(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                       long long N, long long C, long long HxW, long long groups, long long slab_groups,
                       long long piece_packs, double eps) {
    const GroupSlabs slabs = {x, gamma, beta, y, mean, rstd, N, C, HxW, groups, slab_groups, piece_packs, acc_t(eps)};
    slabs.run<Tile::cluster>();
}
