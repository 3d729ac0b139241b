// LayerNorm backward, strategy `warp`: one team of `lanes` lanes of a warp per row, which the team holds in registers.
//
//   dy, x, dh, dx: (rows, length); dh is null unless Tile::addend. x is h if the forward had a residual.
//   mean, rstd: (rows). gamma: (length) or null.
//   dx and the parameter gradients are null if they are not wanted. x is null if only dbeta is wanted.
//   A team has Tile::lanes lanes. A lane holds Tile::packs_per_thread packs of dy, of x and of dh. `teams` teams take
//   the rows in turn. A team keeps the sums of its columns over all its rows, in float32 (float64 for float64 data): in
//   registers if a lane has few enough columns, otherwise in shared memory.
//   Sums: pairs (dbeta, dgamma), stored to a workspace [teams / teams per block, length]. Row i contains the sums of
//   the i-th block's teams. If there is one row, the kernel writes dgamma and dbeta themselves.
//   Grid: the blocks take the teams in turn, Tile::threads / Tile::lanes teams at a time.
//   Shared memory: one row of sums per team of the block, or one per two teams if registers hold the teams' sums;
//   gamma, which the teams share.
//
// Every byte of dy, x and dh is read once, before the team writes dx. So dx may be the same array as dy or x. The strategy
// wins for rows of up to about two thousand elements.
#include "partition/backward_rows.cuh"

extern "C" __global__ void __launch_bounds__(Tile::threads, resident_blocks_of_gradients())
    layer_norm_backward_warp(const data_t* dy, const data_t* x, const stat_t* mean, const stat_t* rstd,
                             const gamma_t* gamma, data_t* dx, Pair* workspace, gamma_t* dgamma, gamma_t* dbeta,
                             long long rows, long long length, long long teams, const data_t* dh) {
    const ParameterGradients parameters = {workspace, dgamma, dbeta, length};
    const RowArrays arrays = {dy, x, dh, mean, rstd};
    const RowGradients<WithMean> gradients = {arrays, gamma, nullptr, dx, parameters, rows, static_cast<int>(length),
                                              teams,  1,     acc_t(0)};
    gradients.run<Tile::lanes, 1, 1>();
}
