// GroupNorm backward, strategy `cluster`: the blocks of a cluster share a slab of whole groups of Tile::samples samples.
// Each block stages a piece of the slab of one sample in its shared memory.
//
//   dy, x, dx: (N, C, HxW) or (N, HxW, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   Tile::samples is 1 or N, and divides Tile::cluster. If it is N, parameter gradients are wanted.
//   Sums: pairs (dbeta, dgamma), stored to row n of a workspace [N, C]. If N is Tile::samples, the kernel writes dgamma
//   and dbeta themselves.
//   Grid: Tile::cluster blocks per cluster; the clusters take the N * groups / slab_groups / Tile::samples items in
//   turn. A block writes dx of its piece. The first block of a sample writes the sums of its slab; the sums of all
//   samples are written by all blocks, each every Tile::cluster-th channel.
//   Shared memory: same as group_norm_backward_block.cu, and per channel the totals of the cluster.
//
// Every byte of dy and x is read once. Each block adds the totals of all blocks of the cluster, which it reads through
// distributed shared memory. All blocks add them in the same order. The strategy wins for groups that are too large for
// one block's shared memory, up to about 1.8 MB. It also wins if there are fewer groups than multiprocessors, or if a
// cluster can hold all samples of a slab: then no second kernel has to add up the parameter gradients. Requires sm_90.
#include "group_norm/backward_slab.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(slab_threads))
    group_norm_backward_cluster(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace, gamma_t* dgamma,
                                gamma_t* dbeta, long long N, long long C, long long HxW, long long groups,
                                long long slab_groups, long long piece_packs) {
    const GroupSlabs slabs = {dy, x, mean, rstd,   gamma,       beta,       dx, {workspace, dgamma, dbeta, C},
                              N,  C, HxW,  groups, slab_groups, piece_packs};
    slabs.run<Tile::cluster / Tile::samples, Tile::samples>();
}
