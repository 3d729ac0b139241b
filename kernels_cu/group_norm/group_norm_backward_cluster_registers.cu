// GroupNorm backward, strategy `cluster` with the slab in registers (load=registers): the blocks of a cluster share a
// group of Tile::samples samples. Each block holds a slice of the group of one sample.
//
//   dy, x, dx: (N, C, HxW), also (N, 1, C). mean, rstd: (N, groups). gamma, beta: (C) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted and there is no
//   activation.
//   A thread holds Tile::packs_per_thread packs of dy and of x. A slice has at most threads * packs *
//   pack_size elements.
//   Tile::samples is 1 or N, and divides Tile::cluster. If it is N, parameter gradients are wanted, HxW > 1, and a group
//   has several channels.
//   Sums: pairs (dbeta, dgamma), stored to row n of a workspace [N, C]. If N is Tile::samples, the kernel writes dgamma
//   and dbeta themselves.
//   Grid: Tile::cluster blocks per cluster; the clusters take the N * groups / Tile::samples items in turn. A block
//   writes dx of its slice, and the sums of every Tile::cluster-th channel of the group.
//   Shared memory: two rows of one pair per warp, for sums, and one pair per row that other blocks read. If parameter
//   gradients are wanted, HxW > 1 and a group has several channels: also the parts of the channels' sums, one pair each
//   (packs of the block + channels of a group - 1), and one pair per block and channel, which the other blocks write.
//
// Every byte of dy and x is read once and stays in registers. At most one barrier of the cluster precedes dx. The
// strategy wins if there are fewer groups than multiprocessors and a slice fits in registers. It also wins if a cluster
// can hold all samples of a group: then no second kernel has to add up the parameter gradients. Requires sm_90.
#include "group_norm/backward_registers.cuh"

extern "C" __global__ void CLUSTER __launch_bounds__(Tile::threads, blocks_of(512))
    group_norm_backward_cluster_registers(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                                          const gamma_t* gamma, const beta_t* beta, data_t* dx, Pair* workspace,
                                          gamma_t* dgamma, gamma_t* dbeta, long long N, long long C, long long HxW,
                                          long long groups) {
    const GroupRuns runs = {
        dy, x, mean, rstd, gamma, beta, dx, {workspace, dgamma, dbeta, C}, N, C, groups, static_cast<int>(HxW)};
    runs.run<Tile::threads, Tile::cluster / Tile::samples, Tile::samples>();
}
