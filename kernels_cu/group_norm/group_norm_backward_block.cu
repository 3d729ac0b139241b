// GroupNorm backward, strategy `block`: a block per slab of whole groups of one sample, staged in shared memory.
//
//   dy, x, dx (N, C, HxW) or (N, HxW, C); mean, rstd (N, groups); gamma, beta (C) or null
//   dx, and the parameter gradients, are null where they are not wanted; x is null where only dbeta is
//   sums: workspace row n of [N, C] pairs (dbeta, dgamma), or, for N = 1, dgamma and dbeta themselves
//   grid: N * groups / slab_groups slabs, dealt out block by block; a block writes its slab of dx and its row of sums
//   shared memory: mbarriers; per channel its totals, gamma, beta and group; per group its statistics and sums; the slabs
//   of dy and x, piece_packs each; partial sums
//
// Every byte of dy and x is read once. Wins from a few thousand elements a group up to what shared memory holds; where
// half of that is enough, two blocks share a multiprocessor and one loads while the other writes.
#include "group_norm/backward_slab.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, blocks_of(slab_threads))
    group_norm_backward_block(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                              const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace, gamma_t* dgamma,
                              gamma_t* dbeta, long long N, long long C, long long HxW, long long groups,
                              long long slab_groups, long long piece_packs) {
    const GroupSlabs slabs = {dy, x, mean, rstd,   gamma,       beta,       dx, {workspace, dgamma, dbeta, C},
                              N,  C, HxW,  groups, slab_groups, piece_packs};
    slabs.run<1>();
}
