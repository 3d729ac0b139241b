// GroupNorm forward, strategy `block`: a block per slab of whole groups of one sample, staged in shared memory.
//
//   x, y (N, C, HxW) or (N, HxW, C); gamma, beta (C) or null; mean, rstd (N, groups)
//   grid: N * groups / slab_groups slabs, dealt out block by block; a block writes its slab of y, mean and rstd
//   shared memory: mbarriers; per channel its totals and affine form, whose mean is at first a centre; per group its
//   moments; the slab of x, piece_packs long; partial sums
//
// Every byte of x is read once. Wins from a few thousand elements a group up to what shared memory holds; where half of
// that is enough, two blocks share a multiprocessor and one loads while the other writes.
#include "group_norm/forward_slab.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_block(const data_t* x, const gamma_t* gamma, const beta_t* beta, data_t* y, acc_t* mean, acc_t* rstd,
                     long long N, long long C, long long HxW, long long groups, long long slab_groups,
                     long long piece_packs, double eps) {
    const GroupSlabs slabs = {x, gamma, beta, y, mean, rstd, N, C, HxW, groups, slab_groups, piece_packs, acc_t(eps)};
    slabs.run<1>();
}
