// GroupNorm backward, strategy `cluster` with channels-last groups in registers (load=registers): the blocks of a cluster
// share a slab of Tile::slab_groups whole groups of Tile::samples samples. Each block holds some rows of one sample.
//
//   dy, x, dx: (N, HxW, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   A thread holds Tile::packs_per_thread packs of dy and of x, in one column of the slab. A block holds
//   HxW * samples / cluster rows, rounded up.
//   Tile::samples is 1 or N, and divides Tile::cluster. If it is N, parameter gradients are wanted.
//   Sums: pairs (dbeta, dgamma), stored to row n of a workspace [N, C]. If N is Tile::samples, the kernel writes dgamma
//   and dbeta themselves.
//   Grid: Tile::cluster blocks per cluster; the clusters take the N * groups / slab_groups / Tile::samples items in
//   turn. A block writes dx of its rows, and the sums of every Tile::cluster-th channel of the slab.
//   Shared memory: two rows of one pair per warp and group, for sums, and one pair per row and group that other blocks
//   read. If parameter gradients are wanted: also one pair per thread and element of a pack, and one pair per block and
//   channel, which the other blocks write.
//
// Every byte of dy and x is read once and stays in registers. At most one barrier of the cluster precedes dx. By the
// cost model, the strategy wins if there are fewer slabs than multiprocessors, or a slab does not fit in the registers
// of one block. It also wins if a cluster can hold all samples of a slab: then no second kernel has to add up the
// parameter gradients.
// Requires sm_90.
#include "group_norm/backward_columns.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(column_threads))
    group_norm_backward_cluster_columns(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                        const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace,
                                        gamma_t* dgamma, gamma_t* dbeta, long long N, long long C, long long HxW,
                                        long long groups) {
    const GroupColumns slabs = {
        dy, x, mean, rstd, gamma, beta, dx, {workspace, dgamma, dbeta, C}, N, C, groups, static_cast<int>(HxW)};
    slabs.run<Tile::cluster / Tile::samples, Tile::samples>();
}
