// GroupNorm backward, strategy `cluster`: a cluster of Tile::cluster blocks per slab of whole groups of one sample.
// Each block stages a piece of the slab in its shared memory.
//
//   dy, x, dx: (N, C, HxW) or (N, HxW, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   Sums: pairs (dbeta, dgamma), stored to row n of a workspace [N, C]. For N = 1 the kernel writes dgamma and dbeta
//   themselves.
//   Grid: Tile::cluster blocks per cluster; the clusters take the N * groups / slab_groups slabs in turn. A block
//   writes dx of its piece. The first block of the cluster writes the sums of the slab.
//   Shared memory: same as group_norm_backward_block.cu, and per channel the totals of the cluster.
//
// Every byte of dy and x is read once. Each block adds the totals of all blocks of the cluster, which it reads through
// distributed shared memory. All blocks add them in the same order. The strategy wins for groups that are too large for
// one block's shared memory, up to about 1.8 MB. It also wins if there are fewer groups than multiprocessors. Requires
// sm_90.
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
