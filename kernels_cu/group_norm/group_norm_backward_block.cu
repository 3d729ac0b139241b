// GroupNorm backward, strategy `block`: one block per slab of whole groups of one sample, staged in shared memory.
//
//   dy, x, dx: (N, C, HxW) or (N, HxW, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   Sums: pairs (dbeta, dgamma), stored to row n of a workspace [N, C]. For N = 1 the kernel writes dgamma and dbeta
//   themselves.
//   Grid: the blocks take the N * groups / slab_groups slabs in turn. A block writes dx and the sums of its slab.
//   Shared memory: mbarriers; per channel the totals, gamma, beta and the index of the group; per group the statistics,
//   A / L and B / L; the slabs of dy and x, piece_packs packs each; partial sums.
//
// Every byte of dy and x is read once. The strategy wins from a few thousand elements per group up to the capacity of
// shared memory. If a block needs at most half of it, two blocks share a multiprocessor: one loads while the other
// writes.
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
