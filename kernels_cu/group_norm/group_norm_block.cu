// GroupNorm forward, strategy `block`: one block per slab of whole groups of one sample, staged in shared memory.
//
//   x, y: (N, C, HxW) or (N, HxW, C). gamma, beta: (C) or null. mean, rstd: (N, groups).
//   Grid: the blocks take the N * groups / slab_groups slabs in turn. A block writes y, mean and rstd of its slab.
//   Shared memory: mbarriers; per channel the totals and an Affine, whose mean is the centre until the statistics are
//   known; per group the moments; the slab of x, piece_packs packs; partial sums.
//
// Every byte of x is read once. The strategy wins from a few thousand elements per group up to the capacity of shared
// memory. If a block needs at most half of it, two blocks share a multiprocessor: one loads while the other writes.
#include "group_norm/forward_slab.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_block(const data_t* x, const gamma_t* gamma, const beta_t* beta, y_t* y, acc_t* mean, acc_t* rstd,
                     long long N, long long C, long long HxW, long long groups, long long slab_groups,
                     long long piece_packs, double eps) {
    const GroupSlabs slabs = {x, gamma, beta, y, mean, rstd, N, C, HxW, groups, slab_groups, piece_packs, acc_t(eps)};
    slabs.run<1>();
}
